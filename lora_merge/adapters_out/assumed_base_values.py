"""Readers of the tensors of a job's sources, whose base may be assumed."""

from __future__ import annotations

from torch import Tensor

from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..engine.tensors import TensorCache
from ..errors import UsageError
from .job import GIVE_BASE, AdapterJob
from .sources import NOWHERE, Sources


class WithoutBase(TensorCache):
    """Reads an adapter's tensors, and refuses the base's."""

    def fetch(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored; UsageError for one of the base."""
        if info.file == NOWHERE:
            raise UsageError("a formula reads the weights of the base", info.name, GIVE_BASE)
        return super().fetch(info)


def cache_of(job: AdapterJob, reader: Reader, sources: Sources) -> TensorCache:
    """Return the reader of tensors; without a base, one that refuses those of the base."""
    files = frozenset(p for a in sources.adapters for p in a.index.files)
    return (WithoutBase if job.base is None else TensorCache)(reader, files)
