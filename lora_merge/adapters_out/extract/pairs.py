"""The pairs of a weight of the tuned checkpoint and one of the base, in the words of the output's dialect. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from ...algorithms import flat
from ...errors import FitError
from ...files.checkpoint import Index
from ...models.chosen import Chosen
from ...models.names import AVERAGES, Names
from ...models.tied_weights import tied
from ...models.weights import RowSlice, WeightView
from ...text import listed
from ..dialects import Dialect
from ..places import Place, places

FLOATING: Final = ("F", "BF", "C64")
"""First letters of the dtypes of weights; integers are indices, such as position ids."""

VAE: Final = "vae"


class Pair(NamedTuple):
    """One parameter: its place in the base, in the words of the dialect, and its rows in the tuned checkpoint."""

    place: Place
    tuned: WeightView

    @property
    def name(self) -> str:
        """The parameter as reports and errors name it."""
        return self.place.label

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers in fp32: what the work on it is measured by."""
        return 4 * prod(self.place.view.shape)


@dataclass(frozen=True)
class Pairs:
    """Every parameter that both checkpoints have and that is to be compared."""

    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]
    nameless: tuple[Pair, ...] = ()  # rows that the dialect has no name for: they must be equal in both


def paired(
    base: tuple[Index, Names], tuned: tuple[Index, Names], to: Dialect, chosen: Chosen, *, lenient: bool
) -> Pairs:
    """Return the parameters of both checkpoints side by side.

    Raises FitError for a parameter that only one of them has, or that has two shapes. `lenient`: name the
    latter, and those that only the tuned checkpoint has, in a note instead.
    """
    here = [*places(base[1], to)]
    chosen.on_base(base[1])
    chosen.check({place.component for place in here})
    there = {_key(p): p for p in places(tuned[1], to)}
    twins = _twins(base) | _twins(tuned)
    found, absent, left, notes, resized = [], [], [], [], list[str]()
    for place in here:
        mate = there.pop(_key(place), None)
        if not _compared(place, base[0]) or not _taken(place, chosen):
            left += [] if _usual(place) else [place.component]
            continue
        if mate is None:
            absent += [] if place.view.row_slices[0].key in twins else [place]
            continue
        if mate.view.matrix != place.view.matrix or mate.view.shape != place.view.shape:
            resized.append(_expect_alike(place, mate, lenient=lenient))
        elif prod(place.view.shape):  # a weight without numbers has no difference
            found.append(Pair(place, mate.view))
    if absent:
        raise _absent(absent, found)
    extra = [p for p in there.values() if _compared(p, tuned[0]) and _taken(p, chosen)]
    extra = [p for p in extra if p.view.row_slices[0].key not in twins]
    if extra and not lenient:
        raise FitError(f"{len(extra)} parameters are in the tuned checkpoint alone",
                       listed((p.view.row_slices[0].key for p in extra), 3),
                       "give the base that it was tuned from, or leave them out: --unmatched skip")  # fmt: skip
    alone = [p.view.row_slices[0].key for p in extra]
    kinds = {"in the tuned checkpoint alone": alone, "of another shape in the tuned checkpoint": resized}
    notes += [f"{what}, left out: {listed(keys, 3)}" for what, keys in kinds.items() if keys]
    if left:
        notes.append(f"{', '.join(sorted({*left}))} is not compared; --include {min(left)} does")
    rest = [p for p in _nameless(base, here) if prod(p.view.shape) and _compared(p, base[0]) and _taken(p, chosen)]
    alike = [p for p in rest if _same_rows(p, tuned[0], base[0])]
    if lost := [p.name for p in rest if p not in alike]:
        notes.append(f"{len(lost)} weights have no name in {to.name} and are not compared: {listed(lost, 3)}")
    return Pairs(tuple(found), tuple(notes), tuple(Pair(p, p.view) for p in alike))


def _expect_alike(place: Place, mate: Place, *, lenient: bool) -> str:
    """Return the key of a weight that has another shape in the tuned checkpoint; FitError unless these are left out."""
    key = place.view.row_slices[0].key
    if not lenient:
        raise FitError("a weight has another shape in the tuned checkpoint",
                       f"{key}: {[*place.view.shape]}, in the tuned one {[*mate.view.shape]}",
                       "give the base that it was tuned from, or leave it out: --unmatched skip")  # fmt: skip
    return key


def _nameless(side: tuple[Index, Names], there: Sequence[Place]) -> Iterator[Place]:
    """Yield the rows of stored weights that no place holds."""
    index, names = side
    taken: dict[str, set[RowSlice]] = {}
    for place in there:
        for piece in place.view.row_slices:
            taken.setdefault(piece.key, set()).add(piece)
    for key in index.tensors.keys() - index.beside:
        shape = names.shapes.get(names.without_wrappers(key), index.tensors[key].shape)
        whole, at = RowSlice(key, 0, *flat(shape)), 0
        pieces = sorted(taken.get(key, ()), key=lambda p: p.start)
        if pieces:
            whole = whole._replace(cols=pieces[0].cols, stop=prod(shape) // max(pieces[0].cols, 1))
        for piece in (*pieces, whole._replace(start=whole.stop)):
            if piece.start > at:
                rows = whole._replace(start=at, stop=piece.start)
                view = WeightView((rows,), (rows.rows, rows.cols) if len(shape) > 1 else (rows.rows,))
                yield Place("", key, "weight", view, names.component(key), norm=False, bare=True)
            at = max(at, piece.stop)


def _same_rows(place: Place, tuned: Index, base: Index) -> bool:
    """Return whether the tuned checkpoint has a tensor of the same name and shape."""
    key = place.view.row_slices[0].key
    return key in tuned.tensors and tuned.tensors[key].shape == base.tensors[key].shape


def _key(place: Place) -> tuple[str, str, str]:
    return place.prefix, place.module, place.parameter


def _taken(place: Place, chosen: Chosen) -> bool:
    keys = (piece.key for piece in place.view.row_slices)
    return chosen.takes(place.component, keys, usual=_usual(place))


def _usual(place: Place) -> bool:
    return place.component != VAE


def _compared(place: Place, index: Index) -> bool:
    """Return whether a parameter is a weight, and not an index (position ids), an average of weights or a scale."""
    keys = [piece.key for piece in place.view.row_slices]
    plain = index.beside.isdisjoint(keys) and all(
        k in index.packed or index.tensors[k].dtype.startswith(FLOATING) for k in keys
    )
    return plain and not any(k.startswith(AVERAGES) for k in keys)


def _twins(side: tuple[Index, Names]) -> set[str]:
    """Return the keys of a head that shares the tensor of the embeddings: another file may lack it, or store it too."""
    pair = tied(side[1], side[0].tensors, side[0].config)
    return set() if pair is None else {f"{pair.key or pair.head}.weight", pair.stored}


def _absent(absent: Sequence[Place], found: Sequence[Pair]) -> FitError:
    """Return the error for parameters that only the base has."""
    lost = {p.component for p in absent} - {p.place.component for p in found}
    kept = sorted({p.place.component for p in found})
    fix = f"choose what both have: --include {' --include '.join(kept)}" if lost and kept else (
        "give the base that it was tuned from, or leave them out: --exclude re:REGEX")  # fmt: skip
    keys = listed((p.view.row_slices[0].key for p in absent), 3)
    return FitError(f"{len(absent)} parameters of the base are not in the tuned checkpoint", keys, fix)
