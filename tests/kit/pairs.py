"""The fast lane's share of what the slow lane has whole: pairs of values, a few cases of many, fewer examples.

`@pytest.mark.pairs` on a test with several independent parameters leaves the cases in the fast lane that together have
every pair of values. `@pytest.mark.few(n)` leaves n cases, spread evenly over all. `examples(n)` is the number of
hypothesis' examples. The slow lane (`make test-all`, which sets LORA_MERGE_TESTS=all) has every case and four times n
examples, with new seeds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Sequence
from typing import Final

import pytest

WHOLE: Final = os.environ.get("LORA_MERGE_TESTS") == "all"
"""Whether this run has the slow lane too."""


def examples(count: int) -> int:
    """Return how many examples hypothesis makes in this lane."""
    return 4 * count if WHOLE else max(4, count // 6)


def covering(rows: Sequence[Sequence[Hashable]]) -> set[int]:
    """Return the numbers of the rows to keep: each pair of values that two columns of any row have is in one of them.

    The row with the most new pairs is taken next, the first of equals, so that the choice depends on the rows alone.
    """
    pairs = [frozenset(itertools.combinations(enumerate(row), 2)) for row in rows]
    left = set().union(*pairs)
    chosen: set[int] = set()
    while left:
        best = max(range(len(rows)), key=lambda n: len(pairs[n] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen


def spread(count: int, most: int) -> set[int]:
    """Return at most so many of the numbers below `count`, at equal distances, the first and the last among them."""
    if count <= most:
        return {*range(count)}
    return {round(n * (count - 1) / (most - 1)) for n in range(most)} if most > 1 else {0}


def leave_out(metafunc: pytest.Metafunc) -> None:
    """Drop the cases of a test with a mark `pairs` or `few` that are not in the fast lane, before items are made."""
    marks = {mark.name: mark for mark in metafunc.definition.iter_markers()}
    mark = marks.get("few") or marks.get("pairs")
    if WHOLE or mark is None or "slow" in marks:
        return
    cases = metafunc._calls
    shared = [n for n, case in enumerate(cases) if all(other.name != "slow" for other in case.marks)]
    if mark.name == "few":
        chosen = spread(len(shared), *mark.args)
    else:
        chosen = covering([tuple(map(id, cases[n].params.values())) for n in shared])
    dropped = {n for place, n in enumerate(shared) if place not in chosen}
    metafunc._calls = [case for n, case in enumerate(cases) if n not in dropped]
