"""Δ of one weight as L R: the stored factors of all adapters, times their weights in the sum. In numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import sqrt
from typing import NamedTuple

import numpy as np

from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import DTYPE_ROWS, FLOATS
from ..engine.coefficients import PRODUCT_METHODS, coefficients
from ..errors import not_finite
from ..matching.patch import Patch, PatchPart
from ..merge_methods import COMBINATIONS, MEAN, SUM
from ..models.weights import RowSlice
from .decomposition.factors import inner_products, squares_of, stacked
from .decomposition.stored_factors import FactoredDelta
from .groups import Target, is_plain
from .job import FACTORS, AdapterJob
from .module_tensors import Norms
from .rounding import (
    Array,
    Bits,
    Distinct,
    all_finite,
    is_below,
    is_held_by_fp32,
    products,
    stored,
    stored_bits,
    widened,
)


class StoredNumbers(NamedTuple):
    """The numbers of a tensor as `as_stored` has them, in one dimension, and their dtype."""

    bits: Array
    dtype: str

    def wide(self) -> Array:
        """Return them in fp64."""
        if self.dtype in FLOATS:
            return widened(self.bits, self.dtype, np.float64)
        return self.bits.view(DTYPE_ROWS[self.dtype].code).astype(np.float64)


def read_numbers(reader: Reader, info: StoredTensor) -> StoredNumbers:
    """Return the numbers of a stored tensor."""
    return StoredNumbers(stored_bits(stored(reader, info), info.dtype), info.dtype)


def finite_numbers(reader: Reader, info: StoredTensor) -> StoredNumbers:
    """Return the numbers of a tensor of an adapter; InputError where one is not finite."""
    numbers = read_numbers(reader, info)
    expect_finite(numbers.bits, info)
    return numbers


def expect_finite(bits: Array, info: StoredTensor) -> None:
    """Raise InputError with the name of a tensor of an adapter that has a number that is not finite."""
    if info.dtype in FLOATS and not all_finite(bits, info.dtype):
        raise not_finite(f"{info.file}: {info.name}")


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


@dataclass(frozen=True)
class FactoredSums:
    """Adds the changes of one job. `read`: returns the numbers of a tensor of the adapters."""

    job: AdapterJob
    read: Callable[[StoredTensor], StoredNumbers]

    def has(self, target: Target) -> bool:
        """Return whether headers show that the change of a weight is such a sum."""
        uses = _active(target)
        factored = not target.vector and not target.values and COMBINATIONS[self.job.method].linear
        return factored and bool(uses) and all(has_factors(use.patch) for use in uses)

    def delta(self, target: Target, exactly: str | None = None) -> FactoredDelta | None:
        """Return Δ of a weight, in fp64; None for a change that is computed as a matrix.

        `exactly`: the dtype of the output, if Δ is written with all of its columns: a sum of numbers of this dtype in
        16 bits is in fp32, if that holds it.
        """
        if not self.has(target):
            return None
        factors = [self._read(use) for use in sorted(_active(target), key=lambda use: use.patch.adapter)]
        with np.errstate(all="ignore"):  # numbers that are too large are seen in the sums
            narrow = None
            if exactly in ("F16", "BF16") and self._is_concatenated(target, factors, exactly):
                narrow = self._narrow(target, factors, exactly)
            return narrow or self._wide(target, factors)

    def _read(self, use: PatchPart) -> StoredFactor:
        patch = use.patch
        up, down, rank = patch.module.slots["up"], patch.module.slots["down"], patch.shapes["down"][0]
        rows, cols = patch.view.matrix
        first, other = self.read(up), self.read(down)
        return StoredFactor(use, first.bits.reshape(rows, rank), other.bits.reshape(rank, cols),
                            (first.dtype, other.dtype), patch.numbers.get("scale", 1.0))  # fmt: skip

    def _is_concatenated(self, target: Target, factors: Sequence[StoredFactor], dtype: str) -> bool:
        """Return whether the output has the factors of all adapters side by side: of all rows, each one once."""
        if target.parts or self.job.compute_dtype is not None or self.job.method not in (SUM, MEAN):
            return False
        distinct, rows = Distinct(), target.matrix[0]
        for n, (use, up, down, kinds, _) in enumerate(factors):
            whole = (use.start, use.piece.start, use.piece.rows) == (0, 0, rows) and not use.piece.transposed
            first = distinct.first(n, down.reshape(-1).view(np.uint8).data)
            if not whole or len(up) != rows or {*kinds} != {dtype} or first != n:
                return False
        apart = len({f.use.patch.adapter for f in factors}) == len(factors)
        return apart and 0 < sum(len(f.down) for f in factors) <= min(target.matrix)

    def _narrow(self, target: Target, factors: Sequence[StoredFactor], dtype: str) -> FactoredDelta | None:
        """Return the sum in fp32; None where that does not hold it, or where a number may not be finite."""
        # Step 1: Δ.
        weights = coefficients(self.job.method, (), [f.use.strength for f in factors], self.job.numbers)
        if not all(weights):
            return None
        ranks = [len(f.down) for f in factors]
        scales = [weight * f.scale for weight, f in zip(weights, factors, strict=True)]
        ups, down = [f.up for f in factors], np.concatenate([f.down for f in factors])
        left, right = widened(np.concatenate(ups, 1), dtype, np.float32), widened(down, dtype, np.float32)
        left *= np.repeat(scales, ranks).astype(np.float32)
        bits = FactorBits(dtype, ups, scales, down)
        norms = dict[int, float]()
        delta = FactoredDelta(left, right, max(ranks), {target.label: norms}, bits)
        # Step 2: the norms of all terms, by which fp32 holds it or not.
        columns, rows = delta.grams
        largest = DTYPE_ROWS[dtype].largest * np.minimum(np.abs(np.repeat(scales, ranks)), 1.0)
        if not is_below(columns, largest) or not is_below(rows, DTYPE_ROWS[dtype].largest):
            return None
        both, starts = np.multiply(columns, rows, dtype=np.float64), [0, *accumulate(ranks[:-1])]
        squares = np.add.reduceat(np.add.reduceat(both, starts, 0), starts, 1)  # ⟨Δᵢ, Δⱼ⟩
        every = [(float(squares.sum()), float(both.trace()))]
        every += zip(squares.diagonal().tolist(), np.add.reduceat(both.diagonal(), starts).tolist(), strict=True)
        if not all(is_held_by_fp32(whole, alone) for whole, alone in every):
            return None
        for (use, *_), weight, n in zip(factors, weights, squares.diagonal().tolist(), strict=True):
            norms[use.patch.adapter] = sqrt(n) * abs(use.strength / weight)
        return delta

    def _wide(self, target: Target, factors: Sequence[StoredFactor]) -> FactoredDelta:
        """Return Δ in fp64. InputError where an adapter's number is not finite."""
        for use, up, down, *_ in factors:
            for slot, bits in (("up", up), ("down", down)):
                expect_finite(bits, use.patch.module.slots[slot])
        kind = np.float32 if self.job.compute_dtype == "fp32" else np.float64
        groups = groupby(factors, key=lambda f: f.use.patch.adapter)
        summands = [self._summand(target, [*some], kind) for _, some in groups]
        pairs = inner_products([(s.left, s.right) for s in summands]) if self.job.method in PRODUCT_METHODS else ()
        weights = coefficients(self.job.method, pairs, [s.strength for s in summands], self.job.numbers)
        left, right = stacked(
            (s.left if w == 1 else s.left * w, s.right) for s, w in zip(summands, weights, strict=True)
        )
        left, right = left.astype(np.float64, copy=False), right.astype(np.float64, copy=False)
        return FactoredDelta(left, right, max(s.left.shape[1] for s in summands), _norms(summands, target))

    def _summand(self, target: Target, factors: Sequence[StoredFactor], kind: type[np.float32 | np.float64]) -> Summand:
        """Return the change by one adapter, in the rows of the target."""
        (out, width), first = target.matrix, factors[0].use
        lefts, rights = list[Array](), list[Array]()
        for use, up, down, kinds, scale in factors:
            left, right = widened(up, kinds[0], kind) * kind(scale), widened(down, kinds[1], kind)
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


def _active(target: Target) -> list[PatchPart]:
    return [use for use in target.uses if use.strength]


def has_factors(patch: Patch) -> bool:
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
