"""Reads stored tensors as torch tensors: adapters' tensors, checked for NaN, and weights, decoded by their codec; keeps
tensors that many blocks use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..disk.files import Source, StoredTensor
from ..disk.reader import Reader
from ..errors import InputError
from ..files.codecs.base import Packing
from ..models.weights import RowSlice, Weight, WeightView
from .blocks import Block
from .placement import TORCH_DTYPES, Placement, odd, stage

Fetch: TypeAlias = Callable[[StoredTensor], Tensor]
"""Function that returns a tensor as stored, from its entry in a header."""

KEPT: Final = 2**24
"""The most numbers that a `DeviceCache` keeps, of all tensors together."""


class TensorCache:
    """Reads tensors from files on demand and keeps those of the current window; several threads may share it."""

    def __init__(self, reader: Reader, adapters: frozenset[Path]) -> None:
        self._reader, self._adapters = reader, adapters
        self._kept: dict[tuple[Source, int, int], Tensor] = {}

    def fetch(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored, on the CPU; InputError if an adapter's values are not finite."""
        key = (info.source, info.offset, info.nbytes)  # an empty tensor has the offset of the next one
        tensor = self._kept.get(key)
        if tensor is None:
            tensor = view_bytes(self._reader.view(info), info.dtype, info.shape)
            if info.file in self._adapters:
                check_finite(tensor, info)
            self._kept[key] = tensor
        return tensor

    def forget(self) -> None:
        """Drop the tensors; called after each window, so that memory does not grow with the model."""
        self._kept.clear()


class DeviceCache:
    """Tensors at their placement, made once for all blocks and plans that use them; keeps about `KEPT` numbers."""

    def __init__(self) -> None:
        self._made: dict[Any, Tensor] = {}
        self._numbers = 0
        self._lock = Lock()

    def get(self, key: Any, make: Callable[[], Tensor], settle: Callable[[], None]) -> Tensor:
        """Return the tensor of this key, made once even if two threads want it, and settled before it is shared."""
        found = self._made.get(key)
        if found is not None:
            return found
        if self._numbers > KEPT:
            return make()
        with self._lock:
            if key not in self._made:
                made = make()
                settle()
                self._made[key] = made
                self._numbers += made.numel()
            return self._made[key]

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._made.clear()
            self._numbers = 0


def decoded(numbers: Tensor, weight: Weight, first: int, fetch: Fetch) -> Tensor:
    """Return the values of a weight's rows from `first` on, from their stored numbers; they may share memory."""
    encoding, sides, _ = weight.packing
    return encoding.codec.decode(numbers, {role: fetch(info) for role, info in sides.items()}, first)


def stored_numbers(block: Block, fetch: Fetch) -> Tensor:
    """Return the stored numbers of a block of a weight that is not padded, read from the base."""
    (first, count), weight = block.stored, block.target.weight
    size, offset = weight.packing.encoding.nbytes, weight.stored.offset
    shape = weight.packing.encoding.stored_shape((block.last - block.first, block.cols))
    return fetch(replace(weight.stored, shape=shape, offset=offset + size(first), nbytes=size(count)))


def weight_values(weight: Weight, fetch: Fetch) -> Tensor:
    """Return all numbers of a weight; the padding is zeros."""
    values = decoded(fetch(weight.stored), weight, 0, fetch)
    if not weight.padded:
        return values
    padded = values.new_zeros(weight.shape)
    padded[tuple(map(slice, values.shape))] = values
    return padded


def gathered(view: WeightView, whole: Callable[[RowSlice], Tensor], at: Placement) -> Tensor:
    """Return [rows, cols] of a view at the placement; `whole` returns a piece's whole weight, `piece.cols` wide."""
    parts = []
    for piece, _ in view.addresses():
        rows = whole(piece)[piece.start : piece.stop]
        parts.append(stage([rows.t() if piece.transposed else rows], at)[0])
    return torch.cat(parts)


def encoded(values: Tensor, packing: Packing, first: int, fetch: Fetch) -> Tensor:
    """Return a weight's rows from `first` on as stored numbers, not yet rounded to their dtype."""
    encoding, sides, _ = packing
    return encoding.codec.encode(values, {role: fetch(info) for role, info in sides.items()}, first)


def view_bytes(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return the bytes as a tensor that shares them."""
    kind = TORCH_DTYPES[dtype]
    if not raw.nbytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)


def packed(raw: memoryview, packing: Packing, shape: tuple[int, ...]) -> Tensor:
    """Return the stored numbers of a weight's rows of this shape as a tensor that shares the bytes."""
    return view_bytes(raw, packing.encoding.dtype, packing.encoding.stored_shape(shape))


def check_finite(tensor: Tensor, info: StoredTensor) -> None:
    """Raise InputError naming the tensor if it holds NaN or infinite values."""
    if not tensor.is_floating_point():
        return
    if tensor.dtype.itemsize == 1:  # no isfinite for fp8: compare exponent and mantissa bits
        bits = tensor.view(torch.uint8) & 0x7F
        bad = bits == 0x7F if tensor.dtype == torch.float8_e4m3fn else bits >= 0x7C
        finite = not bool(bad.any())
    else:
        finite = not odd(tensor)
    if not finite:
        raise InputError("the adapter holds NaN or infinite values", f"{info.file}: {info.name}",
                         "the training diverged; use an earlier checkpoint of the adapter")  # fmt: skip
