"""What is stored of a weight, and where the rows of a view lie. Run: pytest tests/models/test_weights.py"""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lora_merge.dtypes import StoredTensor
from lora_merge.models.weights import RowSlice, Weight, WeightView, absent_weight, rows_of

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def stored(shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor("a", "F32", shape, Path("a"), 0, 4 * prod(shape))


@given(sizes=SIZES, more=st.lists(st.integers(0, 3), min_size=4, max_size=4), data=st.data())
def test_stored_elements_of_some_rows_are_those_in_the_low_corner(
    sizes: list[int], more: list[int], data: st.DataObject
) -> None:
    """All rows of the first axis, padded in any axes or in none."""
    small, large = tuple(sizes), tuple(a + b for a, b in zip(sizes, more, strict=False))
    numbers = np.arange(1, prod(small) + 1).reshape(small)
    padded = np.zeros(large, int)
    padded[tuple(map(slice, small))] = numbers
    first = data.draw(st.integers(0, large[0]))
    last = data.draw(st.integers(first, large[0]))
    row = prod(large[1:])
    at, count = Weight(large, stored(small)).span(first * row, last * row)
    there = padded[first:last]
    if large == small:
        assert np.array_equal(numbers.reshape(-1)[at : at + count], there.reshape(-1))
    else:
        assert np.array_equal(numbers.reshape(-1)[at : at + count], there[there > 0])


@given(sizes=SIZES)
def test_absent_weight_has_no_stored_elements(sizes: list[int]) -> None:
    weight = absent_weight("b", tuple(sizes), stored((2,)))
    assert (weight.shape, weight.padded, weight.stored.nbytes) == (tuple(sizes), True, 0)
    assert weight.span(0, prod(sizes)) == (0, 0)


@given(heights=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_addresses_follow_each_other_and_rows_are_cut_by_them(heights: list[int], data: st.DataObject) -> None:
    view = WeightView(tuple(RowSlice(str(n), 2, 2 + h, 3) for n, h in enumerate(heights)), (sum(heights), 3))
    found = [(piece.key, first + i, piece.start + i) for piece, first in view.addresses() for i in range(piece.rows)]
    assert [row for _, row, _ in found] == list(range(sum(heights)))
    low = data.draw(st.integers(0, sum(heights)))
    high = data.draw(st.integers(low, sum(heights)))
    cut = rows_of(view, low, high)
    rows = [(piece.key, row) for piece in cut.row_slices for row in range(piece.start, piece.stop)]
    assert rows == [(key, row) for key, _, row in found[low:high]]
