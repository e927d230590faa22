"""(IA)³, ΔW = w ⊙ W along rows or input channels. Liu et al. 2022, arXiv:2205.05638, section 3.3.

LyCORIS stores w, the factor minus 1, and `on_input` 0 or 1 for the axis (lycoris/modules/ia3.py). A convolution with
groups has factors for the inputs of all groups; the rows of a group have the inputs of that group.
PEFT stores the factor itself, see peft_ia3.py. The bias is scaled in bypass mode alone (adapters/kohya_args.py).
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Bypass, Checks, Shape, Shapes, expect
from .bounds import below

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Indices


class Ia3Tensors(NamedTuple):
    """The adapter tensors of n layers of equal shape, stacked."""

    diff: Tensor  # w, [n, groups, in] if the shapes allow inputs, else [n, out, 1]
    on_input: Indices  # [n, 1, 1], 0: rows, 1: input channels


def groups_of(size: int, target: Shape) -> int:
    """Return the number of groups of inputs that so many factors belong to; 0 if they cannot be factors of inputs."""
    if len(target) < 2 or target[1] == 0:
        return 0
    groups, rest = divmod(size, target[1])
    return 0 if rest or (groups > 1 and (len(target) == 2 or target[0] % groups)) else groups


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of diff, (groups, in) if it can be factors of inputs, else (out, 1), and on_input (1, 1);
    `check` compares the two."""
    stored = shapes["diff"]
    size = prod(stored)
    groups = groups_of(size, target)
    expect(holds=prod(shapes["on_input"]) == 1, otherwise="on_input is not one number")
    expect(
        holds=len(target) > 0 and (groups > 0 or size == target[0]) and max(stored, default=0) == size,
        otherwise=f"it is {list(stored)}, the weight is {list(target)}",
    )
    return {"diff": (groups, target[1]) if groups else (size, 1), "on_input": (1, 1)}


def check(integers: Mapping[str, Tensor], shapes: Shapes, target: Shape) -> None:
    """Raise DoesNotFit if the axis that `on_input` names does not have the length of diff."""
    axis, size = int(integers["on_input"]), prod(shapes["diff"])
    expect(
        holds=groups_of(size, target) > 0 if axis else size == target[0],
        otherwise=f"on_input {axis} for {size} factors, the weight is {list(target)}",
    )


def delta(base: Tensor, t: Ia3Tensors) -> Tensor:
    """Return ΔW [n, out, cols]; `on_input` is read only if the shapes allow both axes."""
    import torch

    (n, out, cols), (_, groups, inputs) = base.shape, t.diff.shape
    view = base.reshape(n, groups, out // groups, inputs, cols // inputs)
    on_columns = (view * t.diff[:, :, None, :, None]).reshape(base.shape)  # rows are groups with one input
    if groups * inputs != out:
        return on_columns
    return torch.where(t.on_input == 1, on_columns, base * t.diff.reshape(n, out, 1))


IA3 = Algorithm(
    "ia3", Ia3Tensors, fitted_shapes, delta, "arXiv:2205.05638",
    checks=Checks({"on_input": lambda _s, _t: [below(2)]}, integers=check), reads_base=True,
    bypass=Bypass(with_bias=True, input_groups=lambda shapes, target: groups_of(prod(shapes["diff"]), target)),
)  # fmt: skip
