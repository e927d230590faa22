"""The addresses of weights in all rooms: their stored part, and the rows that an adapter sees as one matrix.

An adapter for `attn.to_q` on a checkpoint that stores `qkv` fused sees rows [0:H) of that tensor: one
slice. An adapter for `qkv` on a checkpoint that stores q, k and v apart sees three slices. Swapped halves
are two slices in the other order; GPT-2's `[in, out]` weights are a transposed slice. So slicing, fusing,
swapping and transposing need no other concept. A weight that an adapter enlarges is padded with zeros; a weight that
the base lacks is all padding. `Weight` states the stored part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ..dtypes import Shape, StoredTensor, flat
from ..files.encodings.base import Packing, plain


class Weight(NamedTuple):
    """A weight of this shape. Its low corner (usually all of it) is stored; the rest is zeros."""

    shape: Shape
    stored: StoredTensor  # the stored values
    packed: Packing | None = None  # how the values are stored; None: plain

    @property
    def packing(self) -> Packing:
        """The form in which the values are stored."""
        return self.packed or plain(self.stored.dtype)

    @property
    def padded(self) -> bool:
        """Whether a part of the weight is not stored."""
        return self.packed is None and self.stored.shape != self.shape

    def span(self, low: int, high: int) -> tuple[int, int]:
        """Return (first, count) of the stored elements among the weight's elements [low, high); they are consecutive.

        Both bounds of a padded weight are whole rows of its first axis.
        """
        if not self.padded:
            return low, high - low
        row, width = prod(self.shape[1:]), prod(self.stored.shape[1:])
        first, last = (min(at // max(row, 1), self.stored.shape[0]) * width for at in (low, high))
        return first, last - first


def absent_weight(name: str, shape: Shape, like: StoredTensor) -> Weight:
    """Return a weight of zeros with the dtype and source of a stored tensor."""
    return Weight(shape, StoredTensor(name, like.dtype, (0, *shape[1:]), like.source, 0, 0))


class RowSlice(NamedTuple):
    """Rows [start, stop) of a stored tensor seen as a matrix `cols` wide; consecutive bytes.

    `cols` is the product of all axes but the first, except for stacked matrices `[E, out, in]`, which are
    seen as `E·out` rows of width `in`. A transposed slice contributes `cols` rows of width `stop − start`, or only its
    `columns`: the gate of an `[E, in, 2·out]` stack is the first half of the columns of each expert's rows.
    """

    key: str
    start: int
    stop: int
    cols: int
    transposed: bool = False
    columns: range | None = None  # of a transposed slice; None: all

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.stop - self.start) * (self.rows if self.transposed else self.cols)

    @property
    def rows(self) -> int:
        """Number of rows in the view."""
        if not self.transposed:
            return self.stop - self.start
        return self.cols if self.columns is None else len(self.columns)

    @property
    def across(self) -> slice:
        """The columns of a transposed slice, as an index of the stored rows."""
        return slice(None) if self.columns is None else slice(self.columns.start, self.columns.stop, self.columns.step)

    def part(self, low: int, high: int) -> RowSlice:
        """Return the rows [low, high) of those that the slice contributes to a view."""
        if self.transposed:
            return self._replace(columns=(self.columns or range(self.cols))[low:high])
        return self._replace(start=self.start + low, stop=self.start + high)


class WeightView(NamedTuple):
    """The weight as the adapter sees it: the rows of all row slices, one below the other, in this shape."""

    row_slices: tuple[RowSlice, ...]
    shape: Shape

    def addresses(self) -> Iterator[tuple[RowSlice, int]]:
        """Yield every row slice with the row of the view that it begins at."""
        first = 0
        for piece in self.row_slices:
            yield piece, first
            first += piece.rows

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) as the formulas see it: stacked matrices `[E, out, in]` are `E·out` rows of width `in`."""
        first = self.row_slices[0]
        cols = first.stop - first.start if first.transposed else first.cols
        if len(self.row_slices) == 1:
            return first.rows, cols
        return prod(self.shape) // cols if cols else sum(p.rows for p in self.row_slices), cols


def whole(key: str, shape: Shape) -> WeightView:
    """Return the view of a whole stored tensor."""
    rows, cols = flat(shape)
    return WeightView((RowSlice(key, 0, rows, cols),), shape)


def as_matrices(view: WeightView) -> WeightView:
    """Return a whole stack as rows of the width of one matrix, so that all views of it agree on its rows."""
    if len(view.shape) != 3 or len(view.row_slices) > 1 or view.row_slices[0].transposed:
        return view
    experts, rows, cols = view.shape
    piece = view.row_slices[0]
    return WeightView((RowSlice(piece.key, 0, experts * rows, cols),), view.shape) if piece.start == 0 else view


def rows_of(view: WeightView, start: int, stop: int) -> WeightView:
    """Return the rows [start, stop) of a view."""
    pieces = []
    for p, at in view.addresses():
        lo, hi = max(start - at, 0), min(stop - at, p.rows)
        if lo < hi:
            pieces.append(p.part(lo, hi))
    return WeightView(tuple(pieces), (stop - start, *view.shape[1:]))


def transposed(view: WeightView) -> WeightView:
    """Return the transpose of a whole matrix."""
    (p,) = view.row_slices
    return WeightView((p._replace(transposed=not p.transposed),), view.shape[::-1])


def turned(like: WeightView, view: WeightView) -> WeightView:
    """Return a whole matrix transposed if `like` is seen transposed."""
    return transposed(view) if like.row_slices[0].transposed and not view.row_slices[0].transposed else view


def stacked(parts: Sequence[WeightView]) -> WeightView | None:
    """Return the views' rows, one below the other; None if their widths differ.

    Neighbouring rows of one tensor become one piece again, so q, k and v of a fused tensor are that tensor.
    """
    pieces: list[RowSlice] = []
    for p in (p for part in parts for p in part.row_slices):
        last = pieces[-1] if pieces else None
        if last and last.key == p.key and last.stop == p.start and not (last.transposed or p.transposed):
            pieces[-1] = RowSlice(p.key, last.start, p.stop, p.cols)
        else:
            pieces.append(p)
    widths = {prod(part.shape[1:]) for part in parts}
    if len(widths) > 1:
        return None
    tails = {part.shape[1:] for part in parts}
    tail = tails.pop() if len(tails) == 1 else (widths.pop(),)
    return WeightView(tuple(pieces), (sum(part.shape[0] for part in parts), *tail))
