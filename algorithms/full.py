"""Whole differences and whole replacements.

`full`: ΔW is stored as it is (`diff`, `diff_b`, `w_norm`, `b_norm`); LyCORIS lycoris/modules/full.py.
`set`: the trained value itself is stored (`set_weight`, PEFT `modules_to_save`), ΔW = V − W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Algorithm, Shape, Shapes, expect, flat

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FullTensors:
    """The stored difference or value."""

    diff: Tensor  # [n, out, cols]


def fit(shapes: Shapes, target: Shape) -> Shapes:
    """Shape of diff as (out, cols)."""
    stored, (out, cols) = shapes["diff"], flat(target)
    expect(
        holds=flat(stored) == (out, cols),
        otherwise=f"it is {list(stored)}, the weight is {list(target)}",
    )
    return {"diff": (out, cols)}


def delta(base: Tensor, t: FullTensors) -> Tensor:
    """ΔW [n, out, cols] as stored; `base` is not read."""
    return t.diff.clone()


def set_delta(base: Tensor, t: FullTensors) -> Tensor:
    """V − W [n, out, cols]."""
    return t.diff - base


FULL = Algorithm("full", FullTensors, fit, delta, "LyCORIS", sliced={"diff": 0})
SET = Algorithm("set", FullTensors, fit, set_delta, "PEFT", sliced={"diff": 0}, reads_base=True)
