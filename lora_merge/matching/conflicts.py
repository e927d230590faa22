"""Changes that meet on the same rows: of two modules of one adapter, and of several adapters. No torch.

Two names for one weight are allowed for tied embeddings; an equal copy is applied once; all else is refused. Several
adapters are refused if their changes cannot be added, and a note says if the `--method` makes a difference.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Final, NamedTuple

from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS
from ..errors import FitError, InputError
from ..job import Adapter, Job
from ..merge_methods import SUM
from ..models.prefixes import prefixed
from ..models.weights import RowSlice
from ..paths import input_name
from ..row_ranges import Ranges
from ..text import Note, listed, several
from .patch import Match, Patch

TIED_NAMES: Final = re.compile(
    r"(?:^|[._])(?:embed_(?:tokens|in|out)|tokens_embed|(?:word|token|tok)_embeddings?|lm_head|shared$|wte|decoder$)(?:[._]|$)"
    r"|(?:^|\.)embeddings?$"
)
"""Names of token embeddings and heads that may share their weight, so that two names may be two modules.

Other embeddings do not count: for `x_embedder`, `pos_embed.proj` and `shared_experts` a second name is the same layer.
"""

TWICE: Final = Note("the adapter contains it a second time under another name, equal byte for byte; it is applied once")

READS_CHANGED_WEIGHTS: Final = (
    "{modules}: the change depends on weights that {earlier} also changes. Both changes are computed from the base and "
    "added; use --method compose to apply them in sequence"
)
"""The note on modules whose formula reads weights that earlier adapters change, where the changes are added."""


class _Name(NamedTuple):
    """The name of a module, read once: thousands of modules may be compared with each other."""

    name: str
    innermost: str  # without prefixes
    may_share: bool  # whether modules of such names may share their weight

    @classmethod
    def of(cls, name: str) -> _Name:
        return cls(name, prefixed(name)[-1][1].replace(".", "_"), TIED_NAMES.search(name) is not None)

    @property
    def kinds(self) -> tuple[str | None, ...]:
        """The kinds of names that clash with this one; None: all that cannot share their weight."""
        return (self.innermost,) if self.may_share else (self.innermost, None)


class _RowGroup:
    """The patches that change the same rows. Names are parsed only when a second module changes some of the rows."""

    def __init__(self, columns: range | None) -> None:
        self.columns = columns  # the only ones of these rows that change; None: all
        self.unread: list[Patch] = []
        self._by_kind: dict[str | None, tuple[Patch, _Name]] = {}

    def clashes(self, name: _Name) -> Iterator[tuple[Patch, _Name]]:
        """Return the first patch of every kind of names that clashes with a name, and its name."""
        for patch in self.unread:
            other = _Name.of(patch.module.name)
            for kind in other.kinds:
                self._by_kind.setdefault(kind, (patch, other))
        self.unread.clear()
        patches = (self._by_kind[kind] for kind in name.kinds if kind in self._by_kind)
        return ((patch, other) for patch, other in patches if other.name != name.name)


def _clashes(patch: Patch, groups: Sequence[_RowGroup]) -> Iterator[tuple[Patch, _Name]]:
    """Return the patches of other modules, and their names, that may not change the same rows as a patch."""
    name = _Name.of(patch.module.name)
    return chain.from_iterable(group.clashes(name) for group in groups)


def _apart(first: range | None, second: range | None) -> bool:
    """Return whether two choices of columns, None for all, have no column in common."""
    return first is not None and second is not None and set(first).isdisjoint(second)


class DuplicateCheck:
    """The rows of the base that one adapter changes so far, with the patch of each."""

    def __init__(self, path: Path, values: FileValues) -> None:
        self._path, self._values = path, values
        self._groups: dict[str, tuple[Ranges[_RowGroup], dict[RowSlice, _RowGroup]]] = {}  # base key → patches by rows

    def repeats(self, patch: Patch) -> bool:
        """Remember a patch; return whether an equal patch of another name changes the same rows already.

        InputError if a different patch of another name changes some of the rows.
        """
        for piece in patch.view.row_slices:
            ranges, others = self._groups.setdefault(piece.key, (Ranges(), {}))
            groups = [
                group for group in ranges.meeting(piece.start, piece.stop) if not _apart(group.columns, piece.columns)
            ]
            for other, by in _clashes(patch, groups) if groups else ():
                if self._equal(patch, other):
                    return True
                raise InputError(
                    "two modules of the adapter change the same weight",
                    f"{self._path}: {by.name} and {patch.module.name} both mean {piece.key}",
                    "remove one of the two; applying both would double the effect",
                )
            if piece not in others:
                ranges.add(piece.start, piece.stop, others.setdefault(piece, _RowGroup(piece.columns)))
            others[piece].unread.append(patch)
        return False

    def _equal(self, first: Patch, second: Patch) -> bool:
        """Return whether two patches have the same formula, scalars and tensors on the same rows."""
        fields = ("algorithm", "shapes", "scalars", "settings", "view", "magnitude")
        if not all(getattr(first, name) == getattr(second, name) for name in fields):
            return False
        slots, others = ({**patch.module.slots, **patch.module.shared} for patch in (first, second))
        return slots.keys() == others.keys() and all(self._values.same(slots[s], others[s]) for s in slots)


def with_overlap_notes(job: Job, matched: Sequence[Match]) -> tuple[Match, ...]:
    """Return the matches, each with a note on its modules that read rows which earlier adapters change.

    For these modules (orthogonal and scaling formulas, DoRA, all others that read the base) the sum of differences is
    not what the adapters give one after the other.
    Whoever names another method than `sum` has chosen how changes combine, and needs no note.
    """
    if job.method != SUM or len(matched) < 2:
        return tuple(matched)
    changed = [_ChangedRows(match) for match in matched]
    return tuple(
        replace(match, notes=(*match.notes, *_overlap_notes(job, match, changed[:n])))
        for n, match in enumerate(matched)
    )


def _overlap_notes(job: Job, match: Match, changed: Sequence[_ChangedRows]) -> Iterator[Note]:
    """Yield the notes on one adapter, where the adapters before it change rows that it reads."""
    modules_by_earlier: dict[tuple[int, ...], list[str]] = {}
    for patch, key in _reading(match) if changed else ():
        pieces = [*patch.view.row_slices]
        if len(pieces) == 1:  # a head with a new tensor of its own: the rows of that tensor
            pieces = [pieces[0]._replace(key=key)]
        pieces += [piece for view in patch.base_slots.values() for piece in view.row_slices]
        before = tuple(n for n, rows in enumerate(changed) if any(map(rows.overlaps, pieces)))
        if before:
            modules_by_earlier.setdefault(before, []).append(patch.module.where)
    for numbers, modules in modules_by_earlier.items():
        earlier = listed([input_name(job.adapters[n].path) for n in numbers])
        yield Note(READS_CHANGED_WEIGHTS.format(modules=several([*dict.fromkeys(modules)]), earlier=earlier))


def _reading(match: Match) -> Iterator[tuple[Patch, str]]:
    """Yield every patch whose formula reads the base, once, with the name of a tensor that it changes."""
    patches = set()
    for key, uses in match.uses.items():
        for use in uses:
            if (use.patch.reads_base or use.patch.base_slots) and id(use.patch) not in patches:
                patches.add(id(use.patch))
                yield use.patch, key


class _ChangedRows:
    """The rows that one adapter changes, as sorted ranges of every tensor."""

    def __init__(self, match: Match) -> None:
        rows = {key: sorted((u.piece.start, u.piece.stop) for u in uses) for key, uses in match.uses.items()}
        self._starts = {key: [start for start, _ in ranges] for key, ranges in rows.items()}
        self._stops = {key: list(accumulate((stop for _, stop in ranges), max)) for key, ranges in rows.items()}

    def overlaps(self, piece: RowSlice) -> bool:
        """Return whether the adapter changes a row of the piece."""
        starts, stops = self._starts.get(piece.key, []), self._stops.get(piece.key, [])
        before = bisect_left(starts, piece.stop)  # number of ranges that begin before the piece ends
        return before > 0 and stops[before - 1] > piece.start


def check_addable(adapters: Sequence[Adapter], matches: Sequence[Match], values: FileValues) -> None:
    """Raise FitError if adapters cannot be added: they replace one parameter, or were trained on different values."""
    _check_same_values(adapters, matches, values)
    # A parameter that one adapter replaces is changed by no other, and by itself only with what PEFT adds to values.
    replaced: set[str] = set()
    for adapter, match in zip(adapters, matches, strict=True):
        for key in match.replaced:
            formulas = {use.patch.algorithm for use in match.uses.get(key, ())}
            by_itself = any(not ALGORITHMS[name].part_of_lora for name in formulas)
            if key in replaced or by_itself or any(key in other.uses for other in matches if other is not match):
                raise FitError("a parameter is replaced as a whole and changed again", f"{key}: by {adapter.path}",
                               "merge the adapters one after the other")  # fmt: skip
            replaced.add(key)
    # A weight that one adapter makes larger is changed by no other at its old size.
    sizes = {key: shape for match in matches for key, shape in match.grown.items()}
    for key, shape in sizes.items():
        uses = [use for match in matches for use in match.uses.get(key, ())]
        if any(use.patch.view.shape != shape for use in uses):
            raise FitError("one adapter makes a weight larger that another changes as it is", f"{key} to {list(shape)}",
                           "merge the adapters one after the other, the one that makes it larger last")  # fmt: skip


def _check_same_values(adapters: Sequence[Adapter], matches: Sequence[Match], values: FileValues) -> None:
    """Raise FitError if two adapters store different values of a tensor of the base."""
    for adapter, match in zip(adapters, matches, strict=True):
        for key, info in match.bases.items():
            for other_adapter, other in zip(adapters, matches, strict=True):
                copy = other.copies.get(key, info)
                if other is not match and (copy.shape != info.shape or values.differing(copy, info)):
                    raise FitError("two adapters were trained on different values of a tensor",
                                   f"{key}: {adapter.path}: {info.name}, {other_adapter.path}: {copy.name}",
                                   "merge one of them, or remove that tensor from the one to ignore"
                                   )  # fmt: skip
