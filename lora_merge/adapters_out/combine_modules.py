"""Makes the modules of `combine`, `resize` and `average`: on each weight, changes are computed and combined. A module
has rows of one weight, or of several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt

import torch
from torch import Tensor

from ..adapter_options import KEEP
from ..algorithms import ALGORITHMS
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import HOST
from ..engine.tensors import view_bytes
from ..errors import InputError
from ..merge_methods import ADDED, COMBINATIONS, UNDIRECTED
from ..planning.combination import Combining
from ..text import Note
from .assumed_base_values import cache_of
from .change import SINGLE, Evaluator, norms_of, sum_of
from .combined_change import Cut, Delta, combine, without_repeats
from .conversion import Conversion
from .convert_modules import Converter, rows_in_order
from .copied_tensors import ModuleTensors
from .decomposition.factors import STORED_IN_16
from .exact_sums import Concatenation
from .form import Form
from .groups import Filled, PlacePart, Target
from .job import AdapterJob
from .module_tensors import LayerTensors, Norms
from .parallel import PerThread
from .rank_rules import Rule
from .sources import Sources


class WeightChanges:
    """The combined changes of the weights of one job."""

    def __init__(self, job: AdapterJob, sources: Sources, reader: Reader) -> None:
        self.job, self.sources, self.reader = job, sources, reader
        self._single = job.compute_dtype == "fp32"
        self._evaluators = PerThread(self.evaluator)
        stored = [i.dtype for a in sources.adapters for m in a.modules for i in m.slots.values()]
        self.noise = STORED_IN_16 if stored and all(ITEM_BYTES.get(d, 4) <= 2 for d in stored) else 0.0
        self.combining = Combining(COMBINATIONS[job.method], job.numbers, sources.adapters)
        self.notes: dict[Note, None] = {}

    def evaluator(self) -> Evaluator:
        """Return what computes the change of a weight by each adapter, for one thread."""
        cache = cache_of(self.job, self.reader, self.sources)
        return Evaluator(self.sources, cache, SINGLE if self._single else HOST)

    def of(self, target: Target) -> Delta | None:
        """Return Δ of a weight; None without a change. Factors that are decomposed are in fp64, however they were
        computed."""
        delta = self._combined(target)
        if delta is None or delta.whole is not None or not self._single:
            return delta
        left, right = delta.factors
        return replace(delta, left=left.double(), right=right.double())

    def _combined(self, target: Target) -> Delta | None:
        evaluator = self._evaluators.get()
        changes = [c for c in evaluator.changes(target) if c.strength]
        evaluator.forget()
        uses = [[u for u in target.uses if u.patch.adapter == c.adapter] for c in changes]
        seeds = [self.combining.seed(c.adapter, its) for c, its in zip(changes, uses, strict=True)]
        if target.vector and self.job.method in UNDIRECTED:
            self.notes[Note(f"{self.job.method}: {ADDED}")] = None
        if not changes:
            return None
        return replace(combine(self.job, target, changes, seeds), norms=norms_of(changes, target))

    def scale(self, target: Target) -> float:
        """Return α / rank of a layer whose α the user did not give as a number: that of the one change of a weight."""
        if self.job.alpha == "rank" or len(target.uses) != 1:
            return 1.0
        patch = target.uses[0].patch
        scale = patch.numbers.get("scale")
        plain = ALGORITHMS[patch.algorithm].rank is not None and {"up", "down"} <= patch.shapes.keys()
        return scale if plain and scale and scale > 0 and patch.magnitude is None else 1.0


def _turned(delta: Delta) -> Delta:
    """Return the transposed Δ."""
    whole = None if delta.whole is None else RowMatrix.of(delta.dense().mT.contiguous())
    left, right = (None if t is None else t.mT for t in (delta.right, delta.left))
    return Delta(left, right, whole, delta.before)


@dataclass(frozen=True)
class Combiner(Converter):
    """Makes modules from the combined changes of the weights that they have rows of."""

    changes: WeightChanges = field(kw_only=True)
    sums: Concatenation = field(kw_only=True)
    weight: Callable[[Target], float | None] = field(kw_only=True)
    """Gives ‖W‖² of the rows of the base that a layer changes."""
    weights: dict[int, Delta | None] = field(default_factory=dict, kw_only=True)
    """Identity of a weight → its Δ, of the weights of the last modules."""
    modules: dict[str, Delta] = field(default_factory=dict, kw_only=True)
    """Label → Δ of the last modules."""

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how modules were made."""
        return [*self.changes.notes]

    def forget(self) -> None:
        """Drop what was computed for the last modules."""
        super().forget()
        self.weights.clear()
        self.modules.clear()

    def nbytes(self, group: Sequence[Filled]) -> int:
        """Return about how many bytes the changes of modules take: factors several times, or matrices."""
        weights = {id(part.whole): part.whole for module in group for part in module.parts}
        return sum(nbytes_of_change(self.job, weight) for weight in weights.values())

    def where(self, module: Filled) -> str:
        """Return the place of a module for errors."""
        return f"{self.job.output}: {module.place.label}"

    def is_zero(self, tensors: ModuleTensors) -> bool:
        """Return whether a module changes nothing."""
        return not tensors.layer.squares or super().is_zero(tensors)

    def changes_nothing(self) -> InputError:
        """Return the error for an output without modules."""
        return InputError("the result changes nothing", str(self.job.output), "check the adapters and their strengths")

    def tensors_of(self, filled: Filled, form: Form, rank: int | None = None) -> ModuleTensors:
        """Return the tensors of one module, with the facts of its change."""
        if (alone := self.sums.layer(filled.alone) if filled.alone else None) is not None:
            return self._as_stored(filled, alone)
        tensors, delta = super().tensors_of(filled, form, rank), self.delta(filled)
        weights = [self.weight(part.layer) for part in filled.parts]
        known = None if None in weights or not tensors.layer.squares else sum(w for w in weights if w is not None)
        facts = replace(tensors.layer, effect=tensors.layer.effect or delta.effect, norms=self._norms(filled),
                        before=delta.before, weight=known)  # fmt: skip
        return replace(tensors, layer=facts)

    def _as_stored(self, filled: Filled, sum_of_factors: LayerTensors) -> ModuleTensors:
        """Return the module of a sum of stored factors."""
        layer, entries = sum_of_factors
        tensors = {self.to.endings[slot]: view_bytes(memoryview(e.data).cast("B"), e.dtype, e.shape)
                   for slot, e in entries.items() if isinstance(e.data, memoryview)}  # fmt: skip
        if self.to.alpha:
            tensors[self.to.endings.get("alpha", ".alpha")] = torch.tensor(layer.alpha, dtype=torch.float32)
        return ModuleTensors(filled.place, tensors, layer)

    def cut(self, filled: Filled, delta: Delta, rule: Rule, rank: int | None) -> Cut:
        """Return the cut of a module of a rule, or of a rank that is decided already, with its α or α / rank."""
        if self.job.alpha != KEEP or not self.to.alpha:
            return super().cut(filled, delta, rule, rank)
        scales = {self.changes.scale(part.layer) for part in filled.parts}
        return Cut(rule, rank, None, scales.pop() if len(scales) == 1 else 1.0)

    def rows(self, filled: Filled) -> RowMatrix:
        """Return Δ of a module by rows."""
        return self.delta(filled).rows

    def delta(self, filled: Filled) -> Delta:
        """Return Δ of a module: the rows of the changes of its weights."""
        label = filled.place.label
        if label not in self.modules:
            self.modules[label] = self._joined(filled)
        return self.modules[label]

    def _joined(self, filled: Filled) -> Delta:
        changed = [(part, delta) for part in filled.parts if (delta := self._of_part(part)) is not None]
        before = min((delta.before for _, delta in changed), default=0)
        before = before and max(delta.before for _, delta in changed)
        out, cols = filled.place.view.matrix
        if len(changed) == 1 and changed[0][0].rows == (range(out),):
            return changed[0][1]
        if any(delta.whole is not None for _, delta in changed):
            terms = [(1.0, rows_in_order(delta.rows, _order(part, out))) for part, delta in changed]
            return Delta(None, None, sum_of((out, cols), terms).cached(), before)
        lefts, rights = [torch.zeros(out, 0, dtype=torch.float64)], [torch.zeros(0, cols, dtype=torch.float64)]
        for part, delta in changed:
            left, right = delta.factors
            lefts.append(left.new_zeros(out, left.shape[1]).index_copy_(0, torch.tensor(part.order), left))
            rights.append(right)
        return Delta(*without_repeats(torch.cat(lefts, 1), torch.cat(rights)), None, before)

    def _of_part(self, part: PlacePart) -> Delta | None:
        """Return Δ of rows of a weight, as the place sees them."""
        if id(part.whole) not in self.weights:
            self.weights[id(part.whole)] = self.changes.of(part.whole)
        if (delta := self.weights[id(part.whole)]) is None:
            return None
        delta = delta.of(part.layer)
        if part.turned is None:
            return delta
        turned = _turned(delta)
        if part.turned.columns is None:
            return turned
        rows = torch.tensor(part.turned.columns)
        if turned.whole is not None:
            return replace(turned, whole=turned.whole.of_rows(rows))
        return replace(turned, left=turned.factors[0][rows])

    def _norms(self, filled: Filled) -> Norms:
        """Return the norm of each adapter's change of the module."""
        squares: dict[int, float] = {}
        for part in filled.parts:
            delta = self.weights[id(part.whole)]
            for adapter, norm in ({} if delta is None else delta.norms.get(part.layer.label, {})).items():
                squares[adapter] = squares.get(adapter, 0.0) + norm * norm
        return {adapter: sqrt(square) for adapter, square in squares.items()}


def nbytes_of_change(job: AdapterJob, target: Target) -> int:
    """Return about how many bytes the change of a weight takes: factors several times, or matrices and what is
    stored."""
    (out, cols), ranks = target.matrix, target.ranks
    factored = COMBINATIONS[job.method].linear and None not in ranks and not target.values
    read = sum(prod(shape) for use in target.uses for shape in use.patch.shapes.values())
    most = min(out, cols, sum(r or 0 for r in ranks))
    return 8 * min(6 * most * (out + cols) if factored else sys.maxsize,
                   (len(target.uses) + 3) * out * cols) + 8 * read  # fmt: skip


def _order(part: PlacePart, out: int) -> Tensor:
    """Return for each of `out` rows the row of a part that it is; -1 for others."""
    order, lines = torch.full((out,), -1), torch.tensor(part.order)
    order[lines] = torch.arange(len(lines))
    return order


def combiner(conversion: Conversion, reader: Reader, sums: Concatenation) -> Callable[[], Combiner]:
    """Return a function that returns the maker of the modules of combined changes, for one thread."""
    job, sources = conversion.job, conversion.sources
    changes = WeightChanges(job, sources, reader)

    def make() -> Combiner:
        return Combiner(job, conversion.to, changes.evaluator(), changes.noise, changes=changes, sums=sums,
                        weight=sums.weight)  # fmt: skip

    return make
