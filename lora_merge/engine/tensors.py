"""Reads stored tensors as torch tensors: adapters' tensors, checked for NaN, and weights, decoded by their codec; keeps
tensors that many blocks use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ..disk.files import Memory, Source, StoredTensor
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES, TABLE
from ..errors import InputError
from ..files.codecs.base import CODES, InvalidPart, Packing
from ..models.weights import RowSlice, Weight, WeightView
from .row_blocks import Block
from .tasks import BlockTask, FoldTask, InUnitsTask
from .tensor_moves import TORCH_DTYPES, WHOLE, DeviceStream, Placement, aligned, host, odd, rounds_to_eight_bits, stage
from .windows import Fold

Fetch: TypeAlias = Callable[[StoredTensor], Tensor]
"""Function that returns a tensor as stored, from its entry in a header."""

KEPT: Final = 2**24
"""The most numbers that a `DeviceCache` keeps, of all tensors together."""

SHARE: Final = 4
"""A `TensorCache` keeps one part in so many of the memory limit, a `DeviceCache` a quarter of that in fp32."""

RECENT: Final = 4
"""The tensors used last that a `TensorCache` keeps whatever their size: the formulas under way need them anyway."""

LEAST_UNIT: Final = 2.0**-30
"""The factor from which on, up to its inverse, changes of a weight in units of it stay in the range of fp32."""


class TensorCache:
    """Reads tensors from files on demand and keeps those of the current window; several threads may share it. Two that
    want the same tensor at once may both read it, which costs less than if all waited while one reads.

    `room`: the bytes that are kept, of the tensors used last.
    """

    def __init__(self, reader: Reader, adapters: frozenset[Path], room: int = 2**62) -> None:
        self._reader, self._adapters, self._room = reader, adapters, room
        self._kept: OrderedDict[tuple[Source, int, int, str], Tensor] = OrderedDict()
        self._bytes, self._lock = 0, Lock()

    def fetch(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored, on the CPU; InputError if an adapter's values are not finite."""
        key = (info.source, info.offset, info.nbytes, info.dtype)  # an empty tensor has the offset of the next one
        with self._lock:
            tensor = self._kept.get(key)
            if tensor is not None:
                self._kept.move_to_end(key)
        if tensor is None:
            tensor = view_bytes(self._reader.view(info), info.dtype, info.shape)
            if info.file in self._adapters:
                check_finite(tensor, info)
            self._keep(key, tensor)
        return tensor.view(info.shape)  # the same bytes may be asked for in another shape

    def _keep(self, key: tuple[Source, int, int, str], tensor: Tensor) -> None:
        """Keep a tensor, and drop those used longest ago where all take more than the room."""
        with self._lock:
            if key not in self._kept:
                self._bytes += tensor.nbytes
            self._kept[key] = tensor
            while self._bytes > self._room and len(self._kept) > RECENT:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes

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
            self._kept.clear()
            self._bytes = 0


class DeviceCache:
    """Tensors at their placement, made once for all blocks and plans that use them; keeps about `most` numbers."""

    def __init__(self, most: int = KEPT) -> None:
        self._made: dict[Any, Tensor] = {}
        self._numbers, self._most = 0, most
        self._lock = Lock()

    def get(self, key: Any, make: Callable[[], Tensor], settle: Callable[[], None]) -> Tensor:
        """Return the tensor of this key, made once even if two threads want it, and settled before it is shared."""
        found = self._made.get(key)
        if found is not None:
            return found
        if self._numbers > self._most:
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
    """Return the stored parts of `count` numbers of a weight from `first` on, on the device of the codes, `numbers`; a
    single number of the whole weight stays on the CPU."""
    found = {CODES: numbers}
    for role, part in packing.parts.items():
        info, (low, size) = part.info, part.span(first, count)
        kind = info.dtype if info.dtype in TORCH_DTYPES and role != CODES else "U8"
        shape = (size // ITEM_BYTES[kind],)
        own = fetch(replace(info, dtype=kind, shape=shape, offset=info.offset + low, nbytes=size))
        found[role] = own if shape == (1,) and not part.numbers else beside(own, numbers)
    return found


def beside(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor on the device of another."""
    return tensor if tensor.device == other.device else stage([tensor], Placement(other.device, tensor.dtype))[0]


def codecs_on(device: torch.device) -> bool:
    """Return whether codecs compute on a device other than the host: it must have all dtypes and operations."""
    return device.type != "cpu" and device.type in WHOLE and rounds_to_eight_bits(device)


def computing(device: torch.device) -> AbstractContextManager[Any]:
    """Let codecs make their own tensors on a device."""
    return nullcontext() if device.type == "cpu" else device


def in_units(tasks: Sequence[FoldTask], fetch: Fetch) -> Sequence[FoldTask]:
    """Return tasks of one kind in units of the scale of their whole weights, where codes are kept, every weight has
    such a scale, and no change depends on W; else the tasks as they are.

    Such numbers need no product where they are decoded, and no division where they are encoded.
    """
    block, encoding = tasks[0].block, tasks[0].block.target.packing.encoding
    common, targets = encoding.common, [task.block.target for task in tasks]
    reads = block.target.combining is not None or any(s.use.patch.reads_base for s in block.slices)
    if not common or reads or any(t.recoded or t.weight.packing.parts != t.packing.parts for t in targets):
        return tasks  # a scale that is made anew is not that of the base
    with suppress(InvalidPart):  # whoever decodes the weight raises the error
        units = [encoding.factor_of({common: fetch(t.packing.parts[common].info)}) for t in targets]
        if all(LEAST_UNIT < unit < 1 / LEAST_UNIT for unit in units):
            return [
                InUnitsTask(replace(task.block, target=target.in_units), task.base, task.into, unit, task)
                for task, target, unit in zip(tasks, targets, units, strict=True)
            ]
    return tasks


def decoded(numbers: Tensor, weight: Weight, first: int, count: int, fetch: Fetch) -> Tensor:
    """Return `count` values of a weight from `first` on, from their stored numbers; they may share memory.

    Raises InputError for scales that are not positive, finite numbers, and for codes whose numbers fp32 cannot hold.
    """
    encoding = weight.packing.encoding
    if encoding.plain:
        return numbers
    try:
        with computing(numbers.device):
            values = encoding.decode(parts_of(numbers, weight.packing, first, count, fetch), first, count)
        if encoding.quantised and weight.packing.scaled and odd(values):
            raise InvalidPart("its scales are too large for fp32")
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
        parts.append(stage([rows[:, piece.across].t() if piece.transposed else rows], at)[0])
    return torch.cat(parts)


def stored_base(block: Block, fetch: Fetch) -> Tensor:
    """Return the stored base values of a block, read again, as a `BlockTask` has them."""
    weight = block.target.weight
    stored = stored_numbers(weight, *block.stored, fetch)
    return stored.view(-1, block.cols) if weight.packing.encoding.plain and not weight.padded else stored


def base_view(f: Fold, data: memoryview) -> Tensor:
    """Return the base values of a fold, which share the bytes of its buffer."""
    block, weight = f.block, f.block.target.weight
    shape = (block.stored[1],) if weight.padded else (block.last - block.first, block.cols)
    return packed(data[f.source : f.source + f.source_bytes], weight.packing, weight.stored.dtype, shape)


def base_values(tasks: Sequence[BlockTask], at: Placement, lane: DeviceStream | None, fetch: Fetch) -> Tensor:
    """Return base values [n, rows, cols] in the compute dtype, which may be overwritten; a padded weight has its
    stored values first along every axis, then zeros."""
    block = tasks[0].block
    if not block.target.weight.padded:
        values = [_values(task, at, fetch) for task in tasks]
        # One block needs no copy if it is where formulas compute, in memory that they may overwrite.
        first, base = values[0], tasks[0].base
        alone = len(tasks) == 1 and (first.device, first.dtype) == (at.device, at.dtype)
        decoded_apart = first is not base and not _shares(first, base)
        if alone and (in_place(tasks, at) or (decoded_apart and aligned(first))):
            return first.unsqueeze(0)
        return stage(values, at, lane)
    out = torch.zeros((len(tasks), block.last - block.first, block.cols), dtype=at.dtype, device=at.device)
    for rows, task in zip(out, tasks, strict=True):
        if task.base.numel():
            weight = task.block.target.weight
            corner = stage([task.base.reshape(-1, *weight.stored.shape[1:])], at)[0]
            rows.view(-1, *weight.shape[1:])[tuple(slice(0, d) for d in corner.shape)] = corner
    return out


def _shares(values: Tensor, base: Tensor) -> bool:
    """Return whether values are in the memory of the stored numbers, not decoded into their own."""
    return values.device == base.device and (values.untyped_storage().data_ptr() == base.untyped_storage().data_ptr())


def _values(task: BlockTask, at: Placement, fetch: Fetch) -> Tensor:
    """Return the numbers of a block, [rows, cols]; those of codes are on the device if it runs codecs."""
    block, weight = task.block, task.block.target.weight
    if weight.packed is None:
        return task.base
    codes = stage([task.base], Placement(at.device, torch.uint8))[0] if codecs_on(at.device) else task.base
    return decoded(codes, weight, *block.stored, fetch).view(block.last - block.first, block.cols)


def in_place(tasks: Sequence[BlockTask], at: Placement) -> bool:
    """Return whether base values and result share memory in which formulas may compute, in the compute dtype: then
    nothing is copied."""
    task = tasks[0]
    if len(tasks) > 1 or not isinstance(task, FoldTask) or task.base is not task.into:
        return False
    return (at.device.type, at.dtype) == ("cpu", task.into.dtype) and aligned(task.into)


def view_bytes(raw: memoryview, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return the bytes as a tensor that shares them."""
    kind = TORCH_DTYPES.get(dtype) or getattr(torch, TABLE[dtype].library)
    if not raw.nbytes:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)


def as_bytes(numbers: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat."""
    return numbers.contiguous().reshape(-1).view(torch.uint8)


def packed(raw: memoryview, packing: Packing, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return stored numbers as a tensor that shares the bytes: plain ones in this shape, codes as flat bytes."""
    return view_bytes(raw, dtype, shape) if packing.encoding.plain else view_bytes(raw, "U8", (raw.nbytes,))


def raw(numbers: Tensor) -> bytes:
    """Return the bytes of a tensor."""
    found: Any = host(as_bytes(numbers)).numpy()
    return bytes(found.tobytes())


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
