"""Modules that are made from stored factors, in numpy: those of `combine`, `resize` and `average` are summed, cut and
rounded, those of a conversion are copied with their α under other names.

No torch: its import takes as long as all of this. A change of another kind, and a sum with more columns than its weight
has rank, are matrices (matrix_modules.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isfinite, prod, sqrt
from typing import Final, Protocol

import numpy as np

from ..algorithms import ALGORITHMS
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import DTYPE_ROWS, ITEM_BYTES
from ..errors import beyond_dtype, beyond_fp64
from ..merge_methods import COMBINATIONS
from ..text import Note
from .decomposition.factors import STORED_IN_16, Grams, decomposing, squares_of, without_repeats
from .decomposition.stored_factors import Cut, FactoredDelta, StoredFactors, exact, truncated
from .dialects import Dialect
from .factored_sums import FactoredSums, expect_finite, read_numbers
from .form import Form
from .groups import Filled, PlacePart, Target
from .job import AUTO, FACTORS, WHOLE, AdapterJob
from .module_tensors import Layer, Norms, StoredModule, with_change
from .output_file import Entry
from .output_modules import Conversion
from .rank_rules import EXACT, LayerSpectrum, Rule
from .rounding import Array, all_finite, data_of, is_below, is_held_by_fp32, stored, stored_bits, widened
from .sources import Sources
from .weight_norms import weight_norms


def noise_of(sources: Sources) -> float:
    """Return the share of the largest singular value below which others are noise of the inputs."""
    stored = [i.dtype for a in sources.adapters for m in a.modules for i in m.slots.values()]
    return STORED_IN_16 if stored and all(ITEM_BYTES.get(d, 4) <= 2 for d in stored) else 0.0


@dataclass(frozen=True)
class FactoredModules:
    """Makes modules from factors, in one thread."""

    conversion: Conversion
    sums: FactoredSums
    noise: float
    """Singular values below this share of the largest one are noise of the inputs."""
    weight: Callable[[Target], float | None]
    """Gives ‖W‖² of the rows of the base that a layer changes."""
    weights: dict[int, FactoredDelta | None] = field(default_factory=dict)
    """Identity of a weight → its Δ, of the weights of the last modules."""
    notes: Sequence[Note] = ()

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """Label → form of a module."""
        return self.conversion.forms_by_label

    @property
    def dtype(self) -> str:
        """The dtype of the output, as files name it."""
        assert self.conversion.job.dtype is not None, "all inputs decide it"
        return self.conversion.job.dtype

    def has(self, filled: Filled) -> bool:
        """Return whether headers show that a module is made here."""
        form = self.forms[filled.place.label]
        if form.kind != "matrix" or form.whole or not all(self.sums.has(part.whole) for part in filled.parts):
            return False
        patches = [use.patch for part in filled.parts for use in part.layer.uses if use.strength]
        columns = sum(min(patch.shapes["down"][0], *patch.view.matrix) for patch in patches)
        return form.rule.name == EXACT or columns <= min(filled.place.view.matrix)

    def nbytes(self, group: Sequence[Filled]) -> int:
        """Return about how many bytes the changes of modules take."""
        return nbytes_of(self.conversion.job, group)

    def forget(self) -> None:
        """Drop what was computed for the last modules."""
        self.weights.clear()

    def modules(self, group: Sequence[Filled], ranks: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return modules that `has` knows, whose bytes are in memory. `ranks`: see `shared_out`."""
        modules = [self.module(filled, ranks.get(filled.place.label)) for filled in group]
        self.forget()
        return [with_change(module, measured=True) for module in modules if module is not None]

    def spectra(self, group: Sequence[Filled]) -> list[LayerSpectrum]:
        """Return the singular values of modules that `has` knows, for the rule `size`."""
        spectra = [spectrum for filled in group for spectrum in self.spectrum(filled) or ()]
        self.forget()
        return spectra

    def module(self, filled: Filled, rank: int | None) -> StoredModule | None:
        """Return a module whose bytes are in memory; None for one that is made from matrices."""
        place, form, to = filled.place, self.forms[filled.place.label], self.conversion.to
        delta = self._delta(filled) if form.kind == "matrix" and form.algorithm != WHOLE else None
        factors = None if delta is None else self._stored(filled, delta, form, rank)
        (out, cols) = place.view.matrix
        if delta is None or factors is None or (form.algorithm == AUTO and factors.rank * (out + cols) >= out * cols):
            return None
        if not isfinite(factors.squares):
            raise beyond_fp64(place.name)
        if not all_finite(factors.up, self.dtype) or not all_finite(factors.down, self.dtype):
            raise beyond_dtype(f"{self.conversion.job.output}: {place.label}")
        entries = {to.endings[slot]: Entry(slot, self.dtype, stored, data_of(bits))
                   for slot, (bits, stored) in factors.of_shape(place.view.shape).items()}  # fmt: skip
        if factors.rank and to.alpha:
            alpha = data_of(np.array([factors.alpha], np.float32))
            entries[to.endings.get("alpha", ".alpha")] = Entry("alpha", "F32", (), alpha)
        norms = norms_of_parts((part, self.weights[id(part.whole)]) for part in filled.parts)
        weight = self.weight_of(filled) if factors.squares and factors.rank else None
        layer = Layer({}, FACTORS, factors.rank, delta.before, factors.alpha, factors.squares, factors.lost,
                      effect=delta.effect, norms=norms, weight=weight, spectrum=factors.spectrum)  # fmt: skip
        return StoredModule(place, entries, layer)

    def spectrum(self, filled: Filled) -> list[LayerSpectrum] | None:
        """Return the singular values of a module, [] for a Δ of zeros; None as above."""
        delta, label = self._delta(filled), filled.place.label
        if delta is None:
            return None
        with decomposing(label):
            triples = delta.triples(self.noise)
        if triples is None:
            return None
        width = sum(delta.matrix) * ITEM_BYTES[self.dtype]
        return [LayerSpectrum(label, triples.values.tolist(), width)] if triples.squares else []

    def cut(self, filled: Filled, rule: Rule, rank: int | None) -> Cut:
        """Return the cut of a module of a rule, or of a rank that is decided already, with its α or α / rank."""
        alpha, stored = self.conversion.job.alpha, self.conversion.to.alpha
        if not isinstance(alpha, str):
            return Cut(rule, rank, float(alpha) if stored else None)
        scales = {_scale(part.layer) for part in filled.parts} if stored and alpha != "rank" else {1.0}
        return Cut(rule, rank, None, scales.pop() if len(scales) == 1 else 1.0)

    def weight_of(self, filled: Filled) -> float | None:
        """Return ‖W‖² of a module; None where it is not known."""
        weights = [self.weight(part.layer) for part in filled.parts]
        return None if None in weights else sum(weight for weight in weights if weight is not None)

    def _delta(self, filled: Filled) -> FactoredDelta | None:
        """Return Δ of a module; None where the change of a weight that it has rows of is a matrix."""
        exactly = filled.alone is not None and self.forms[filled.place.label].rule.name == EXACT
        changes = list[tuple[PlacePart, FactoredDelta]]()
        for part in filled.parts:
            key = id(part.whole)
            if key not in self.weights:
                self.weights[key] = self.sums.delta(part.whole, self.dtype if exactly else None)
            if (delta := self.weights[key]) is None:
                return None
            changes.append((part, delta))
        return delta_of_parts(filled, changes)

    def _stored(self, filled: Filled, delta: FactoredDelta, form: Form, rank: int | None) -> StoredFactors | None:
        """Return the stored factors; None where Δ has more columns than a rank that is cut."""
        cut = self.cut(filled, form.rule, rank)
        if form.rule.name == EXACT and rank is None:
            return exact(delta, cut, self.dtype)
        with decomposing(filled.place.name):
            triples = delta.triples(self.noise)
        return None if triples is None else truncated(delta, triples, cut, self.dtype)


def factored_modules(conversion: Conversion, reader: Reader) -> Callable[[], FactoredModules]:
    """Return a function that returns what makes the modules of sums of stored factors, for one thread."""
    job, sources = conversion.job, conversion.sources
    sums = FactoredSums(job, partial(read_numbers, reader))
    return partial(FactoredModules, conversion, sums, noise_of(sources), weight_norms(sources, reader))


def _scale(layer: Target) -> float:
    """Return α / rank of the one change of a layer; 1 for others."""
    if len(layer.uses) != 1:
        return 1.0
    patch = layer.uses[0].patch
    scale = patch.numbers.get("scale")
    plain = ALGORITHMS[patch.algorithm].rank is not None and {"up", "down"} <= patch.shapes.keys()
    return scale if plain and scale and scale > 0 and patch.magnitude is None else 1.0


def delta_of_parts(filled: Filled, changes: Sequence[tuple[PlacePart, FactoredDelta]]) -> FactoredDelta:
    """Return Δ of a module: its rows of the changes of weights."""
    out, cols = filled.place.view.matrix
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
    delta = delta.of(part.layer)
    if part.turned is None:
        return delta
    turned, columns = delta.turned, part.turned.columns
    return turned if columns is None else FactoredDelta(turned.left[[*columns]], turned.right, turned.before)


class _WithNorms(Protocol):
    @property
    def norms(self) -> Mapping[str, Norms]: ...


def norms_of_parts(changes: Iterable[tuple[PlacePart, _WithNorms | None]]) -> Norms:
    """Return the norm of each adapter's change of a module, from those of its rows of the Δ of each weight."""
    squares: dict[int, float] = {}
    for part, delta in changes:
        for adapter, norm in ({} if delta is None else delta.norms.get(part.layer.label, {})).items():
            squares[adapter] = squares.get(adapter, 0.0) + norm * norm
    return {adapter: sqrt(square) for adapter, square in squares.items()}


def nbytes_of(job: AdapterJob, group: Sequence[Filled]) -> int:
    """Return about how many bytes the changes of modules take."""
    weights = {id(part.whole): part.whole for module in group for part in module.parts}
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


def copy_of(module: Filled, to: Dialect, reader: Reader) -> StoredModule:
    """Return the stored factors of a module; InputError where a number is not finite, or too large for fp64."""
    (share,), place = module.shares, module.place
    patch = share.patch
    rank, scale = patch.shapes["down"][0], patch.numbers["scale"]
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
    return StoredModule(place, entries, Layer({}, FACTORS, rank, rank, rank * scale, squares, 0.0))


class Copies:
    """Makes the modules of a conversion of which all are copies."""

    notes: Final = ()

    def __init__(self, to: Dialect, reader: Reader) -> None:
        self._to, self._reader = to, reader

    def nbytes(self, group: Sequence[Filled]) -> int:
        """Return the bytes of both factors, as stored and in fp32."""
        slots = [module.shares[0].patch.module.slots for module in group]
        return 3 * sum(s["up"].nbytes + s["down"].nbytes for s in slots)

    def spectra(self, _: Sequence[Filled]) -> list[LayerSpectrum]:
        """No rule looks at copies."""
        return []

    def modules(self, group: Sequence[Filled], _: Mapping[str, int]) -> list[Sequence[StoredModule]]:
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
