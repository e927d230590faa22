"""The facts of layers whose tensors are averaged and whose changes are matrices, with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..engine.tensor_moves import HOST, TORCH_DTYPES
from .assumed_base_values import cache_of
from .change import Evaluator, norms_of, squares_between
from .combined_change import Delta, combine, tensor_of
from .factored_sums import StoredNumbers
from .groups import Target
from .job import AdapterJob
from .module_tensors import ChangeOfMean
from .sources import Sources


class AveragedMatrices:
    """Computes both changes of weights of one job: the average of the changes, and that by the averaged tensors."""

    def __init__(
        self, job: AdapterJob, sources: Sources, reader: Reader, read: Callable[[StoredTensor], StoredNumbers]
    ) -> None:
        """`read`: returns the average of a tensor of the snapshots."""
        self._job, self._read = job, read
        self._files = {file for adapter in sources.adapters for file in adapter.index.files}
        self._cache = cache_of(job, reader, sources)
        self._stored = Evaluator(sources, self._cache, HOST)
        self._averaged = Evaluator(sources, self._cache, HOST, fetch=self._fetch)

    def _fetch(self, info: StoredTensor) -> Tensor:
        """Return the average of a tensor of the snapshots; the base's as it is."""
        if info.file not in self._files:
            return self._cache.fetch(info)
        bits, dtype = self._read(info)
        return tensor_of(bits, TORCH_DTYPES[dtype]).reshape(info.shape)

    def layers(self, target: Target, alone: Target) -> Iterator[tuple[Target, ChangeOfMean]]:
        """Yield the layers that a weight is stored as. `alone`: the weight with the first snapshot's uses alone."""
        changes = self._stored.changes(target)
        delta = combine(self._job, target, changes, [""] * len(changes))
        written, norms = combine(self._job, alone, self._averaged.changes(alone), [""]), norms_of(changes, target)
        for part, only in zip(target.stored, alone.stored, strict=True):
            rows, real = delta.of(part), written.of(only)
            yield part, ChangeOfMean(rows.before, real.before, rows.squares, _apart(rows, real), rows.effect,
                                     norms[part.label])  # fmt: skip
        self._stored.forget()
        self._averaged.forget()


def _apart(delta: Delta, written: Delta) -> float:
    """Return ‖Δ − Δ̂‖²."""
    if delta.whole is None and written.whole is None:
        return delta.factored.apart(written.factored)
    return squares_between(delta.rows, written.rows)
