"""DeLoRA, ΔW = (λ / r) · B diag(1 / ‖bᵢ‖‖aᵢ‖) A diag(w). Bini et al. 2025, arXiv:2503.18225,
section 3.

aᵢ are the rows of A, bᵢ the columns of B, w the stored column norms of the weight at the start.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Factorisation, Shape, Shapes, expect, flat, length, of_factors, rank_of, shape_of_pair

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_NORM = 1e-4  # PEFT tuners/delora/layer.py


class DeloraTensors(NamedTuple):
    """Two factors, and the numbers that scale them."""

    up: Tensor  # B, [n, out, r]
    down: Tensor  # A, [n, r, in]
    length: Tensor  # λ, [n, 1, 1]
    norms: Tensor  # w, [n, 1, in]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (out, r), down (r, in), length (1, 1) and norms (1, in)."""
    (out, cols), rank = flat(target), shapes["down"][0] if shapes["down"] else 0
    expect(
        holds=shapes["up"] == (out, rank) and shapes["down"] == (rank, cols) and rank > 0,
        otherwise=f"up is {list(shapes['up'])}, down {list(shapes['down'])}, the weight {out}×{cols}",
    )
    expect(
        holds=prod(shapes["length"]) == 1,
        otherwise=f"λ is {list(shapes['length'])}, not one number",
    )
    expect(
        holds=prod(shapes["norms"]) == cols,
        otherwise=f"{prod(shapes['norms'])} norms for {cols} columns",
    )
    return {"up": (out, rank), "down": (rank, cols), "length": (1, 1), "norms": (1, cols)}


def factors(base: Tensor, t: DeloraTensors) -> tuple[Tensor, Tensor]:
    """Return B̂ and (λ / r) · Â diag(w), with B's columns and A's rows at length 1; `base` is not read."""
    rank = t.down.shape[1]
    up: Tensor = t.up / length(t.up, (1,)).clamp(min=SMALLEST_NORM)
    down: Tensor = t.down / length(t.down, (2,)).clamp(min=SMALLEST_NORM)
    return up, down * (t.length / rank) * t.norms


DELORA = of_factors(
    "delora", DeloraTensors, fitted_shapes, Factorisation(rank_of("down"), factors), "arXiv:2503.18225",
    weight_shape=shape_of_pair,
)  # fmt: skip
