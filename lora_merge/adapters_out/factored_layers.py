"""Layers of `combine`, `resize` and `average` whose changes are stored as factors, in numpy: summed, cut and rounded.

No torch: its import takes as long as all of this. A change of another kind, and a sum with more columns than its weight
has rank, are matrices (combine_modules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..algorithms import ALGORITHMS
from ..disk.reader import Reader
from ..dtypes import FLOATS, ITEM_BYTES, TABLE
from ..engine.coefficients import PRODUCTS, coefficients
from ..errors import beyond_dtype, beyond_fp64, not_finite
from ..matching.patch import Patch, PatchPart
from ..merge_methods import COMBINATIONS, MEAN, SUM
from ..models.weights import RowSlice
from .decomposition.factors import STORED_IN_16, decomposing, inner_products, squares_of, stacked
from .decomposition.stored_factors import Cut, FactoredDelta, StoredFactors, exact, truncated
from .form import Form
from .groups import Target, is_plain
from .job import AUTO, FACTORS, WHOLE, AdapterJob
from .module_tensors import Layer, LayerTensors, Norms
from .output_file import Entry
from .rank_rules import EXACT, Spectrum
from .rounding import (
    Array,
    Bits,
    Distinct,
    all_finite,
    data_of,
    is_below,
    is_held_by_fp32,
    products,
    stored,
    stored_bits,
    widened,
)
from .sources import Sources


class StoredFactor(NamedTuple):
    """The factors of one use of a patch as a file stores them."""

    use: PatchPart
    up: Array  # [rows of the patch, rank]
    down: Array  # [rank, cols]
    kinds: tuple[str, str]  # their dtypes
    scale: float  # α / rank


class Summand(NamedTuple):
    """The change of a weight by one adapter at strength 1, as L R."""

    adapter: int
    strength: float
    left: Array
    right: Array


@dataclass(frozen=True)
class FactorBits:
    """The factors of a sum as a file stores them: the inputs' numbers, those of B each times its weight in the sum."""

    dtype: str
    ups: Sequence[Bits]
    factors: Sequence[float]
    down: Bits

    @cached_property
    def up(self) -> Bits:
        """The up factors side by side, each times its factor, rounded once."""
        tables = [products(self.dtype, factor) for factor in self.factors]
        # "clip": a check of the indices would take as long again
        if all(table is tables[0] for table in tables):
            return tables[0].take(np.concatenate(self.ups, 1), mode="clip")
        return np.concatenate([t.take(up, mode="clip") for t, up in zip(tables, self.ups, strict=True)], 1)


def cut_of(job: AdapterJob, target: Target, form: Form, rank: int | None, *, stores_alpha: bool) -> Cut:
    """Return the cut of a layer. `rank`: what the rule `size` gave it."""
    alpha = float(job.alpha) if stores_alpha and not isinstance(job.alpha, str) else None
    scale: float | None = None
    if job.alpha != "rank" and len(target.uses) == 1 and stores_alpha:  # α / rank is kept, where α is not a number
        patch = target.uses[0].patch
        plain = ALGORITHMS[patch.algorithm].rank is not None and {"up", "down"} <= patch.shapes.keys()
        scale = patch.numbers.get("scale") if plain and patch.magnitude is None else None
    return Cut(form.rule, rank, alpha, scale if scale and scale > 0 else 1.0)


def noise_of(sources: Sources) -> float:
    """Return the share of the largest singular value below which others are noise of the inputs."""
    stored = [i.dtype for a in sources.adapters for m in a.modules for i in m.slots.values()]
    return STORED_IN_16 if stored and all(ITEM_BYTES.get(d, 4) <= 2 for d in stored) else 0.0


@dataclass
class FactoredMaker:
    """Makes the layers of one job from factors. `weight`: as for `GeneralMaker`."""

    job: AdapterJob
    sources: Sources
    forms: Mapping[str, Form]  # by the label of the layer
    reader: Reader
    dtype: str  # of the output, as files name it
    weight: Callable[[Target], float | None]

    def __post_init__(self) -> None:
        self.noise = noise_of(self.sources)

    def layers_of(self, target: Target, ranks: Mapping[str, int]) -> list[LayerTensors | None] | None:
        """Return the layers that a weight is stored as, None for one whose change is zero; None for a weight whose
        change is computed as a matrix. `ranks`: see `shared_out`."""
        delta = self.delta(target)
        if delta is None:
            return None
        layers = list[LayerTensors | None]()
        for part in target.stored:
            some, form = delta.of(part), self.forms[part.label]
            factors = self._stored(part, some, form, ranks.get(part.label))
            if factors is None or (form.algorithm == AUTO and factors.rank * sum(some.matrix) >= np.prod(some.matrix)):
                return None
            if not isfinite(factors.squares):
                raise beyond_fp64(part.name)
            if not all_finite(factors.up, self.dtype) or not all_finite(factors.down, self.dtype):
                raise beyond_dtype(f"{self.job.output}: {part.label}")
            layers.append(self._layer(part, some, delta.norms[part.label], factors))
        return layers

    def spectra(self, target: Target) -> list[Spectrum] | None:
        """Return the singular values of the layers that a weight is stored as, for the rule `size`; None as above."""
        delta, spectra = self.delta(target), list[Spectrum]()
        for part in target.stored if delta is not None else ():
            some = delta.of(part)
            with decomposing(part.label):
                triples = some.triples(self.noise)
            if triples is None:
                return None
            if triples.squares > 0:
                spectra.append(Spectrum(part.label, triples.values.tolist(), sum(some.matrix) * ITEM_BYTES[self.dtype]))
        return None if delta is None else spectra

    def delta(self, target: Target) -> FactoredDelta | None:
        """Return Δ of a weight, in fp64; an exact sum of numbers in 16 bits in fp32, if that holds it. None for a
        change that is computed as a matrix."""
        uses = sorted((use for use in target.uses if use.strength), key=lambda use: use.patch.adapter)
        whole = any(self.forms[part.label].algorithm == WHOLE for part in target.stored)
        if whole or target.vector or target.values or not uses or not COMBINATIONS[self.job.method].linear:
            return None
        if not all(_has_factors(use.patch) for use in uses):
            return None
        factors = [self._read(use) for use in uses]
        with np.errstate(all="ignore"):  # numbers that are too large are seen in the sums
            narrow = self._narrow(target, factors) if self._is_concatenated(target, factors) else None
            return narrow or self._wide(target, factors)

    def _read(self, use: PatchPart) -> StoredFactor:
        patch = use.patch
        up, down, rank = patch.module.slots["up"], patch.module.slots["down"], patch.shapes["down"][0]
        rows, cols = patch.view.matrix
        bits = [stored_bits(stored(self.reader, info), info.dtype).reshape(shape)
                for info, shape in ((up, (rows, rank)), (down, (rank, cols)))]  # fmt: skip
        return StoredFactor(use, bits[0], bits[1], (up.dtype, down.dtype), patch.numbers.get("scale", 1.0))

    def _is_concatenated(self, target: Target, factors: Sequence[StoredFactor]) -> bool:
        """Return whether the output has the factors of 16 bits of all adapters side by side: of all rows, each one
        once."""
        narrow = self.dtype in ("F16", "BF16") and self.job.compute_dtype is None and self.job.method in (SUM, MEAN)
        if not narrow or target.parts or self.forms[target.label].rule.name != EXACT:
            return False
        distinct, rows = Distinct(), target.matrix[0]
        for n, (use, up, down, kinds, _) in enumerate(factors):
            whole = (use.start, use.piece.start, use.piece.rows) == (0, 0, rows) and not use.piece.transposed
            first = distinct.first(n, down.reshape(-1).view(np.uint8).data)
            if not whole or len(up) != rows or {*kinds} != {self.dtype} or first != n:
                return False
        apart = len({f.use.patch.adapter for f in factors}) == len(factors)
        return apart and 0 < sum(len(f.down) for f in factors) <= min(target.matrix)

    def _narrow(self, target: Target, factors: Sequence[StoredFactor]) -> FactoredDelta | None:
        """Return the sum in fp32; None where that does not hold it, or where a number may not be finite."""
        # Step 1: Δ.
        weights = coefficients(self.job.method, (), [f.use.strength for f in factors], self.job.numbers)
        if not all(weights):
            return None
        ranks = [len(f.down) for f in factors]
        factors = [f._replace(scale=weight * f.scale) for weight, f in zip(weights, factors, strict=True)]
        summands = [self._summand(target, [factor], np.float32) for factor in factors]
        scales, down = [f.scale for f in factors], np.concatenate([f.down for f in factors])
        bits = FactorBits(self.dtype, [f.up for f in factors], scales, down)
        left, right = np.concatenate([s.left for s in summands], 1), np.concatenate([s.right for s in summands])
        delta = FactoredDelta(left, right, max(ranks), bits=bits)
        # Step 2: the norms of all terms, by which fp32 holds it or not.
        columns, rows = delta.grams
        largest = TABLE[self.dtype].largest * np.minimum(np.abs(np.repeat(scales, ranks)), 1.0)
        if not is_below(columns, largest) or not is_below(rows, TABLE[self.dtype].largest):
            return None
        both, starts = np.multiply(columns, rows, dtype=np.float64), [0, *accumulate(ranks[:-1])]
        squares = np.add.reduceat(np.add.reduceat(both, starts, 0), starts, 1)  # ⟨Δᵢ, Δⱼ⟩
        every = [(float(squares.sum()), float(both.trace()))]
        every += zip(squares.diagonal().tolist(), np.add.reduceat(both.diagonal(), starts).tolist(), strict=True)
        if not all(is_held_by_fp32(whole, alone) for whole, alone in every):
            return None
        norms = {s.adapter: sqrt(n) * abs(s.strength / weight)
                 for s, weight, n in zip(summands, weights, squares.diagonal().tolist(), strict=True)}  # fmt: skip
        return replace(delta, norms={target.label: norms})

    def _wide(self, target: Target, factors: Sequence[StoredFactor]) -> FactoredDelta:
        """Return Δ in fp64. InputError where an adapter's number is not finite."""
        for factor in factors:
            for slot, bits, dtype in zip(("up", "down"), (factor.up, factor.down), factor.kinds, strict=True):
                if not all_finite(bits, dtype):
                    info = factor.use.patch.module.slots[slot]
                    raise not_finite(f"{info.file}: {info.name}")
        kind = np.float32 if self.job.compute_dtype == "fp32" else np.float64
        groups = groupby(factors, key=lambda f: f.use.patch.adapter)
        summands = [self._summand(target, [*some], kind) for _, some in groups]
        pairs = inner_products([(s.left, s.right) for s in summands]) if self.job.method in PRODUCTS else ()
        weights = coefficients(self.job.method, pairs, [s.strength for s in summands], self.job.numbers)
        left, right = stacked(
            (s.left if w == 1 else s.left * w, s.right) for s, w in zip(summands, weights, strict=True)
        )
        left, right = left.astype(np.float64, copy=False), right.astype(np.float64, copy=False)
        return FactoredDelta(left, right, max(s.left.shape[1] for s in summands), _norms(summands, target))

    def _summand(self, target: Target, factors: Sequence[StoredFactor], kind: npt.DTypeLike) -> Summand:
        """Return the change by one adapter, in the rows of the target."""
        (out, width), first = target.matrix, factors[0].use
        lefts, rights = list[Array](), list[Array]()
        for use, up, down, kinds, scale in factors:
            left, right = widened(up, kinds[0], kind) * np.dtype(kind).type(scale), widened(down, kinds[1], kind)
            left, right = _short(left, right)
            left = left[use.start : use.start + use.piece.rows]
            if use.piece.transposed:
                left, right = right.T, _across(left.T, use.piece)
            if use.strength != first.strength:
                left = left * (use.strength / first.strength)
            lefts.append(_placed(left, use.piece.start, out))
            rights.append(right.reshape(len(right), width))
        pair = (lefts[0], rights[0]) if len(factors) == 1 else (np.concatenate(lefts, 1), np.concatenate(rights))
        return Summand(first.patch.adapter, first.strength, *pair)

    def _stored(self, part: Target, delta: FactoredDelta, form: Form, rank: int | None) -> StoredFactors | None:
        """Return the stored factors of a layer; None where Δ has more columns than a rank that is cut."""
        delta = delta.turned if part.turned else delta
        cut = cut_of(self.job, part, form, rank, stores_alpha=self.sources.spelling.alpha)
        if form.rule.name == EXACT and rank is None:
            return exact(delta, cut, self.dtype)
        with decomposing(part.name):
            triples = delta.triples(self.noise)
        return None if triples is None else truncated(delta, triples, cut, self.dtype)

    def _layer(self, part: Target, delta: FactoredDelta, norms: Norms, factors: StoredFactors) -> LayerTensors | None:
        if not factors.squares or not factors.rank:
            return None
        shape = part.shape[::-1] if part.turned else part.shape
        facts = Layer({}, FACTORS, factors.rank, delta.before, factors.alpha, factors.squares, factors.lost,
                      effect=delta.effect, norms=norms, weight=self.weight(part))  # fmt: skip
        return LayerTensors(facts, {slot: Entry(slot, self.dtype, stored, data_of(bits))
                                    for slot, (bits, stored) in factors.of_shape(shape).items()})  # fmt: skip


def _has_factors(patch: Patch) -> bool:
    """Return whether a change is that of two stored factors."""
    dtypes = {patch.module.slots[slot].dtype for slot in ("up", "down") if slot in patch.module.slots}
    plain = patch.algorithm == FACTORS and is_plain(patch) and patch.magnitude is None and not patch.reads_base
    return plain and dtypes <= FLOATS


def _short(left: Array, right: Array) -> tuple[Array, Array]:
    """Return factors of the same product with no more columns than the product can have ranks."""
    out, cols = len(left), right.shape[1]
    if left.shape[1] <= min(out, cols):
        return left, right
    identity, product = np.eye(min(out, cols), dtype=left.dtype), left @ right
    return (identity, product) if out <= cols else (product, identity)


def _across(values: Array, piece: RowSlice) -> Array:
    """Return rows of a change of a transposed slice as wide as the stored rows, with zeros in other columns."""
    if piece.columns is None:
        return values
    whole = np.zeros((len(values), piece.cols), values.dtype)
    whole[:, piece.across] = values
    return whole


def _placed(rows: Array, start: int, out: int) -> Array:
    if len(rows) == out:
        return rows
    whole = np.zeros((out, rows.shape[1]), rows.dtype)
    whole[start : start + len(rows)] = rows
    return whole


def _norms(summands: Iterable[Summand], target: Target) -> dict[str, Norms]:
    """Return the norms of the changes of a weight at their strengths, in each layer that it is stored as."""
    norms = dict[str, Norms]()
    for part in target.stored:
        runs = [slice(*run) for run in part.runs] or [slice(0, target.matrix[0])]
        of_adapters = ((s.adapter, abs(s.strength) * sqrt(sum(squares_of(s.left[rows], s.right) for rows in runs)))
                       for s in summands)  # fmt: skip
        norms[part.label] = {adapter: norm for adapter, norm in of_adapters if norm}
    return norms
