"""Shows a state dict as a checkpoint, so that it is matched and planned as a file is; and which tensors share memory,
whatever objects, storages and views they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from ..adapters.tensor_values import FileValues
from ..dtypes import Memory, StoredTensor
from ..engine.tensor_moves import FILE_DTYPES, host
from ..errors import InputError
from ..files.checkpoint import Index
from ..files.pickles import raw_bytes
from ..models.names import Names
from ..models.tied_weights import tied
from ..options import unlike
from ..text import with_article

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
    """Return whether two values of a tensor share a byte, as those of expanded tensors and of windows do."""
    axes, size = _axes(tensor), 1
    for step, n in axes:
        if step < size:
            break
        size += (n - 1) * step
    else:
        return False  # each axis steps over all values of the axes before it
    return tensor.numel() > 0 and (not axes[0][0] or bool((_starts(0, axes).diff() < 1).any()))


def _axes(tensor: Tensor) -> list[tuple[int, int]]:
    """Return (stride, length) of the axes that have several values, the smallest stride first."""
    return sorted((step, n) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


def _spans(tensors: Mapping[str, Tensor]) -> Iterator[ByteSpan]:
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            low, elements = tensor.data_ptr(), 1 + sum((n - 1) * step for step, n in _axes(tensor))
            handle = 0 if tensor.device.type in ADDRESSED else tensor.untyped_storage().data_ptr()
            yield ByteSpan((str(tensor.device), handle), low, low + elements * tensor.element_size(), name, tensor)


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


TIED_CONFIG: Final[Mapping[str, Any]] = {"architectures": ["ForCausalLM"], "tie_word_embeddings": True}
"""The configuration of a model whose head shares the tensor of its embeddings."""


DTYPE_NAMES: Final = FILE_DTYPES | {
    getattr(torch, name): "F8_E8M0" for name in ("float8_e8m0fnu",) if hasattr(torch, name)
}
"""Dtype → its name in files; older versions of torch lack the dtype of powers of two."""


def index_of(name: str, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None) -> Index:
    """Return a state dict as a checkpoint with a made-up file name; InputError for entries that are not tensors.

    `read` returns a tensor by name when its values are needed, if that is not the tensor in the state dict.
    """
    path, infos = Path(f"<{name}>"), {}
    if not isinstance(tensors, Mapping):
        raise unlike(tensors, name, "a table of names and tensors, such as model.state_dict()")

    @lru_cache(maxsize=4)  # a tensor on a GPU is copied to the host once, also if it is read in pieces
    def of_tensor(value: Tensor) -> memoryview:
        return raw_bytes(host(value))

    def content(key: str) -> memoryview:
        return of_tensor(read(key) if read else tensors[key])

    for key, value in tensors.items():
        if not isinstance(key, str):
            raise unlike(key, f"a name in {path}", "a str")
        check_values(value, f"{path}: {key}")
        source, nbytes = Memory(path, partial(content, key)), value.numel() * value.element_size()
        infos[key] = StoredTensor(key, DTYPE_NAMES[value.dtype], tuple(value.shape), source, 0, nbytes)
    return Index(path, infos, {}, (path,))


def codes(tensor: Tensor) -> bool:
    """Return whether a parameter holds codes of a quantisation and the rest next to it, as those of bitsandbytes do."""
    return type(tensor) not in (Tensor, Parameter) and (hasattr(tensor, "quant_state") or hasattr(tensor, "CB"))


def ties(tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return pairs of names, in their order, whose tensors share memory."""
    order = {name: number for number, name in enumerate(tensors)}
    return sorted((pair for pair in shared(tensors, tensors) if order[pair[0]] < order[pair[1]]),
                  key=lambda pair: (order[pair[0]], order[pair[1]]))  # fmt: skip


def tied_head(base: Index, lookup: Names) -> tuple[str, ...]:
    """Return the names of embeddings and head if both hold the same values; else ()."""
    head = tied(lookup, base.tensors, TIED_CONFIG)
    same = head is not None and head.stored and FileValues().same(head.info, base.tensors[head.stored])
    return (head.info.name, head.stored) if head is not None and same else ()


def check_weight(value: object) -> None:
    """Raise UsageError unless an argument is a tensor, and InputError unless that holds its values."""
    if not isinstance(value, Tensor):
        raise unlike(value, "the base's weight", "a tensor")
    check_values(value, "the base's weight")


def check_values(value: object, where: str) -> None:
    """Raise InputError unless a value is a tensor whose bytes are its values, and these are in memory."""
    kind = with_article(type(value).__name__)
    if not isinstance(value, Tensor):
        raise InputError(f"{kind} is not a tensor", where, _instead_of(value))
    if not _strided(value):
        if type(value) in (Tensor, Parameter):
            layout, dtype = (str(name).removeprefix("torch.") for name in (value.layout, value.dtype))
            kind = f"{with_article(layout)} tensor of {dtype}"
        fix = "give strided tensors of dtypes that .safetensors has, and leave out all other entries"
        raise InputError(f"{kind} is not a plain tensor", where, fix)
    if hasattr(value, "__tensor_flatten__"):  # torchao's codes, sharded tensors: they only look like one tensor
        fix = "give the values themselves, such as tensor.dequantize(), or merge into the files with `merge`"
        raise InputError(f"{kind} is not a plain tensor", where, fix)
    if codes(value):
        fix = "give what state_dict() of its module returns, or merge into the files with `merge`"
        raise InputError(f"{kind} holds a part of the weight alone", where, fix)
    if value.is_meta:
        raise InputError("a tensor on the meta device has no values", where, "load the model before merging")
    if value.numel() and not _in_memory(value):
        raise InputError("the memory of this tensor was freed, or is none", where, "load the model before merging")


def _instead_of(value: object) -> str:
    """Return what to give in the place of an entry that is no tensor."""
    if isinstance(value, Mapping):
        return "give the table in it, if that has the weights"
    if isinstance(value, list | tuple):
        return "convert each: {name: torch.tensor(numbers) for name, numbers in lists.items()}"
    if hasattr(value, "__array__"):
        return "convert each: {name: torch.from_numpy(array) for name, array in arrays.items()}"
    return "leave the entry out"


def _strided(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape, steps, and a dtype of files, as lazy, nested and sparse tensors have not."""
    try:
        return (
            tensor.layout == torch.strided and tensor.dtype in DTYPE_NAMES and len(tensor.stride()) == len(tensor.shape)
        )
    except (RuntimeError, ValueError, TypeError):  # torch's ways to refuse
        return False


def _in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's storage holds all its values, as those of sharded models do not at all times."""
    try:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        reach = (tensor.storage_offset() + last + 1) * tensor.element_size()
        return bool(tensor.data_ptr()) and reach <= tensor.untyped_storage().nbytes()
    except RuntimeError:  # fake tensors have no pointer
        return False
