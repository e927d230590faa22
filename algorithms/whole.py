"""Whole changes and whole replacements.

`full`: ΔW itself is stored (`diff`, `diff_b`, `w_norm`, `b_norm`); LyCORIS
lycoris/modules/full.py. `set`: the trained value itself is stored (`set_weight`, PEFT
`modules_to_save`), ΔW = V − W. `full_rank`: ai-toolkit's network type "fullrank" calls the whole ΔW
`lora_down` and has no `lora_up`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from .base import Algorithm, Shape, Shapes, expect, flat, same_inputs

if TYPE_CHECKING:
    from torch import Tensor


class FullTensors(NamedTuple):
    """The stored change or trained value."""

    diff: Tensor  # [n, out, cols]


class FullRankTensors(NamedTuple):
    """The stored change under ai-toolkit's name."""

    down: Tensor  # [n, out, cols]


def fitted_shapes(shapes: Shapes, target: Shape) -> Shapes:
    """Return the one slot as (out, cols)."""
    ((slot, stored),) = shapes.items()
    expect(
        holds=stored[:1] == target[:1] and same_inputs(stored[1:], target[1:]),
        otherwise=f"{slot} is {list(stored)}, the weight is {list(target)}",
    )
    return {slot: flat(target)}


def delta(base: Tensor, t: FullTensors) -> Tensor:
    """Return ΔW [n, out, cols] as stored; `base` is not read."""
    return t.diff.clone()


def accumulate(acc: Tensor, t: FullTensors, strength: Tensor) -> None:
    """Add strength · ΔW to acc."""
    acc.addcmul_(t.diff, strength)


def set_delta(base: Tensor, t: FullTensors) -> Tensor:
    """Return V − W [n, out, cols]."""
    return t.diff - base


def set_accumulate(acc: Tensor, t: FullTensors, strength: Tensor) -> None:
    """Add strength · (V − acc) to acc; at strength 1 the result is V, without rounding."""
    acc.lerp_(t.diff, strength)


def full_rank_delta(base: Tensor, t: FullRankTensors) -> Tensor:
    """Return ΔW [n, out, cols] as stored; `base` is not read."""
    return t.down.clone()


def full_rank_scalars(alpha: float | None, _: Shapes, __: Shape) -> Mapping[str, float]:
    """Return no scalar; raise DoesNotFit for an α, whose scale would be α / rank with a rank that is not stored."""
    expect(
        holds=not alpha,
        otherwise=f"lora_down is the whole change, scaled by alpha {alpha} over an unknown rank",
    )
    return {}


FULL = Algorithm(
    "full", FullTensors, fitted_shapes, delta, "LyCORIS", row_axes={"diff": 0}, accumulate=accumulate,
    stores="change", layout="stored", weight_shape=lambda shapes: shapes["diff"],
)  # fmt: skip
SET = Algorithm(
    "set", FullTensors, fitted_shapes, set_delta, "PEFT", row_axes={"diff": 0}, reads_base=True,
    accumulate=set_accumulate, layout="stored",
    in_peft="any",
)  # fmt: skip
FULL_RANK = Algorithm(
    "full_rank", FullRankTensors, fitted_shapes, full_rank_delta, "ai-toolkit",
    scalars_from=full_rank_scalars, row_axes={"down": 0},
    stores="change", in_peft="never",
)  # fmt: skip
