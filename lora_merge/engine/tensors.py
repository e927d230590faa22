"""Reads stored tensors as torch tensors: adapters' tensors, checked for NaN, and weights, decoded by their codec; keeps
tensors that many blocks use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..disk.files import Memory, Source, StoredTensor
from ..disk.reader import Reader
from ..disk.spool import PartBytes
from ..dtypes import ITEM_BYTES
from ..errors import InputError, TooLarge
from ..files.codecs.base import CODES, DRAW, InvalidPart, OutOfRange, Packing
from ..models.weights import RowSlice, Weight, WeightView
from ..planning.plan import OutputTensor
from .placement import TORCH_DTYPES, Placement, host, odd, stage

Fetch: TypeAlias = Callable[[StoredTensor], Tensor]
"""Function that returns a tensor as stored, from its entry in a header."""

KEPT: Final = 2**24
"""The most numbers that a `DeviceCache` keeps, of all tensors together."""


class TensorCache:
    """Reads tensors from files on demand and keeps those of the current window; several threads may share it."""

    def __init__(self, reader: Reader, adapters: frozenset[Path]) -> None:
        self._reader, self._adapters = reader, adapters
        self._kept: dict[tuple[Source, int, int, str], Tensor] = {}

    def fetch(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored, on the CPU; InputError if an adapter's values are not finite."""
        key = (info.source, info.offset, info.nbytes, info.dtype)  # an empty tensor has the offset of the next one
        tensor = self._kept.get(key)
        if tensor is None:
            tensor = view_bytes(self._reader.view(info), info.dtype, info.shape)
            if info.file in self._adapters:
                check_finite(tensor, info)
            self._kept[key] = tensor
        return tensor

    def read(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored, on the CPU; it is not kept."""
        return view_bytes(self._reader.view(info), info.dtype, info.shape)

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


def parts_of(numbers: Tensor, packing: Packing, first: int, count: int, fetch: Fetch) -> dict[str, Tensor]:
    """Return the stored parts of `count` numbers of a weight from `first` on; `numbers` are the codes."""
    found = {CODES: numbers}
    for role, part in packing.parts.items():
        info, (low, size) = part.info, part.span(first, count)
        kind = info.dtype if info.dtype in TORCH_DTYPES and role != CODES else "U8"
        shape = (size // ITEM_BYTES[kind],)
        found[role] = fetch(replace(info, dtype=kind, shape=shape, offset=info.offset + low, nbytes=size))
    return found


def decoded(numbers: Tensor, weight: Weight, first: int, count: int, fetch: Fetch) -> Tensor:
    """Return `count` values of a weight from `first` on, from their stored numbers; they may share memory.

    Raises InputError for scales that are not positive, finite numbers.
    """
    encoding = weight.packing.encoding
    if encoding.plain:
        return numbers
    try:
        values = encoding.decode(parts_of(numbers, weight.packing, first, count, fetch), first, count)
    except InvalidPart as e:
        where = f"{weight.stored.file}: {weight.stored.name}"
        raise InputError(f"a weight cannot be decoded: {e}", where, "download the model again") from e
    return values.reshape(-1)


def stored_numbers(weight: Weight, first: int, count: int, fetch: Fetch) -> Tensor:
    """Return the stored numbers of a part of a weight that is not padded, flat, read from the base: its codes as bytes
    where they are not plain numbers."""
    info, encoding = weight.stored, weight.packing.encoding
    low = encoding.nbytes(first)
    if encoding.plain:
        return fetch(replace(info, shape=(count,), offset=info.offset + low, nbytes=encoding.nbytes(count)))
    size = max(0, min(encoding.nbytes(count), info.nbytes - low)) if encoding.unit[1] else 0
    return fetch(replace(info, dtype="U8", shape=(size,), offset=info.offset + low, nbytes=size))


def weight_values(weight: Weight, fetch: Fetch) -> Tensor:
    """Return all numbers of a weight; the padding is zeros."""
    count = prod(weight.shape)
    if weight.packed is not None:
        return decoded(stored_numbers(weight, 0, count, fetch), weight, 0, count, fetch).reshape(weight.shape)
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
        parts.append(stage([rows.t() if piece.transposed else rows], at)[0])
    return torch.cat(parts)


def view_bytes(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return the bytes as a tensor that shares them."""
    kind = TORCH_DTYPES[dtype]
    if not raw.nbytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)


def as_bytes(numbers: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat."""
    return numbers.contiguous().reshape(-1).view(torch.uint8)


def packed(raw: memoryview, packing: Packing, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return stored numbers as a tensor that shares the bytes: plain ones in this shape, codes as flat bytes."""
    return view_bytes(raw, dtype, shape) if packing.encoding.plain else view_bytes(raw, "U8", (raw.nbytes,))


class Codes(NamedTuple):
    """The codes of some numbers, as bytes: those of the base, and the tensor for the new ones, which may share memory;
    and uniform numbers, for stochastic rounding."""

    base: Tensor
    into: Tensor
    uniform: Tensor | None


def recode(
    target: OutputTensor, first: int, values: Tensor, codes: Codes, fetch: Fetch
) -> tuple[PartBytes, ...] | None:
    """Write the codes of merged numbers from `first` on; return the bytes of the other parts that changed.

    Returns None, and writes nothing, where a part of the whole weight does not cover the numbers.
    """
    old, new = _encoded(target, first, values, codes, fetch)
    if new is None:
        return None
    changed = []
    for role, numbers in new.items():
        if role != CODES and not torch.equal(as_bytes(numbers), as_bytes(old[role])):
            part = target.packing.parts[role]
            changed.append(PartBytes(part.info.name, part.span(first, values.numel())[0], raw(numbers)))
    codes.into.copy_(as_bytes(new[CODES]))
    return tuple(changed)


def read_back(target: OutputTensor, first: int, values: Tensor, fetch: Fetch) -> Tensor | None:
    """Return merged numbers of a quantised weight from `first` on as a reader of the output decodes them, flat; None
    where a part of the whole weight does not cover them."""
    base = stored_numbers(target.weight, first, values.numel(), fetch)
    old, new = _encoded(target, first, values, Codes(base, base, None), fetch)
    if new is None:
        return None
    parts = {role: as_bytes(n) if role == CODES else as_bytes(n).view(old[role].dtype) for role, n in new.items()}
    return target.packing.encoding.decode({**old, **parts}, first, values.numel()).reshape(-1)


def _encoded(
    target: OutputTensor, first: int, values: Tensor, codes: Codes, fetch: Fetch
) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Return the stored parts of some numbers: the base's, and those of the merged values; None where no part covers
    them."""
    packing, count = target.packing, values.numel()
    afresh = target.weight.packing.encoding is not packing.encoding  # the base has no codes of this kind
    wide = host(values, torch.float64 if values.dtype == torch.float64 else torch.float32).reshape(-1)
    if afresh and odd(wide):
        raise InputError("the base holds NaN or infinite numbers, which no code stands for",
                         f"{target.source.file}: {target.name}", "write --dtype bf16")  # fmt: skip
    old = parts_of(torch.zeros_like(codes.into) if afresh else codes.base, packing, first, count, fetch)
    if codes.uniform is not None:
        old[DRAW] = codes.uniform
    try:
        new = packing.encoding.encode(wide, old, first)
    except OutOfRange as e:
        raise TooLarge(f"a number is too large for {packing.encoding.title}", target.name, "write --dtype bf16") from e
    return old, None if new is None else dict(new)


def raw(numbers: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    found: Any = as_bytes(numbers).numpy()
    return bytes(found.tobytes())


def refitted(target: OutputTensor, largest: float, fetch: Fetch) -> OutputTensor:
    """Return the target with parts of the whole weight, held in memory, that cover this largest magnitude."""
    encoding, _, parts, _ = target.packing
    whole = {role: fetch(part.info) for role, part in parts.items() if not part.numbers}
    made = {
        role: replace(
            parts[role].info, source=Memory.of(parts[role].info.file, memoryview(bytearray(raw(numbers)))), offset=0
        )
        for role, numbers in encoding.refit(whole, largest).items()
    }
    found = {role: part._replace(info=made.get(role, part.info)) for role, part in parts.items()}
    return target._replace(packed=target.packing._replace(parts=found))


def new_parts(target: OutputTensor) -> Iterator[PartBytes]:
    """Yield the parts of a refitted target that are held in memory."""
    for part in target.packing.parts.values():
        if isinstance(part.info.source, Memory) and not part.numbers:
            yield PartBytes(part.info.name, 0, bytes(part.info.source.content()))


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
