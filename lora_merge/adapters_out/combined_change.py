"""Makes the tensors of one layer of the output: the changes are combined, cut to a rank, and rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..engine.coefficients import PRODUCT_METHODS, coefficients
from ..engine.combination import combined_rows
from ..engine.module_change import ModuleChange
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import FILE_DTYPES, HOST, Placement, finite, odd
from ..errors import beyond_dtype
from ..merge_methods import COMBINATIONS
from .change import Change, largest_rank
from .decomposition.factors import Triples, decomposing, inner_products, stacked
from .decomposition.matrix_svd import of_dense, values_of
from .decomposition.storage_rounding import apart_from, rounded
from .decomposition.stored_factors import Cut, FactoredDelta, StoredFactors, exact, rounded_pair, spectrum_of, truncated
from .groups import Target
from .job import AUTO, FACTORS, WHOLE, AdapterJob
from .module_tensors import Layer, Norms
from .rank_rules import EXACT, LayerSpectrum, Rule
from .rounding import Array, Effect, Totals, totals_of_rows


@dataclass(frozen=True)
class Delta(ModuleChange):
    """Δ of one layer before it is cut to a rank."""

    before: int = 0  # the largest rank of the inputs; 0 where one of them is a matrix without factors
    norms: Mapping[str, Norms] = field(default_factory=dict)  # of each layer that the weight is stored as
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

    def of(self, part: Target) -> Delta:
        """Return the rows of Δ that a layer stores; of its factors, the columns that are not zero there."""
        if not part.runs:
            return self
        if self.whole is None:
            return Delta.of_factors(self.factored.of(part))
        ranks, order = part.ranks, torch.cat([torch.arange(start, stop) for start, stop in part.runs])
        before = 0 if None in ranks else min(max((rank or 0 for rank in ranks), default=0), *part.matrix)
        return Delta(None, None, self.whole.of_rows(order), before)

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
        """The numbers of Δ, as far as they are looked at."""
        return self.factored.effect if self.whole is None else self.totals.effect


def combine(job: AdapterJob, target: Target, changes: Sequence[Change], seeds: Sequence[str]) -> Delta:
    """Return Δ of one layer by the job's method. `seeds`: one for each change."""
    row = COMBINATIONS[job.method]
    factored = row.linear and not target.vector and all(c.left is not None for c in changes)
    before = largest_rank(changes)
    if not factored:
        whole = combined_rows(job.method, [c.rows for c in changes], [c.strength for c in changes], job.numbers,
                              seeds, vector=target.vector)  # fmt: skip
        return Delta(None, None, whole.cached(), before)
    weights = coefficients(job.method, _products(changes) if job.method in PRODUCT_METHODS else (),
                           [c.strength for c in changes], job.numbers)  # fmt: skip
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


def expect_finite(tensors: Iterable[Tensor], where: str) -> None:
    """Raise TooLarge, with the name of a layer, if a number that was cast to the dtype of the output is not finite."""
    if any(odd(t) and not bool(finite(t).all()) for t in tensors):
        raise beyond_dtype(where)


@dataclass(frozen=True)
class Storage:
    """The form in which the layers of one run are stored."""

    algorithm: str
    dtype: torch.dtype
    noise: float  # singular values below this share of the largest one are noise of the inputs
    at: Placement = HOST  # where matrices are decomposed

    def layer(self, target: Target, delta: Delta, cut: Cut, triples: Triples | None = None) -> Layer:
        """Return the stored tensors of a layer. `triples`: of Δ, as many as the rule needs, if they are known."""
        if target.vector or self.algorithm == WHOLE:
            return self._whole(target, delta)
        layer = self._factored(target, delta, cut, triples)
        out, cols = delta.matrix
        if self.algorithm == AUTO and layer.algorithm == FACTORS and layer.rank * (out + cols) >= out * cols:
            return self._whole(target, delta)  # smaller, and nothing is cut
        return layer

    def _factored(self, target: Target, delta: Delta, cut: Cut, triples: Triples | None) -> Layer:
        """Return the layer as factors; as a whole matrix if it has none, which headers show (form.py)."""
        if cut.rule.name == EXACT and cut.rank is None:
            if delta.whole is not None:
                return self._whole(target, delta)
            return self.pair(target.shape, delta.before, exact(delta.factored, cut, self.kind))
        rank = cut.rank
        rule = cut.rule if rank is None else replace(cut.rule, most=rank)  # no more vectors than are stored
        with decomposing(target.name):
            leading = triples or spectrum(delta, rule, self.noise, self.at)
        if delta.whole is None:
            return self.pair(target.shape, delta.before, truncated(delta.factored, leading, cut, self.kind))
        return self._cut(target, delta.whole, delta.before, leading, cut)

    def _whole(self, target: Target, delta: Delta) -> Layer:
        """Return the whole matrix, rounded once."""
        stored = rounded(delta.rows, self.dtype)
        effect = None if delta.whole is None else stored.totals.effect
        tensors = {"diff": stored.numbers.reshape(target.shape)}
        return Layer(tensors, WHOLE, 0, delta.before, None, stored.totals.squares, stored.lost, effect=effect)

    def _cut(self, target: Target, whole: RowMatrix, before: int, triples: Triples, cut: Cut) -> Layer:
        """Return the leading triples of a matrix as factors."""
        pair = rounded_pair(triples.pair(cut.chosen(triples, before)), cut, self.kind)
        up, down = map(torch.from_numpy, pair.real)
        lost = max(0.0, apart_from(whole, up, down, triples.squares))
        return self.pair(
            target.shape, before, StoredFactors(*pair.bits, pair.alpha, triples.squares, lost, spectrum_of(triples))
        )

    @property
    def kind(self) -> str:
        """The dtype as files name it."""
        return FILE_DTYPES[self.dtype]

    def pair(self, shape: Sequence[int], before: int, factors: StoredFactors) -> Layer:
        """Return both factors in the shapes of a linear layer or of a convolution."""
        tensors = {slot: tensor_of(bits, self.dtype).reshape(stored)
                   for slot, (bits, stored) in factors.of_shape(shape).items()}  # fmt: skip
        return Layer(tensors, FACTORS, factors.rank, before, factors.alpha, factors.squares, factors.lost,
                     spectrum=factors.spectrum)  # fmt: skip


def tensor_of(bits: Array, dtype: torch.dtype) -> Tensor:
    """Return stored numbers as a tensor, in the same memory."""
    return torch.from_numpy(np.ascontiguousarray(bits)).view(dtype)
