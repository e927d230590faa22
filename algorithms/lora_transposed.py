"""LoRA as in LLMs-from-scratch, appendix E, and mlx-lm: x A B, so ΔW = c · (A B)ᵀ. Raschka 2024.

A is (in, r) and B (r, out), the transposes of the usual factors. The file stores no α; c is α / r in
the present code of appendix E and α in its first editions, so both are settings. mlx-lm's c is
the `scale` of its configuration (mlx_lm/tuner/lora.py, LoRALinear).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Factorisation, Shape, Shapes, expect, flat, of_factors, rank_of
from .lora import add_product
from .tensors import PairWithoutAlpha

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (r, out) and down (in, r)."""
    out, cols = flat(target)
    up, down = shapes["up"], shapes["down"]
    expect(
        holds=len(up) == len(down) == 2 and up[0] == down[1] and (out, cols) == (up[1], down[0]),
        otherwise=f"lora.A is {list(down)}, lora.B is {list(up)}, the weight is {list(target)}",
    )
    return {"up": up, "down": down}


def factors(base: Tensor, t: PairWithoutAlpha) -> tuple[Tensor, Tensor]:
    """Return c · Bᵀ and Aᵀ; `base` is not read."""
    return t.up.mT * scale(t.lora_alpha, t.up.shape[1], over_rank=t.over_rank), t.down.mT


def accumulate(acc: Tensor, t: PairWithoutAlpha, strength: Tensor) -> None:
    """Add strength · ΔW to acc, in one fused multiply-add."""
    add_product(acc, t.up.mT, t.down.mT, strength * scale(t.lora_alpha, t.up.shape[1], over_rank=t.over_rank))


def scale(lora_alpha: float, rank: int, *, over_rank: bool) -> float:
    """Return c."""
    return lora_alpha / rank if over_rank and rank else lora_alpha


LORA_TRANSPOSED = of_factors(
    "lora_transposed", PairWithoutAlpha, fitted_shapes, Factorisation(rank_of("up"), factors), "LLMs-from-scratch",
    row_axes={"up": 1}, accumulate=accumulate, layout="in_out",
    weight_shape=lambda shapes: (shapes["up"][-1], shapes["down"][0]),
)  # fmt: skip
