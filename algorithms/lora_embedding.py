"""LoRA of an embedding, ΔW = (α / r) · (B A)ᵀ. Hu et al. 2021, arXiv:2106.09685; layout of PEFT.

The weight is [vocabulary, dim] and the factors are those of its transpose, A [r, vocabulary] and
B [dim, r]. It is a row of the table, because here some rows of ΔW need only some columns of A.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Factorisation, Shape, Shapes, alpha_over, expect_shapes, flat, of_factors, rank_of
from .tensors import FactorPair

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (dim, r) and down (r, vocabulary)."""
    (rows, cols), (rank, _) = flat(target), flat(shapes["down"])
    return expect_shapes(shapes, {"up": (cols, rank), "down": (rank, rows)})


def factors(base: Tensor, t: FactorPair) -> tuple[Tensor, Tensor]:
    """Return Aᵀ and (α / r) · Bᵀ; `base` is not read."""
    return t.down.transpose(1, 2), (t.up * t.scale).transpose(1, 2)


def accumulate(acc: Tensor, t: FactorPair, strength: Tensor) -> None:
    """Add strength · ΔW to acc, in one fused multiply-add."""
    acc.baddbmm_(t.down.transpose(1, 2), (t.up * (t.scale * strength)).transpose(1, 2))


LORA_EMBEDDING = of_factors(
    "lora_embedding", FactorPair, fitted_shapes, Factorisation(rank_of("down"), factors), "arXiv:2106.09685",
    scalars_from=alpha_over("down"), row_axes={"down": 1}, accumulate=accumulate, layout="table",
    weight_shape=lambda shapes: (shapes["down"][-1], shapes["up"][0]),
)  # fmt: skip
