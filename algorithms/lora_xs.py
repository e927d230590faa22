"""LoRA-XS, ΔW = (α / r) · U M Vᵀ: a small trained core between the base's first singular vectors, which are stored.
Bałazy et al. 2024, arXiv:2405.17604.

Stable Audio 3 writes it, with DoRA's magnitude or without; stable_audio_3/models/lora/model.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .base import Factorisation, Shape, Shapes, alpha_over, expect_shapes, flat, of_factors, rank_of

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class LoraXsTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    left: Tensor  # U, [n, out, r]
    core: Tensor  # M, [n, r, r]
    right: Tensor  # V, [n, cols, r]
    scale: Scalar  # α / r


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of left (out, r), core (r, r) and right (cols, r)."""
    (out, cols), rank = flat(target), shapes["core"][0] if shapes["core"] else 0
    return expect_shapes(shapes, {"left": (out, rank), "core": (rank, rank), "right": (cols, rank)})


def factors(_: Tensor, t: LoraXsTensors) -> tuple[Tensor, Tensor]:
    """Return (α / r) · U M and Vᵀ."""
    return (t.left @ t.core) * t.scale, t.right.mT


LORA_XS = of_factors(
    "lora_xs", LoraXsTensors, fitted_shapes, Factorisation(rank_of("core"), factors), "arXiv:2405.17604",
    scalars_from=alpha_over("core"), row_axes={"left": 0},
)  # fmt: skip
