"""The pairs of a weight of the tuned checkpoint and one of the base, in the words of the output's dialect. No torch.

A parameter may have another form in one of them: new rows, a new module, or a head that shares its embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from ...dtypes import flat
from ...errors import FitError
from ...files.checkpoint import Index
from ...matching.fit_errors import kind_of_model
from ...models.names import AVERAGES, UNKNOWN_TITLE, Names
from ...models.part_factors import ParameterChoice, or_leave_out
from ...models.parts import ABSENT
from ...models.tied_weights import TiedPair, tied
from ...models.weights import RowSlice, WeightView
from ...text import Note, listed, plural
from ..dialects import Dialect
from ..groups import Place, places


class Pair(NamedTuple):
    """One parameter: its place in the base, in the words of the dialect, and its rows in the tuned checkpoint."""

    place: Place
    tuned: WeightView
    fresh: bool = False  # whether its new value is stored, as the base lacks it or has other rows; `place` is in tuned
    before: WeightView | None = None  # the rows that the base has of a fresh one
    head: str = ""  # the key of a head whose weight the base shares with its embeddings

    @property
    def name(self) -> str:
        """The parameter as reports and errors name it."""
        return self.place.label


def separated(
    base: tuple[Index, Names], tuned: tuple[Index, Names], base_places: Sequence[Place], tuned_places: Sequence[Place]
) -> list[Pair]:
    """Return the pair of a head that one checkpoint shares with its embeddings and the other has apart, if there is
    one: the shared tensor is the head's weight there."""
    mine, theirs = (tied(side[1], side[0].tensors, side[0].config) for side in (base, tuned))
    if (mine is None) == (theirs is None) or (mine is not None and mine.stored):
        return []
    shared, sharing, alone = (mine, base_places, tuned_places) if mine else (theirs, tuned_places, base_places)
    assert shared is not None, "one of both is"
    head, table = _head(shared, alone), next((p for p in sharing if p.key == shared.info.name), None)
    if head is None or table is None:
        return []
    if mine is None:
        return [Pair(head, table.view)]
    return [Pair(head._replace(view=table.view), head.view, head=f"{mine.key or mine.head}.weight")]


def _head(pair: TiedPair, places: Iterable[Place]) -> Place | None:
    names = {f"{name}.weight" for name in (pair.head, pair.key) if name}
    return next((p for p in places if p.key in names), None)


def enlarged(place: Place, new: WeightView) -> bool:
    """Return whether a whole tensor outside of the numbered layers has other rows, as embeddings and heads have after
    new tokens."""
    old = place.view
    plain = all(len(v.row_slices) == 1 and not v.row_slices[0].transposed for v in (old, new))
    alike = old.shape[1:] == new.shape[1:] and len(old.shape) == len(new.shape) > 0
    return plain and alike and not _stacks(f"{place.prefix}{place.module}.")


def added(extra: Sequence[Place], here: Sequence[Place]) -> list[Pair]:
    """Return the parameters of modules that the base lacks as a whole, such as a new head; none of a layer behind the
    last one of a stack, as no program has a place for it."""
    known = {(p.prefix, p.module) for p in here}
    stacks = {stack for p in here for stack in _stacks(p.prefix + p.module)}
    return [
        Pair(p, p.view, fresh=True)
        for p in extra
        if (p.prefix, p.module) not in known and not p.bare and not p.view.row_slices[0].transposed
        and len(p.view.row_slices) == 1 and stacks.isdisjoint(_stacks(p.prefix + p.module))
    ]  # fmt: skip


def _stacks(name: str) -> list[str]:
    return [name[: match.start()] for match in re.finditer(r"\.\d+(?=\.|$)", name)]


def said_of_rows(place: Place, view: WeightView) -> Note:
    """Return the note about a parameter with other rows."""
    rows = view.shape[0]
    return Note(f"{place.name}: {place.view.shape[0]} rows become {rows}, stored whole; before PEFT loads it, give the "
                f"base as many: resize_token_embeddings({rows})")  # fmt: skip


def said_of_new(new: Sequence[Pair]) -> list[Note]:
    """Return the note about modules that the base lacks, if there are any."""
    names = dict.fromkeys(p.place.module for p in new)
    return [Note(f"the base lacks {listed(names, 3)}, stored whole; PEFT loads it into a class of models that has it")
            ] if names else []  # fmt: skip


FLOATING: Final = ("F", "BF", "C64")
"""First letters of the dtypes of weights; integers are indices, such as position ids."""

ITS_BASE: Final = "give the base that it was tuned from"

VAE: Final = "vae"

PARTS: Final = ("te", VAE, "connectors")
"""Components of a pipeline that are files of their own."""


@dataclass(frozen=True)
class Pairs:
    """Every parameter that both checkpoints have and that is to be compared."""

    pairs: tuple[Pair, ...]
    notes: tuple[Note, ...]
    nameless: tuple[Pair, ...] = ()  # rows that the dialect has no name for: they must be equal in both
    head: TiedPair | None = None  # the head that shares the weight of the embeddings in both


def paired(
    base: tuple[Index, Names], tuned: tuple[Index, Names], to: Dialect, chosen: ParameterChoice, *, lenient: bool
) -> Pairs:
    """Return the parameters of both checkpoints side by side.

    Raises FitError for a parameter that only one of them has, or that has two shapes. `lenient`: name the
    latter, and parameters that only the tuned checkpoint has, in a note instead.
    """
    # Step 1: the parameters of both, in the words of the dialect.
    here = [*places(base[1], to)]
    tuned_places = {_key(p): p for p in places(tuned[1], to)}
    every = {piece.key: p.component for p in (*tuned_places.values(), *here) for piece in p.view.row_slices}
    chosen.check(every, ABSENT)
    apart = separated(base, tuned, here, [*tuned_places.values()])
    twins = _twins(base) | _twins(tuned)
    # Step 2: each parameter of the base with its counterpart.
    pairs, absent, left, notes, resized = list[Pair](), list[Place](), [], [], list[str]()
    for place in (*here, *(p.place for p in apart if p.head)):
        separate = next((p for p in apart if _key(p.place) == _key(place)), None)
        mate = tuned_places.pop(_key(place), None)
        if not _compared(place, base[0]) or not _taken(place, chosen):
            left += [] if _usual(place) else [place.component]
            continue
        view = separate.tuned if separate else mate.view if mate else None
        if view is None:
            absent += [] if place.key in twins else [place]
        elif view.matrix == place.view.matrix and view.shape == place.view.shape:
            pairs += (
                [separate or Pair(place, view)] if prod(view.shape) else []
            )  # without values there is no difference
        elif to.whole and enlarged(place, view):
            pairs.append(Pair(place._replace(view=view), view, fresh=True, before=place.view))
            notes.append(said_of_rows(place, view))
        else:
            other = _other_models(base, tuned, share=enlarged(place, view), resized=True)
            resized.append(_expect_alike(place, view, lenient=lenient, other=other))
    if absent:
        raise _other_models(base, tuned, share=bool(pairs)) or _absent(absent, pairs)
    # Step 3: the parameters that only the tuned checkpoint has.
    extra = [p for p in tuned_places.values() if _compared(p, tuned[0]) and _taken(p, chosen)]
    extra = [p for p in extra if p.key not in twins]
    new = added(extra, here) if to.whole else []
    pairs += new
    notes += said_of_new(new)
    alone = [p.key for p in extra if all(p is not new_pair.place for new_pair in new)]
    if alone and not lenient:
        are = plural(len(alone), "weight is", "weights are")
        raise _other_models(base, tuned, share=bool(pairs)) or FitError(
            f"{are} only in the tuned checkpoint",
            listed(alone, 3),
            _fix(in_folder=len(added(extra, here)) == len(extra)),
        )
    kinds = {"only in the tuned checkpoint": alone, "of another shape in the tuned checkpoint": resized}
    notes += [Note(f"{what}, left out: {listed(keys, 3)}") for what, keys in kinds.items() if keys]
    if left:
        notes.append(Note(f"{', '.join(sorted({*left}))} is left out; --include {min(left)} extracts it, too"))
    # Step 4: the rows without a name in the dialect, and the shared head.
    rest = [p for p in _nameless(base, here) if prod(p.view.shape) and _compared(p, base[0]) and _taken(p, chosen)]
    alike = [p for p in rest if _same_rows(p, tuned[0], base[0])]
    if lost := [p.name for p in rest if p not in alike]:
        notes.append(Note(f"no name in {to.name}, not compared: {plural(len(lost), 'weight')}: {listed(lost, 3)}"))
    head = None if apart else tied(base[1], base[0].tensors, base[0].config)
    return Pairs(tuple(pairs), tuple(notes), tuple(Pair(p, p.view) for p in alike), head)


def _other_models(
    base: tuple[Index, Names], tuned: tuple[Index, Names], *, share: bool, resized: bool = False
) -> FitError | None:
    """Return the error for two checkpoints of different models; None where it is not known what both are, or where one
    may be a part of the other. `share`: whether they have weights in common; `resized`: whether one has another shape,
    so that the classes of their configurations count too."""
    (one, first), (two, other) = base, tuned
    titles = (first.what, other.what)
    if resized and first.what == other.what:
        titles = (first.title, other.title)
    if titles[0] == titles[1] or UNKNOWN_TITLE in titles:
        return None
    if share and not all(lookup.known and lookup.known.component not in PARTS for lookup in (first, other)):
        return None
    what = f"different models: {' and '.join(map(kind_of_model, titles))}"
    return FitError(what, f"{one.path} and {two.path}", ITS_BASE)


def _expect_alike(place: Place, view: WeightView, *, lenient: bool, other: FitError | None) -> str:
    """Return the key of a weight that has another shape in the tuned checkpoint; FitError unless these are left out.
    `other`: the error if the checkpoints are of different models."""
    key = place.key
    if not lenient:
        where = f"{key}: {[*place.view.shape]}, in the tuned one {[*view.shape]}"
        fix = _fix(in_folder=enlarged(place, view))
        raise other or FitError("a weight has another shape in the tuned checkpoint", where, fix)
    return key


def _fix(*, in_folder: bool) -> str:
    """Return the advice on parameters that differ. `in_folder`: whether a folder of PEFT holds them: new rows of
    embeddings, and new heads."""
    folder = "write a PEFT folder with `--format peft -o FOLDER`, " if in_folder else ""
    return f"{ITS_BASE}, {folder}or leave them out: `--unmatched skip`"


def _nameless(side: tuple[Index, Names], places: Sequence[Place]) -> Iterator[Place]:
    """Yield the rows of stored weights that no place holds."""
    index, names = side
    taken: dict[str, set[RowSlice]] = {}
    for place in places:
        for piece in place.view.row_slices:
            taken.setdefault(piece.key, set()).add(piece)
    for key in index.tensors.keys() - index.packing_names:
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
    return place.key in tuned.tensors and tuned.tensors[place.key].shape == base.tensors[place.key].shape


def _key(place: Place) -> tuple[str, str, str]:
    return place.prefix, place.module, place.parameter


def _taken(place: Place, chosen: ParameterChoice) -> bool:
    return chosen.takes(place.component, place.keys, usual=_usual(place))


def _usual(place: Place) -> bool:
    return place.component != VAE


def _compared(place: Place, index: Index) -> bool:
    """Return whether a parameter is a weight, and not an index (position ids), an average of weights or a scale."""
    keys = place.keys
    plain = index.packing_names.isdisjoint(keys) and all(
        k in index.packed or index.tensors[k].dtype.startswith(FLOATING) for k in keys
    )
    return plain and not any(k.startswith(AVERAGES) for k in keys)


def _twins(side: tuple[Index, Names]) -> set[str]:
    """Return the keys of a head that shares the tensor of the embeddings: another file may lack it, or store it too."""
    pair = tied(side[1], side[0].tensors, side[0].config)
    return set() if pair is None else {f"{pair.key or pair.head}.weight", pair.stored}


def _absent(absent: Sequence[Place], pairs: Sequence[Pair]) -> FitError:
    """Return the error for parameters that only the base has."""
    lost = {p.component for p in absent} - {p.place.component for p in pairs}
    components = sorted({p.place.component for p in pairs})
    keys = [p.key for p in absent]
    both = f"choose what both have: `--include {' --include '.join(components)}`"
    fix = both if lost and components else or_leave_out(ITS_BASE, keys)
    are = plural(len(absent), "weight of the base is", "weights of the base are")
    return FitError(f"{are} not in the tuned checkpoint", listed(keys, 3), fix)
