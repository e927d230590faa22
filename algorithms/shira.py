"""SHiRA, ΔW zero except for some entries. Bhardwaj et al. 2024, arXiv:2406.13175, section 3."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Checks, Shape, Shapes, expect, flat
from .bounds import below

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Indices


class ShiraTensors(NamedTuple):
    """The values and their positions."""

    values: Tensor  # [n, m]
    places: Indices  # rows and columns, [n, 2, m]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of values (m,) and places (2, m)."""
    count = prod(shapes["values"])
    expect(
        holds=shapes["values"] == (count,) and shapes["places"] == (2, count),
        otherwise=f"values is {list(shapes['values'])}, places is {list(shapes['places'])}",
    )
    expect(
        holds=count <= prod(target),
        otherwise=f"{count} entries are more than the weight {list(target)} has",
    )
    return {"values": (count,), "places": (2, count)}


def delta(base: Tensor, t: ShiraTensors) -> Tensor:
    """Return ΔW [n, out, cols]; values at repeated positions are added, and the values of `base` are
    not read."""
    rows, cols = t.places[:, 0], t.places[:, 1]
    change = base.new_zeros(base.shape)
    change.view(base.shape[0], -1).scatter_add_(1, rows * base.shape[2] + cols, t.values)
    return change


SHIRA = Algorithm(
    "shira", ShiraTensors, fitted_shapes, delta, "arXiv:2406.13175",
    checks=Checks({"places": lambda _, target: [below(size) for size in flat(target)]}),
)  # fmt: skip
