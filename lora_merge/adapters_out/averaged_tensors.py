"""Averages the tensors of snapshots, as a training's own moving average does, and measures how far that is from the
average of their changes.

A product of averaged factors is not the average of the products: for close snapshots the two are near each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..adapters.modules import SCALES
from ..adapters.peft.rules import METADATA
from ..disk.destination import check_output
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import FLOATS, ITEM_BYTES, spoken
from ..engine.row_matrix import PIECE
from ..engine.tensor_moves import HOST, TORCH_DTYPES
from ..engine.tensors import TensorCache
from ..engine.torch_state import undisturbed
from ..errors import FitError, VerificationFailed
from ..files.checkpoint import Index, open_checkpoint
from ..progress import Counting, Progress, unwatched
from ..proof.reference.floats import decode, step
from .assumed_base_values import cache_of
from .change import Evaluator, norms_of, squares_between
from .combined_change import Delta, combine
from .copied_tensors import entry
from .decomposition.factors import squares_of
from .groups import Target
from .job import AdapterJob
from .module_tensors import Layer, waiting_entry
from .output_file import Entry, Proof, drafted, expect_room
from .pipeline import AdapterRun, Outcome, RunFacts, coverage, model_of, output_dtype
from .proof import REDO, Comparison, Squares, Stated, prove
from .report import AdapterReport
from .same_training import NOT_ONE, expect_alike
from .sources import Sources, open_sources
from .weight_norms import weight_norms


@dataclass(frozen=True)
class Averages:
    """The average of each tensor that the snapshots have."""

    snapshots: tuple[Index, ...]
    weights: tuple[float, ...]
    betas: Sequence[float] | None
    cache: TensorCache
    dtype: torch.dtype

    def of(self, info: StoredTensor) -> Tensor:
        """Return a tensor's average over the snapshots, in the dtype of the output; the base's as it is."""
        if not any(info.file in index.files for index in self.snapshots):
            return self.cache.fetch(info)
        tensors = [self.cache.fetch(index.tensors[info.name]) for index in self.snapshots]
        if not _is_averaged(info):
            if any(not torch.equal(t.double(), tensors[0].double()) for t in tensors):
                raise FitError("a number that scales a change differs between snapshots", info.name, NOT_ONE)
            return tensors[0]
        average = torch.empty(tensors[0].shape, dtype=self.dtype)
        into, flat = average.view(-1), [t.reshape(-1) for t in tensors]
        for first in range(0, len(into), PIECE):
            part = slice(first, first + PIECE)
            into[part] = averaged([t[part] for t in flat], self.weights, self.betas)
        return average


def _is_averaged(info: StoredTensor) -> bool:
    """Return whether a tensor is averaged: numbers of a model, and none that scales a change, such as α."""
    return info.dtype in FLOATS and info.name.rpartition(".")[2] not in SCALES


def averaged(values: Sequence[Any], weights: Sequence[float], betas: Sequence[float] | None) -> Any:
    """Return Σ wᵢθᵢ in fp64; a moving average θ̄ ← βθ̄ + (1 − β)θ step by step in fp32, as training keeps it.

    `values`: tensors of torch or arrays of numpy, in both of which a float takes the dtype of what it multiplies.
    """
    wide, single = (torch.float64, torch.float32) if isinstance(values[0], Tensor) else (np.float64, np.float32)

    def cast(value: Any, dtype: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) else value.astype(dtype)

    if betas is None:
        return sum(w * cast(v, wide) for w, v in zip(weights, values, strict=True))
    average = cast(values[0], single)
    for beta, value in zip(betas, values[1:], strict=True):
        average = average * beta + cast(value, single) * (1 - beta)
    return average


@undisturbed()
def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Write the average of the tensors: the output appears when it is complete and verified, or not at all."""
    with ExitStack() as stack:
        this = stack.enter_context(AdapterRun(job, progress))
        sources = open_sources(job, this.hash_adapters())
        files = [p for i in sources.indexes for p in i.files]
        check_output(job.output, files, overwrite=job.inputs.overwrite)
        snapshots = tuple(a.index for a in sources.adapters)
        expect_alike(snapshots)
        dtype = output_dtype(job, sources.adapters)
        reader = this.reading(sources.indexes)
        cache = cache_of(job, reader, sources)
        weights = tuple(a.strength for a in job.adapters)
        means = Averages(snapshots, weights, job.shares, cache, TORCH_DTYPES[dtype])
        unchosen = _unchosen(sources) if job.include or job.exclude else ()
        chosen = {name: info for name, info in snapshots[0].tensors.items() if name not in unchosen}
        rows = [(name, dtype if _is_averaged(info) else info.dtype, info.shape) for name, info in chosen.items()]
        expect_room(job, rows)
        layers = dict(_layers(sources, job, means, weight_norms(sources, reader), this.counted))
        draft, entries = stack.enter_context(drafted(job, reader, rows, snapshots, folder=False)), list[Entry]()
        for name, info in chosen.items():
            entries.append(waiting_entry(entry(name, means.of(info)), draft))
            cache.forget()
        outcome = Outcome(job, snapshots, layers, entries, model=model_of(sources), unchanged=_configured(snapshots))
        facts = RunFacts(coverage(job, sources), spoken(dtype), (*dict.fromkeys(sources.notes),))
        return outcome.finish(reader, draft, facts, partial(prove_average, means, job), this)


def _unchosen(sources: Sources) -> set[str]:
    """Return the tensors of the first snapshot's modules that change no weight that is averaged."""
    first, targets = sources.adapters[0], sources.targets
    every = {i.name for m in first.modules for i in m.tensors} | {i.name for i in first.strange}
    chosen = {i.name for t in targets for u in t.uses for i in u.patch.module.tensors}  # of any: a weight may be 0
    return every - chosen - {info.name for t in targets for _, info, _ in t.values}


def _configured(snapshots: Sequence[Index]) -> dict[str, str]:
    """Return the entry of diffusers that states α, which the tensors do not."""
    configuration = snapshots[0].metadata.get(METADATA)
    return {} if configuration is None else {METADATA: configuration}


def _layers(
    sources: Sources, job: AdapterJob, means: Averages, weight: Callable[[Target], float | None], begin: Counting
) -> Iterator[tuple[str, Layer]]:
    """Yield each layer's facts: ‖Σ wᵢΔWᵢ‖², and how far the change of the averaged tensors is from that sum. `weight`:
    gives ‖W‖² of the rows of the base that a layer changes."""
    stored = Evaluator(sources, means.cache, HOST)
    evaluator = Evaluator(sources, means.cache, HOST, fetch=means.of)
    count = begin("make", sum(means.dtype.itemsize * prod(t.shape) for t in sources.targets))
    for target in sources.targets:
        delta = combine(job, target, changes := stored.changes(target), [""] * len(changes))
        first = min((u.patch.adapter for u in target.uses), default=0)  # one of weight 0 has no uses
        uses = tuple(u._replace(strength=1.0) for u in target.uses if u.patch.adapter == first)
        alone, norms = replace(target, uses=uses, values=target.values[:1]), norms_of(changes, target)
        written = combine(job, alone, evaluator.changes(alone), [""])
        for part, only in zip(target.stored, alone.stored, strict=True):
            rows, real = delta.of(part), written.of(only)
            kind = only.uses[0].patch.algorithm if only.uses else "replacement"
            yield part.label, Layer({}, kind, real.before, rows.before, None, rows.squares, _apart(rows, real),
                                    effect=rows.effect, norms=norms[part.label], weight=weight(part))  # fmt: skip
        stored.forget()
        evaluator.forget()
        count(means.dtype.itemsize * prod(target.shape))


def _apart(delta: Delta, written: Delta) -> float:
    """Return ‖Δ − Δ̂‖²."""
    if delta.whole is None and written.whole is None:
        (left, right), (up, down) = delta.factors, written.factors
        return squares_of(torch.cat((left, -up), 1), torch.cat((right, down), 0))
    return squares_between(delta.rows, written.rows)


def prove_average(means: Averages, job: AdapterJob, reader: Reader, path: Path, begin: Counting) -> Proof:
    """Compute tensors of the output once more with numpy; VerificationFailed if one is not the nearest number of its
    dtype."""
    index = open_checkpoint(path)
    averages = [info for info in index.tensors.values() if _is_averaged(info)]

    def read(info: StoredTensor, source: Reader, first: int) -> Any:
        size = ITEM_BYTES[info.dtype]
        return decode(source.read(info, first * size, min(PIECE * size, info.nbytes - first * size)), info.dtype)

    with Reader([index]) as written:

        def squares(info: StoredTensor) -> Squares:
            for first in range(0, prod(info.shape), PIECE):
                some = [read(i.tensors[info.name], reader, first) for i in means.snapshots]
                average = averaged(some, means.weights, means.betas).astype(np.float64)
                numbers = read(info, written, first).astype(np.float64)
                if bool((np.abs(numbers - average) > step(average, info.dtype)).any()):
                    raise VerificationFailed("a written tensor is not the average", f"{path}: {info.name}", REDO)
            return Squares(0.0, 0.0)

        comparisons = [
            Comparison(info.name, 2 * prod(info.shape), 8 * 4 * min(PIECE, prod(info.shape)), Stated(0.0),
                       partial(squares, info))
            for info in averages
        ]  # fmt: skip
        return prove(comparisons, job, path, begin, layers=len(averages))
