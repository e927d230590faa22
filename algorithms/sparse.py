"""LoRA with a sparse remainder, ΔW = (α / r) · (B A + S). LyCORIS extraction with `use_bias`,
lycoris/utils/__init__.py.

S is stored as coordinates, values and size. The file calls it `bias_…`; it belongs to the weight.
Indices and sizes are int16, so what exceeds 32767 has wrapped into the negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import lora
from .base import Algorithm, Shape, Shapes, alpha_over, expect, flat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Indices, Scalar


@dataclass(frozen=True)
class LoraSparseTensors:
    """The adapter tensors of n layers of equal shape, stacked."""

    up: Tensor  # [n, out, r]
    down: Tensor  # [n, r, cols]; with a core [n, r, in]
    indices: Indices  # [n, 2, z], rows and columns
    values: Tensor  # [n, z]
    size: Indices  # [n, 2], out and cols
    scale: Scalar  # α / r
    mid: Tensor | None = None  # Tucker core, [n, r, r, k]


def fit(shapes: Shapes, target: Shape) -> Shapes:
    """Shapes without n as in LoraSparseTensors."""
    indices, values = shapes["indices"], shapes["values"]
    expect(
        holds=len(values) == 1 and indices == (2, *values) and shapes["size"] == (2,),
        otherwise=f"indices are {list(indices)}, values {list(values)}, size {list(shapes['size'])}",
    )
    return {**lora.fit(shapes, target), "indices": indices, "values": values, "size": (2,)}


def check(integers: Mapping[str, Tensor], _: Shapes, target: Shape) -> None:
    """The remainder has the size of the weight and no index points beyond it."""
    out, cols = flat(target)
    size = [int(s) for s in _unwrapped(integers["size"])]
    expect(holds=size == [out, cols], otherwise=f"bias_size {size}, the weight {list(target)}")
    rows, columns = _unwrapped(integers["indices"])
    expect(
        holds=not rows.numel() or bool((rows < out).all() and (columns < cols).all()),
        otherwise=f"bias_indices point beyond {[out, cols]}",
    )


def delta(base: Tensor, t: LoraSparseTensors) -> Tensor:
    """ΔW [n, out, cols]; `base` is not read."""
    pair = lora.LoraTensors(t.up, t.down, t.scale, t.mid)
    dense = lora.delta(base, pair)
    rows, columns = _unwrapped(t.indices).unbind(1)
    flat_index = rows * base.shape[2] + columns
    dense.view(dense.shape[0], -1).scatter_add_(1, flat_index, t.values * t.scale[:, :, 0])
    return dense


def _unwrapped(stored: Tensor) -> Tensor:
    """Indices with int16's overflow undone."""
    import torch

    return torch.where(stored < 0, stored + 65536, stored)


LORA_SPARSE = Algorithm(
    "lora_sparse", LoraSparseTensors, fit, delta, "LyCORIS", numbers=alpha_over("down"), check=check
)
