"""LoRA with a sparse remainder, ΔW = (α / r) · (B A + S). LyCORIS extraction with `use_bias`,
lycoris/utils/__init__.py.

S is stored as coordinates, values and size. The file calls it `bias_…`; it belongs to the weight.
Indices and sizes are int16, so values above 32767 are stored as negative ones.

With a Tucker core, S has another meaning: since 1.7 that extraction takes it from the tuned weight
instead of the change (4.1.3, `small_conv`), so S includes the base: at the positions of S,
ΔW = (α / r) · (B A + S) − W.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from . import lora
from .base import Algorithm, Checks, Shape, Shapes, alpha_over, expect, flat, shape_of_pair
from .bounds import Bounds, below, outside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Indices, Scalar


class LoraSparseTensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    up: Tensor  # [n, out, r]
    down: Tensor  # [n, r, cols]
    indices: Indices  # [n, 2, z], rows and columns
    values: Tensor  # [n, z]
    size: Indices  # [n, 2], out and cols
    scale: Scalar  # α / r


class LoraSparseTuckerTensors(NamedTuple):
    """The tensors of LoraSparseTensors with a Tucker core."""

    up: Tensor  # [n, out, r]
    mid: Tensor  # [n, r, r, k]
    down: Tensor  # [n, r, in]
    indices: Indices  # [n, 2, z], rows and columns, none twice
    values: Tensor  # [n, z]
    size: Indices  # [n, 2], out and cols
    scale: Scalar  # α / r


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes without n as in the two dataclasses."""
    indices, values = shapes["indices"], shapes["values"]
    expect(
        holds=len(values) == 1 and indices == (2, *values) and shapes["size"] == (2,),
        otherwise=f"indices are {list(indices)}, values {list(values)}, size {list(shapes['size'])}",
    )
    return {**lora.fitted_shapes(shapes, target), "indices": indices, "values": values, "size": (2,)}


def check(integers: Mapping[str, Tensor], _: Shapes, target: Shape) -> None:
    """Raise DoesNotFit if the remainder has another size than the weight, or an index points outside of the weight."""
    out, cols = flat(target)
    size = [int(s) for s in _unwrapped(integers["size"])]
    expect(holds=size == [out, cols], otherwise=f"bias_size {size}, the weight {list(target)}")
    beyond = outside(_unwrapped(integers["indices"]), [below(out), below(cols)])
    expect(holds=beyond is None, otherwise=f"bias_indices point beyond {[out, cols]}")


def check_tucker(integers: Mapping[str, Tensor], shapes: Shapes, target: Shape) -> None:
    """Raise DoesNotFit as `check` does, and for a repeated position, whose base value would be subtracted twice."""
    check(integers, shapes, target)
    places = _flat_places(integers["indices"][None], flat(target)[1]).flatten().tolist()
    expect(holds=len(set(places)) == len(places), otherwise="bias_indices name a place twice")


def delta(base: Tensor, t: LoraSparseTensors) -> Tensor:
    """Return ΔW [n, out, cols]; `base` is not read."""
    dense = lora.LORA.delta(base, lora.LoraTensors(t.up, t.down, t.scale))
    return _added(dense, t.indices, t.values * t.scale[:, :, 0])


def delta_tucker(base: Tensor, t: LoraSparseTuckerTensors) -> Tensor:
    """Return ΔW [n, out, cols] from the untouched `base`."""
    dense = lora.LORA.delta(base, lora.LoraTensors(t.up, t.down, t.scale, t.mid))
    old = base.flatten(1).gather(1, _flat_places(t.indices, base.shape[2]))
    return _added(dense, t.indices, t.values * t.scale[:, :, 0] - old)


def stored_bounds(_: Shapes, __: Shape) -> list[Bounds]:
    """Return the range of stored values: int16, or positive int32 if a program saved them wider."""
    return [Bounds(-(2**15), 2**31)]


BOUNDS: Final = MappingProxyType({"indices": stored_bounds, "size": stored_bounds})


def _added(dense: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return `dense` with the sparse values added in place."""
    dense.view(dense.shape[0], -1).scatter_add_(1, _flat_places(indices, dense.shape[2]), values)
    return dense


def _flat_places(indices: Tensor, cols: int) -> Tensor:
    """Return positions [n, z] in the flattened weight."""
    rows, columns = _unwrapped(indices).unbind(1)
    return rows * cols + columns


def _unwrapped(stored: Tensor) -> Tensor:
    """Return the indices with the overflow of int16 undone; BOUNDS allows no number below int16."""
    import torch

    return torch.where(stored < 0, stored + 65536, stored)


LORA_SPARSE = Algorithm(
    "lora_sparse", LoraSparseTensors, fitted_shapes, delta, "LyCORIS", scalars_from=alpha_over("down"),
    checks=Checks(BOUNDS, integers=check), weight_shape=shape_of_pair,
)  # fmt: skip
LORA_SPARSE_TUCKER = Algorithm(
    "lora_sparse_tucker", LoraSparseTuckerTensors, fitted_shapes, delta_tucker, "LyCORIS",
    scalars_from=alpha_over("down"), checks=Checks(BOUNDS, integers=check_tucker), reads_base=True,
)  # fmt: skip
