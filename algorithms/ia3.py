"""(IA)³, ΔW = w ⊙ W along rows or input channels. Liu et al. 2022, arXiv:2205.05638, section 3.3.

LyCORIS stores w, the factor minus 1, and `on_input` 0 or 1 for the axis (lycoris/modules/ia3.py).
PEFT stores the factor itself, see peft_ia3.py. The bias is scaled in bypass mode alone (adapters/kohya_args.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, expect
from .bounds import below

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from .base import Indices


@dataclass(frozen=True)
class Ia3Tensors:
    """The adapter tensors of n layers of equal shape, stacked."""

    diff: Tensor  # w, [n, out] or [n, in]
    on_input: Indices  # [n, 1, 1], 0: rows, 1: input channels


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of diff (out,) or (in,) and on_input (1, 1); `check` compares the two."""
    stored = shapes["diff"]
    size = prod(stored)
    expect(holds=prod(shapes["on_input"]) == 1, otherwise="on_input is not one number")
    expect(
        holds=len(target) > 0 and size in target[:2] and max(stored, default=0) == size,
        otherwise=f"it is {list(stored)}, the weight is {list(target)}",
    )
    return {"diff": (size,), "on_input": (1, 1)}


def check(integers: Mapping[str, Tensor], shapes: Shapes, target: Shape) -> None:
    """Raise DoesNotFit if the axis that `on_input` names does not have the length of diff."""
    axis = int(integers["on_input"])
    expect(
        holds=shapes["diff"] == target[axis : axis + 1],
        otherwise=f"on_input {axis} for {list(shapes['diff'])}, the weight is {list(target)}",
    )


def delta(base: Tensor, t: Ia3Tensors) -> Tensor:
    """Return ΔW [n, out, cols]; `on_input` is read only where the shapes allow both axes."""
    import torch

    (n, out, cols), size = base.shape, t.diff.shape[1]
    if cols % size:
        return base * t.diff[:, :, None]
    on_columns = (base.view(n, out, size, -1) * t.diff[:, None, :, None]).flatten(2)
    if size != out:
        return on_columns
    return torch.where(t.on_input == 1, on_columns, base * t.diff[:, :, None])


IA3 = Algorithm(
    "ia3", Ia3Tensors, fitted_shapes, delta, "arXiv:2205.05638", bounds={"on_input": lambda _s, _t: [below(2)]},
    check=check, reads_base=True,
)  # fmt: skip
