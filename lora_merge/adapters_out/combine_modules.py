"""Makes the layers of `combine` and `resize`: on each weight, changes are computed, combined and cut to a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite

from ..disk.reader import Reader
from ..engine.devices import places
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import HOST, TORCH_DTYPES
from ..errors import beyond_fp64
from ..merge_methods import ADDED, COMBINATIONS, UNDIRECTED
from ..planning.combination import Combining
from ..text import Note
from .assumed_base_values import cache_of
from .change import SINGLE, Evaluator, norms_of
from .combined_change import Delta, Storage, combine, expect_finite, spectra
from .copied_tensors import entry
from .factored_layers import cut_of, noise_of
from .form import Form
from .groups import Target
from .job import FACTORS, AdapterJob
from .module_tensors import Layer, LayerTensors, without_bytes
from .parallel import PerThread
from .rank_rules import LayerSpectrum
from .sources import Sources


@dataclass
class GeneralMaker:
    """Makes the layers of one job. `weight`: gives ‖W‖² of the rows of the base that a layer changes."""

    job: AdapterJob
    sources: Sources
    forms: Mapping[str, Form]  # by the label of the layer
    reader: Reader
    kind: str  # the dtype of the output, as files name it
    weight: Callable[[Target], float | None]

    def __post_init__(self) -> None:
        self.dtype = TORCH_DTYPES[self.kind]
        self._single = self.job.compute_dtype == "fp32"
        self._evaluators = PerThread(self._evaluator)
        self.at = places(self.job.inputs.device, "F32")[0]
        self.noise, self.stores_alpha = noise_of(self.sources), self.sources.spelling.alpha
        self.combining = Combining(COMBINATIONS[self.job.method], self.job.numbers, self.sources.adapters)
        self.notes: dict[Note, None] = {}

    def layers_of(self, target: Target, ranks: Mapping[str, int]) -> list[LayerTensors | None]:
        """Return the layers that a weight is stored as; None where the change is zero. `ranks`: see `shared_out`."""
        delta, layers = self._change_of_weight(target), list[LayerTensors | None]()
        for part in target.stored:
            if delta is None:
                layers.append(None)
                continue
            rows = delta.of(part)
            layer = self._layer(part, rows, ranks.get(part.label))
            if not isfinite(layer.squares):
                raise beyond_fp64(part.name)
            where = f"{self.job.output}: {part.label}"
            expect_finite(layer.tensors.values(), where)
            zero = not layer.squares or (layer.algorithm == FACTORS and not layer.rank)
            facts = replace(layer, effect=layer.effect or rows.effect, norms=delta.norms[part.label],
                           weight=None if zero else self.weight(part))  # fmt: skip
            entries = {slot: entry(slot, tensor) for slot, tensor in layer.tensors.items()}
            layers.append(None if zero else LayerTensors(without_bytes(facts), entries))
        return layers

    def _change_of_weight(self, target: Target) -> Delta | None:
        """Return Δ of a weight. Factors that are decomposed are in fp64, however they were computed."""
        delta = self._combined(target)
        if delta is None or delta.whole is not None or not self._single:
            return delta
        left, right = delta.factors
        return replace(delta, left=left.double(), right=right.double())

    def _evaluator(self) -> Evaluator:
        cache = cache_of(self.job, self.reader, self.sources)
        return Evaluator(self.sources, cache, SINGLE if self._single else HOST)

    def _combined(self, target: Target) -> Delta | None:
        """Return Δ of a weight."""
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

    def _layer(self, target: Target, delta: Delta, rank: int | None) -> Layer:
        form = self.forms[target.label]
        storage = Storage(form.algorithm, self.dtype, self.noise, self.at)
        cut = cut_of(self.job, target, form, rank, stores_alpha=self.stores_alpha)
        if target.turned:
            return storage.layer(replace(target, shape=target.shape[::-1], uses=()), _turned(delta), cut)
        return storage.layer(target, delta, cut)

    def spectra(self, target: Target) -> Iterator[LayerSpectrum]:
        """Yield the singular values of the layers that a weight is stored as, for the rule `size`."""
        delta = self._change_of_weight(target) if not target.vector else None
        if delta is not None:
            layers = ((part.label, delta.of(part)) for part in target.stored)
            yield from spectra(layers, self.dtype.itemsize, self.noise)


def _turned(delta: Delta) -> Delta:
    """Return the transposed Δ."""
    whole = None if delta.whole is None else RowMatrix.of(delta.dense().mT.contiguous())
    left, right = (None if t is None else t.mT for t in (delta.right, delta.left))
    return Delta(left, right, whole, delta.before)
