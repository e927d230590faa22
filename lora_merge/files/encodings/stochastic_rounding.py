"""Stochastic rounding: a number becomes one of its two neighbours, the nearer one more often, so that sums stay right.

The mean of many draws is the number, up to the largest number of a dtype and the outermost codes of a scale. Scales
cover their values up to there alone (`base.end_margin`); what a plain dtype cuts to its largest value stays that.

The draws depend on the tensor's name, the seed and the place of the number alone, not on windows, threads or devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from ...dtypes import DTYPE_ROWS
from .arithmetic import cached_table

if TYPE_CHECKING:
    from torch import Tensor

Draw: TypeAlias = "Callable[[str, int, int], Tensor]"
"""(name of a tensor, first number, count) → uniform numbers in [0, 1), in fp32."""

ROUNDED_VALUES: Final = 2**20
"""Values that are rounded at once."""

GOLDEN_RATIO: Final = 0x9E3779B97F4A7C15 - 2**64

MIXES: Final = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""Increment and rounds of SplitMix64 (Steele, Lea and Flood 2014), a hash of a counter; as signed numbers."""


def draws(seed: int) -> Draw:
    """Return the draws of a seed."""

    def draw(name: str, first: int, count: int) -> Tensor:
        key = int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "little") ^ seed
        z = torch.arange(first, first + count).mul_(GOLDEN_RATIO).add_((key & (2**64 - 1)) - 2**63)
        for shift, factor in MIXES:
            z = z.bitwise_xor_(torch.bitwise_right_shift(z, shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
        return torch.bitwise_right_shift(z, 40).bitwise_and_(2**24 - 1).float().mul_(2.0**-24)

    return draw


def to_floats(values: Tensor, dtype: str, uniform: Tensor) -> Tensor:
    """Return values of a dtype, held in fp32, above or below each value; no largest one becomes infinite."""
    row = DTYPE_ROWS[dtype]
    values, cut = values.float().contiguous(), 24 - row.significand
    bits, mask = values.view(torch.int32), (1 << cut) - 1
    raised = (uniform * (mask + 1)).to(torch.int32).add_(bits).bitwise_and_(~mask).view(torch.float32)
    quantum, size = 2.0**row.smallest, values.abs()
    small = size < quantum * 2.0 ** (row.significand - 1)
    tiny = size.div_(quantum).add_(uniform).floor_().mul_(quantum).copysign_(values)
    rounded = torch.where(small, tiny, raised)
    if not values.numel() or max(-float(values.amin()), float(values.amax())) <= row.room:
        return rounded.clamp_(-row.largest, row.largest)
    near = (rounded.abs() > row.largest) & (values.abs() <= row.room)
    rounded = torch.where(near, rounded.clamp(-row.largest, row.largest), rounded)
    return torch.where(values.isfinite(), rounded, values)


def rounded(values: Tensor, dtype: str, draw: Callable[[int, int], Tensor], at: int) -> Tensor:
    """Return what `to_floats` does, of values in any shape, some at a time: their draws take many times their memory.
    `draw`: (first, count) → uniform numbers. `at`: the place of the first number."""
    rounded_values = torch.empty(values.shape, dtype=torch.float32, device=values.device)
    flat, into = values.reshape(-1), rounded_values.view(-1)
    for first in range(0, len(flat), ROUNDED_VALUES):
        some = flat[first : first + ROUNDED_VALUES]
        into[first : first + ROUNDED_VALUES] = to_floats(some, dtype, draw(at + first, len(some)))
    return rounded_values


def to_integers(values: Tensor, uniform: Tensor) -> Tensor:
    """Return whole numbers above or below each value."""
    return (values.float() + uniform).floor()


def to_table(values: Tensor, table: Tensor, uniform: Tensor) -> Tensor:
    """Return values of a table above or below each value; the outermost ones beyond its ends."""
    from .nearest_codes import ranks

    pairs, values = _neighbours(tuple(table.tolist())), values.float()
    place = ranks(values.reshape(-1).neg(), pairs[0, :-1])
    low, gap = (n.index_select(0, place).view(values.shape) for n in (pairs[1], pairs[2] - pairs[1]))
    up = uniform * gap < values - low
    return pairs[1:].t().reshape(-1).index_select(0, place.mul_(2).add_(up.view(-1))).view(values.shape)


@cached_table
def _neighbours(table: tuple[float, ...]) -> Tensor:
    """Return [3, n + 1] for a table of n different values: what they are, times -1, in order; and for each count of
    them above a value its neighbours in the table."""
    levels = torch.tensor(table, dtype=torch.float32).sort().values
    ends = levels[torch.nn.functional.pad(levels[1:] > levels[:-1], (1, 0), value=1)]  # there may be two zeros
    above = torch.bucketize(ends, levels, right=True).flip(0).clamp(1, len(levels) - 1)
    above = torch.nn.functional.pad(above, (0, 1), value=1)
    return torch.stack([torch.nn.functional.pad(ends.neg().flip(0), (0, 1)), levels[above - 1], levels[above]])
