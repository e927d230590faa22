"""LoRA of stacked experts in mlx-lm, ΔW[e] = c · B_e A_e; mlx_lm/tuner/lora.py, LoRASwitchLinear.

Every expert has its own factors, A (E, r, in) and B (E, out, r), transposed in comparison with those of other layers of
mlx-lm (lora_transposed.py). The file stores no α: c is the `scale` of the configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, expect
from .lora_transposed import scale
from .tensors import PairWithoutAlpha

if TYPE_CHECKING:
    from torch import Tensor


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of up (E, out, r) and down (E, r, in) for a weight (E, out, in)."""
    up, down = shapes["up"], shapes["down"]
    expect(
        holds=len(up) == len(target) == 3 and up[:2] == target[:2] and down == (target[0], up[2], target[2]),
        otherwise=f"lora_a is {list(down)}, lora_b is {list(up)}, the weight is {list(target)}",
    )
    return {"up": up, "down": down}


def delta(base: Tensor, t: PairWithoutAlpha) -> Tensor:
    """Return ΔW in the shape of `base`, whose values are not read: [n, E, out·in], or [n, E·out, in] for rows of it."""
    return ((t.up * scale(t.lora_alpha, t.down.shape[2], over_rank=t.over_rank)) @ t.down).reshape(base.shape)


LORA_SWITCH = Algorithm(
    "lora_switch", PairWithoutAlpha, fitted_shapes, delta, "mlx-lm", row_axes={"up": 0, "down": 0}, layout="experts",
)  # fmt: skip
