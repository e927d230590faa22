"""Ranges of rows: those that meet are found, whatever their lengths; runs of row numbers keep the order of the list."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_merge.row_ranges import Ranges, RowNumbers
from tests.kit.pairs import examples

ranges = st.tuples(st.integers(0, 40), st.integers(0, 30)).map(lambda r: (r[0], r[0] + r[1]))


@given(st.lists(ranges, max_size=12), ranges)
@settings(max_examples=examples(60), deadline=None)
def test_ranges_find_what_a_look_at_each_finds(given_: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    start, stop = asked
    expected = [n for n, (first, last) in enumerate(given_) if max(first, start) < min(last, stop)]
    assert Ranges((*pair, n) for n, pair in enumerate(given_)).meeting(start, stop) == expected


def test_ranges_of_very_different_lengths_are_found() -> None:
    found = Ranges([(0, 10**12, "all"), *((n, n + 1, str(n)) for n in range(0, 200, 2))])
    assert found.meeting(10**9, 10**9 + 1) == ["all"]
    assert found.meeting(6, 9) == ["all", "6", "8"]


def test_runs_of_rows_follow_the_list() -> None:
    rows = RowNumbers([7, 8, 9, 3, 1, 2, 5])
    assert rows.runs == ((7, 3), (3, 1), (1, 2), (5, 1))
    assert (rows.last, RowNumbers().last, RowNumbers().runs) == (9, -1, ())
    assert rows == RowNumbers(rows) == (7, 8, 9, 3, 1, 2, 5)
    assert {rows: 1}[RowNumbers(rows)] == 1
