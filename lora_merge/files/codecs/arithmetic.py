"""Numbers of few bits in torch: decoded by tables, encoded with one rounding. Imported where weights are decoded."""

from __future__ import annotations

from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Final

import torch

from ...dtypes import TABLE

if TYPE_CHECKING:
    from torch import Tensor

FP8: Final = {name: getattr(torch, TABLE[name].library) for name in ("F8_E4M3", "F8_E5M2")}


@cache
def _fp8_values(dtype: str) -> Tensor:
    """Return the number that each byte stands for, in fp32."""
    return torch.arange(256, dtype=torch.uint8).view(FP8[dtype]).float()


@cache
def _fp8_codes(dtype: str) -> Tensor:
    """Return the byte for each number of bf16, by its bits; numbers beyond the range give the largest number."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    limit = TABLE[dtype].largest
    if dtype == "F8_E5M2":  # it has infinities
        return torch.where(numbers.isinf(), numbers, numbers.clamp(-limit, limit)).to(FP8[dtype]).view(torch.uint8)
    return numbers.clamp(-limit, limit).to(FP8[dtype]).view(torch.uint8)


def from_fp8(codes: Tensor, dtype: str) -> Tensor:
    """Return the numbers of bytes, in fp32."""
    return codes.view(FP8[dtype]).float()


def to_fp8(values: Tensor, dtype: str) -> Tensor | None:
    """Return the nearest fp8 numbers as bytes, ties to even; None if a finite number rounds to one beyond the range."""
    return None if largest(values) > TABLE[dtype].room else cut_to_fp8(values, dtype)


def cut_to_fp8(values: Tensor, dtype: str) -> Tensor:
    """Return the nearest fp8 numbers as bytes; finite numbers beyond the range become the largest.

    A table of all numbers of bf16 replaces the cast, which takes several times as long. The numbers are cut to bf16
    with a sticky last bit ("round to odd"): its 7 bits of mantissa are enough for one correct rounding to 3 bits.
    """
    bits = _single(values).contiguous().view(torch.int32)
    index = ((bits >> 16) & 0xFFFF) | (((bits & 0xFFFF) + 0xFFFF) >> 16)
    return _fp8_codes(dtype)[index]


def largest(values: Tensor) -> float:
    """Return the largest magnitude of the finite numbers; 0 if there are none."""
    if not values.numel():
        return 0.0
    low, high = (float(v) for v in values.aminmax())
    if isfinite(low) and isfinite(high):
        return max(-low, high)
    return largest(values[values.isfinite()])


def _single(values: Tensor) -> Tensor:
    """Return numbers in fp32; those of fp64 rounded to odd, so that a later rounding to fewer bits is right."""
    if values.dtype != torch.float64:
        return values.float()
    single = values.float()
    back = single.double()
    bits = single.view(torch.int32) - (back.abs() > values.abs()).to(torch.int32)
    return (bits | (back != values).to(torch.int32)).view(torch.float32)
