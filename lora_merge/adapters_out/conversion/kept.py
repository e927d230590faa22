"""The tensors of one module: their bytes are in the draft of the output, or wait until their turn comes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...disk.draft import Draft
from ...disk.spool import Heap
from ...engine.placement import FILE_DTYPES
from ..outcome.layer import Kept, waiting, without_bytes
from ..written import Entry
from .made import Made


def kept(made: Made, put: Heap | Draft) -> Kept:
    """Return a module whose bytes wait, or are in the draft of the output."""
    entries = {ending: entry(ending, tensor) for ending, tensor in made.tensors.items()}
    return Kept(made.place, waiting(entries, put), without_bytes(made.layer), made.copied)


def entry(name: str, tensor: Tensor) -> Entry:
    """Return a tensor as it is written."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return Entry(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(raw))  # type: ignore[arg-type]
