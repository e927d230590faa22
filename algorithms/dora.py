"""DoRA, W' = m · V / ‖V‖ with V = W + ΔW. Liu et al. 2024, arXiv:2402.09353, section 4.1.

DoRA is not a row of the table: it changes the ΔW of any other algorithm. The norm runs over each output row (axis
"out"; PEFT, ai-toolkit, torchtune, LyCORIS since 3.2) or over each input channel (axis "in"; older
LyCORIS, OneTrainer). The norm is that of V at full strength, as in every trainer's forward.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, Literal

from .base import DoesNotFit, Shape, expect, length

if TYPE_CHECKING:
    from torch import Tensor

Axis = Literal["out", "in"]

SHAPED: Final = ".dora_scale"
"""The only ending of a key whose magnitude has its axis in its shape."""

EPS: Final = 2.0**-23  # of float32; trainers add it to the norm, which matters for rows of zeros only


def fit(magnitude: Shape, target: Shape, ending: str) -> tuple[Axis, Shape]:
    """Return the axis, and the shape as `rescale` wants it without n: (out, 1) or (1, in).

    Only the shape of `.dora_scale` gives the axis (the position of the long axis, where the weight
    is square); every other key, and every vector, means the output. PEFT's (1, out, 1, 1) for
    convolutions looks like an input axis, but is the output axis.
    """
    expect(holds=len(target) > 1, otherwise=f"a magnitude on a weight of shape {list(target)}")
    out, channels = target[:2]
    size, shaped = prod(magnitude), ending == SHAPED and len(magnitude) > 1
    if size == out and (not shaped or magnitude[0] == out):
        return "out", (out, 1)
    if size == channels and shaped and magnitude[1] == channels:
        return "in", (1, channels)
    raise DoesNotFit(f"the magnitude is {list(magnitude)}, the weight {list(target)}")


def rescale(base: Tensor, delta: Tensor, magnitude: Tensor, axis: Axis) -> Tensor:
    """Return ΔW [n, out, cols] with the magnitude [n, out, 1] or [n, 1, in] applied; change no input."""
    v = base + delta
    channels = magnitude.shape[2]
    blocks = v if axis == "out" else v.view(*v.shape[:2], channels, -1)
    dims = (2,) if axis == "out" else (1, 3)
    norm = length(blocks, dims).clamp_(min=EPS)
    blocks.mul_(magnitude.reshape(norm.shape) / norm)
    return v.sub_(base)
