"""Adapters on a device: their tensors are uploaded once, in large pieces, and cast there to the compute dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from threading import Lock
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS
from ..disk.reader import Reader
from ..dtypes import Source, StoredTensor
from ..errors import device_full
from ..matching.patch import PatchPart
from ..planning.plan import Plan
from .tensor_moves import TORCH_DTYPES, DeviceStream, Placement, as_scalars, cast_all, extremes, fit, holds, upload

UPLOAD_GAP: Final = 2**16
"""Bytes between two tensors that are read and uploaded too rather than starting a new piece."""

Key: TypeAlias = tuple[Source, int, int, str] | float
"""The key of a stored tensor, or a number that formulas take: a scale, a strength."""


class AdaptersOnDevice:
    """The tensors of adapters at each placement, made when the first lane asks for one of them."""

    def __init__(self, reader: Reader, plans: Sequence[Plan], most: int, piece: int) -> None:
        """`most`: the bytes that they may take on a device. Those that go beyond it are not held. `piece`: the bytes of
        one upload, unless a tensor has more, from pinned memory."""
        self._reader, self._infos, self._most, self._piece = reader, _used(plans), most, piece
        self._scalars = sorted({1.0, *(x for u in _uses(plans) for x in (u.strength, *u.patch.scalars.values()))})
        self._tensors: dict[Placement, dict[Key, Tensor]] = {}
        self._lock = Lock()

    def get(self, tensor: StoredTensor | float, lane: DeviceStream) -> Tensor | None:
        """Return all values of a tensor, flat, at the lane's placement, or a single one as [1, 1]; None for what is
        not held."""
        if lane.at not in self._tensors:
            with self._lock:
                if lane.at not in self._tensors:
                    self._tensors[lane.at] = self._uploaded_at(lane)
        return self._tensors[lane.at].get(_key(tensor) if isinstance(tensor, StoredTensor) else tensor)

    def size(self, at: Placement) -> int:
        """Return the bytes that they take at a placement."""
        return min(self._most, at.dtype.itemsize * sum(prod(i.shape) for i in self._infos))

    def forget(self) -> None:
        """Give the memory back; nothing may be under way."""
        self._tensors.clear()

    def _uploaded_at(self, lane: DeviceStream) -> dict[Key, Tensor]:
        """Return what `_upload` does, when it is there; if the device has no room, nothing is held from now on."""
        try:
            tensors = self._upload(lane)
        except RuntimeError as e:
            if device_full(e):
                self._tensors[lane.at] = {}
            raise
        lane.settle()
        return tensors

    def _upload(self, lane: DeviceStream) -> dict[Key, Tensor]:
        """Return all tensors and numbers at the lane's placement. A piece with a number that is not finite is left out:
        the fold that needs it reads it again, and names the tensor."""
        tensors: dict[Key, Tensor] = dict(zip(self._scalars, as_scalars(self._scalars, lane.at).unbind(), strict=True))
        left = self._most // lane.at.dtype.itemsize
        of_device = [i for i in self._infos if holds(lane.at.device, TORCH_DTYPES[i.dtype])]
        for infos in _pieces(of_device, self._piece):
            sizes = [prod(i.shape) for i in infos]
            left -= sum(sizes)
            if left < 0:
                break
            start, end = infos[0].offset, infos[-1].offset + infos[-1].nbytes
            host = lane.host("adapter", (end - start,), torch.uint8)
            memory: Any = host.numpy()
            self._reader.read_into(memoryview(memory), infos[0].source, start)
            raw = upload(host, lane, 0)
            values = torch.empty(sum(sizes), dtype=lane.at.dtype, device=lane.at.device)
            parts = values.split_with_sizes(sizes)
            cast_all([raw[i.offset - start :][: i.nbytes].view(TORCH_DTYPES[i.dtype]) for i in infos], parts)
            ends = extremes(values, lane)
            lane.settle()
            if fit(ends, lane.at.dtype):
                tensors |= zip(map(_key, infos), parts, strict=True)
        lane.give_back("adapter")
        return tensors


def _key(info: StoredTensor) -> Key:
    return info.source, info.offset, info.nbytes, info.dtype


def _used(plans: Sequence[Plan]) -> list[StoredTensor]:
    """Return the tensors that formulas take as floats, each once, in the order in which they are stored."""
    infos: dict[Key, StoredTensor] = {}
    for patch in (u.patch for u in _uses(plans)):
        floats = patch.shapes.keys() - ALGORITHMS[patch.algorithm].integer_slots - patch.base_slots.keys()
        for info in (patch.module.slots[slot] for slot in floats):
            if info.nbytes:
                infos[_key(info)] = info
    return sorted(infos.values(), key=lambda i: (str(i.file), i.offset))


def _uses(plans: Sequence[Plan]) -> Iterator[PatchPart]:
    return (part for p in plans for m in p.adapters for part in m.parts)


def _pieces(infos: Iterable[StoredTensor], most: int) -> Iterator[list[StoredTensor]]:
    """Yield lists of tensors, each of one piece of a file, whose values are aligned in it."""
    piece: list[StoredTensor] = []
    for info in infos:
        if piece:
            first, last = piece[0], piece[-1]
            gap = info.offset - last.offset - last.nbytes
            size = info.offset + info.nbytes - first.offset
            near = info.source == first.source and 0 <= gap <= UPLOAD_GAP and size <= most
            if not near or (info.offset - first.offset) % TORCH_DTYPES[info.dtype].itemsize:
                yield piece
                piece = []
        piece.append(info)
    if piece:
        yield piece
