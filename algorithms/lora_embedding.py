"""LoRA of an embedding, ΔW = (α / r) · (B A)ᵀ. Hu et al. 2021, arXiv:2106.09685; layout of PEFT.

The weight is [vocabulary, dim] and the factors are those of its transpose, A [r, vocabulary] and
B [dim, r]. It is a row of the table, because here some rows of ΔW need only some columns of A.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Algorithm, LowRank, Shape, Shapes, alpha_over, expect_shapes, flat, rank_of

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


@dataclass(frozen=True)
class EmbeddingTensors:
    """The factors of n tables of equal shape."""

    up: Tensor  # B, [n, dim, r]
    down: Tensor  # A, [n, r, vocabulary]
    scale: Scalar  # α / r


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (dim, r) and down (r, vocabulary)."""
    (rows, cols), (rank, _) = flat(target), flat(shapes["down"])
    return expect_shapes(shapes, {"up": (cols, rank), "down": (rank, rows)})


def delta(base: Tensor, t: EmbeddingTensors) -> Tensor:
    """Return ΔW [n, vocabulary, dim]; `base` is not read."""
    left, right = factors(base, t)
    return left @ right


def factors(base: Tensor, t: EmbeddingTensors) -> tuple[Tensor, Tensor]:
    """Return Aᵀ and (α / r) · Bᵀ; `base` is not read."""
    return t.down.transpose(1, 2), (t.up * t.scale).transpose(1, 2)


def accumulate(acc: Tensor, t: EmbeddingTensors, strength: Tensor) -> None:
    """Add strength · ΔW to acc, in one fused multiply-add."""
    acc.baddbmm_(t.down.transpose(1, 2), (t.up * (t.scale * strength)).transpose(1, 2))


LORA_EMBEDDING = Algorithm(
    "lora_embedding", EmbeddingTensors, fitted_shapes, delta, "arXiv:2106.09685",
    scalars_from=alpha_over("down"), row_axes={"down": 1}, accumulate=accumulate,
    of_table=True, low_rank=LowRank(rank_of("down"), factors),
    weight_shape=lambda shapes: (shapes["down"][-1], shapes["up"][0]),
)  # fmt: skip
