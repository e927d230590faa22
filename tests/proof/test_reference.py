"""The reference formulas agree with the production ones, and take rows as they take the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_merge.algorithms import ALGORITHMS
from lora_merge.cli.doctor import computed
from lora_merge.engine.placement import Placement
from lora_merge.proof.examples import EXAMPLES, given, weight
from lora_merge.proof.reference import REFERENCE


def test_every_algorithm_has_a_reference_and_an_example() -> None:
    assert set(REFERENCE) == set(ALGORITHMS)
    assert set(EXAMPLES) == set(ALGORITHMS)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_reference_is_the_algorithm_in_float64(name: str) -> None:
    example = EXAMPLES[name]
    base = weight(example)
    want = REFERENCE[name].formula(given(name, example, base))
    got = computed(name, example, base, Placement(torch.device("cpu"), torch.float64))
    assert want.shape == base.shape
    assert np.abs(want).max() > 1e-4
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_rows_of_the_reference_are_the_rows_of_the_whole(name: str) -> None:
    example = EXAMPLES[name]
    base = weight(example)
    whole = REFERENCE[name].formula(given(name, example, base))
    rows = np.array([0, len(base) // 2, len(base) - 1])
    some = REFERENCE[name].formula(given(name, example, base, rows))
    np.testing.assert_allclose(some, whole[rows], rtol=1e-12, atol=1e-12)
