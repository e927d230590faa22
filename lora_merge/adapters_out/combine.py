"""`combine` and `resize` in the words of the first adapter: their plan and their run.

Layer by layer, changes are computed, combined, cut to a rank and stored. No torch, unless a layer needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from ..disk.destination import check_output
from ..disk.draft import Draft
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES, spoken
from ..engine.torch_preload import load_library
from ..errors import FitError, InputError
from ..merge_methods import COMBINATIONS
from ..progress import Counting
from ..text import Note
from .combination_proof import CombinationClaims, prove_combination
from .decomposition.svd_memory import note
from .dialects import dialect
from .factored_layers import FactoredMaker
from .form import Form, form_of_layer
from .groups import Target
from .job import GIVE_BASE, AdapterJob
from .metadata.sizes import PlannedLayer, Tensor, factor_shapes, planned_size, tensors_of
from .module_tensors import Layer, LayerTensors, waiting
from .output_file import CONTENTS, Entry, drafted, expect_room, unique
from .parallel import on_one_core, settings_of_torch, side_by_side
from .pipeline import AdapterRun, Outcome, RunFacts, coverage, idle_alpha, left_out, model_of, output_dtype, planned
from .rank_rules import EXACT, LayerSpectrum, shared_out
from .report import AdapterReport
from .sources import Sources, open_sources, ruled
from .weight_norms import weight_norms

if TYPE_CHECKING:
    from .combine_modules import GeneralMaker

T = TypeVar("T")

HIGH: Final = 256
"""The rank from which on a note advises a rank rule: most directions of such a sum are small."""


def plan(job: AdapterJob, sources: Sources | None = None) -> AdapterReport:
    """Return what `run` would do, from headers: layers, and ranks if headers show them. `sources`: those of the job, if
    they are open."""
    sources = sources or open_sources(job)
    job = ruled(job, sources)
    to = dialect(job.format)
    check_output(job.output, [p for i in sources.indexes for p in i.files], overwrite=True,
                 folder=to is not None and to.folder, contents=CONTENTS)  # fmt: skip
    dtype = output_dtype(job, sources.adapters)
    forms = forms_of(job, sources)
    layers = {layer.label: form.facts for layer, form in zip(_layers(sources), forms, strict=True)}
    size = planned_size(planned_layers(sources, forms, dtype), job.rules.linear, [a.index for a in sources.adapters])
    notes = (*dict.fromkeys(sources.notes), *_memory_note(job, sources, forms),
             *idle_alpha(job, stored=sources.spelling.alpha))  # fmt: skip
    facts = RunFacts(coverage(job, sources), spoken(dtype), notes, weights=weights_of(job, sources, dtype))
    return planned(job, facts, layers, size)


def _layers(sources: Sources) -> list[Target]:
    """Return the layers of the output."""
    return [layer for target in sources.targets for layer in target.stored]


def forms_of(job: AdapterJob, sources: Sources) -> list[Form]:
    """Return the form of every layer of the output; FitError for one that has none."""
    return [form_of_layer(job, target, layer) for target in sources.targets for layer in target.stored]


def planned_layers(sources: Sources, forms: Sequence[Form], dtype: str) -> list[PlannedLayer]:
    """Return the tensors of every layer: factors at their highest rank, if the numbers decide it."""
    layers, spelling = list[PlannedLayer](), sources.spelling
    for target, form in zip(_layers(sources), forms, strict=True):
        shape, rank = target.shape[::-1] if target.turned else target.shape, form.highest
        slots = {"diff": shape} if form.whole else factor_shapes(shape, rank)
        tensors: list[Tensor] = [
            (spelling.key(target.name, target.parameter, slot, norm=target.norm), dtype, stored)
            for slot, stored in slots.items()
        ]
        if spelling.alpha and not form.whole:
            tensors.append((spelling.key(target.name, target.parameter, "alpha"), "F32", ()))
        layers.append(PlannedLayer(tensors, 0 if form.whole else rank))
    return layers


def _memory_note(job: AdapterJob, sources: Sources, forms: Sequence[Form]) -> list[Note]:
    """Return the note about the largest change that is decomposed without factors, if it may exceed the limit."""
    layers = zip(_layers(sources), forms, strict=True)
    return note(((layer.label, layer.matrix, form) for layer, form in layers), job.inputs.max_memory)


def weights_of(job: AdapterJob, sources: Sources, dtype: str) -> int:
    """Return the bytes of the weights whose changes are computed, twice if a rule looks at all layers first."""
    return sum(prod(t.shape) for t in sources.targets) * ITEM_BYTES[dtype] * (1 + job.rules.together)


def _nbytes(job: AdapterJob, target: Target) -> int:
    """Return about how many bytes the change of a weight takes: factors several times, or matrices and what is
    stored."""
    (out, cols), ranks = target.matrix, target.ranks
    factored = COMBINATIONS[job.method].linear and None not in ranks and not target.values
    read = sum(prod(shape) for use in target.uses for shape in use.patch.shapes.values())
    most = min(out, cols, sum(r or 0 for r in ranks))
    return 8 * min(6 * most * (out + cols) if factored else sys.maxsize,
                   (len(target.uses) + 3) * out * cols) + 8 * read  # fmt: skip


def run(job: AdapterJob, sources: Sources, this: AdapterRun) -> AdapterReport:
    """Run a job whose sources are open: the output appears under its name when it is complete and verified, or not at
    all. `this`: begun before the sources were opened, so that its times include that."""
    files = [p for i in sources.indexes for p in i.files]
    check_output(job.output, files, overwrite=job.inputs.overwrite)
    inputs = [a.index for a in sources.adapters]
    dtype = output_dtype(job, sources.adapters)
    with ExitStack() as stack:
        stack.enter_context(settings_of_torch())
        reader = this.reading(sources.indexes)
        forms = forms_of(job, sources)
        rows = tensors_of(planned_layers(sources, forms, dtype))
        if job.command == "combine" and job.rules.all_are(EXACT):  # else numbers decide
            expect_room(job, rows)
        draft = stack.enter_context(drafted(job, reader, rows, inputs, folder=False))
        maker = LayerMaker(job, sources, forms, reader, dtype)
        layers, tensors, zeros = maker.layers(this.counted, draft)
        if not layers:
            raise InputError("the result changes nothing", str(job.output), "check the adapters and their strengths")
        notes = (*dict.fromkeys(sources.notes), *_memory_note(job, sources, forms), *maker.notes, *left_out(zeros),
                 *idle_alpha(job, stored=sources.spelling.alpha))  # fmt: skip
        highest = max(layer.rank for layer in layers.values())
        if job.rules.linear.name == EXACT and highest > HIGH:
            notes = (*notes, Note(f"the exact sum has rank {highest}; --rank energy:0.999 keeps 99.9% of it"))
        outcome = Outcome(job, inputs, layers, _entries(sources, layers, tensors), model=model_of(sources))
        claims = CombinationClaims(job, sources, outcome.layer_facts, sum(e.data.nbytes for e in outcome.entries))
        facts = RunFacts(coverage(job, sources), spoken(dtype), notes, weights=weights_of(job, sources, dtype))
        return outcome.finish(reader, draft, facts, partial(prove_combination, claims), this)


class LayerMaker:
    """Makes the layers of one job: from factors by numpy, from matrices by torch, which is imported for the first of
    these."""

    def __init__(self, job: AdapterJob, sources: Sources, forms: Sequence[Form], reader: Reader, dtype: str) -> None:
        self.job, self.sources, self.reader, self.dtype = job, sources, reader, dtype
        self.forms = {layer.label: form for layer, form in zip(_layers(sources), forms, strict=True)}
        self.weight = weight_norms(sources, reader)
        self.factored = FactoredMaker(job, sources, self.forms, reader, dtype, self.weight)
        self._general: GeneralMaker | None = None
        self._lock = Lock()
        if job.inputs.device not in ("auto", "cpu"):
            self.general  # noqa: B018  # refuses a device that is not there

    @property
    def general(self) -> GeneralMaker:
        """What makes layers from matrices."""
        with self._lock:
            if self._general is None:
                load_library()
                from .combine_modules import GeneralMaker

                self._general = GeneralMaker(self.job, self.sources, self.forms, self.reader, self.dtype, self.weight)
        return self._general

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how layers were made."""
        return [] if self._general is None else [*self._general.notes]

    def layers(self, begin: Counting, draft: Draft) -> tuple[dict[str, Layer], dict[str, dict[str, Entry]], list[str]]:
        """Return the layers by label, their tensors by slot, and the labels of layers whose change is zero."""
        count = begin("make", weights_of(self.job, self.sources, self.dtype))
        ranks = shared_out(self.job.rules.linear, self._spectra(count)) if self.job.rules.together else {}
        stores_alpha = self.sources.spelling.alpha
        layers, tensors, zeros = dict[str, Layer](), dict[str, dict[str, Entry]](), list[str]()

        def work(target: Target) -> list[LayerTensors | None]:
            if (layers := self.factored.layers_of(target, ranks)) is not None:
                return layers
            general = self.general
            on_one_core()
            return general.layers_of(target, ranks)

        for target, results in zip(self.sources.targets, self._side_by_side(work), strict=True):
            for part, stored in zip(target.stored, results, strict=True):
                if stored is None:
                    zeros.append(part.label)
                    continue
                layers[part.label], entries = stored.layer, dict(stored.entries)
                if stored.layer.rank and stores_alpha:
                    alpha = np.float32(stored.layer.alpha).tobytes()
                    entries["alpha"] = Entry("alpha", "F32", (), memoryview(alpha))
                tensors[part.label] = waiting(entries, draft)
            count(prod(target.shape) * ITEM_BYTES[self.dtype])
        return layers, tensors, zeros

    def _spectra(self, count: Callable[[int], object]) -> Iterator[LayerSpectrum]:
        """Yield the singular values of all layers."""

        def work(target: Target) -> list[LayerSpectrum]:
            some = None if target.vector else self.factored.spectra(target)
            if some is not None:
                return some
            general = self.general
            on_one_core()
            return [*general.spectra(target)]

        for target, spectra in zip(self.sources.targets, self._side_by_side(work), strict=True):
            yield from spectra
            count(prod(target.shape) * ITEM_BYTES[self.dtype])

    def _side_by_side(self, work: Callable[[Target], T]) -> Iterator[T]:
        """Yield the result for each weight."""
        bound = self.job.inputs.max_memory // 2  # the rest: torch, and what waits
        return side_by_side(self.sources.targets, work, partial(_nbytes, self.job), bound)


def _entries(
    sources: Sources, layers: Mapping[str, Layer], tensors: Mapping[str, Mapping[str, Entry]]
) -> list[Entry]:  # fmt: skip
    """Return the tensors of the output in the order of the layers; FitError where two have one name."""
    spelling = sources.spelling
    entries = []
    for target in (part for whole in sources.targets for part in whole.stored):
        if target.label not in layers:
            continue
        for slot, entry in tensors[target.label].items():
            key = spelling.key(target.name, target.parameter, slot, norm=target.norm)
            entries.append(replace(entry, name=key))
    if twice := next(unique(entries), None):
        raise FitError("two layers of the output would have one name", twice, GIVE_BASE)
    return entries
