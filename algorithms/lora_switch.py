"""LoRA of stacked experts in mlx-lm, ΔW[e] = c · B_e A_e; mlx_lm/tuner/lora.py, LoRASwitchLinear.

Every expert has factors of its own, A (E, r, in) and B (E, out, r), this way round in contrast to those of its other
layers. As there the file holds no α: c is the `scale` of the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, expect
from .lora_transposed import scale

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoraSwitchTensors:
    """The factors of the experts of n stacks of equal shape."""

    up: Tensor  # B, [n, E, out, r]
    down: Tensor  # A, [n, E, r, in]
    lora_alpha: float  # α
    over_rank: bool = True  # whether c = α / r


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (E, out, r) and down (E, r, in) for a weight (E, out, in)."""
    up, down = shapes["up"], shapes["down"]
    expect(
        holds=len(up) == len(target) == 3 and up[:2] == target[:2] and down == (target[0], up[2], target[2]),
        otherwise=f"lora_a is {list(down)}, lora_b is {list(up)}, the weight is {list(target)}",
    )
    return {"up": up, "down": down}


def delta(base: Tensor, t: LoraSwitchTensors) -> Tensor:
    """Return ΔW in the shape of `base`, whose values are not read: [n, E, out·in], or [n, E·out, in] in pieces."""
    return ((t.up * scale(t.lora_alpha, t.down.shape[2], over_rank=t.over_rank)) @ t.down).reshape(base.shape)


LORA_SWITCH = Algorithm(
    "lora_switch", LoraSwitchTensors, fitted_shapes, delta, "mlx-lm", row_axes={"up": 0, "down": 0}, stacked=True
)
