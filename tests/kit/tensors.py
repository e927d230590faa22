"""Random tensors."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Tensors = dict[str, Tensor]


def rand(*shape: int, seed: int = 0, scale: float = 0.1) -> Tensor:
    """Normal numbers that depend on shape and seed alone; fake ones in a mode of fake tensors."""
    if math.prod(shape) > SMALL or is_in_torch_dispatch_mode():
        return _normal(shape, seed, scale)
    return _small(shape, seed, scale).clone()


SMALL = 4096
"""Numbers of a tensor that is kept for the next test, which most likely wants the same."""


def _normal(shape: tuple[int, ...], seed: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 7919 + sum((i + 1) * d for i, d in enumerate(shape)))
    return torch.randn(shape, generator=generator) * scale


_small = functools.lru_cache(4096)(_normal)


def ulp(t: Tensor) -> Tensor:
    """Distance to the next larger number of its dtype, per element."""
    mantissa = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
    exponent = torch.floor(torch.log2(t.double().abs().clamp(min=1e-30)))
    return torch.exp2(exponent.clamp(min=-24) - mantissa[t.dtype])
