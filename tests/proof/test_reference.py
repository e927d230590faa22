"""The reference formulas agree with the production ones, and take rows as they take the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st

from lora_merge.algorithms import ALGORITHMS
from lora_merge.cli.doctor import computed
from lora_merge.engine.tensor_moves import Placement
from lora_merge.proof.examples import EXAMPLES, Example, formula_input, weight
from lora_merge.proof.reference import REFERENCE
from lora_merge.proof.second_reading.layouts import ALL_BUT_LAST_SQUARE, EQUAL, FIRST_SQUARE, heights
from tests.kit.further_examples import FURTHER
from tests.kit.pairs import examples


def test_every_algorithm_has_a_reference_and_an_example() -> None:
    assert set(REFERENCE) == set(ALGORITHMS)
    assert set(EXAMPLES) == set(ALGORITHMS)


@pytest.mark.few(17)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_reference_is_the_algorithm_in_float64(name: str) -> None:
    _assert_same_change(name, EXAMPLES[name])


@pytest.mark.parametrize("case", FURTHER)
def test_reference_of_other_shapes_and_settings_is_the_algorithm_in_float64(case: str) -> None:
    _assert_same_change(*FURTHER[case])


def _assert_same_change(name: str, example: Example) -> None:
    base = weight(example)
    want = REFERENCE[name].formula(formula_input(name, example, base))
    got = computed(name, example, base, Placement(torch.device("cpu"), torch.float64))
    assert want.shape == base.shape
    assert np.abs(want).max() > 1e-4
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.few(17)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_rows_of_the_reference_are_the_rows_of_the_whole(name: str) -> None:
    example = EXAMPLES[name]
    base = weight(example)
    whole = REFERENCE[name].formula(formula_input(name, example, base))
    rows = np.array([0, len(base) // 2, len(base) - 1])
    some = REFERENCE[name].formula(formula_input(name, example, base, rows))
    np.testing.assert_allclose(some, whole[rows], rtol=1e-12, atol=1e-12)


@for_all(
    st.sampled_from([EQUAL, FIRST_SQUARE, ALL_BUT_LAST_SQUARE]),
    st.integers(2, 4),
    st.integers(0, 30),
    st.integers(0, 8),
)
@settings(max_examples=examples(200))
def test_parts_of_a_fused_weight_fill_it(split: str, count: int, rows: int, inputs: int) -> None:
    """Every part has at least one row, and all together have the weight's; else there is no split."""
    found = heights(split, count, (rows, inputs))
    squares = {EQUAL: 0, FIRST_SQUARE: 1, ALL_BUT_LAST_SQUARE: count - 1}[split]
    left = rows - squares * inputs
    fits = left > 0 and left % (count - squares) == 0 and (not squares or inputs > 0)
    assert bool(found) is fits
    if found:
        assert len(found) == count and sum(found) == rows and min(found) > 0
        assert found[:squares] == (inputs,) * squares and len(set(found[squares:])) == 1
