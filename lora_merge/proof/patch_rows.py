"""Rows of stored tensors: which of them a patch changes, and which of them a view reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..matching.patch import Patch, PatchPart
from ..models.weights import WeightView
from .reference import REFERENCE
from .reference.floats import Array


@dataclass(frozen=True, eq=False)
class PatchRows:
    """The rows of one tensor that one patch changes: parts of the patch that have no row in common."""

    uses: Sequence[PatchPart]

    @property
    def first(self) -> PatchPart:
        """The first of them."""
        return self.uses[0]

    @property
    def patch(self) -> Patch:
        """The patch."""
        return self.first.patch

    @property
    def strength(self) -> float:
        """The strength on this tensor."""
        return self.first.strength

    @property
    def cols(self) -> int:
        """The width of the tensor."""
        return self.first.piece.cols

    @cached_property
    def _pieces(self) -> tuple[Array, Array, Array]:
        """The first row and the last row + 1 of every piece, in their order, and its first row in the view."""
        places = np.array(sorted((u.piece.start, u.piece.stop, u.start) for u in self.uses))
        assert (places[1:, 0] >= places[:-1, 1]).all(), "a view has no row twice"
        return places[:, 0], places[:, 1], places[:, 2]

    def find(self, rows: Array) -> tuple[Array | slice, Array]:
        """Return the places in `rows` of the rows that are in a piece, and which rows of the view these are."""
        starts, stops, first = self._pieces
        number = np.searchsorted(starts, rows, side="right") - 1
        inside = (number >= 0) & (rows < stops[number])
        at = slice(None) if inside.all() else np.flatnonzero(inside)
        return at, rows[at] + (first - starts)[number[at]]


def together(uses: Sequence[PatchPart]) -> Sequence[PatchRows]:
    """Return the uses of a tensor in their order; consecutive uses of one patch become one `PatchRows`."""
    groups: list[list[PatchPart]] = []
    for use in uses:
        last = groups[-1][-1] if groups else None
        if last and last.patch is use.patch and not use.piece.transposed:
            groups[-1].append(use)
        else:
            groups.append([use])
    return [PatchRows(some) for some in groups]


def costs_all(use: PatchPart) -> bool:
    """Return whether one row of the formula costs as much as all of them."""
    magnitude = use.patch.magnitude
    row = REFERENCE.get(use.patch.algorithm)
    return (row is not None and row.whole) or use.piece.transposed or (magnitude or ("out",))[0] == "in"


def stored_rows(view: WeightView, rows: Array) -> Iterator[tuple[str, Array, Array]]:
    """Yield, for every tensor that holds some of these rows of a view, its name, the places in `rows` of the rows that
    it holds, and its own values of them. No piece of the view is transposed."""
    firsts = np.array([at for _, at in view.addresses()])
    starts = np.array([piece.start for piece in view.row_slices])
    number = np.searchsorted(firsts, rows, side="right") - 1
    lines = rows + (starts - firsts)[number]
    names = {key: n for n, key in enumerate(dict.fromkeys(piece.key for piece in view.row_slices))}
    of = np.array([names[piece.key] for piece in view.row_slices])[number]
    for key, n in names.items():
        at = np.flatnonzero(of == n)
        if len(at):
            yield key, at, lines[at]


def gathered(view: WeightView, rows: Array, read: Callable[[str, Array, int], Array]) -> Array:
    """Return rows of a view from its pieces. `read`: gives rows of a stored tensor as a matrix of some columns."""
    if any(piece.transposed for piece in view.row_slices):
        pieces = [(p, read(p.key, np.arange(p.start, p.stop), p.cols)) for p in view.row_slices]
        parts = [values[:, p.across].T if p.transposed else values for p, values in pieces]
        return np.concatenate(parts)[rows]
    if len(view.row_slices) == 1:  # as nearly always: the search takes five times as long
        return read(view.row_slices[0].key, rows + view.row_slices[0].start, view.matrix[1])
    values_of = np.empty((len(rows), view.matrix[1]))
    for key, at, lines in stored_rows(view, rows):
        values_of[at] = read(key, lines, values_of.shape[1])
    return values_of
