"""Shows a state dict as a checkpoint, so that it is matched and planned as a file is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from ..adapters.tensor_values import FileValues
from ..disk.files import Memory, StoredTensor
from ..engine.tensor_moves import FILE_DTYPES, host
from ..errors import InputError
from ..files.checkpoint import Index
from ..files.pickles import raw_bytes
from ..models.names import Names
from ..models.tied_weights import tied
from ..options import unlike
from .spans import shared

TIED_CONFIG: Final[Mapping[str, Any]] = {"architectures": ["ForCausalLM"], "tie_word_embeddings": True}
"""The configuration of a model whose head shares the tensor of its embeddings."""


DTYPE_NAMES: Final = FILE_DTYPES | {
    getattr(torch, name): "F8_E8M0" for name in ("float8_e8m0fnu",) if hasattr(torch, name)
}
"""Dtype → its name in files; older versions of torch lack the dtype of powers of two."""


def index_of(name: str, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None) -> Index:
    """Return a state dict as a checkpoint with a made-up file name; InputError for entries that are not tensors.

    `read` returns a tensor by name when its numbers are needed, if that is not the tensor in the state dict.
    """
    path, infos = Path(f"<{name}>"), {}
    if not isinstance(tensors, Mapping):
        fix = "give model.state_dict(); for files there is lora_merge.merge, for a model in place merge_into"
        raise unlike(tensors, name, "a table of names and tensors", fix)

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
    """Raise UsageError unless an argument is a tensor, and InputError unless that holds its numbers."""
    if not isinstance(value, Tensor):
        raise unlike(value, "the base's weight", "a tensor")
    check_values(value, "the base's weight")


def check_values(value: object, where: str) -> None:
    """Raise InputError unless a value is a tensor whose bytes are its numbers, and these are in memory."""
    kind = type(value).__name__
    if not isinstance(value, Tensor) or not _strided(value):
        fix = "give strided tensors of dtypes that .safetensors has, and leave out all other entries"
        raise InputError(f"a {kind} is not a plain tensor", where, fix)
    if hasattr(value, "__tensor_flatten__"):  # torchao's codes, sharded tensors: they only look like one tensor
        fix = "give the values themselves, such as tensor.dequantize(), or merge into the files with `merge`"
        raise InputError(f"a {kind} is not a plain tensor", where, fix)
    if codes(value):
        fix = "give what state_dict() of its module returns, or merge into the files with `merge`"
        raise InputError(f"a {kind} holds a part of the weight alone", where, fix)
    if value.is_meta:
        raise InputError("a tensor on the meta device has no values", where, "load the model before merging")
    if value.numel() and not _in_memory(value):
        raise InputError("the memory of this tensor was freed, or is none", where, "load the model before merging")


def _strided(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape, steps, and a dtype of files, as lazy, nested and sparse tensors have not."""
    try:
        return (
            tensor.layout == torch.strided and tensor.dtype in DTYPE_NAMES and len(tensor.stride()) == len(tensor.shape)
        )
    except (RuntimeError, ValueError, TypeError):  # torch's ways to refuse
        return False


def _in_memory(tensor: Tensor) -> bool:
    """Return whether a tensor's storage holds all its numbers, as those of sharded models do not at all times."""
    try:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        reach = (tensor.storage_offset() + last + 1) * tensor.element_size()
        return bool(tensor.data_ptr()) and reach <= tensor.untyped_storage().nbytes()
    except RuntimeError:  # fake tensors have no pointer
        return False
