"""An adapter that is not written yet, as far as headers tell it: a plan converts it as a run converts the real one. No
torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ...adapters.file import AdapterFile, group
from ...disk.files import Memory, StoredTensor
from ...dtypes import bytes_of
from ...files.checkpoint import Index
from ..metadata.sizes import PlannedLayer, Tensor


def pretended(path: Path, layers: Iterable[PlannedLayer]) -> AdapterFile:
    """Return an adapter at a path with these tensors. α is the rank, and all other numbers are alike."""
    tensors = [one for layer in layers for one in _with_ranks(path, layer.tensors, layer.rank)]
    return group(Index(path, {one.name: one for one in tensors}, {}, ()))


def _with_ranks(path: Path, tensors: Sequence[Tensor], rank: int) -> list[StoredTensor]:
    found = []
    for name, dtype, shape in tensors:
        size = bytes_of(dtype, shape)
        content = partial(_number, rank) if not shape else partial(_ones, size)
        found.append(StoredTensor(name, dtype, shape, Memory(path, content), 0, size))
    return found


def _number(rank: int) -> memoryview:
    return memoryview(np.float32(rank).tobytes())


def _ones(size: int) -> memoryview:
    return memoryview(b"\1" * size)
