"""Laws of the helper that replaces full products by pairs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.pairs import covering, spread


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_covering_keeps_every_pair_of_values(sizes: list[int]) -> None:
    rows = [*itertools.product(*map(range, sizes))]
    kept = [rows[n] for n in covering(rows)]

    def pairs(some: list[tuple[int, ...]]) -> set[object]:
        return {pair for row in some for pair in itertools.combinations(enumerate(row), 2)}

    assert pairs(kept) == pairs(rows)


def test_covering_is_a_third_of_a_product_of_four() -> None:
    rows = [*itertools.product(range(2), range(4), range(4), range(3))]
    assert len(covering(rows)) <= len(rows) / 3


@given(st.integers(1, 50), st.integers(1, 9))
def test_spread_has_both_ends_and_no_more_than_was_asked(count: int, most: int) -> None:
    kept = spread(count, most)
    assert len(kept) == min(count, most) and min(kept) == 0
    assert most == 1 or max(kept) == count - 1
