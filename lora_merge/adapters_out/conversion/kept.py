"""The tensors of one module as they wait to be written: their bytes are in memory up to a bound, then in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...disk.spool import Heap
from ...engine.placement import FILE_DTYPES
from ..layers import Layer
from ..places import Place
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
    return Kept(made.place, waiting(made.tensors, heap), replace(made.layer, tensors={}), made.copied)


def waiting(tensors: Mapping[str, Tensor], heap: Heap) -> dict[str, Entry]:
    """Return tensors by their slots or endings; their bytes wait."""
    made = {slot: entry(slot, tensor) for slot, tensor in tensors.items()}
    return {slot: replace(e, data=heap.put(e.data)) for slot, e in made.items() if isinstance(e.data, memoryview)}


def entry(name: str, tensor: Tensor) -> Entry:
    """Return a tensor as it is written."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return Entry(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(raw))  # type: ignore[arg-type]
