"""A trained change of a bias, Δb = (α / r) · v; PEFT `lora_bias`, ai-toolkit's `use_bias`, and
BEFT (scale 1)."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, AlphaOverRank, Shape, Shapes, expect, flat

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class BiasTensors(NamedTuple):
    """The stored vector."""

    diff: Tensor  # v, [n, out, 1]
    scale: Scalar  # that of the factors of the same module, or 1


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of diff as (out, 1)."""
    rows, count = flat(target), prod(shapes["diff"])
    expect(holds=rows == (count, 1), otherwise=f"it has {count} values, the bias is {list(target)}")
    return {"diff": rows}


def delta(base: Tensor, t: BiasTensors) -> Tensor:
    """Return Δb [n, out, 1]; `base` is not read."""
    return t.diff * t.scale


LORA_BIAS = Algorithm(
    "lora_bias", BiasTensors, fitted_shapes, delta, "arXiv:2106.09685", row_axes={"diff": 0},
    scalars_from=AlphaOverRank(lambda shapes: shapes.get("down", (0,))[0]),  # r of the factors of the same module
    parameter="bias", weight_shape=lambda shapes: shapes["diff"],
    part_of_lora=True,
)  # fmt: skip
