"""Finds the nearest codes of values, exactly, with one gather for each value: e2m1, and any table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from .arithmetic import cached_table, single

if TYPE_CHECKING:
    from torch import Tensor

KEYS: Final = 2**16

LOW: Final = 0xFFFF
"""Values of fp32 are compared by their upper 16 bits first; a bucket of equal upper bits has 2**16 values."""

INFINITE: Final = 0x7F800000

SMALL: Final = 2**7
"""The count that one signed byte does not hold."""

CUT: Final = 19

UPPER: Final = 32 - CUT + 1
"""Bits of fp32 below the four upper ones of the mantissa; the others, and one for whether a lower bit is set."""

HALF: Final = 3.0
NEAR_END: Final = 6.75
LARGE: Final = 0x10

BEYOND: Final = 0x40
"""Values before they are rounded, and the marks of their codes from there on."""

EACH: Final = 0x0101010101010101
"""A one in each byte of a word."""


def nearest(levels: Tensor, table: Tensor) -> Tensor:
    """Return, as bytes, the places of the nearest values of a table; of two equally near ones, that of the smaller."""
    ordered = table.sort()
    middles = (ordered.values[1:].to(levels.dtype) + ordered.values[:-1].to(levels.dtype)) / 2
    codes: Tensor = ordered.indices.to(torch.uint8)
    small = torch.int8 if len(middles) < SMALL else torch.int16
    places = ranks(levels.reshape(-1), middles, small)
    if torch.equal(ordered.indices, torch.arange(len(codes))):
        return places.to(torch.uint8).view(levels.shape)
    return codes.index_select(0, places.int()).view(levels.shape)


def ranks(values: Tensor, ends: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return how many of some ends, in order, are below each of flat values. `dtype`: a signed one that holds them.

    A search for each number takes forty times as long.
    """
    buckets = _buckets(tuple(ends.tolist())) if values.dtype == torch.float32 else ends[:0]
    if not buckets.numel():
        return torch.bucketize(values, ends).to(dtype)
    bits = values.contiguous().view(torch.int32)
    places = buckets.index_select(0, (bits >> 16).bitwise_and_(LOW))
    places = places.add_(bits).bitwise_right_shift_(16).to(dtype)
    return places.bitwise_xor_(places >> 8 * dtype.itemsize - 1)


@cached_table
def _buckets(places: tuple[float, ...]) -> Tensor:
    """Return a number for each upper 16 bits of fp32. The upper bits of its sum with the bits of a number show how many
    ends are below that: n, or -1 - n for a negative number. Empty if a bucket has two ends.

    If an end is inside a bucket, its lower bits are stored so that the sum carries for values beyond it: the bits
    of negative values grow as these, and n, become smaller.
    """
    ends, points = torch.tensor(places), torch.arange(KEYS, dtype=torch.int32) << 16
    first, last = (torch.bucketize(p.view(torch.float32), ends) for p in (points, points | LOW))
    last = torch.where((points & INFINITE) == INFINITE, first, last)  # NaN next to the infinite values
    if bool((first - last).abs().gt(1).any()):
        return torch.empty(0, dtype=torch.int32)
    negative, splits = points < 0, first != last
    low = ends[torch.minimum(first, last).clamp(max=len(places) - 1)].view(torch.int32) & LOW
    carry = torch.where(splits, torch.where(negative, LOW + 1 - low, LOW - low), 0)
    upper = torch.where(negative, -1 - first, first) - (points >> 16)
    return ((upper << 16) + carry).to(torch.int32)


@cached_table
def _e2m1_codes() -> Tensor:
    """Return the code for each upper bits of fp32, whether or not bits below are set; values beyond the range give the
    largest. Marked are those of large values."""
    places = torch.arange(1 << UPPER, dtype=torch.int32)
    values = (places >> 1 << CUT | (places & 1) << CUT - 1).view(torch.float32)
    size, codes = values.abs(), torch.zeros(len(places), dtype=torch.uint8)
    for code, (middle, even) in enumerate(
        [(0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True)], 1
    ):
        codes[(size > middle) if even else (size >= middle)] = code  # a tie goes to the even code
    codes |= values.signbit().to(torch.uint8) << 3
    return torch.where(size >= NEAR_END, codes | BEYOND, torch.where(size >= HALF, codes | LARGE, codes))


def marked_e2m1_codes(levels: Tensor) -> Tensor:
    """Return the nearest 4-bit codes, ties to even, as bytes; values beyond the range become the largest. Upper bits
    mark those of values from `HALF` on, and from `NEAR_END` on. The levels are overwritten.

    By a table: sign, exponent and the first bits of the mantissa give the code, but for a tie, which no lower bit may
    follow. The sum of these bits, cut off and rounded up, gives both.
    """
    bits = single(levels).contiguous().reshape(-1).view(torch.int32)
    above = (bits + ((1 << CUT) - 1)).bitwise_right_shift_(CUT)
    places = bits.bitwise_right_shift_(CUT).add_(above).bitwise_and_((1 << UPPER) - 1)
    return _e2m1_codes().index_select(0, places)


def e2m1_codes(levels: Tensor) -> Tensor:
    """Return the same without marks."""
    return marked_e2m1_codes(levels).bitwise_and_(15)


def doubtful(marked: Tensor, size: int) -> Tensor:
    """Return the blocks of `size` marked codes that have no number from `HALF` on, or one from `NEAR_END` on. The scale
    of all others covers them, and is not too coarse."""
    if not len(marked):
        return marked.int()
    words = marked.view(torch.int64).view(-1, size // 8)
    while words.shape[1] > 1:
        half = words.shape[1] // 2
        words = words[:, :half] | words[:, half:]
    words = words.view(-1)
    good = (words & LARGE * EACH) != 0
    if int(marked.max()) >= BEYOND:
        good &= (words & BEYOND * EACH) == 0
    return good.logical_not_().nonzero()[:, 0]
