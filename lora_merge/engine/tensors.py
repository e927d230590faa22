"""Reads stored tensors as torch tensors: adapters' tensors, checked for NaN, and weights, decoded by their codec; keeps
tensors that many blocks use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..disk.reader import Reader
from ..dtypes import DTYPE_ROWS, ITEM_BYTES, Memory, Source, StoredTensor
from ..errors import InputError, not_finite
from ..files.encodings.base import CODES, InvalidPart, Packing
from ..models.weights import RowSlice, Weight, WeightView
from .tensor_moves import FULL_DEVICES, TORCH_DTYPES, Placement, host, odd, rounds_to_eight_bits, stage

Fetch: TypeAlias = Callable[[StoredTensor], Tensor]
"""Function that returns a tensor as stored, from its entry in a header."""

CACHED_VALUES: Final = 2**24
"""The most values that a `DeviceCache` keeps, of all tensors together."""

CACHE_SHARE: Final = 4
"""A `TensorCache` keeps one part in so many of the memory limit, a `DeviceCache` a quarter of that in fp32."""

RECENT_TENSORS: Final = 4
"""The tensors used last that a `TensorCache` keeps whatever their size: the formulas under way need them anyway."""


class TensorCache:
    """Reads tensors from files on demand and keeps those of the current window; several threads may share it. Two that
    want the same tensor at once may both read it, which costs less than if all waited while one reads.

    `room`: the bytes that are kept, of the tensors used last.
    """

    def __init__(self, reader: Reader, adapters: frozenset[Path], room: int = 2**62) -> None:
        self._reader, self._adapters, self._room = reader, adapters, room
        self._tensors: OrderedDict[tuple[Source, int, int, str], Tensor] = OrderedDict()
        self._bytes, self._lock = 0, Lock()

    def fetch(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored, on the CPU; InputError if an adapter's values are not finite."""
        key = (info.source, info.offset, info.nbytes, info.dtype)  # an empty tensor has the offset of the next one
        with self._lock:
            tensor = self._tensors.get(key)
            if tensor is not None:
                self._tensors.move_to_end(key)
        if tensor is None:
            tensor = view_bytes(self._reader.view(info), info.dtype, info.shape)
            if info.file in self._adapters:
                check_finite(tensor, info)
            self._keep(key, tensor)
        return tensor.view(info.shape)  # the same bytes may be asked for in another shape

    def _keep(self, key: tuple[Source, int, int, str], tensor: Tensor) -> None:
        """Keep a tensor, and drop those used longest ago if all take more than the room."""
        with self._lock:
            if key not in self._tensors:
                self._bytes += tensor.nbytes
            self._tensors[key] = tensor
            while self._bytes > self._room and len(self._tensors) > RECENT_TENSORS:
                self._bytes -= self._tensors.popitem(last=False)[1].nbytes

    def read(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored, on the CPU; it is not kept."""
        if isinstance(info.source, Memory):
            return view_bytes(self._reader.view(info), info.dtype, info.shape)
        raw: Any = torch.empty(info.nbytes, dtype=torch.uint8)  # a bytearray would be filled with zeros first
        self._reader.read_into(memoryview(raw.numpy()), info.source, info.offset)
        return view_bytes(memoryview(raw.numpy()), info.dtype, info.shape)

    def forget(self) -> None:
        """Drop the tensors; called after each window, so that memory does not grow with the model."""
        with self._lock:
            self._tensors.clear()
            self._bytes = 0


class DeviceCache:
    """Tensors at their placement, made once for all blocks and plans that use them; keeps about `most` values."""

    def __init__(self, most: int = CACHED_VALUES) -> None:
        self._tensors: dict[Any, Tensor] = {}
        self._elements, self._most = 0, most
        self._lock = Lock()

    def get(self, key: Any, make: Callable[[], Tensor], settle: Callable[[], None]) -> Tensor:
        """Return the tensor of this key, made once even if two threads want it, and settled before it is shared."""
        tensor = self._tensors.get(key)
        if tensor is not None:
            return tensor
        if self._elements > self._most:
            return make()
        with self._lock:
            if key not in self._tensors:
                new = make()
                settle()
                self._tensors[key] = new
                self._elements += new.numel()
            return self._tensors[key]

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._tensors.clear()
            self._elements = 0


def parts_of(stored: Tensor, packing: Packing, first: int, count: int, fetch: Fetch) -> dict[str, Tensor]:
    """Return the stored parts of `count` values of a weight from `first` on, on the device of the codes, `stored`; a
    single value of the whole weight stays on the CPU."""
    parts = {CODES: stored}
    for role, part in packing.parts.items():
        info, (low, size) = part.info, part.span(first, count)
        kind = info.dtype if info.dtype in TORCH_DTYPES and role != CODES else "U8"
        shape = (size // ITEM_BYTES[kind],)
        values = fetch(replace(info, dtype=kind, shape=shape, offset=info.offset + low, nbytes=size))
        parts[role] = values if shape == (1,) and not part.group else on_device_of(values, stored)
    return parts


def on_device_of(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor on the device of another."""
    return tensor if tensor.device == other.device else stage([tensor], Placement(other.device, tensor.dtype))[0]


def codecs_on(device: torch.device) -> bool:
    """Return whether codecs compute on a device other than the host: it must have all dtypes and operations."""
    return device.type != "cpu" and device.type in FULL_DEVICES and rounds_to_eight_bits(device)


def computing(device: torch.device) -> AbstractContextManager[Any]:
    """Let codecs make their own tensors on a device."""
    return nullcontext() if device.type == "cpu" else device


def decoded(stored: Tensor, weight: Weight, first: int, count: int, fetch: Fetch) -> Tensor:
    """Return `count` values of a weight from `first` on, from their stored values; they may share memory.

    Raises InputError for scales that are not positive, finite values, and for codes whose values fp32 cannot hold.
    """
    encoding = weight.packing.encoding
    if encoding.plain:
        return stored
    try:
        with computing(stored.device):
            values = encoding.decode(parts_of(stored, weight.packing, first, count, fetch), first, count)
        if encoding.quantised and weight.packing.scaled and odd(values):
            raise InvalidPart("its scales are too large for fp32")
    except InvalidPart as e:
        where = f"{weight.stored.file}: {weight.stored.name}"
        raise InputError(f"a weight cannot be decoded: {e}", where, "download the model again") from e
    return values.reshape(-1)


def stored_values(weight: Weight, first: int, count: int, fetch: Fetch) -> Tensor:
    """Return the stored values of a part of a weight that is not padded, flat, read from the base: its codes as bytes
    if they are not plain values."""
    info, encoding = weight.stored, weight.packing.encoding
    low = encoding.nbytes(first)
    if encoding.plain:
        return fetch(replace(info, shape=(count,), offset=info.offset + low, nbytes=encoding.nbytes(count)))
    size = max(0, min(encoding.nbytes(count), info.nbytes - low)) if encoding.unit[1] else 0
    return fetch(replace(info, dtype="U8", shape=(size,), offset=info.offset + low, nbytes=size))


def weight_values(weight: Weight, fetch: Fetch) -> Tensor:
    """Return all values of a weight; the padding is zeros."""
    count = prod(weight.shape)
    if weight.packed is not None:
        return decoded(stored_values(weight, 0, count, fetch), weight, 0, count, fetch).reshape(weight.shape)
    values = fetch(weight.stored)
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
        parts.append(stage([rows[:, piece.across].t() if piece.transposed else rows], at)[0])
    return torch.cat(parts)


def view_bytes(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return the bytes as a tensor that shares them."""
    kind = TORCH_DTYPES.get(dtype) or getattr(torch, DTYPE_ROWS[dtype].library)
    if not raw.nbytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)


def as_bytes(values: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def packed(raw: memoryview, packing: Packing, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return stored values as a tensor that shares the bytes: plain ones in this shape, codes as flat bytes."""
    return view_bytes(raw, dtype, shape) if packing.encoding.plain else view_bytes(raw, "U8", (raw.nbytes,))


def raw(values: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    array: Any = host(as_bytes(values)).numpy()
    return bytes(array.tobytes())


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
        raise not_finite(f"{info.file}: {info.name}")
