"""Copies and casts sampled rows, on the device where they are."""

from __future__ import annotations

import torch
from torch import Tensor

from ..placement import _ready, holds


def workspace(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros on the device of other numbers, in a dtype in which sums of squares keep their digits."""
    return torch.zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def strided(values: Tensor, rows: range) -> Tensor:
    """Return rows [n, k, cols] of each block [n, rows, cols]. The range begins at 0, and its end is a multiple of its
    step."""
    return values.narrow(1, 0, rows.stop).view(len(values), len(rows), rows.step, -1).select(2, 0)


def take(taken: Tensor, into: Tensor) -> None:
    """Copy rows [n, k, cols] to the beginning of [n, width]."""
    held = into.narrow(1, 0, taken.shape[1] * taken.shape[2]).view(taken.shape)
    if taken.device == held.device:
        torch.mul(taken, 1, out=held)  # a copy between tensors of one device that fakes of a GPU can make too
    else:
        held.copy_(taken)


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers as an output of another dtype holds them, in their own dtype and place. Those that are too
    large become infinite or NaN."""
    if dtype.itemsize >= values.dtype.itemsize:
        return values
    ready = _ready(values, dtype)
    if holds(values.device, dtype):
        return ready.to(dtype).to(values.dtype)
    return ready.cpu().to(dtype).to(values.dtype).to(values.device)
