"""The factors of a formula: their product is ΔW, and their rank is the one that headers tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lora_merge.algorithms import ALGORITHMS, flat
from lora_merge.proof.examples import CONV, EXAMPLES, Example, shapes, tensors, weight

LOW_RANK = {name for name, row in ALGORITHMS.items() if row.low_rank is not None}

FURTHER = {
    "linear": ("lora", Example({"up": (12, 2), "down": (2, 16)}, numbers={"scale": 0.75})),
    "no core": ("loha", Example({"w1_a": (12, 2), "w1_b": (2, 16), "w2_a": (12, 2), "w2_b": (2, 16)},
                                numbers={"scale": 0.75})),
    "whole": ("lokr", Example({"w1": (3, 2), "w2": (4, 8)}, numbers={"scale": 0.75, "rs_scale": 1.5})),
    "pairs": ("lokr", Example({"w1_a": (3, 1), "w1_b": (1, 2), "w2_a": (4, 2), "w2_b": (2, 8)},
                              numbers={"scale": 0.75, "rs_scale": 1.5}, settings={"rs_lora": True})),
    "right": ("lokr", Example({"w1": (3, 2), "w2": (4, 2, 9)}, CONV, {"scale": 0.75, "rs_scale": 1.5},
                              {"right_aligned": True})),
    "left": ("lokr", Example({"w1": (3, 2), "w2": (4, 2, 9)}, CONV, {"scale": 0.75, "rs_scale": 1.5})),
    "no kernel": ("glora", Example({"a1": (16, 2), "a2": (2, 16), "b1": (12, 2), "b2": (2, 16)},
                                   numbers={"scale": 0.75})),
    "blocks in up": ("bdlora", Example({"up": (2, 6, 2), "down": (2, 2, 16)}, numbers={"scale": 0.75})),
    "orthogonal": ("hra", Example({"vectors": (16, 2)}, settings={"orthogonal": True})),
    "last": ("tlora", replace(EXAMPLES["tlora"], settings={"algo": "tlora", "sig_type": "last"})),
    "qr": ("deft", replace(EXAMPLES["deft"], settings={"method": "qr"})),
}  # fmt: skip
CASES = {name: (name, EXAMPLES[name]) for name in sorted(LOW_RANK)} | FURTHER


@pytest.mark.parametrize("case", CASES)
def test_the_product_of_the_factors_is_the_change(case: str) -> None:
    name, example = CASES[case]
    row = ALGORITHMS[name]
    assert row.low_rank is not None
    fitted, base = shapes(example), torch.from_numpy(weight(example))[None]
    given = {slot: torch.from_numpy(np.asarray(value))[None] for slot, value in tensors(name, example).items()}
    derived = row.derived(fitted, example.shape, {**row.settings, **example.settings})
    given |= {slot: value[None].to(torch.float64) for slot, value in derived.items()}
    numbers = {scalar: torch.full((1, 1, 1), v, dtype=torch.float64) for scalar, v in example.numbers.items()}
    filled = row.prepared(row.tensors(**given, **numbers, **example.settings))
    left, right = row.low_rank.factors(base, filled)
    assert left.shape == (1, base.shape[1], row.low_rank.rank(fitted, example.shape))
    assert right.shape == (1, left.shape[2], flat(example.shape)[1])
    torch.testing.assert_close(left @ right, row.delta(base, filled), rtol=1e-10, atol=1e-12)
