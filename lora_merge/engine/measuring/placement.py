"""Copies and casts the rows that are looked at, on the device where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..placement import _ready, holds


def widened(values: Tensor) -> Tensor:
    """Return the numbers in a dtype in which sums of squares do not overflow and keep their digits."""
    return values if values.dtype == torch.float64 else values.float()


def workspace(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return memory for numbers beside others, in the dtype of `widened`."""
    return torch.empty(shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def numbers_of(rows: Sequence[int], like: Tensor) -> Tensor:
    """Return numbers of rows on the device of other numbers."""
    return torch.tensor(rows).to(like.device)


def take(values: Tensor, index: Tensor, into: Tensor) -> None:
    """Copy rows of blocks [n, rows, cols] into [n, k · cols]; `index` [n · k] counts the rows of all blocks."""
    flat, out = values.reshape(-1, values.shape[-1]), into.view(-1, values.shape[-1])
    if flat.dtype == out.dtype and flat.device == out.device:
        torch.index_select(flat, 0, index, out=out)
    else:
        out.copy_(flat.index_select(0, index.to(flat.device)))


def as_stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers as an output of another dtype holds them, in their own dtype and place. Those that are too
    large become infinite or NaN."""
    if dtype.itemsize >= values.dtype.itemsize:
        return values
    ready = _ready(values, dtype)
    if holds(values.device, dtype):
        return ready.to(dtype).to(values.dtype)
    return ready.cpu().to(dtype).to(values.dtype).to(values.device)
