"""Finds out whether a GPU rounds to 8 bits as the host does."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

EIGHT: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


@cache
def rounds_to_eight_bits(device: torch.device) -> bool:
    """Return whether a CUDA device casts fp32 and bf16 to 8-bit floats as the host does; True for other devices.

    In torch for CUDA 13.2 and later some of these casts gave NaN or other numbers (pytorch#177769, pytorch#177870).
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
    every = (upper << 16).view(torch.float32)  # every number of bf16
    try:
        for dtype in EIGHT:
            numbers = every[every.abs() <= torch.finfo(dtype).max]
            for source in (torch.float32, torch.bfloat16):
                given = _cast(numbers, source)
                there = torch.empty_like(given, device=device).copy_(given)
                codes = _cast(there, dtype).view(torch.uint8)
                made = torch.empty(codes.shape, dtype=codes.dtype, device="cpu").copy_(codes)
                if not torch.equal(made, _cast(given, dtype).view(torch.uint8)):
                    return False
    except RuntimeError:  # such as no memory: the host casts then
        return False
    return True


def _cast(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(numbers, dtype=dtype).copy_(numbers)
