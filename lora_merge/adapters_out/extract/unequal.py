"""Parameters that the two checkpoints do not have in the same form: new rows, new modules, and heads that one of them
shares with its embeddings. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ...files.checkpoint import Index
from ...models.names import Names
from ...models.tied_weights import TiedPair, tied
from ...models.weights import WeightView
from ...text import Note, listed
from ..places import Place
from .pair import Pair


def separated(
    base: tuple[Index, Names], tuned: tuple[Index, Names], here: Sequence[Place], there: Sequence[Place]
) -> list[Pair]:
    """Return the pair of a head that one checkpoint shares with its embeddings and the other has apart, if there is
    one: the shared tensor is the head's weight there."""
    mine, theirs = (tied(side[1], side[0].tensors, side[0].config) for side in (base, tuned))
    if (mine is None) == (theirs is None) or (mine is not None and mine.stored):
        return []
    shared, sharing, alone = (mine, here, there) if mine else (theirs, there, here)
    assert shared is not None, "one of both is"
    head, table = _head(shared, alone), next((p for p in sharing if _stored(p) == shared.info.name), None)
    if head is None or table is None:
        return []
    if mine is None:
        return [Pair(head, table.view)]
    return [Pair(head._replace(view=table.view), head.view, head=f"{mine.key or mine.head}.weight")]


def _head(pair: TiedPair, there: Iterable[Place]) -> Place | None:
    names = {f"{name}.weight" for name in (pair.head, pair.key) if name}
    return next((p for p in there if _stored(p) in names), None)


def _stored(place: Place) -> str:
    return place.view.row_slices[0].key


def enlarged(old: WeightView, new: WeightView) -> bool:
    """Return whether a whole tensor has other rows, as embeddings and heads have after new tokens."""
    plain = all(len(v.row_slices) == 1 and not v.row_slices[0].transposed for v in (old, new))
    return plain and old.shape[1:] == new.shape[1:] and len(old.shape) == len(new.shape) > 0


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
    return [name[: found.start()] for found in re.finditer(r"\.\d+(?=\.|$)", name)]


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
