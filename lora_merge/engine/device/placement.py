"""Moves whole windows between host and device, and casts many blocks there with one operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..placement import PATTERNS, ROOM, DeviceStream, _ready


def upload(host: Tensor, lane: DeviceStream, piece: int) -> Tensor:
    """Return bytes of the host on the lane's device; the transfer is only queued. With a `piece` of 0, it is one, and
    the device reads the memory itself; else the bytes go through pinned memory, so many at once."""
    if not piece or lane.stream is None:
        return host.to(lane.at.device, non_blocking=True)
    there = torch.empty_like(host, device=lane.at.device)
    for number, first in enumerate(range(0, len(host), piece)):
        if number > 1:
            lane.settle()  # the last transfer from this half
        part = host[first : first + piece]
        own = lane.host(f"piece {number % 2}", part.shape, part.dtype).copy_(part)
        there[first : first + piece].copy_(own, non_blocking=True)
    return there


def download(there: Tensor, host: Tensor, lane: DeviceStream, piece: int) -> None:
    """Queue a copy of bytes of the device to the host, or make it through pinned memory; `piece` as in `upload`."""
    if not piece or lane.stream is None:
        host.copy_(there, non_blocking=lane.stream is not None)
        return
    for first in range(0, len(host), piece):
        part = host[first : first + piece]
        own = lane.host("piece 0", part.shape, part.dtype).copy_(there[first : first + piece], non_blocking=True)
        lane.settle()
        part.copy_(own)


def cast_all(sources: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Cast tensors into others of the same shapes and of one device, with one operation for each pair of dtypes.

    Numbers are rounded once, to the nearest; see `rounded` for fp64.
    """
    kinds: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for source, target in zip(sources, into, strict=True):
        own = kinds.setdefault((source.dtype, target.dtype), ([], []))
        own[0].append(source)
        own[1].append(target)
    for (old, new), (given, wanted) in kinds.items():
        if len(wanted) > 1 and {old, new} <= PATTERNS.keys():
            torch._foreach_copy_(wanted, given)
        else:  # one tensor, or 8-bit numbers
            for source, target in zip(given, wanted, strict=True):
                target.copy_(source)


class Gather:
    """Copies on a device that are made together."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []
        self._into: list[Tensor] = []

    def add(self, source: Tensor, into: Tensor) -> None:
        """Plan a copy, with a cast if the dtypes differ."""
        self._sources.append(source)
        self._into.append(into)

    def stacked(self, parts: list[Tensor]) -> Tensor:
        """Return n tensors of equal shape as one [n, …], which has its values after `run`."""
        out = parts[0].new_empty((len(parts), *parts[0].shape))
        for part, slot in zip(parts, out.unbind(), strict=True):
            self.add(part, slot)
        return out

    def run(self) -> None:
        """Make the copies."""
        cast_all(self._sources, self._into)


def rounded(work: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in a dtype from which a cast rounds correctly."""
    return _ready(work, dtype)


def extremes(work: Tensor, lane: DeviceStream, number: int = 0) -> Tensor:
    """Return the smallest and the largest number, NaN if there is a NaN, in memory of the host that holds them once the
    lane is settled; the next call with the same `number` overwrites them."""
    found = work.new_empty(2)
    torch.aminmax(work, out=(found[0], found[1]))
    return brought(found, lane, f"extremes {number}")


def brought(values: Tensor, lane: DeviceStream, use: str) -> Tensor:
    """Return numbers in memory of the host that holds them once the lane is settled; the next call for the same use and
    dtype overwrites them."""
    if lane.stream is None or values.device.type == "cpu":
        return values.cpu()
    return lane.host(f"{use} {values.dtype}", values.shape, values.dtype).copy_(values, non_blocking=True)


def fit(found: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all numbers between two `extremes` are finite, and finite once they are rounded to a dtype."""
    return all(abs(number) <= ROOM[dtype] for number in found.tolist())
