"""RoAd, pairs of outputs rotated and stretched. Liao and Monz 2024, arXiv:2409.00119, section 3.

In every group of outputs with halves (x₁, x₂): W' = f ⊙ W + g ⊙ (−x₂, x₁), the bias likewise, with
f = α cos θ and g = α sin θ. road_1 stores θ and α once for both halves, road_2 for every output,
road_4 separately for f and g; the number of values gives the variant."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .base import Algorithm, Checks, Shape, Shapes, expect, flat

if TYPE_CHECKING:
    from torch import Tensor


class RoadTensors(NamedTuple):
    """The angles and the factors."""

    theta: Tensor  # [n, out/2], [n, out] or [n, 2·out]
    stretch: Tensor  # α, same shape
    group: int  # `group_size`


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the shapes of theta and stretch."""
    count, out = prod(shapes["theta"]), flat(target)[0]
    expect(holds=shapes["theta"] == shapes["stretch"], otherwise="theta and alpha differ in shape")
    expect(
        holds=2 * count in (out, 2 * out, 4 * out),
        otherwise=f"{count} angles do not turn {out} outputs",
    )
    return {"theta": (count,), "stretch": (count,)}


def check_settings(settings: Mapping[str, Any], _: Shapes, target: Shape) -> None:
    """Raise DoesNotFit if the groups do not tile the outputs."""
    group, out = settings["group"], flat(target)[0]
    expect(
        holds=group > 1 and group % 2 == 0 and out % group == 0,
        otherwise=f"groups of {group} do not divide the weight's {out} outputs",
    )


def delta(base: Tensor, t: RoadTensors) -> Tensor:
    """Return (f − 1) ⊙ W + g ⊙ (−x₂, x₁), [n, out, cols]."""
    import torch

    n, out, cols = base.shape
    groups, parts = out // t.group, t.theta.shape[1] * 2 // out
    theta, alpha = (x.reshape(n, groups, parts, -1) for x in (t.theta, t.stretch))
    if parts == 1:  # one number for the pair
        theta, alpha = theta.repeat(1, 1, 2, 1), alpha.repeat(1, 1, 2, 1)
    first, second = slice(None, 2), slice(-2, None)  # the same two halves unless there are four
    keep = (alpha[:, :, first] * theta[:, :, first].cos()).unsqueeze(4)  # [n, groups, 2, half, 1]
    turn = (alpha[:, :, second] * theta[:, :, second].sin()).unsqueeze(4)
    halves = base.reshape(n, groups, 2, t.group // 2, cols)
    turned = torch.stack((-halves[:, :, 1], halves[:, :, 0]), dim=2)
    return ((keep - 1) * halves + turn * turned).reshape(base.shape)


ROAD = Algorithm(
    "road", RoadTensors, fitted_shapes, delta, "arXiv:2409.00119", reads_base=True, also_bias=True,
    checks=Checks(settings=check_settings),
)  # fmt: skip
