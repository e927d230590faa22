"""Modules from stored factors, in numpy: Δ of one weight is L R, the factors of all adapters times their weights in the
sum; copies keep theirs. Layers whose change has no stored factors are made by `matrix_modules.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, groupby
from math import isfinite, prod, sqrt
from typing import Final, NamedTuple, Protocol

import numpy as np

from ..algorithms import ALGORITHMS
from ..disk.reader import Reader
from ..dtypes import DTYPE_ROWS, FLOATS, ITEM_BYTES, StoredTensor
from ..engine.coefficients import coefficients
from ..errors import beyond_dtype, beyond_fp64, not_finite
from ..matching.patch import PatchPart
from ..merge_methods import COMBINATIONS, MEAN, SUM
from ..text import Note
from .dialects import Dialect
from .factors import (
    STORED_IN_16,
    Cut,
    FactoredDelta,
    Grams,
    StoredFactors,
    decomposing,
    exact,
    inner_products,
    placed,
    shortest,
    spread,
    squares_of,
    stacked,
    truncated,
    without_repeats,
)
from .form import Conversion, Form
from .groups import OutputModule, PlacePart, Runs, Target
from .input_adapters import InputAdapters
from .job import AUTO, FACTORS, WHOLE, AdapterJob
from .module_tensors import AdapterNorms, Layer, StoredModule, layer_norms, with_change
from .output_file import Entry
from .rank_rules import EXACT, LayerSpectrum, Rule
from .values import (
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

NORM_SAMPLE: Final = 2**14
"""The values of a weight of the base from which its norm is estimated, at least, in whole rows."""


def weight_norms(inputs: InputAdapters, reader: Reader) -> Callable[[PlacePart], float | None]:
    """Return a function that returns ‖W‖² of the rows of the base's weight that a layer changes, from some of them that
    are spread evenly; None without a base, and of a weight that is not stored whole."""
    if inputs.base is None:
        return lambda _: None
    from ..proof.weights import WeightReader

    base = WeightReader(reader, inputs.base)

    def squares(part: PlacePart) -> float | None:
        weight = inputs.weights.get(part.target.key)
        if weight is None or weight.padded:
            return None
        _, cols = part.matrix
        shape = (prod(weight.shape) // max(cols, 1), cols)
        rows = np.concatenate([np.arange(*run) for run in part.runs or ((0, shape[0]),)])
        some = rows[:: max(1, len(rows) // max(1, -(-NORM_SAMPLE // max(cols, 1))))]
        values = base(weight.stored, shape, some)
        return float(np.vdot(values, values)) * len(rows) / max(len(some), 1)

    return squares


class StoredValues(NamedTuple):
    """The values of a tensor as `as_stored` has them, in one dimension, and their dtype."""

    bits: Array
    dtype: str

    def wide(self) -> Array:
        """Return them in fp64."""
        if self.dtype in FLOATS:
            return widened(self.bits, self.dtype, np.float64)
        return self.bits.view(DTYPE_ROWS[self.dtype].code).astype(np.float64)


def read_values(reader: Reader, info: StoredTensor) -> StoredValues:
    """Return the values of a stored tensor."""
    return StoredValues(stored_bits(stored(reader, info), info.dtype), info.dtype)


def finite_values(reader: Reader, info: StoredTensor) -> StoredValues:
    """Return the values of a tensor of an adapter; InputError where one is not finite."""
    values = read_values(reader, info)
    expect_finite(values.bits, info)
    return values


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
    """The factors of a sum as a file stores them: the inputs' values, those of B each times its weight in the sum."""

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
    """Adds the changes of one job. `read`: returns the values of a tensor of the adapters."""

    job: AdapterJob
    read: Callable[[StoredTensor], StoredValues]

    def has(self, target: Target) -> bool:
        """Return whether headers show that the change of a weight is such a sum."""
        return target.factored and COMBINATIONS[self.job.method].linear

    def delta(self, target: Target, exactly: str | None = None) -> FactoredDelta | None:
        """Return Δ of a weight, in fp64; None for a change that is computed as a matrix.

        `exactly`: the dtype of the output, if Δ is written with all of its columns: a sum of values of this dtype in
        16 bits is in fp32, if that holds it.
        """
        if not self.has(target):
            return None
        uses = sorted((use for use in target.uses if use.strength), key=lambda use: use.patch.adapter)
        factors = [self._read(use) for use in uses]
        with np.errstate(all="ignore"):  # values that are too large are seen in the sums
            narrow = None
            if exactly in ("F16", "BF16") and self._is_concatenated(target, factors, exactly):
                narrow = self._narrow(factors, exactly)
            return narrow or self._wide(target, factors)

    def _read(self, use: PatchPart) -> StoredFactor:
        patch = use.patch
        up, down, rank = patch.module.slots["up"], patch.module.slots["down"], patch.shapes["down"][0]
        rows, cols = patch.view.matrix
        first, other = self.read(up), self.read(down)
        return StoredFactor(use, first.bits.reshape(rows, rank), other.bits.reshape(rank, cols),
                            (first.dtype, other.dtype), patch.scalars.get("scale", 1.0))  # fmt: skip

    def _is_concatenated(self, target: Target, factors: Sequence[StoredFactor], dtype: str) -> bool:
        """Return whether the output has the factors of all adapters side by side: of all rows, each one once."""
        if self.job.compute_dtype is not None or self.job.method not in (SUM, MEAN):
            return False
        distinct, rows = Distinct(), target.matrix[0]
        for n, (use, up, down, kinds, _) in enumerate(factors):
            whole = (use.start, use.piece.start, use.piece.rows) == (0, 0, rows) and not use.piece.transposed
            first = distinct.first(n, down.reshape(-1).view(np.uint8).data)
            if not whole or len(up) != rows or {*kinds} != {dtype} or first != n:
                return False
        apart = len({f.use.patch.adapter for f in factors}) == len(factors)
        return apart and 0 < sum(len(f.down) for f in factors) <= min(target.matrix)

    def _narrow(self, factors: Sequence[StoredFactor], dtype: str) -> FactoredDelta | None:
        """Return the sum in fp32; None where that does not hold it, or where a number may not be finite."""
        # Step 1: Δ.
        weights = coefficients(self.job.method, lambda: (), [f.use.strength for f in factors], self.job.parameters)
        if not all(weights):
            return None
        ranks = [len(f.down) for f in factors]
        scales = [weight * f.scale for weight, f in zip(weights, factors, strict=True)]
        of_columns = np.repeat(scales, ranks)
        ups, down = [f.up for f in factors], np.concatenate([f.down for f in factors])
        left, right = widened(np.concatenate(ups, 1), dtype, np.float32), widened(down, dtype, np.float32)
        left *= of_columns.astype(np.float32)
        bits = FactorBits(dtype, ups, scales, down)
        norms = dict[int, float]()
        delta = FactoredDelta(left, right, max(ranks), {(): norms}, bits)
        # Step 2: the norms of all terms, by which fp32 holds it or not.
        columns, rows = delta.grams
        largest = DTYPE_ROWS[dtype].largest * np.minimum(np.abs(of_columns), 1.0)
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
        weights = coefficients(self.job.method, lambda: inner_products([(s.left, s.right) for s in summands]),
                               [s.strength for s in summands], self.job.parameters)  # fmt: skip
        left, right = stacked(
            (s.left if w == 1 else s.left * w, s.right) for s, w in zip(summands, weights, strict=True)
        )
        left, right = left.astype(np.float64, copy=False), right.astype(np.float64, copy=False)
        norms = layer_norms(target, summands, lambda s, rows: squares_of(s.left[rows], s.right))
        return FactoredDelta(left, right, max(s.left.shape[1] for s in summands), norms)

    def _summand(self, target: Target, factors: Sequence[StoredFactor], kind: type[np.float32 | np.float64]) -> Summand:
        """Return the change by one adapter, in the rows of the target."""
        (out, width), first = target.matrix, factors[0].use
        lefts, rights = list[Array](), list[Array]()
        for use, up, down, kinds, scale in factors:
            left, right = widened(up, kinds[0], kind) * kind(scale), widened(down, kinds[1], kind)
            left, right = shortest(left, right)
            left = left[use.start : use.start + use.piece.rows]
            if use.piece.transposed:
                left, right = right.T, spread(left.T, use.piece)
            if use.strength != first.strength:
                left = left * (use.strength / first.strength)
            lefts.append(placed(left, use.piece.start, out))
            rights.append(right.reshape(len(right), width))
        pair = (lefts[0], rights[0]) if len(factors) == 1 else (np.concatenate(lefts, 1), np.concatenate(rights))
        return Summand(first.patch.adapter, first.strength, *pair)


def noise_of(inputs: InputAdapters) -> float:
    """Return the share of the largest singular value below which others are noise of the inputs."""
    stored = [i.dtype for a in inputs.adapters for m in a.modules for i in m.slots.values()]
    return STORED_IN_16 if stored and all(ITEM_BYTES.get(d, 4) <= 2 for d in stored) else 0.0


@dataclass(frozen=True)
class FactoredModules:
    """Makes modules from factors, in one thread."""

    conversion: Conversion
    sums: FactoredSums
    noise: float
    """Singular values below this share of the largest one are noise of the inputs."""
    weight: Callable[[PlacePart], float | None]
    """Gives ‖W‖² of the rows of the base that a layer changes."""
    weights: dict[int, FactoredDelta | None] = field(default_factory=dict)
    """Identity of a weight → its Δ, of the weights of the last modules."""
    notes: Sequence[Note] = ()

    @property
    def dtype(self) -> str:
        """The dtype of the output, as files name it."""
        assert self.conversion.job.dtype is not None, "all inputs decide it"
        return self.conversion.job.dtype

    def has(self, output: OutputModule) -> bool:
        """Return whether headers show that a module is made here."""
        form = self.conversion.forms[output.place.label]
        if form.kind != "matrix" or form.whole or not all(self.sums.has(part.target) for part in output.parts):
            return False
        patches = [use.patch for part in output.parts for use in part.uses if use.strength]
        columns = sum(min(patch.shapes["down"][0], *patch.view.matrix) for patch in patches)
        return form.rule.name == EXACT or columns <= min(output.place.view.matrix)

    def nbytes(self, group: Sequence[OutputModule]) -> int:
        """Return about how many bytes the changes of modules take."""
        return nbytes_of(self.conversion.job, group)

    def forget(self) -> None:
        """Drop what was computed for the last modules."""
        self.weights.clear()

    def modules(self, group: Sequence[OutputModule], ranks: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return modules that `has` knows, whose bytes are in memory. `ranks`: see `ranks_by_size`."""
        modules = [self.module(output, ranks.get(output.place.label)) for output in group]
        self.forget()
        return [with_change(module, measured=True) for module in modules if module is not None]

    def spectra(self, group: Sequence[OutputModule]) -> list[LayerSpectrum]:
        """Return the singular values of modules that `has` knows, for the rule `size`."""
        spectra = [spectrum for output in group for spectrum in self.spectrum(output) or ()]
        self.forget()
        return spectra

    def module(self, output: OutputModule, rank: int | None) -> StoredModule | None:
        """Return a module whose bytes are in memory; None for one that is made from matrices."""
        place, form, to = output.place, self.conversion.forms[output.place.label], self.conversion.to
        delta = self._delta(output) if form.kind == "matrix" and form.algorithm != WHOLE else None
        factors = None if delta is None else self._stored(output, delta, form, rank)
        (out, cols) = place.view.matrix
        if delta is None or factors is None or (form.algorithm == AUTO and factors.rank * (out + cols) >= out * cols):
            return None
        if not isfinite(factors.squares):
            raise beyond_fp64(place.name)
        if not factors.finite and not all(all_finite(bits, self.dtype) for bits in (factors.up, factors.down)):
            raise beyond_dtype(f"{self.conversion.job.output}: {place.label}")
        entries = {to.endings[slot]: Entry(slot, self.dtype, stored, data_of(bits))
                   for slot, (bits, stored) in factors.of_shape(place.view.shape).items()}  # fmt: skip
        if factors.rank and to.alpha:
            alpha = data_of(np.array([factors.alpha], np.float32))
            entries[to.endings.get("alpha", ".alpha")] = Entry("alpha", "F32", (), alpha)
        norms = norms_of_parts((part, self.weights[id(part.target)]) for part in output.parts)
        weight = self.weight_of(output) if factors.squares and factors.rank else None
        layer = Layer(FACTORS, factors.rank, delta.before, factors.alpha, factors.squares, factors.lost,
                      effect=delta.effect, norms=norms, weight=weight, spectrum=factors.spectrum)  # fmt: skip
        return StoredModule(place, entries, layer)

    def spectrum(self, output: OutputModule) -> list[LayerSpectrum] | None:
        """Return the singular values of a module, [] for a Δ of zeros; None as above."""
        delta, label = self._delta(output), output.place.label
        if delta is None:
            return None
        with decomposing(label):
            triples = delta.triples(self.noise)
        if triples is None:
            return None
        width = sum(delta.matrix) * ITEM_BYTES[self.dtype]
        return [LayerSpectrum(label, triples.values.tolist(), width)] if triples.squares else []

    def cut(self, output: OutputModule, rule: Rule, rank: int | None) -> Cut:
        """Return the cut of a module of a rule, or of a rank that is decided already, with its α or α / rank."""
        alpha, stored = self.conversion.job.alpha, self.conversion.to.alpha
        if not isinstance(alpha, str):
            return Cut(rule, rank, float(alpha) if stored else None)
        scales = {_scale(part.uses) for part in output.parts} if stored and alpha != "rank" else {1.0}
        return Cut(rule, rank, None, scales.pop() if len(scales) == 1 else 1.0)

    def weight_of(self, output: OutputModule) -> float | None:
        """Return ‖W‖² of a module; None where it is not known."""
        weights = [self.weight(part) for part in output.parts]
        return None if None in weights else sum(weight for weight in weights if weight is not None)

    def _delta(self, output: OutputModule) -> FactoredDelta | None:
        """Return Δ of a module; None where the change of a weight that it has rows of is a matrix."""
        exactly = output.alone and self.conversion.forms[output.place.label].rule.name == EXACT
        changes = list[tuple[PlacePart, FactoredDelta]]()
        for part in output.parts:
            key = id(part.target)
            if key not in self.weights:
                self.weights[key] = self.sums.delta(part.target, self.dtype if exactly else None)
            if (delta := self.weights[key]) is None:
                return None
            changes.append((part, delta))
        return delta_of_parts(output, changes)

    def _stored(self, output: OutputModule, delta: FactoredDelta, form: Form, rank: int | None) -> StoredFactors | None:
        """Return the stored factors; None where Δ has more columns than a rank that is cut."""
        cut = self.cut(output, form.rule, rank)
        if form.rule.name == EXACT and rank is None:
            return exact(delta, cut, self.dtype)
        with decomposing(output.place.name):
            triples = delta.triples(self.noise)
        return None if triples is None else truncated(delta, triples, cut, self.dtype)


def factored_modules(conversion: Conversion, reader: Reader) -> Callable[[], FactoredModules]:
    """Return a function that returns what makes the modules of sums of stored factors, for one thread."""
    job, inputs = conversion.job, conversion.inputs
    sums = FactoredSums(job, partial(read_values, reader))
    return partial(FactoredModules, conversion, sums, noise_of(inputs), weight_norms(inputs, reader))


def _scale(uses: Sequence[PatchPart]) -> float:
    """Return α / rank of the one change of some rows; 1 for others."""
    if len(uses) != 1:
        return 1.0
    patch = uses[0].patch
    scale = patch.scalars.get("scale")
    plain = ALGORITHMS[patch.algorithm].rank is not None and {"up", "down"} <= patch.shapes.keys()
    return scale if plain and scale and scale > 0 and patch.magnitude is None else 1.0


def delta_of_parts(output: OutputModule, changes: Sequence[tuple[PlacePart, FactoredDelta]]) -> FactoredDelta:
    """Return Δ of a module: its rows of the changes of weights."""
    out, cols = output.place.view.matrix
    deltas = [(part, _in_place(part, delta)) for part, delta in changes]
    if len(deltas) == 1 and deltas[0][0].rows == (range(out),):
        return deltas[0][1]
    lefts, rights = [np.zeros((out, 0))], [np.zeros((0, cols))]
    for part, delta in deltas:
        left = np.zeros((out, delta.left.shape[1]))
        left[part.order] = delta.left
        lefts.append(left)
        rights.append(delta.right)
    ranks = [delta.before for _, delta in deltas]
    before = max(ranks) if all(ranks) and ranks else 0
    return FactoredDelta(*without_repeats(np.concatenate(lefts, 1), np.concatenate(rights)), before)


def _in_place(part: PlacePart, delta: FactoredDelta) -> FactoredDelta:
    """Return Δ of rows of a weight, as the place has them."""
    delta = delta.of(part)
    if part.turned is None:
        return delta
    turned, columns = delta.turned, part.turned.columns
    return turned if columns is None else FactoredDelta(turned.left[[*columns]], turned.right, turned.before)


class _WithNorms(Protocol):
    @property
    def norms(self) -> Mapping[Runs, AdapterNorms]: ...


def norms_of_parts(changes: Iterable[tuple[PlacePart, _WithNorms | None]]) -> AdapterNorms:
    """Return the norm of each adapter's change of a module, from those of its rows of the Δ of each weight."""
    squares: dict[int, float] = {}
    for part, delta in changes:
        for adapter, norm in ({} if delta is None else delta.norms.get(part.runs, {})).items():
            squares[adapter] = squares.get(adapter, 0.0) + norm * norm
    return {adapter: sqrt(square) for adapter, square in squares.items()}


def nbytes_of(job: AdapterJob, group: Sequence[OutputModule]) -> int:
    """Return about how many bytes the changes of modules take."""
    weights = {id(part.target): part.target for module in group for part in module.parts}
    return sum(_nbytes(job, weight) for weight in weights.values())


def _nbytes(job: AdapterJob, target: Target) -> int:
    """Return about how many bytes the change of a weight takes: factors several times, or matrices and what is
    stored."""
    (out, cols), ranks = target.matrix, target.ranks
    factored = COMBINATIONS[job.method].linear and None not in ranks and not target.values
    read = sum(prod(shape) for use in target.uses for shape in use.patch.shapes.values())
    most = min(out, cols, sum(r or 0 for r in ranks))
    return 8 * min(6 * most * (out + cols) if factored else sys.maxsize,
                   (len(target.uses) + 3) * out * cols) + 8 * read  # fmt: skip


def copy_of(module: OutputModule, to: Dialect, reader: Reader) -> StoredModule:
    """Return the stored factors of a module; InputError where a number is not finite, or too large for fp64."""
    (share,), place = module.shares, module.place
    patch = share.patch
    rank, scale = patch.shapes["down"][0], patch.scalars["scale"]
    up, down = patch.module.slots["up"], patch.module.slots["down"]
    raw = stored(reader, up), stored(reader, down)
    squares = _squares(raw, (up, down), rank, scale)
    if not isfinite(squares):
        raise beyond_fp64(patch.module.name)
    ones, alpha = (1,) * (len(place.view.shape) - 2), np.array([rank * scale], np.float32)
    rows = {
        to.endings["up"]: (up.dtype, (prod(up.shape) // rank, rank, *ones), raw[0].data),
        to.endings["down"]: (down.dtype, (rank, *place.view.shape[1:]), raw[1].data),
        to.endings.get("alpha", ".alpha"): ("F32", (), data_of(alpha)),
    }
    entries = {name: Entry(name, *row) for name, row in rows.items()}
    return StoredModule(place, entries, Layer(FACTORS, rank, rank, rank * scale, squares, 0.0))


class Copies:
    """Makes the modules of a conversion of which all are copies."""

    notes: Final = ()

    def __init__(self, to: Dialect, reader: Reader) -> None:
        self._to, self._reader = to, reader

    def nbytes(self, group: Sequence[OutputModule]) -> int:
        """Return the bytes of both factors, as stored and in fp32."""
        slots = [module.shares[0].patch.module.slots for module in group]
        return 3 * sum(s["up"].nbytes + s["down"].nbytes for s in slots)

    def spectra(self, _: Sequence[OutputModule]) -> list[LayerSpectrum]:
        """No rule looks at copies."""
        return []

    def modules(self, group: Sequence[OutputModule], _: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return copies, whose bytes are in memory."""
        return [with_change(copy_of(module, self._to, self._reader), measured=False) for module in group]


def _squares(raw: Sequence[Array], infos: Sequence[StoredTensor], rank: int, scale: float) -> float:
    """Return ‖ΔW‖² of stored factors, in fp32 where that holds it. InputError where a number is not finite."""
    shapes, kinds = ((-1, rank), (rank, -1)), [info.dtype for info in infos]
    bits = [stored_bits(r, kind).reshape(shape) for r, kind, shape in zip(raw, kinds, shapes, strict=True)]
    with np.errstate(all="ignore"):
        grams = Grams.of(*(widened(b, kind, np.float32) for b, kind in zip(bits, kinds, strict=True)))
        below = all(is_below(g, DTYPE_ROWS[kind].largest) for g, kind in zip(grams, kinds, strict=True))
        if below and is_held_by_fp32(squares := grams.squares(), grams.apart()):
            return squares * scale**2
        for b, info in zip(bits, infos, strict=True):
            expect_finite(b, info)
        left, right = (widened(b, kind, np.float64) for b, kind in zip(bits, kinds, strict=True))
        return squares_of(left * scale, right)
