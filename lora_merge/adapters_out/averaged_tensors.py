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
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..adapters.modules import SCALE_SLOTS
from ..adapters.peft.rules import ADAPTER_METADATA
from ..adapters.suffixes import split
from ..disk.destination import check_output
from ..disk.reader import Reader
from ..dtypes import FLOATS, ITEM_BYTES, StoredTensor, spoken
from ..errors import FitError, VerificationFailed, beyond_dtype
from ..files.checkpoint import Index, open_checkpoint
from ..progress import Counting, Progress, unwatched
from ..proof.reference.floats import Floats, decode
from .factored_modules import FactoredSums, StoredValues, finite_values, read_values, weight_norms
from .groups import OutputModule, components, layers_of_weights
from .input_adapters import InputAdapters, open_adapters
from .job import AdapterJob
from .module_tensors import Layer, waiting_entry
from .output_file import Entry, Proof, drafted, expect_room
from .output_modules import weights_of
from .parallel import settings_of_torch
from .pipeline import AdapterRun, Outcome, RunFacts, coverage, output_dtype
from .proof import REDO, Comparison, Squares, StatedLoss, prove
from .report import AdapterReport
from .values import Array, all_finite, as_stored, data_of

if TYPE_CHECKING:
    from .delta import AveragedMatrices

NOT_ONE: Final = "average changes, for which they need not be alike: `--space delta`"


def expect_alike(snapshots: Sequence[Index]) -> None:
    """Raise FitError unless all snapshots have the same tensors."""
    first = {name: info.shape for name, info in snapshots[0].tensors.items()}
    for index in snapshots[1:]:
        other = {name: info.shape for name, info in index.tensors.items()}
        if first != other:
            name = next(n for n in (*first, *other) if first.get(n) != other.get(n))
            what = "two snapshots have a tensor in different shapes" if name in first.keys() & other.keys() else (
                "a snapshot lacks a tensor that another one has")  # fmt: skip
            raise FitError(what, f"{index.path}: {name}", NOT_ONE)
        if index.metadata.get(ADAPTER_METADATA) != snapshots[0].metadata.get(ADAPTER_METADATA):
            raise FitError("two snapshots have different configurations in their headers", str(index.path), NOT_ONE)


AVERAGED_VALUES: Final = 2**18
"""Values that are averaged at a time: they stay in the caches."""


@dataclass(frozen=True)
class Averages:
    """The average of each tensor that the snapshots have."""

    snapshots: tuple[Index, ...]
    weights: tuple[float, ...]
    betas: Sequence[float] | None
    reader: Reader
    dtype: str  # of the output, as files name it

    def of(self, info: StoredTensor) -> StoredValues:
        """Return a tensor's average over the snapshots, in the dtype of the output. FitError for a number that scales a
        change and is not the same in all."""
        tensors = [finite_values(self.reader, index.tensors[info.name]) for index in self.snapshots]
        if not _is_averaged(info):
            if any(not np.array_equal(t.wide(), tensors[0].wide()) for t in tensors):
                raise FitError("a number that scales a change differs between snapshots", info.name, NOT_ONE)
            return tensors[0]
        pieces = []
        for first in range(0, max(tensors[0].bits.size, 1), AVERAGED_VALUES):
            some = [t._replace(bits=t.bits[first : first + AVERAGED_VALUES]).wide() for t in tensors]
            pieces.append(as_stored(averaged(some, self.weights, self.betas), self.dtype))
        average = np.concatenate(pieces)
        if not all_finite(average, self.dtype):
            raise beyond_dtype(info.name)
        return StoredValues(average, self.dtype)


def _is_averaged(info: StoredTensor) -> bool:
    """Return whether a tensor is averaged: values of a model, and none that scales a change, such as α."""
    known = split(info.name)
    return info.dtype in FLOATS and (known is None or known[1].slot not in SCALE_SLOTS)


def averaged(values: Sequence[Array], weights: Sequence[float], betas: Sequence[float] | None) -> Array:
    """Return Σ wᵢθᵢ in fp64; a moving average θ̄ ← βθ̄ + (1 − β)θ step by step in fp32, as training keeps it."""
    if betas is None:
        total = np.zeros(len(values[0]))
        for weight, value in zip(weights, values, strict=True):
            total += weight * value.astype(np.float64, copy=False)
        return total
    average = values[0].astype(np.float32)
    for beta, value in zip(betas, values[1:], strict=True):
        average = average * beta + value.astype(np.float32) * (1 - beta)
    return average


def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Write the average of the tensors: the output appears when it is complete and verified, or not at all."""
    with ExitStack() as stack:
        stack.enter_context(settings_of_torch())
        this = stack.enter_context(AdapterRun(job, progress))
        inputs = open_adapters(job, this.hash_adapters())
        files = [p for i in inputs.indexes for p in i.files]
        check_output(job.output, files, overwrite=job.inputs.overwrite)
        snapshots = tuple(a.index for a in inputs.adapters)
        expect_alike(snapshots)
        dtype = output_dtype(job, inputs.adapters)
        reader = this.reading(inputs.indexes)
        means = Averages(snapshots, tuple(a.strength for a in job.adapters), job.shares, reader, dtype)
        unchosen = _unchosen(inputs) if job.include or job.exclude else ()
        chosen = {name: info for name, info in snapshots[0].tensors.items() if name not in unchosen}
        rows = [(name, dtype if _is_averaged(info) else info.dtype, info.shape) for name, info in chosen.items()]
        expect_room(job, rows)
        modules = layers_of_weights(inputs.targets)
        weights = weights_of(job, modules)
        layers = dict(_layers(inputs, modules, job, means, this.counted("make", weights)))
        draft, entries = stack.enter_context(drafted(job, reader, rows, snapshots, folder=False)), list[Entry]()
        for name, info in chosen.items():
            bits, kind = means.of(info)
            entries.append(waiting_entry(Entry(name, kind, info.shape, data_of(bits)), draft))
        outcome = Outcome(job, snapshots, layers, entries, None, inputs.architecture, _configured(snapshots))
        facts = RunFacts(coverage(job, inputs), spoken(dtype), (*dict.fromkeys(inputs.notes),), weights=weights)
        return outcome.finish(reader, draft, facts, partial(prove_average, means, job), this)


def _unchosen(inputs: InputAdapters) -> set[str]:
    """Return the tensors of the first snapshot's modules that change no weight that is averaged."""
    first, targets = inputs.adapters[0], inputs.targets
    every = {i.name for m in first.modules for i in m.tensors} | {i.name for i in first.strange}
    chosen = {i.name for t in targets for u in t.uses for i in u.patch.module.tensors}  # of any: a weight may be 0
    return every - chosen - {info.name for t in targets for _, info, _ in t.values}


def _configured(snapshots: Sequence[Index]) -> dict[str, str]:
    """Return the entry of diffusers that states α, which the tensors do not."""
    configuration = snapshots[0].metadata.get(ADAPTER_METADATA)
    return {} if configuration is None else {ADAPTER_METADATA: configuration}


def _layers(
    inputs: InputAdapters,
    modules: Sequence[OutputModule],
    job: AdapterJob,
    means: Averages,
    count: Callable[[int], object],
) -> Iterator[tuple[str, Layer]]:
    """Yield each layer's facts: ‖Σ wᵢΔWᵢ‖², and how far the change of the averaged tensors is from that sum.
    `count`: is called with the bytes of each layer."""
    weight = weight_norms(inputs, means.reader)
    of_changes = FactoredSums(job, partial(read_values, means.reader))
    of_tensors = FactoredSums(job, means.of)
    matrices: AveragedMatrices | None = None
    for group in components(modules):
        parts = [part for module in group for part in module.parts]
        target = parts[0].target
        first = min((u.patch.adapter for u in target.uses), default=0)  # one of weight 0 has no uses
        uses = tuple(u._replace(strength=1.0) for u in target.uses if u.patch.adapter == first)
        alone = replace(target, uses=uses, values=target.values[:1])
        kind = uses[0].patch.algorithm if uses else "replacement"
        deltas: Any = of_changes.delta(target), of_tensors.delta(alone)
        if None in deltas:
            from .delta import AveragedMatrices  # with torch

            matrices = matrices or AveragedMatrices(job, inputs, means.reader, means.of)
            deltas = matrices.deltas(target, alone)
        for module, part in zip(group, parts, strict=True):
            delta, written = deltas[0].of(part), deltas[1].of(replace(part, target=alone))
            yield module.place.label, Layer(kind, written.before, delta.before, None, delta.squares,
                                            delta.apart(written), effect=delta.effect, norms=deltas[0].norms[part.runs],
                                            weight=weight(part))  # fmt: skip
            count(8 * prod(part.matrix))
        if matrices is not None:
            matrices.forget()


def weighted_sum(values: Sequence[Array], weights: Sequence[float], *, moving: bool) -> tuple[Array, Array]:
    """Return Σ wᵢθᵢ in float64, and how far another computation of it may be from that: each of its n steps multiplies
    and adds, in fp32 for a `moving` average, with at most four roundings by a relative 2⁻²⁴, else 2⁻⁵³."""
    stack, unit = np.stack(values).astype(np.float64), 2.0**-24 if moving else 2.0**-53
    column = np.array(weights)
    return column @ stack, 4 * len(values) * (unit * (np.abs(column) @ np.abs(stack)) + 2.0**-149 * moving)


def prove_average(means: Averages, job: AdapterJob, reader: Reader, path: Path, begin: Counting) -> Proof:
    """Compare tensors of the output with the sum of the snapshots' values by their weights, which a moving average
    adds up otherwise; VerificationFailed if one is not the nearest number of its dtype."""
    index = open_checkpoint(path)
    averages = [info for info in index.tensors.values() if _is_averaged(info)]

    def read(info: StoredTensor, source: Reader, first: int) -> Any:
        size = ITEM_BYTES[info.dtype]
        return decode(
            source.read(info, first * size, min(AVERAGED_VALUES * size, info.nbytes - first * size)), info.dtype
        )

    with Reader([index]) as written:

        def squares(info: StoredTensor) -> Squares:
            for first in range(0, prod(info.shape), AVERAGED_VALUES):
                some = [read(i.tensors[info.name], reader, first) for i in means.snapshots]
                average, slack = weighted_sum(some, means.weights, moving=means.betas is not None)
                values = read(info, written, first).astype(np.float64)
                if bool((np.abs(values - average) > Floats(info.dtype).step(average) + slack).any()):
                    raise VerificationFailed("a written tensor is not the average", f"{path}: {info.name}", REDO)
            return Squares(0.0, 0.0)

        comparisons = [
            Comparison(info.name, 2 * prod(info.shape), 8 * 4 * min(AVERAGED_VALUES, prod(info.shape)),
                       StatedLoss(0.0), partial(squares, info))
            for info in averages
        ]  # fmt: skip
        return prove(comparisons, job, path, begin, layers=len(averages))
