"""Makes the modules of `combine`, `resize` and `average`: on each weight, changes are computed and combined. A module
has rows of one weight, or of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..disk.reader import Reader
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import HOST
from ..merge_methods import ADDED_VECTORS, COMBINATIONS, UNDIRECTED
from ..planning.combination import Combining
from ..text import Note
from .assumed_base_values import cache_of
from .change import SINGLE, Evaluator, norms_of, sum_of
from .combined_change import Delta, combine
from .convert_modules import Converter, rows_in_order
from .copied_tensors import ModuleTensors
from .decomposition.stored_factors import Cut
from .factored_modules import FactoredModules, delta_of_parts, nbytes_of, norms_of_parts
from .form import Form
from .groups import Filled, PlacePart, Target
from .job import AdapterJob
from .module_tensors import StoredModule
from .output_modules import Conversion
from .parallel import PerThread
from .rank_rules import LayerSpectrum, Rule
from .sources import Sources


class WeightChanges:
    """The combined changes of the weights of one job."""

    def __init__(self, job: AdapterJob, sources: Sources, reader: Reader) -> None:
        self.job, self.sources, self.reader = job, sources, reader
        self._single = job.compute_dtype == "fp32"
        self._evaluators = PerThread(self.evaluator)
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
            self.notes[Note(f"{self.job.method}: {ADDED_VECTORS}")] = None
        if not changes:
            return None
        return replace(combine(self.job, target, changes, seeds), norms=norms_of(changes, target))


@dataclass(frozen=True)
class Combiner(Converter):
    """Makes modules from the combined changes of the weights that they have rows of: from factors in numpy, if these
    are stored, else from matrices."""

    changes: WeightChanges = field(kw_only=True)
    factored: FactoredModules = field(kw_only=True)
    weights: dict[int, Delta | None] = field(default_factory=dict, kw_only=True)
    """Identity of a weight → its Δ, of the weights of the last modules."""
    deltas: dict[str, Delta] = field(default_factory=dict, kw_only=True)
    """Label → Δ of the last modules."""

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how modules were made."""
        return [*self.changes.notes]

    def forget(self) -> None:
        """Drop what was computed for the last modules."""
        super().forget()
        self.factored.forget()
        self.weights.clear()
        self.deltas.clear()

    def nbytes(self, group: Sequence[Filled]) -> int:
        """Return about how many bytes the changes of modules take: factors several times, or matrices."""
        return nbytes_of(self.job, group)

    def where(self, module: Filled) -> str:
        """Return the place of a module for errors."""
        return f"{self.job.output}: {module.place.label}"

    def module(self, filled: Filled, rank: int | None) -> StoredModule:
        """Return one module."""
        return self.factored.module(filled, rank) or super().module(filled, rank)

    def spectrum(self, filled: Filled) -> list[LayerSpectrum]:
        """Return the singular values of a module; [] for a Δ of zeros."""
        known = self.factored.spectrum(filled)
        return super().spectrum(filled) if known is None else known

    def tensors_of(self, filled: Filled, form: Form, rank: int | None = None) -> ModuleTensors:
        """Return the tensors of one module, with the facts of its change."""
        tensors, delta = super().tensors_of(filled, form, rank), self.delta(filled)
        facts = replace(tensors.layer, effect=tensors.layer.effect or delta.effect, before=delta.before,
                        norms=norms_of_parts((part, self.weights[id(part.whole)]) for part in filled.parts),
                        weight=self.factored.weight_of(filled) if tensors.layer.squares else None)  # fmt: skip
        return replace(tensors, layer=facts)

    def cut(self, filled: Filled, delta: Delta, rule: Rule, rank: int | None) -> Cut:
        """Return the cut of a module of a rule, or of a rank that is decided already, with its α or α / rank."""
        return self.factored.cut(filled, rule, rank)

    def rows(self, filled: Filled) -> RowMatrix:
        """Return Δ of a module by rows."""
        return self.delta(filled).rows

    def delta(self, filled: Filled) -> Delta:
        """Return Δ of a module: the rows of the changes of its weights."""
        label = filled.place.label
        if label not in self.deltas:
            self.deltas[label] = self._joined(filled)
        return self.deltas[label]

    def _joined(self, filled: Filled) -> Delta:
        changed = [(part, delta) for part in filled.parts if (delta := self._of_weight(part.whole)) is not None]
        if all(delta.whole is None for _, delta in changed):
            return Delta.of_factors(delta_of_parts(filled, [(part, delta.factored) for part, delta in changed]))
        out, cols = filled.place.view.matrix
        parts = [(part, _in_place(part, delta)) for part, delta in changed]
        if len(parts) == 1 and parts[0][0].rows == (range(out),):
            return parts[0][1]
        before = min(delta.before for _, delta in parts) and max(delta.before for _, delta in parts)
        terms = [(1.0, rows_in_order(delta.rows, _order(part, out))) for part, delta in parts]
        return Delta(None, None, sum_of((out, cols), terms).cached(), before)

    def _of_weight(self, target: Target) -> Delta | None:
        if id(target) not in self.weights:
            self.weights[id(target)] = self.changes.of(target)
        return self.weights[id(target)]


def _in_place(part: PlacePart, delta: Delta) -> Delta:
    """Return Δ of rows of a weight, as the place has them."""
    delta = delta.of(part.layer)
    if part.turned is None:
        return delta
    turned, columns = RowMatrix.of(delta.dense().mT.contiguous()), part.turned.columns
    rows = turned if columns is None else turned.of_rows(torch.tensor(columns))
    return Delta(None, None, rows, delta.before)


def _order(part: PlacePart, out: int) -> Tensor:
    """Return for each of `out` rows the row of a part that it is; -1 for others."""
    order, lines = torch.full((out,), -1), torch.tensor(part.order)
    order[lines] = torch.arange(len(lines))
    return order


def combiner(conversion: Conversion, reader: Reader, factored: Callable[[], FactoredModules]) -> Callable[[], Combiner]:
    """Return a function that returns the maker of the modules of combined changes, for one thread."""
    changes, forms = WeightChanges(conversion.job, conversion.sources, reader), conversion.forms_by_label

    def make() -> Combiner:
        here = factored()
        return Combiner(conversion.job, conversion.to, forms, changes.evaluator(), reader, here.noise,
                        changes=changes, factored=here)  # fmt: skip

    return make
