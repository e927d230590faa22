"""Pairs in the place of full products: the few cases of a test that have every pair of values of two parameters."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence

import pytest


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


def mark_products(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases of each test marked `pairs` that have no pair of values of their own."""
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairs"):
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in products.values():
        chosen = covering([tuple(map(id, case.callspec.params.values())) for case in cases])
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker(pytest.mark.slow)
