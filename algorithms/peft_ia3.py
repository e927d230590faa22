"""(IA)³ of PEFT: W' = l ⊙ W, on the output axis (and the bias) or on the input axis.

Liu et al. 2022, arXiv:2205.05638, section 3.3. The stored vector is the factor itself, not the
factor minus 1 as in LyCORIS. The configuration gives the axis (`feedforward_modules` are scaled on
their input); the vector of a convolution has the same shape for both axes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, expect, flat

if TYPE_CHECKING:
    from torch import Tensor


class OutTensors(NamedTuple):
    """One factor per row."""

    factor: Tensor  # [n, out, 1]


class InTensors(NamedTuple):
    """One factor per input."""

    factor: Tensor  # [n, groups, in]


def fitted_shapes_out(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of factor as (out, 1); also for the bias."""
    stored, out = shapes["factor"], flat(target)[0]
    column = len(target) < 2 or len(target) > 2 or stored == (out, 1)  # (1, in) is the other kind
    expect(
        holds=prod(stored) == out and column,
        otherwise=f"it is {list(stored)}, the weight has {out} rows",
    )
    return {"factor": (out, 1)}


def fitted_shapes_in(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shape of factor as (groups, in of one group)."""
    stored, count = shapes["factor"], prod(shapes["factor"])
    expect(holds=len(target) >= 2, otherwise=f"it scales inputs, the weight is {list(target)}")
    groups = count // target[1] if target[1] else 0
    expect(
        holds=count == groups * target[1] and stored == (1, count, *[1] * (len(stored) - 2)) and groups > 0,
        otherwise=f"it is {list(stored)}, the weight has {target[1]} inputs",
    )
    expect(
        holds=groups == 1 or (len(target) > 2 and target[0] % groups == 0),
        otherwise=f"it has {count} values, the weight has {target[1]} inputs",
    )
    return {"factor": (groups, target[1])}


def delta_out(base: Tensor, t: OutTensors) -> Tensor:
    """Return (l − 1) ⊙ W by rows, [n, out, cols]."""
    return base * (t.factor - 1)


def delta_in(base: Tensor, t: InTensors) -> Tensor:
    """Return (l − 1) ⊙ W by inputs, [n, out, cols]; the rows of a group have the inputs of that group."""
    n, groups, inputs = t.factor.shape
    view = base.reshape(n, groups, -1, inputs, base.shape[2] // inputs)
    return (view * (t.factor - 1)[:, :, None, :, None]).reshape(base.shape)


PEFT_IA3_OUT = Algorithm(
    "peft_ia3_out", OutTensors, fitted_shapes_out, delta_out, "arXiv:2205.05638",
    row_axes={"factor": 0}, reads_base=True, also_bias=True,
)  # fmt: skip
PEFT_IA3_IN = Algorithm("peft_ia3_in", InTensors, fitted_shapes_in, delta_in, "arXiv:2205.05638", reads_base=True)
