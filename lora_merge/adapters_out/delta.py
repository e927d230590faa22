"""Δ of one layer, with torch: changes are combined, cut to a rank, rounded once, and become the tensors of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..disk.reader import Reader
from ..dtypes import StoredTensor
from ..engine.coefficients import coefficients
from ..engine.combination import combined_rows
from ..engine.module_change import ModuleChange
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import FILE_DTYPES, HOST, TORCH_DTYPES, Placement, finite, odd
from ..engine.tensors import view_bytes
from ..errors import beyond_dtype
from ..matching.patch import Patch
from ..merge_methods import COMBINATIONS
from .change import Change, Evaluator, cache_of, largest_rank, squares_between, squares_of_part
from .factored_modules import StoredValues
from .factors import (
    Cut,
    FactoredDelta,
    StoredFactors,
    Triples,
    decomposing,
    exact,
    inner_products,
    rounded_pair,
    spectrum_of,
    stacked,
    truncated,
)
from .groups import Place, PlacePart, Runs, Target
from .input_adapters import InputAdapters
from .job import AUTO, FACTORS, WHOLE, AdapterJob
from .matrix_svd import of_dense, values_of
from .module_tensors import AdapterNorms, Layer, StoredModule, layer_norms
from .output_file import Entry
from .rank_rules import EXACT, LayerSpectrum, Rule
from .values import ZERO_TOTALS, Array, Effect, Totals, squares, squares_of_rows, totals_of, totals_of_rows

LOST_IN_FP32: Final = 1e-10
"""The share of ‖Δ‖² from which on a difference that is formed in fp32 has digits enough."""


def apart_from(whole: RowMatrix, up: Tensor, down: Tensor, total: float, dtype: torch.dtype | None = None) -> float:
    """Return ‖Δ − B A‖² of a matrix Δ, number by number, some rows at a time, which stay in the caches. In fp32 that is
    exact to a thousandth from LOST_IN_FP32 · ‖Δ‖² on; for less it is computed in fp64. `total`: ‖Δ‖². `dtype`: default:
    that of Δ."""
    off, wide = 0.0, torch.float64
    dtype_of_sums = dtype or whole.read(slice(0, 0)).dtype
    left, right = up.to(dtype_of_sums), down.to(dtype_of_sums)
    for rows, block in whole.blocks(owned=False):
        off += squares(torch.addmm(block.to(dtype_of_sums), left[rows], right, alpha=-1))
    return off if off > LOST_IN_FP32 * total or dtype_of_sums == wide else apart_from(whole, up, down, total, wide)


class RoundedMatrix(NamedTuple):
    """A matrix as it is stored, the totals of the exact one, and ‖Δ − Δ̂‖²."""

    values: Tensor
    totals: Totals
    lost: float  # ‖Δ − Δ̂‖²


def rounded(exact: RowMatrix, dtype: torch.dtype) -> RoundedMatrix:
    """Return a matrix that is rounded once, some rows at a time."""
    values = torch.empty(exact.shape, dtype=dtype)
    totals, lost = ZERO_TOTALS, 0.0
    for rows, block in exact.blocks(owned=False):
        values[rows] = block
        totals += totals_of(block)
        lost += squares(values[rows].double() - block.double())
    return RoundedMatrix(values, totals, lost)


@dataclass(frozen=True)
class Delta(ModuleChange):
    """Δ of one layer before it is cut to a rank."""

    before: int = 0  # the largest rank of the inputs; 0 where one of them is a matrix without factors
    norms: Mapping[Runs, AdapterNorms] = field(default_factory=dict)  # of each layer of the weight
    known: Totals | None = None  # of a whole matrix, where they are known

    @staticmethod
    def of_factors(delta: FactoredDelta) -> Delta:
        """Return the same Δ, in the same memory."""
        return Delta(torch.from_numpy(delta.left), torch.from_numpy(delta.right), None, delta.before, delta.norms)

    @cached_property
    def factored(self) -> FactoredDelta:
        """The factors in numpy, in the same memory."""
        left, right = self.factors
        return FactoredDelta(left.numpy(), right.numpy(), self.before)

    def of(self, part: PlacePart) -> Delta:
        """Return the rows of Δ that a layer stores; of its factors, the columns that are not zero there."""
        if not part.runs:
            return self
        if self.whole is None:
            return Delta.of_factors(self.factored.of(part))
        ranks, order = part.ranks, torch.cat([torch.arange(start, stop) for start, stop in part.runs])
        before = 0 if None in ranks else min(max((rank or 0 for rank in ranks), default=0), *part.matrix)
        return Delta(None, None, self.whole.of_rows(order), before)

    def apart(self, other: Delta) -> float:
        """Return ‖Δ − Δ'‖²."""
        if self.whole is None and other.whole is None:
            return self.factored.apart(other.factored)
        return squares_between(self.rows, other.rows)

    @cached_property
    def totals(self) -> Totals:
        """The totals of a whole Δ."""
        return self.known or totals_of_rows(self.rows)

    @cached_property
    def squares(self) -> float:
        """‖Δ‖²."""
        return self.factored.squares if self.whole is None else self.totals.squares

    @property
    def effect(self) -> Effect:
        """The largest entry of Δ and its share of non-zeros, from all rows or from a sample."""
        return self.factored.effect if self.whole is None else self.totals.effect


def combine(job: AdapterJob, target: Target, changes: Sequence[Change], seeds: Sequence[str]) -> Delta:
    """Return Δ of one layer by the job's method. `seeds`: one for each change."""
    row = COMBINATIONS[job.method]
    factored = row.linear and not target.vector and all(c.left is not None for c in changes)
    before = largest_rank(changes)
    if not factored:
        whole = combined_rows(job.method, [c.rows for c in changes], [c.strength for c in changes], job.parameters,
                              seeds, vector=target.vector)  # fmt: skip
        return Delta(None, None, whole.cached(), before)
    weights = coefficients(job.method, lambda: _products(changes), [c.strength for c in changes], job.parameters)
    factors = []
    for c, weight in zip(changes, weights, strict=True):
        left, right = c.factors
        factors.append((left if weight == 1 else left * weight, right))
    return Delta.of_factors(FactoredDelta(*stacked(factors), before))


def _products(changes: Sequence[Change]) -> list[list[float]]:
    """Return ⟨τᵢ, τⱼ⟩."""
    return inner_products([(np.asarray(c.left), np.asarray(c.right)) for c in changes])


def spectrum(delta: Delta, rule: Rule, noise: float, at: Placement = HOST) -> Triples:
    """Return the singular triples of a layer, as many as its rule needs; matrices are decomposed at a placement."""
    if delta.whole is None and (triples := delta.factored.triples(noise)) is not None:
        return triples
    return of_dense(delta.rows, rule.of_inputs(delta.before), noise, at, delta.squares)


def spectra(layers: Iterable[tuple[str, Delta]], itemsize: int, noise: float) -> Iterator[LayerSpectrum]:
    """Yield the singular values of layers with a change, for the rule `size`; `itemsize`: bytes of a number."""
    for name, delta in layers:
        if delta.squares > 0:
            with decomposing(name):
                values = (
                    spectrum(delta, Rule("energy", 1.0), noise).values
                    if delta.whole is None
                    else values_of(delta.whole)
                )
            yield LayerSpectrum(name, values.tolist(), sum(delta.matrix) * itemsize)


def expect_finite(entries: Iterable[Entry], where: str) -> None:
    """Raise TooLarge, with the name of a layer, if a number that was cast to the dtype of the output is not finite.
    `entries`: tensors in memory."""
    tensors = (view_bytes(e.data, e.dtype, e.shape) for e in entries if isinstance(e.data, memoryview))
    if any(odd(t) and not bool(finite(t).all()) for t in tensors):
        raise beyond_dtype(where)


Slots: TypeAlias = Mapping[str, Tensor]
"""Slot → stored tensor of a layer."""


@dataclass(frozen=True)
class Storage:
    """The form in which the layers of one run are stored."""

    algorithm: str
    dtype: torch.dtype
    noise: float  # singular values below this share of the largest one are noise of the inputs
    at: Placement = HOST  # where matrices are decomposed

    def layer(self, place: Place, delta: Delta, cut: Cut, triples: Triples | None = None) -> tuple[Slots, Layer]:
        """Return the stored tensors of a layer, and its facts. `triples`: of Δ, as many as the rule needs, if they are
        known."""
        if place.vector or self.algorithm == WHOLE:
            return self._whole(place, delta)
        tensors, layer = self._factored(place, delta, cut, triples)
        out, cols = delta.matrix
        if self.algorithm == AUTO and layer.algorithm == FACTORS and layer.rank * (out + cols) >= out * cols:
            return self._whole(place, delta)  # smaller, and nothing is cut
        return tensors, layer

    def _factored(self, place: Place, delta: Delta, cut: Cut, triples: Triples | None) -> tuple[Slots, Layer]:
        """Return the layer as factors; as a whole matrix if it has none, which headers show (form.py)."""
        if cut.rule.name == EXACT and cut.rank is None:
            if delta.whole is not None:
                return self._whole(place, delta)
            return self.pair(place.view.shape, delta.before, exact(delta.factored, cut, self.kind))
        rank = cut.rank
        rule = cut.rule if rank is None else replace(cut.rule, most=rank)  # no more vectors than are stored
        with decomposing(place.name):
            leading = triples or spectrum(delta, rule, self.noise, self.at)
        if delta.whole is None:
            return self.pair(place.view.shape, delta.before, truncated(delta.factored, leading, cut, self.kind))
        return self._cut(place, delta.whole, delta.before, leading, cut)

    def _whole(self, place: Place, delta: Delta) -> tuple[Slots, Layer]:
        """Return the whole matrix, rounded once."""
        stored = rounded(delta.rows, self.dtype)
        effect = None if delta.whole is None else stored.totals.effect
        layer = Layer(WHOLE, 0, delta.before, None, stored.totals.squares, stored.lost, effect=effect)
        return {"diff": stored.values.reshape(place.view.shape)}, layer

    def _cut(self, place: Place, whole: RowMatrix, before: int, triples: Triples, cut: Cut) -> tuple[Slots, Layer]:
        """Return the leading triples of a matrix as factors."""
        pair = rounded_pair(triples.pair(cut.chosen(triples, before)), cut, self.kind)
        up, down = map(torch.from_numpy, pair.real)
        lost = max(0.0, apart_from(whole, up, down, triples.squares))
        return self.pair(
            place.view.shape, before, StoredFactors(*pair.bits, pair.alpha, triples.squares, lost, spectrum_of(triples))
        )

    @property
    def kind(self) -> str:
        """The dtype as files name it."""
        return FILE_DTYPES[self.dtype]

    def pair(self, shape: Sequence[int], before: int, factors: StoredFactors) -> tuple[Slots, Layer]:
        """Return both factors in the shapes of a linear layer or of a convolution."""
        tensors = {slot: tensor_of(bits, self.dtype).reshape(stored)
                   for slot, (bits, stored) in factors.of_shape(shape).items()}  # fmt: skip
        return tensors, Layer(FACTORS, factors.rank, before, factors.alpha, factors.squares, factors.lost,
                              spectrum=factors.spectrum)  # fmt: skip


def tensor_of(bits: Array, dtype: torch.dtype) -> Tensor:
    """Return stored values as a tensor, in the same memory."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(dtype)


def rounded_change(place: Place, ending: str, change: RowMatrix, dtype: torch.dtype) -> StoredModule:
    """Return a parameter's whole change, rounded once."""
    stored = rounded(change, dtype)
    layer = Layer(WHOLE, 0, 0, None, stored.totals.squares, stored.lost)
    return stored_module(place, {ending: stored.values.reshape(place.view.shape)}, layer)


def rounded_value(place: Place, value: RowMatrix, change: RowMatrix, dtype: torch.dtype) -> StoredModule:
    """Return a parameter's new value, rounded once, where the dialect stores no changes of it."""
    stored = rounded(value, dtype)
    layer = Layer(WHOLE, 0, 0, None, squares_of_rows(change), stored.lost)
    return stored_module(place, {f".{place.parameter}": as_value(place, stored.values)}, layer)


def as_value(place: Place, values: Tensor) -> Tensor:
    """Return a parameter as the model has it, which may be [in, out], such as Conv1D of GPT-2."""
    value = values.reshape(place.view.shape)
    return (value.mT if is_turned(place) else value).contiguous()


def is_turned(place: Place) -> bool:
    """Return whether the base stores a matrix [in, out]."""
    return place.view.row_slices[0].transposed and len(place.view.shape) == 2


def holds(dtype: torch.dtype, value: Tensor) -> bool:
    """Return whether a dtype holds all values of a tensor."""
    return not value.is_floating_point() or value.dtype == dtype or torch.equal(value.to(dtype).to(value.dtype), value)


def stored_magnitude(patch: Patch) -> tuple[int, ...]:
    """Return the stored shape of a magnitude, which shows its axis."""
    assert patch.magnitude is not None, "the caller looked"
    _, shape = patch.magnitude
    ones = (1,) * (len(patch.view.shape) - 2)
    return (*shape, *ones)


def stored_module(place: Place, tensors: Mapping[str, Tensor], layer: Layer, *, copied: bool = False) -> StoredModule:
    """Return a module whose tensors, by their endings, are written as they are in memory."""
    return StoredModule(place, {ending: entry(ending, tensor) for ending, tensor in tensors.items()}, layer, copied)


def entry(name: str, tensor: Tensor) -> Entry:
    """Return a tensor as it is written."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return Entry(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(raw))  # type: ignore[arg-type]


class AveragedMatrices:
    """Computes both changes of weights of one job: the average of the changes, and that by the averaged tensors."""

    def __init__(
        self, job: AdapterJob, inputs: InputAdapters, reader: Reader, read: Callable[[StoredTensor], StoredValues]
    ) -> None:
        """`read`: returns the average of a tensor of the snapshots."""
        self._job, self._read = job, read
        self._files = {file for adapter in inputs.adapters for file in adapter.index.files}
        self._cache = cache_of(job, reader, inputs)
        self._stored = Evaluator(inputs, self._cache, HOST)
        self._averaged = Evaluator(inputs, self._cache, HOST, fetch=self._fetch)

    def _fetch(self, info: StoredTensor) -> Tensor:
        """Return the average of a tensor of the snapshots; the base's as it is."""
        if info.file not in self._files:
            return self._cache.fetch(info)
        bits, dtype = self._read(info)
        return tensor_of(bits, TORCH_DTYPES[dtype]).reshape(info.shape)

    def deltas(self, target: Target, alone: Target) -> tuple[Delta, Delta]:
        """Return both changes of a weight. `alone`: the weight with the first snapshot's uses alone."""
        changes = self._stored.changes(target)
        delta = combine(self._job, target, changes, [""] * len(changes))
        written = combine(self._job, alone, self._averaged.changes(alone), [""])
        return replace(delta, norms=layer_norms(target, changes, squares_of_part)), written

    def forget(self) -> None:
        """Drop the tensors that were read."""
        self._stored.forget()
        self._averaged.forget()
