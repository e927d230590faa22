"""Readers of the tensors of a conversion, whose base may be assumed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..engine.tensors import TensorCache
from ..errors import UsageError
from .job import GIVE_BASE, AdapterJob
from .sources import Sources
from .without_base import NOWHERE


class WithoutBase(TensorCache):
    """Reads an adapter's tensors. The base's are refused, or drawn at random for a proof.

    An equation between two formulas that holds for random weights holds for all weights.
    """

    def __init__(self, reader: Reader, adapters: frozenset[Path], *, drawn: bool) -> None:
        super().__init__(reader, adapters)
        self._drawn = drawn

    def fetch(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored; UsageError for one of the base."""
        if info.file != NOWHERE:
            return super().fetch(info)
        if not self._drawn:
            raise UsageError("a formula reads the weights of the base", info.name, GIVE_BASE)
        generator = torch.Generator().manual_seed(sum(info.name.encode()))
        return torch.randn(info.shape, generator=generator)


def cache_of(job: AdapterJob, reader: Reader, sources: Sources, *, drawn: bool = False) -> TensorCache:
    """Return the reader of tensors; without a base, one that refuses those of the base, or draws them."""
    files = frozenset(p for a in sources.adapters for p in a.index.files)
    return TensorCache(reader, files) if job.base is not None else WithoutBase(reader, files, drawn=drawn)
