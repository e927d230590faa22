"""Where adapters meet on the same rows, and `--method` makes a difference: what the user should know. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from ..job import Job
from ..methods import METHODS
from ..models.weights import RowSlice
from ..text import listed
from .patch import Match, Patch

ADDED: Final = (
    "what {there} does to the same weights comes first, but this formula reads the base's own values, and the "
    "differences are added; --method compose applies adapters one after the other, in the order given"
)
"""The note for modules whose formula reads weights that adapters before them change, where their changes are added."""


def with_meetings(job: Job, matched: Sequence[Match]) -> tuple[Match, ...]:
    """The matches with a note on every one of which modules read rows that adapters before it change.

    Those are the modules for which adding differences and acting in turn give other weights: orthogonal and scaling
    formulas, DoRA and all others that read the base. Where adapters act in turn there is nothing to note.
    """
    if METHODS[job.method].in_turn:
        return tuple(matched)
    changed = [_Changed(one) for one in matched]
    return tuple(replace(one, notes=(*one.notes, *_meetings(job, one, changed[:n]))) for n, one in enumerate(matched))


def _meetings(job: Job, one: Match, changed: Sequence[_Changed]) -> Iterator[str]:
    """What is to be noted of one adapter, where those before it change these rows."""
    met: dict[tuple[int, ...], list[str]] = {}
    for patch, key in _reading(one) if changed else ():
        pieces = [*patch.view.pieces]
        if len(pieces) == 1:  # of a head that gets a tensor of its own, the rows of that tensor
            pieces = [pieces[0]._replace(key=key)]
        pieces += [piece for view in patch.beside.values() for piece in view.pieces]
        before = tuple(n for n, those in enumerate(changed) if any(map(those.meets, pieces)))
        if before:
            met.setdefault(before, []).append(patch.module.where)
    for numbers, modules in met.items():
        there = listed([job.adapters[n].path.name for n in numbers])
        yield f"{listed(dict.fromkeys(modules), 2)}: {ADDED.format(there=there)}"


def _reading(one: Match) -> Iterator[tuple[Patch, str]]:
    """Every patch of an adapter whose formula reads the base, once, with a tensor that it changes."""
    seen = set()
    for key, uses in one.uses.items():
        for use in uses:
            if (use.patch.reads_base or use.patch.beside) and id(use.patch) not in seen:
                seen.add(id(use.patch))
                yield use.patch, key


class _Changed:
    """The rows that one adapter changes, as sorted ranges of every tensor."""

    def __init__(self, one: Match) -> None:
        rows = {key: sorted((u.piece.start, u.piece.stop) for u in uses) for key, uses in one.uses.items()}
        self._starts = {key: [start for start, _ in ranges] for key, ranges in rows.items()}
        self._stops = {key: list(accumulate((stop for _, stop in ranges), max)) for key, ranges in rows.items()}

    def meets(self, piece: RowSlice) -> bool:
        """Whether it changes a row of the piece."""
        starts, stops = self._starts.get(piece.key, []), self._stops.get(piece.key, [])
        before = bisect_left(starts, piece.stop)  # so many ranges begin before the piece ends
        return before > 0 and stops[before - 1] > piece.start
