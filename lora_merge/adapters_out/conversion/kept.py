"""The tensors of one module as they wait to be written: their bytes are in memory up to a bound, then in a file; those
that an input stores are read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...disk.files import StoredTensor
from ...disk.spool import Heap, Ranges, Waiting
from ...engine.placement import FILE_DTYPES
from ...engine.tensors import TensorCache
from ..layers import Layer
from ..places import Place
from ..truncation.storing import alike
from ..written import Entry
from .made import Made


@dataclass(frozen=True)
class Kept:
    """The stored tensors of one module by their ending, and the facts of its layer, which holds no tensors."""

    place: Place
    tensors: Mapping[str, Entry]
    layer: Layer
    copied: bool = False  # whether the tensors are those of the input


def kept(made: Made, heap: Heap) -> Kept:
    """Return a module whose bytes wait."""
    return Kept(made.place, waiting(made.layer, made.tensors, heap), without_bytes(made.layer), made.copied)


def without_bytes(layer: Layer) -> Layer:
    """Return the facts of a layer alone."""
    return replace(layer, tensors={}, copies={})


def waiting(layer: Layer, tensors: Mapping[str, Tensor], heap: Heap) -> dict[str, Entry]:
    """Return the tensors of a layer by their slots or endings; their bytes wait."""
    made = {slot: entry(slot, tensor) for slot, tensor in tensors.items()}
    return {slot: replace(e, data=layer.copies.get(slot) or held(e, heap)) for slot, e in made.items()}


def held(one: Entry, heap: Heap) -> Waiting:
    """Return the bytes of a tensor that is in memory as they wait."""
    assert isinstance(one.data, memoryview), "it was just made"
    return heap.put(one.data)


def copies_of(tensor: Tensor, stored: Sequence[StoredTensor], cache: TensorCache) -> Ranges | None:
    """Return the input's tensors whose bytes, one after another, are those of a tensor; None where these are not."""
    if any(info.dtype != FILE_DTYPES[tensor.dtype] for info in stored):
        return None
    found = [cache.fetch(info).reshape(-1) for info in stored]
    if sum(map(len, found)) != tensor.numel():
        return None
    bits, at = tensor.reshape(-1), 0
    for own in found:
        if not alike(bits[at : at + len(own)], own):
            return None
        at += len(own)
    return cache.again(*stored)


def entry(name: str, tensor: Tensor) -> Entry:
    """Return a tensor as it is written."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return Entry(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(raw))  # type: ignore[arg-type]
