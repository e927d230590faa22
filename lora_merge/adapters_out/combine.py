"""`combine` and `resize` in the words of the first adapter: their plan and their run.

Layer by layer, changes are computed, combined, cut to a rank and stored. No torch, unless a layer needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np

from ..adapter_options import KEEP
from ..disk.destination import check_output
from ..disk.draft import Draft
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES, spoken
from ..engine.torch_preload import load_library
from ..errors import FitError, InputError
from ..merge_methods import COMBINATIONS
from ..models.part_factors import or_leave_out
from ..progress import Counting, Progress, unwatched
from ..text import Note
from .combination_proof import CombinationClaims, prove_combination
from .decomposition.svd_memory import note
from .dialects import dialect
from .exact_sums import Concatenation, weight_norms
from .form import Form, form_of_layer
from .groups import Target
from .job import GIVE_BASE, AdapterJob
from .metadata.sizes import PlannedLayer, Tensor, factor_shapes, planned_size, tensors_of
from .module_tensors import Layer, LayerTensors, waiting
from .output_file import Entry, drafted, expect_room, unique, unread
from .parallel import on_one_core, side_by_side
from .pipeline import (
    AdapterRun,
    Outcome,
    RunFacts,
    coverage,
    high_rank,
    idle_alpha,
    left_out,
    model_of,
    output_dtype,
    planned,
    weights_of,
)
from .rank_rules import EXACT
from .report import AdapterReport
from .sources import Sources, chosen_of, open_sources, ruled

if TYPE_CHECKING:
    from .combine_modules import GeneralMaker
    from .conversion import Conversion

TRAINED_APART: Final = (
    "the head was trained apart from the embeddings that share its weight in this base, which a sum has no name for"
)


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers: layers, and ranks if headers show them."""
    sources, job = open_sources(job), replace(job, inputs=replace(job.inputs, overwrite=True))
    if (conversion := _in_dialect(job, sources)) is not None:
        from .convert import plan as plan_of_modules

        return plan_of_modules(conversion.job, conversion)
    job = ruled(job, sources)
    check_output(job.output, [p for i in sources.indexes for p in i.files], overwrite=True)
    dtype = output_dtype(job, sources.adapters)
    forms = forms_of(job, sources)
    layers = {layer.label: form.facts for layer, form in zip(_layers(sources), forms, strict=True)}
    size = planned_size(planned_layers(sources, forms, dtype), job.rules.linear, [a.index for a in sources.adapters])
    notes = (*dict.fromkeys(sources.notes), *_memory_note(job, sources, forms),
             *idle_alpha(job, stored=sources.spelling.alpha))  # fmt: skip
    facts = RunFacts(coverage(job, sources), spoken(dtype), notes, weights=weights_of(job, sources, dtype))
    return planned(job, facts, layers, size)


def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Run a job: the output appears under its name when it is complete and verified, or not at all."""
    with AdapterRun(job, progress) as this:
        sources = open_sources(job, this.hash_adapters())
        if (conversion := _in_dialect(job, sources)) is not None:
            from .convert import write

            return write(conversion, this)
        return _write(ruled(job, sources), sources, this)


def _in_dialect(job: AdapterJob, sources: Sources) -> Conversion | None:
    """Return the modules of the output in the dialect that `--format` names, or that the first adapter has where it has
    one module for several weights of the base; None for layers of one weight in the words of the first adapter."""
    name = sources.fused if job.format == KEEP else job.format
    if name == KEEP:
        return None
    to = dialect(name)
    if to is None:
        raise FitError("the first adapter has one module for several weights of this base, in words of no dialect",
                       str(job.adapters[0].path), "name the output's dialect, such as --format kohya")  # fmt: skip
    known = sources.inputs.names.shapes if sources.inputs else {}
    head = next((t.key for t in sources.targets if known and t.key not in known), "")
    if to.folder and head:
        raise FitError(
            TRAINED_APART, head, or_leave_out("give a base that stores both (tie_word_embeddings: false)", [head])
        )
    from .convert import grouped
    from .without_base import without_base

    if job.base is None:
        sources = chosen_of(job, without_base(job, sources.adapters, to))
    return grouped(replace(job, format=to.name, dtype=output_dtype(job, sources.adapters)), sources, to)


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


def _nbytes(job: AdapterJob, target: Target) -> int:
    """Return about how many bytes the change of a weight takes: factors several times, or matrices and what is
    stored."""
    (out, cols), ranks = target.matrix, target.ranks
    factored = COMBINATIONS[job.method].linear and None not in ranks and not target.values
    read = sum(prod(shape) for use in target.uses for shape in use.patch.shapes.values())
    most = min(out, cols, sum(r or 0 for r in ranks))
    return 8 * min(6 * most * (out + cols) if factored else sys.maxsize,
                   (len(target.uses) + 3) * out * cols) + 8 * read  # fmt: skip


def _write(job: AdapterJob, sources: Sources, this: AdapterRun) -> AdapterReport:
    """Write layers in the words of the first adapter."""
    files = [p for i in sources.indexes for p in i.files]
    check_output(job.output, files, overwrite=job.inputs.overwrite)
    inputs = [a.index for a in sources.adapters]
    dtype = output_dtype(job, sources.adapters)
    with ExitStack() as stack:
        if "torch" in sys.modules:  # else its settings are those of its import
            from ..engine.torch_state import undisturbed

            stack.enter_context(undisturbed())
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
        entries = _entries(sources, layers, tensors)
        notes = (*dict.fromkeys(sources.notes), *_memory_note(job, sources, forms), *maker.notes, *left_out(zeros),
                 *idle_alpha(job, stored=sources.spelling.alpha), *high_rank(job, layers.values()),
                 *unread(e.name for e in entries))  # fmt: skip
        outcome = Outcome(job, inputs, layers, entries, model=model_of(sources))
        claims = CombinationClaims(job, sources, outcome.layer_facts, sum(e.data.nbytes for e in entries))
        facts = RunFacts(coverage(job, sources), spoken(dtype), notes, weights=weights_of(job, sources, dtype))
        return outcome.finish(reader, draft, facts, partial(prove_combination, claims), this)


class LayerMaker:
    """Makes the layers of one job: by numpy where factors are put side by side, else by torch, which is imported for
    the first of the others."""

    def __init__(self, job: AdapterJob, sources: Sources, forms: Sequence[Form], reader: Reader, dtype: str) -> None:
        self.job, self.sources, self.reader, self.dtype = job, sources, reader, dtype
        self.forms = {layer.label: form for layer, form in zip(_layers(sources), forms, strict=True)}
        self.weight = weight_norms(sources, reader)
        self.concatenation = Concatenation(job, self.forms, reader, dtype, self.weight)
        self._general: GeneralMaker | None = None
        self._lock = Lock()

    @property
    def general(self) -> GeneralMaker:
        """The way of everything that is not put side by side."""
        with self._lock:
            if self._general is None:
                load_library()
                from .combine_modules import GeneralMaker

                self._general = GeneralMaker(self.job, self.sources, self.forms, self.reader, self.dtype, self.weight)
        return self._general

    @property
    def notes(self) -> Sequence[Note]:
        """The notes on how layers were made."""
        return [] if self._general is None else [*self._general.changes.notes]

    def layers(self, begin: Counting, draft: Draft) -> tuple[dict[str, Layer], dict[str, dict[str, Entry]], list[str]]:
        """Return the layers by label, their tensors by slot, and the labels of layers whose change is zero."""
        count = begin("make", weights_of(self.job, self.sources, self.dtype))
        ranks = self.general.shared_out(count) if self.job.rules.together else {}
        stores_alpha = self.sources.spelling.alpha
        layers, tensors, zeros = dict[str, Layer](), dict[str, dict[str, Entry]](), list[str]()

        def work(target: Target) -> list[LayerTensors | None]:
            if (alone := self.concatenation.layer(target)) is not None:
                return [alone]
            general = self.general
            on_one_core()
            return general.layers_of(target, ranks)

        targets, bound = self.sources.targets, self.job.inputs.max_memory // 2  # the rest: torch, and what waits
        size = partial(_nbytes, self.job)
        for target, results in zip(targets, side_by_side(targets, work, size, bound), strict=True):
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
