"""The factors of a formula: their product is ΔW, and their rank is the one that headers tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_merge.algorithms import ALGORITHMS, DoesNotFit, flat
from lora_merge.proof.examples import EXAMPLES, shapes, tensors, weight
from tests.kit.further_examples import FURTHER

LOW_RANK = {name for name, row in ALGORITHMS.items() if row.low_rank is not None}

CASES = {name: (name, EXAMPLES[name]) for name in sorted(LOW_RANK)} | FURTHER


@pytest.mark.parametrize("case", CASES)
def test_product_of_the_factors_is_the_change(case: str) -> None:
    name, example = CASES[case]
    row = ALGORITHMS[name]
    assert row.low_rank is not None
    fitted, base = shapes(example), torch.from_numpy(weight(example))[None]
    given = {slot: torch.from_numpy(np.asarray(value))[None] for slot, value in tensors(name, example).items()}
    derived = row.derived(fitted, example.shape, {**row.settings, **example.settings})
    given |= {slot: value[None].to(torch.float64) for slot, value in derived.items()}
    numbers = {scalar: torch.full((1, 1, 1), v, dtype=torch.float64) for scalar, v in example.scalars.items()}
    filled = row.prepared(row.tensors(**given, **numbers, **example.settings))
    left, right = row.low_rank.factors(base, filled)
    assert left.shape == (1, base.shape[1], row.low_rank.rank(fitted, example.shape))
    assert right.shape == (1, left.shape[2], flat(example.shape)[1])
    torch.testing.assert_close(left @ right, row.delta(base, filled), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sides", [((0, 0), (2, 2)), ((2, 2), (0, 3)), ((2, 0), (2, 2))])
def test_factors_of_nothing_have_sizes(sides: tuple[tuple[int, int], tuple[int, int]]) -> None:
    """A file may hold tensors without elements; their product is a weight without any."""
    row, numbers = ALGORITHMS["lokr"], torch.ones(1, 1, 1)
    w1, w2 = (torch.ones(1, *side) for side in sides)
    assert row.low_rank is not None
    filled = row.tensors(w1=w1, w2=w2, scale=numbers, rs_scale=numbers)
    base = torch.zeros(1, sides[0][0] * sides[1][0], sides[0][1] * sides[1][1])
    left, right = row.low_rank.factors(base, filled)
    assert torch.equal(left @ right, row.delta(base, filled))


@pytest.mark.few(44)
@pytest.mark.parametrize("alpha", [1e300, -1e300, 5e-324, -2.0, 0.0])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_alpha_gives_a_number(name: str, alpha: float) -> None:
    """Squares of large ones are infinite, which the merge refuses; no row raises another error."""
    row = ALGORITHMS[name]
    try:
        found = row.scalars_from(alpha, shapes(EXAMPLES[name]), EXAMPLES[name].shape)
    except DoesNotFit:
        return
    assert all(type(value) is float for value in found.values())
