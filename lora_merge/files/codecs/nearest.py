"""Finds the nearest codes of numbers, exactly, with one gather for each number: e2m1, and any table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from .arithmetic import a_table, single

if TYPE_CHECKING:
    from torch import Tensor

KEYS: Final = 2**16
LOW: Final = 0xFFFF
"""Numbers of fp32 are told apart by their upper 16 bits first; a bucket of equal upper bits has 2**16 numbers."""

INFINITE: Final = 0x7F800000


def nearest(levels: Tensor, table: Tensor) -> Tensor:
    """Return, as bytes, the places of the nearest numbers of a table; of two equally near ones, that of the smaller.
    The levels may be overwritten."""
    found = table.sort()
    middles = (found.values[1:].to(levels.dtype) + found.values[:-1].to(levels.dtype)) / 2
    codes: Tensor = found.indices.to(torch.uint8)
    places = ranks(levels.reshape(-1), middles)
    if torch.equal(found.indices, torch.arange(len(codes))):
        return places.to(torch.uint8).view(levels.shape)
    return codes.index_select(0, places).view(levels.shape)


def ranks(values: Tensor, ends: Tensor) -> Tensor:
    """Return how many of some ends, in order, lie below each of flat numbers, which may be overwritten.

    A search for each number takes twenty times as long.
    """
    buckets = _buckets(tuple(ends.tolist())) if values.dtype == torch.float32 else ends[:0]
    if not buckets.numel():
        return torch.bucketize(values, ends)
    bits = values.view(torch.int32)
    low, sign = bits & LOW, bits >> 31
    low.bitwise_xor_(sign).sub_(sign)  # with the sign of the number, whose bits grow with its magnitude
    buckets = buckets.index_select(0, bits.bitwise_right_shift_(16).bitwise_and_(LOW))
    return buckets.add_(low).bitwise_right_shift_(16)


@a_table
def _buckets(places: tuple[float, ...]) -> Tensor:
    """Return a number for each upper 16 bits of fp32, in whose upper bits is how many ends lie below a number, once its
    lower 16 bits are added to it, or subtracted if it is negative. Empty if a bucket has two ends.

    An end in a bucket is stored so that the sum carries, or the difference borrows, for numbers beyond it.
    """
    ends, points = torch.tensor(places), torch.arange(KEYS, dtype=torch.int32) << 16
    first, last = (torch.bucketize(p.view(torch.float32), ends) for p in (points, points | LOW))
    last = torch.where((points & INFINITE) == INFINITE, first, last)  # NaN beside the infinite numbers
    negative = points < 0
    splits = first != last
    if bool((first - last).abs().gt(1).any()):
        return torch.empty(0, dtype=torch.int32)
    which = torch.where(negative, last, first).clamp(max=len(places) - 1)
    low = ends[which].view(torch.int32) & LOW
    beyond = torch.where(negative, torch.where(splits, low - 1, LOW), torch.where(splits, LOW - low, 0))
    return ((first << 16) + beyond).to(torch.int32)


@a_table
def _e2m1_codes() -> Tensor:
    """Return the code for each number of bf16, by its bits; numbers beyond the range give the largest."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    size, codes = numbers.abs(), torch.zeros(2**16, dtype=torch.uint8)
    for code, (middle, even) in enumerate(
        [(0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5.0, True)], 1
    ):
        codes[(size > middle) if even else (size >= middle)] = code  # a tie goes to the even code
    return codes | (numbers.signbit().to(torch.uint8) << 3)


def e2m1_codes(levels: Tensor) -> Tensor:
    """Return the nearest 4-bit codes, ties to even; numbers beyond the range become the largest. The levels are
    overwritten.

    By a table of all numbers of bf16: cut to bf16 with a sticky last bit ("round to odd"), a number keeps enough bits
    for one correct rounding to two.
    """
    bits = single(levels).contiguous().reshape(-1).view(torch.int32)
    sticky = (bits & 0xFFFF).add_(0xFFFF).bitwise_right_shift_(16)
    return _e2m1_codes().index_select(0, bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF).bitwise_or_(sticky))
