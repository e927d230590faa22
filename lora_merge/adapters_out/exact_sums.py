"""The exact sum of adapters that are stored as factors in 16 bits: these are put side by side, by numpy in fp32.

No torch: its import takes as long as all of this. A sum that fp32 does not hold, or whose terms cancel, is left to the
general way (combine_modules.py), and so is every other kind of change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod, sqrt
from typing import Final, NamedTuple

import numpy as np

from ..disk.draft import Draft
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import TABLE
from ..merge_methods import MEAN, SUM
from ..method_parameters import SMALLEST
from ..progress import Counting
from .conversion import Conversion, weight_of
from .form import Form
from .groups import Target, is_plain
from .job import FACTORS, AdapterJob
from .module_tensors import Layer, LayerTensors, StoredModule, waiting
from .output_file import Entry
from .parallel import side_by_side
from .rank_rules import EXACT
from .rounding import (
    LEAST,
    ROOM,
    TINY,
    WIDEN,
    WORK,
    Bits,
    Distinct,
    Effect,
    Matrix,
    is_below,
    is_finite,
    is_held_by_fp32,
    narrowed,
    products,
    stored,
)
from .sources import NOWHERE, Sources


class SummandFactors(NamedTuple):
    """The stored factors of one adapter's change of a weight."""

    adapter: int
    up: StoredTensor
    down: StoredTensor
    rank: int
    scale: float  # α / rank
    strength: float


class Summand(NamedTuple):
    """The part of one adapter in a sum."""

    adapter: int
    up: Bits  # its stored up factor [out, rank]
    factor: float  # by which `up` is multiplied: α / rank times its weight in the sum
    ratio: float  # of its strength to its weight in the sum


class Sum(NamedTuple):
    """Δ of a weight: both factors, the products of all columns and of all rows, and ‖Δ‖²."""

    left: Matrix  # [out, R]
    right: Matrix  # [R, cols]
    columns: Matrix  # LᵀL [R, R]
    rows: Matrix  # R Rᵀ [R, R]
    squares: float
    norms: Mapping[int, float]  # of each adapter's change at its strength


class StoredPair(NamedTuple):
    """Both factors as they are stored, and ‖Δ − Δ̂‖²."""

    up: Bits
    down: Bits
    off: float


class Concatenation:
    """Makes the layers of one job. `forms`: by the label of the layer. `dtype`: of the output. `weight`: gives ‖W‖² of
    the rows of the base that a layer changes."""

    def __init__(
        self, job: AdapterJob, forms: Mapping[str, Form], reader: Reader, dtype: str,
        weight: Callable[[Target], float | None],
    ) -> None:  # fmt: skip
        self.job, self.forms, self.reader, self.dtype, self.weight = job, forms, reader, dtype, weight
        form = job.command, job.algorithm, job.alpha, job.compute_dtype
        plain = form == ("combine", FACTORS, "rank", None) and job.inputs.device in ("auto", "cpu")
        self.possible = plain and job.method in (SUM, MEAN) and dtype in ("F16", "BF16")

    def has(self, target: Target) -> bool:
        """Return whether headers show such a sum."""
        return self.possible and bool(self._factors(target))

    def layer(self, target: Target) -> LayerTensors | None:
        """Return the layer of a weight; None for one that is not such a sum."""
        factors = self._factors(target) if self.possible else []
        with np.errstate(all="ignore"):  # numbers beyond fp32 are seen in the sums
            return self._layer(target, factors) if factors else None

    def _layer(self, target: Target, factors: Sequence[SummandFactors]) -> LayerTensors | None:
        whole = 1.0 if self.job.method == SUM else sum(pair.strength for pair in factors)
        if abs(whole) < SMALLEST or not self.job.numbers.scale:
            return None
        down = self._downs(factors)
        if down is None:
            return None  # factors of two adapters become one
        parts = []
        for pair in factors:
            up = stored(self.reader, pair.up).view(np.uint16).reshape(-1, pair.rank)
            weight = self.job.numbers.scale * (pair.strength / whole)
            parts.append(Summand(pair.adapter, up, weight * pair.scale, abs(pair.strength / weight)))
        delta = _sum(parts, down, self.dtype)
        stored_pair = _rounded(delta, parts, down, self.dtype) if delta else None
        return self._stored(target, factors, delta, stored_pair) if delta and stored_pair else None

    def _downs(self, factors: Sequence[SummandFactors]) -> Bits | None:
        """Return the down factors below each other [R, cols]; None where two are equal."""
        sizes = [prod(pair.down.shape) for pair in factors]
        down = np.empty(sum(sizes), np.uint16)
        raws = [piece.data.cast("B") for piece in np.split(down, [*accumulate(sizes)][:-1])]
        for pair, raw in zip(factors, raws, strict=True):
            self.reader.read_into(raw, pair.down.source, pair.down.offset)
        distinct = Distinct()
        alike = any(distinct.first(n, raw) != n for n, raw in enumerate(raws))
        return None if alike else down.reshape(sum(pair.rank for pair in factors), -1)

    def _factors(self, target: Target) -> list[SummandFactors]:
        """Return the factors of all adapters that change a weight; [] unless all are plain and for all of its rows."""
        if target.vector or target.values or target.parts or target.turned or target.stacked:
            return []
        if self.forms[target.label].rule.name != EXACT:
            return []
        factors = []
        for use in sorted((u for u in target.uses if u.strength), key=lambda u: u.patch.adapter):
            patch, piece = use.patch, use.piece
            whole = (use.start, piece.start, piece.rows) == (0, 0, target.matrix[0]) and not piece.transposed
            plain = patch.algorithm == FACTORS and is_plain(patch) and patch.magnitude is None and not patch.reads_base
            if not plain or not whole or patch.view.matrix != target.matrix:
                return []
            up, down, rank = patch.module.slots["up"], patch.module.slots["down"], patch.shapes["down"][0]
            if {up.dtype, down.dtype} != {self.dtype} or not rank:
                return []
            factors.append(SummandFactors(patch.adapter, up, down, rank, patch.numbers.get("scale", 1.0), use.strength))
        apart = len({pair.adapter for pair in factors}) == len(factors)
        return factors if apart and sum(pair.rank for pair in factors) <= min(target.matrix) else []

    def _stored(
        self, target: Target, factors: Sequence[SummandFactors], delta: Sum, rounded: StoredPair
    ) -> LayerTensors:
        rank, ones = delta.right.shape[0], (1,) * len(target.shape[2:])
        layer = Layer({}, FACTORS, rank, max(pair.rank for pair in factors), float(rank), delta.squares, rounded.off,
                      effect=_effect(delta), norms=delta.norms, weight=self.weight(target))  # fmt: skip
        return LayerTensors(layer, {
            "down": Entry("down", self.dtype, (rank, *target.shape[1:]), rounded.down.data),
            "up": Entry("up", self.dtype, (len(delta.left), rank, *ones), rounded.up.data),
        })  # fmt: skip


def _sum(parts: Sequence[Summand], down: Bits, dtype: str) -> Sum | None:
    """Return Δ from the stored factors; None where fp32 does not hold ‖Δ‖², or where a number may be too large for the
    dtype or is not finite."""
    up = np.concatenate([part.up for part in parts], 1)
    left, right = WIDEN[dtype](up).reshape(up.shape), WIDEN[dtype](down).reshape(down.shape)
    ranks = [part.up.shape[1] for part in parts]
    factors, starts = np.repeat([part.factor for part in parts], ranks), [0, *accumulate(ranks[:-1])]
    largest = TABLE[dtype].largest * np.minimum(np.abs(factors), 1.0)
    left *= factors.astype(np.float32)
    columns, rows = left.T @ left, right @ right.T
    if not is_below(columns, largest) or not is_below(rows, TABLE[dtype].largest):
        return None
    both = np.multiply(columns, rows, dtype=np.float64)
    squares = np.add.reduceat(np.add.reduceat(both, starts, 0), starts, 1)  # ⟨Δᵢ, Δⱼ⟩
    alone = np.add.reduceat(both.diagonal(), starts)
    whole, alone_squares = float(squares.sum()), squares.diagonal().tolist()
    if not (is_held_by_fp32(whole, float(alone.sum())) and all(map(is_held_by_fp32, alone_squares, alone.tolist()))):
        return None
    norms = {part.adapter: sqrt(n) * part.ratio for part, n in zip(parts, alone_squares, strict=True)}
    return Sum(left, right, columns, rows, whole, norms)


def _rounded(delta: Sum, parts: Sequence[Summand], down: Bits, dtype: str) -> StoredPair | None:
    """Return both factors, rounded once; None where a number is too large for the dtype. `down`: the inputs' numbers,
    which stay as they are where no row needs another scale."""
    left, right, rows = delta.left, delta.right, delta.rows
    if (shift := _shift(delta, dtype)) is None:
        up = _multiplied(parts, dtype)
    else:
        left, right, rows = left * shift, right / shift[:, None], rows / shift[:, None] / shift
        up, down = narrowed(left, dtype), narrowed(right, dtype)
        if not is_finite(up, dtype) or not is_finite(down, dtype):
            return None
    first = left - WIDEN[dtype](up).reshape(left.shape)
    second = None if shift is None else right - WIDEN[dtype](down).reshape(right.shape)
    return StoredPair(up, down, _apart((left, right), (first, second), rows))


def _multiplied(parts: Sequence[Summand], dtype: str) -> Bits:
    """Return the up factors side by side, each times its factor, rounded once."""
    tables = [products(dtype, part.factor) for part in parts]  # "clip": a check of the indices would take as long again
    if all(table is tables[0] for table in tables):
        return tables[0].take(np.concatenate([part.up for part in parts], 1), mode="clip")
    return np.concatenate([table.take(part.up, mode="clip") for part, table in zip(parts, tables, strict=True)], 1)


def _shift(delta: Sum, dtype: str) -> Matrix | None:
    """Return powers of two by which columns of L are multiplied, and rows of R divided, so that a narrow dtype holds
    the digits of both; None where it does already."""
    if dtype not in TINY:
        return None  # of the range of fp32
    lengths = np.sqrt(delta.columns.diagonal().astype(np.float64) / len(delta.left))
    other = np.sqrt(delta.rows.diagonal().astype(np.float64) / delta.right.shape[1])
    bad = (np.minimum(lengths, other) < ROOM * TINY[dtype]) | (np.maximum(lengths, other) > TABLE[dtype].largest / ROOM)
    bad &= (lengths > 0) & (other > 0)
    if not bad.any():
        return None
    ratios = np.where(bad, other, 1.0) / np.where(bad, lengths, 1.0)
    return np.exp2(np.round(np.log2(ratios) / 2)).astype(np.float32)


def _apart(factors: tuple[Matrix, Matrix], errors: tuple[Matrix, Matrix | None], rows: Matrix) -> float:
    """Return ‖L R − B A‖² from L − B and R − A, as `storage_rounding.apart` does; None for R − A: zeros."""
    (left, right), (first, second) = factors, errors
    if second is None or not second.any():
        first = first[first.any(1)]  # few rows, where the dtype holds most numbers
        return max(0.0, float(np.sum((first.T @ first) * rows, dtype=np.float64)))
    up = left - first
    off = (first.T @ first) * rows + 2 * (first.T @ up) * (right @ second.T) + (up.T @ up) * (second @ second.T)
    return max(0.0, float(np.sum(off, dtype=np.float64)))


def _effect(delta: Sum) -> Effect:
    """Return the effect of Δ, by some of its rows."""
    count = max(LEAST, WORK // max(delta.right.size, 1))
    some = delta.left[:: max(1, len(delta.left) // count)] @ delta.right
    return Effect(len(delta.left) * delta.right.shape[1], some.size, None, float(np.abs(some).max(initial=0)))


def modules_of_sums(conversion: Conversion, sums: Concatenation, draft: Draft, begin: Counting) -> list[StoredModule]:
    """Return the modules of a dialect, whose bytes are in the draft; [] unless all are such sums, in a file."""
    to, modules = conversion.to, list[StoredModule]()
    targets = [target for module in conversion.modules if (target := module.alone) is not None and sums.has(target)]
    if to.folder or "up_bias" in to.endings or len(targets) < len(conversion.modules):
        return []
    count = begin("make", sum(map(weight_of, conversion.modules)))
    layers = side_by_side(targets, sums.layer, nbytes_of_sum, conversion.job.inputs.max_memory // 2)
    for module, stored_layer in zip(conversion.modules, layers, strict=True):
        if stored_layer is None:
            return []
        layer, entries = stored_layer
        by_ending = {to.endings[slot]: entry for slot, entry in entries.items()}
        if to.alpha:
            alpha = memoryview(np.float32(layer.alpha).tobytes())
            by_ending[to.endings.get("alpha", ".alpha")] = Entry("alpha", "F32", (), alpha)
        modules.append(StoredModule(module.place, waiting(by_ending, draft), layer))
        count(weight_of(module))
    return modules


def nbytes_of_sum(target: Target) -> int:
    """Return about how many bytes the factors of a weight's changes take: as stored, and in fp32."""
    return 6 * sum(prod(shape) for use in target.uses for shape in use.patch.shapes.values())


LOOKED_AT: Final = 2**14
"""The numbers of a weight of the base from which its norm is estimated, at least, in whole rows."""


def weight_norms(sources: Sources, reader: Reader) -> Callable[[Target], float | None]:
    """Return a function that returns ‖W‖² of the rows of the base's weight that a layer changes, from some of them that
    are spread evenly; None without a base, and of a weight that is not stored whole."""
    if sources.inputs is None or sources.inputs.base.path == NOWHERE:
        return lambda _: None
    from ..proof.weights import WeightReader

    base = WeightReader(reader, sources.inputs.base)

    def squares(part: Target) -> float | None:
        weight = sources.weights.get(part.key)
        if weight is None or weight.padded:
            return None
        _, cols = part.matrix
        shape = (prod(weight.shape) // max(cols, 1), cols)
        rows = np.concatenate([np.arange(*run) for run in part.runs or ((0, shape[0]),)])
        some = rows[:: max(1, len(rows) // max(1, -(-LOOKED_AT // max(cols, 1))))]
        values = base(weight.stored, shape, some)
        return float(np.vdot(values, values)) * len(rows) / max(len(some), 1)

    return squares
