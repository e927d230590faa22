"""The memory that tensors touch: which of them share bytes, whatever objects, storages and views they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

ADDRESSED: Final = ("cpu", "cuda", "xpu")
"""Kinds of devices whose pointers are addresses; on others (Metal) a pointer is a handle of its storage."""


@dataclass(frozen=True)
class ByteSpan:
    """The bytes from the first to the last that a tensor touches."""

    space: tuple[str, int]  # device, and the storage where pointers are no addresses
    low: int
    high: int
    name: str
    tensor: Tensor

    @cached_property
    def runs(self) -> tuple[Tensor, int]:
        """Addresses of the runs of bytes that the tensor touches, sorted; and the bytes of each run."""
        size = length = self.tensor.element_size()
        axes = [(step * size, n) for step, n in _axes(self.tensor)]
        while axes and axes[0][0] <= length:
            step, n = axes.pop(0)
            length += (n - 1) * step
        return _starts(self.low, axes), length


def shared(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield (name, other name) of each pair of tensors of the two tables that touch a common byte.

    A tensor that is in both tables is such a pair. Tensors without values touch no byte.
    """
    rows = [(side, span) for side, table in enumerate((tensors, others)) for span in _spans(table)]
    live: tuple[list[ByteSpan], list[ByteSpan]] = [], []
    for side, span in sorted(rows, key=lambda row: (row[1].space, row[1].low)):
        for spans in live:
            spans[:] = [s for s in spans if s.high > span.low and s.space == span.space]
        for other in live[1 - side]:
            if other.tensor is span.tensor or _touch(other, span):
                yield (other.name, span.name) if side else (span.name, other.name)
        live[side].append(span)


def repeats(tensor: Tensor) -> bool:
    """Return whether two numbers of a tensor share a byte, as those of expanded tensors and of windows do."""
    axes, size = _axes(tensor), 1
    for step, n in axes:
        if step < size:
            break
        size += (n - 1) * step
    else:
        return False  # each axis steps over all numbers of the axes before it
    return tensor.numel() > 0 and (not axes[0][0] or bool((_starts(0, axes).diff() < 1).any()))


def _axes(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (stride, length) of the axes that have several numbers, the smallest stride first."""
    return sorted((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


def _spans(tensors: Mapping[str, Tensor]) -> Iterator[ByteSpan]:
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            low, numbers = tensor.data_ptr(), 1 + sum((n - 1) * step for step, n in _axes(tensor))
            handle = 0 if tensor.device.type in ADDRESSED else tensor.untyped_storage().data_ptr()
            yield ByteSpan((str(tensor.device), handle), low, low + numbers * tensor.element_size(), name, tensor)


def _touch(a: ByteSpan, b: ByteSpan) -> bool:
    """Return whether the tensors of two spans that overlap touch a common byte."""
    (starts, length), (others, width) = sorted((a.runs, b.runs), key=lambda runs: len(runs[0]))
    last = torch.searchsorted(others, starts + length) - 1  # of the runs of b, the last that begins before each end
    return bool(((last >= 0) & (others[last] + width > starts)).any())


def _starts(first: int, axes: list[tuple[int, int]]) -> Tensor:
    """Return the sorted addresses to which steps along the axes lead."""
    starts = torch.tensor([first], device="cpu")
    for step, n in axes:
        starts = (starts + step * torch.arange(n, device="cpu")[:, None]).reshape(-1)
    return starts.sort().values if len(axes) > 1 else starts
