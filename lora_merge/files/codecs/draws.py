"""Stochastic rounding: a number becomes one of its two neighbours, the nearer one more often, so that sums stay right.

The draws depend on the tensor's name, the seed and the place of the number alone, not on windows, threads or devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from ...dtypes import TABLE

if TYPE_CHECKING:
    from torch import Tensor

Draw: TypeAlias = "Callable[[str, int, int], Tensor]"
"""(name of a tensor, first number, count) → uniform numbers in [0, 1), in fp32."""

STEP: Final = 0x9E3779B97F4A7C15 - 2**64
MIXES: Final = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""Increment and rounds of SplitMix64 (Steele, Lea and Flood 2014), a hash of a counter; as signed numbers."""


def draws(seed: int) -> Draw:
    """Return the draws of a seed."""

    def draw(name: str, first: int, count: int) -> Tensor:
        key = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "little") ^ seed
        z = torch.arange(first, first + count).mul_(STEP).add_((key & (2**64 - 1)) - 2**63)
        for shift, factor in MIXES:
            z = z.bitwise_xor_(torch.bitwise_right_shift(z, shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
        return torch.bitwise_right_shift(z, 40).bitwise_and_(2**24 - 1).float().mul_(2.0**-24)

    return draw


def to_floats(values: Tensor, dtype: str, uniform: Tensor) -> Tensor:
    """Return numbers of a dtype, held in fp32, above or below each value; no largest one becomes infinite."""
    row = TABLE[dtype]
    values, cut = values.float().contiguous(), 24 - row.significand
    bits, mask = values.view(torch.int32), (1 << cut) - 1
    raised = (bits + (uniform * (mask + 1)).to(torch.int32)).bitwise_and(~mask).view(torch.float32)
    quantum = 2.0**row.smallest
    tiny = (values.abs() / quantum + uniform).floor().mul(quantum).copysign(values)
    found = torch.where(values.abs() < quantum * 2.0 ** (row.significand - 1), tiny, raised)
    near = (found.abs() > row.largest) & (values.abs() <= row.room)
    found = torch.where(near, found.clamp(-row.largest, row.largest), found)
    return torch.where(values.isfinite(), found, values)


def to_integers(values: Tensor, uniform: Tensor) -> Tensor:
    """Return whole numbers above or below each value."""
    return (values.float() + uniform).floor()


def to_table(values: Tensor, table: Tensor, uniform: Tensor) -> Tensor:
    """Return numbers of a table above or below each value; the outermost ones beyond its ends."""
    levels: Tensor = table.sort().values
    values = values.float()
    above = torch.bucketize(values, levels, right=True).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return torch.where(uniform * (high - low) < values - low, high, low)
