"""Uni-LoRA, ΔW = B A, all numbers of A and B taken from one short vector. Li et al. 2025, arXiv:2506.00799.

A[i, j] = θ[a_ij] · s_ij, B likewise; θ is stored once for all layers. Which entry each number is (a) and its scale (s)
follow from the order in which the model's code lists its layers, so only files that hold them can be merged (PEFT
`save_indices`, tuners/unilora/layer.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, expect, expect_shapes, flat
from .bounds import Bounds, below

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices


@dataclass(frozen=True)
class UniTensors:
    """Where the numbers of both factors are in the vector, and their scales."""

    down_choice: Indices  # [n, r, in]
    down_weight: Tensor  # [n, r, in]
    up_choice: Indices  # [n, out, r]
    up_weight: Tensor  # [n, out, r]
    bank: Tensor  # θ, [n, numbers]; shared


def fit(shapes: Shapes, target: Shape) -> Shapes:
    """Shapes as stored."""
    (out, cols), choice = flat(target), shapes["down_choice"]
    rank, bank = choice[0] if choice else 0, shapes.get("bank", ())
    up, down = (out, rank), (rank, cols)
    want = {"down_choice": down, "down_weight": down, "up_choice": up, "up_weight": up}
    expect_shapes(shapes, want)
    expect(holds=len(bank) == 1 and bank[0] > 0, otherwise=f"the vector that all layers share is {list(bank)}")
    return {**want, "bank": bank}


def entries(shapes: Shapes, _: Shape) -> list[Bounds]:
    """The numbers of the vector."""
    return [below(shapes["bank"][0])]


def delta(base: Tensor, t: UniTensors) -> Tensor:
    """ΔW [n, out, cols]; `base` is not read."""
    return _factor(t.bank, t.up_choice, t.up_weight) @ _factor(t.bank, t.down_choice, t.down_weight)


def _factor(bank: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
    return bank.gather(1, choice.flatten(1)).view(weight.shape) * weight


UNILORA = Algorithm(
    "unilora", UniTensors, fit, delta, "arXiv:2506.00799",
    sliced={"up_choice": 0, "up_weight": 0}, shared=frozenset({"bank"}),
    bounds={"up_choice": entries, "down_choice": entries},
)  # fmt: skip
