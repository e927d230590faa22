"""OneTrainer's OFT: blocks of input columns are rotated, W' = W bd(R)ᵀ. OneTrainer
modules/module/oft_utils.py, after arXiv:2506.19847 (OFTv2).

R is the Neumann series of the Cayley transform, cut after five terms: I + 2S + 2S² + 2S³ + S⁴. For
convolutions OneTrainer rotates the weight instead of the input, in the opposite direction: W' =
flat(W) bd(R). A single stored block is shared by all columns. If `scaled_oft` is stored, the
stored values are 2√(b−1) times too large.
"""

from __future__ import annotations

from math import prod, sqrt
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, expect, flat
from .peft_oft import block_size, skew_blocks, tiles

if TYPE_CHECKING:
    from torch import Tensor


class OneTrainerOftTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked; cols = k·b."""

    skew: Tensor  # upper triangles of S, row by row, [n, k, b(b−1)/2]; k = 1: shared
    scaled: Tensor | None = None  # a flag: its value is not read


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of skew (k, b(b−1)/2) and scaled (1,) for linear layers."""
    expect(holds=len(target) == 2, otherwise=f"the weight is {list(target)}, not a linear layer's")
    return _fitted_shapes(shapes, target)


def fitted_shapes_conv(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of skew (k, b(b−1)/2) and scaled (1,) for convolutions."""
    expect(holds=len(target) > 2, otherwise=f"the weight is {list(target)}, not a convolution's")
    return _fitted_shapes(shapes, target)


def _fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    stored, (_, cols) = shapes["skew"], flat(target)
    k, b = (stored[0], block_size(stored[1])) if len(stored) == 2 else (0, 0)
    expect(holds=b > 0, otherwise=f"skew is {list(stored)}: not the triangles of square blocks")
    expect(
        holds=tiles(k, b, cols),
        otherwise=f"{k} blocks of {b} columns, the weight is {list(target)}",
    )
    if "scaled" not in shapes:
        return {"skew": stored}
    expect(holds=prod(shapes["scaled"]) == 1, otherwise="scaled_oft is not one flag")
    return {"skew": stored, "scaled": (1,)}


def _turned(t: OneTrainerOftTensors) -> Tensor:
    """Return R − I, [n, k, b, b]."""
    s = skew_blocks(t.skew)
    if t.scaled is not None:
        s = s / (2 * sqrt(max(s.shape[-1] - 1, 1)))
    squared = s @ s
    return squared @ (squared + 2 * s) + 2 * (squared + s)


def _by_blocks(base: Tensor, right: Tensor) -> Tensor:
    """Return base · bd(right), [n, out, cols]."""
    n, out, _ = base.shape
    blocks = base.view(n, out, -1, right.shape[-1]).transpose(1, 2)  # [n, k, out, b]
    return (blocks @ right).transpose(1, 2).flatten(2)


def delta(base: Tensor, t: OneTrainerOftTensors) -> Tensor:
    """Return ΔW [n, out, cols] of linear layers, from the untouched `base`."""
    return _by_blocks(base, _turned(t).mT)


def delta_conv(base: Tensor, t: OneTrainerOftTensors) -> Tensor:
    """Return ΔW [n, out, cols] of convolutions, from the untouched `base`."""
    return _by_blocks(base, _turned(t))


ONETRAINER_OFT = Algorithm(
    "onetrainer_oft", OneTrainerOftTensors, fitted_shapes, delta, "arXiv:2506.19847",
    row_axes={}, reads_base=True,
    in_peft="never",
)  # fmt: skip
ONETRAINER_OFT_CONV = Algorithm(
    "onetrainer_oft_conv", OneTrainerOftTensors, fitted_shapes_conv, delta_conv, "arXiv:2506.19847",
    row_axes={}, reads_base=True,
    in_peft="never",
)  # fmt: skip
