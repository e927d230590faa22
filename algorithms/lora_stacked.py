"""LoRA of stacked experts with factors of three axes, ΔW[e] = (α / r) · B_e A_e.

A is (E, r, in) and B (E, out, r); a factor with a first axis of 1 serves all experts. Tinker shares the outer side of
each layer, SGLang the inner one of the first and the outer one of the second; SkyRL and Megatron share none. Sources:
https://github.com/thinking-machines-lab/tinker-cookbook tinker_cookbook/weights/_merge.py,
https://github.com/NovaSky-AI/SkyRL #1852, https://github.com/sgl-project/sglang pull 21466.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from .base import Algorithm, Shape, Shapes, alpha_over, expect
from .tensors import FactorPair

if TYPE_CHECKING:
    from torch import Tensor


def _fitted_shapes(shared: frozenset[str]) -> Callable[[Shapes, Shape], Shapes]:
    """Return the check of shapes for factors of which these are shared by all experts."""

    def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
        """Return the shapes of up (E or 1, out, r) and down (E or 1, r, in) for a weight (E, out, in)."""
        up, down = shapes["up"], shapes["down"]
        expect(
            holds=len(up) == len(down) == len(target) == 3 and target[0] > 0,
            otherwise=f"these are factors of stacked experts, the weight is {list(target)}",
        )
        counts = {slot: 1 if slot in shared else target[0] for slot in ("up", "down")}
        expect(
            holds=(up, down) == ((counts["up"], target[1], up[2]), (counts["down"], up[2], target[2])),
            otherwise=f"down is {list(down)}, up is {list(up)}, the weight is {list(target)}",
        )
        return {"up": up, "down": down}

    return fitted_shapes


def delta(base: Tensor, t: FactorPair) -> Tensor:
    """Return ΔW in the shape of `base`, whose values are not read: [n, E, out·in], or [n, E·out, in] for rows of it."""
    return ((t.up * t.scale.unsqueeze(3)) @ t.down).reshape(base.shape)


def _row(name: str, shared: str = "") -> Algorithm:
    return Algorithm(
        name, FactorPair, _fitted_shapes(frozenset((shared,))), delta, "arXiv:2106.09685",
        scalars_from=alpha_over("down", 1), row_axes=dict.fromkeys({"up", "down"} - {shared}, 0),
        layout="experts",
    )  # fmt: skip


LORA_STACKED: Final = _row("lora_stacked")
LORA_STACKED_DOWN: Final = _row("lora_stacked_down", "down")
LORA_STACKED_UP: Final = _row("lora_stacked_up", "up")

STACKED: Final = (LORA_STACKED, LORA_STACKED_DOWN, LORA_STACKED_UP)
"""Rows for factors of each expert, and for those of which one serves all experts."""
