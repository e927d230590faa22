"""Runs `combine` and `resize`: layer by layer, changes are computed, combined, cut to a rank and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from ..adapters.file import AdapterFile, weight_shape
from ..adapters.suffixes import split
from ..disk.destination import check_output
from ..disk.draft import Draft
from ..disk.hashes import RunningHashes
from ..disk.reader import Reader
from ..dtypes import DTYPES, FLOATS, ITEM_BYTES, spoken
from ..engine.placement import FILE_DTYPES, TORCH_DTYPES
from ..engine.tensors import TensorCache
from ..engine.torch_state import undisturbed
from ..errors import FitError, InputError, UsageError
from ..files.checkpoint import Index
from ..methods import COMBINATIONS
from ..models.names import denoiser_of
from ..planning.recipe import sha256
from ..progress import Progress, Stage, Step, counted
from ..proof.stored import Stored
from ..shapes import Shape
from ..text import Note
from ..version import __version__
from .changes import Evaluator
from .conversion.kept import waiting
from .job import FACTORS, WHOLE, AdapterJob
from .joining.targets import Target
from .layers import Layer, numbers_of
from .making import Maker, most_rank, ranks, weights_of
from .metadata.entries import Known
from .metadata.sizes import PlannedLayer, Tensor, planned_size, tensors_of
from .proof import Claims, prove
from .rank_rules import COUNT, EXACT, SAME
from .report import AdapterReport, numbers_by_block
from .sources import Sources, open_sources
from .truncation.need import note
from .written import Content, Entry, Proof, Spelling, drafted, put, recipe, unique, write

HIGH: Final = 256
"""The rank from which on a note advises a rank rule: most directions of such a sum are small."""


@dataclass(frozen=True)
class Facts:
    """The facts of a report, of a run or of a plan, beside its layers."""

    coverage: Mapping[str, Any]
    dtype: str
    notes: tuple[Note, ...] = ()
    to: str = "keep"  # the dialect
    weights: int = 0  # bytes of the weights whose changes are computed


@dataclass(frozen=True)
class Outcome:
    """The layers that a run has made, before they are written."""

    job: AdapterJob
    inputs: Sequence[Index]  # whose metadata the output keeps, and whose hashes its recipe has
    layers: Mapping[str, Layer]
    entries: Sequence[Entry]
    config: Mapping[str, Any] | None = None  # of a PEFT folder
    model: str = ""  # the stem of the architecture's file; "" where it is unknown
    kept: Mapping[str, str] = field(default_factory=dict)  # entries of the metadata as they are
    made_by: Mapping[str, Any] | None = None  # the recipe, where it is not that of the job

    @cached_property
    def told(self) -> dict[str, dict[str, Any]]:
        """Layer → what the report tells of it."""
        return {name: numbers_of(layer, len(self.job.adapters)) for name, layer in self.layers.items()}

    def finish(
        self, reader: Reader, draft: Draft, facts: Facts, prove: Callable[[Path], Proof], run: Run
    ) -> AdapterReport:
        """Complete the output, prove it, and return the report."""
        run.progress(Step("flush", str(self.job.output)))
        numbers = numbers_by_block(self.told, denoiser_of(self._shapes()))
        residual, tensors = numbers["all"]["residual"], put(self.entries, draft)
        known = Known(self.job, self.inputs, self.told, tensors, self.model)
        entries = known.entries(
            lambda dropped: self.made_by or recipe(self.job, self.inputs, residual, dropped, run.digest), draft.sha256
        )
        entries |= self.kept
        written, proof = write(self.job, reader, draft, Content(tensors, entries, self.config), prove)
        times = run.times()
        return AdapterReport(
            str(self.job.output), facts.to, facts.dtype, facts.coverage, self.told, residual, 1 - residual**2, written,
            sum(times.values()), facts.notes, proof, __version__, facts.weights, numbers, stages=times,
        )  # fmt: skip

    def _shapes(self) -> dict[str, Shape]:
        """Return layer → [out, in] of the weight that it changes, as far as its tensors show it."""
        slots: dict[str, dict[str, Shape]] = {}
        for one in self.entries:
            if found := split(one.name):
                slots.setdefault(found[0], {})[found[1].slot] = one.shape
        return {name: weight_shape(own) for name, own in slots.items()}


class Run:
    """A run that has begun."""

    def __init__(self, job: AdapterJob, progress: Progress) -> None:
        self._watcher, self._output = progress, str(job.output)
        self._began: list[tuple[Stage, float]] = []
        self.digest: Callable[[Path], str] = sha256
        self.progress(Step("load", self._output))

    def progress(self, step: Step) -> None:
        """Pass a step on, and note when its stage began."""
        if not self._began or self._began[-1][0] != step.stage:
            self._began.append((step.stage, time.monotonic()))
        self._watcher(step)

    def times(self) -> dict[str, float]:
        """Return the seconds of each stage until now; one begins where the one before it ends."""
        found: dict[str, float] = {}
        ends = (*(at for _, at in self._began[1:]), time.monotonic())
        for (stage, start), end in zip(self._began, ends, strict=True):
            found[stage] = found.get(stage, 0.0) + end - start
        return found

    def reading(self, stack: ExitStack, indexes: Iterable[Index]) -> Reader:
        """Return the reader of the inputs, which are hashed from now on beside all other work."""
        indexes = [*indexes]
        reader = stack.enter_context(Reader(indexes))
        files = dict.fromkeys(f for index in indexes for f in index.files)
        self.digest = stack.enter_context(RunningHashes(reader, (), [*files])).hexdigest
        return reader

    def counted(self, stage: Stage, total: int) -> Callable[[int], object]:
        """Begin a stage of so many bytes; see `progress.counted`."""
        return counted(self.progress, stage, self._output, total)


@undisturbed()
def run(job: AdapterJob, sources: Sources, this: Run) -> AdapterReport:
    """Run a job whose sources are open: the output appears under its name when it is complete and verified, or not at
    all. `this`: begun before the sources were opened, so that its times include that."""
    files = [p for i in sources.indexes for p in i.files]
    check_output(job.output, files, overwrite=job.inputs.overwrite)
    inputs = [a.index for a in sources.adapters]
    dtype = output_dtype(job, sources.adapters)
    with ExitStack() as stack:
        reader = this.reading(stack, sources.indexes)
        own = frozenset(p for i in inputs for p in i.files)
        base = Stored(reader, sources.inputs.base) if sources.inputs else None
        maker = Maker(job, sources, lambda at: Evaluator(sources, TensorCache(reader, own), at), dtype, base)
        own_layers = planned_layers(job, sources, dtype)
        draft = stack.enter_context(drafted(job, reader, tensors_of(own_layers), inputs, folder=False))
        kept: dict[str, dict[str, Entry]] = {}
        stores_alpha = Spelling.of(sources.adapters[0]).alpha

        def keep(name: str, layer: Layer) -> None:
            alpha = {"alpha": torch.tensor(layer.alpha, dtype=torch.float32)} if layer.rank and stores_alpha else {}
            kept[name] = waiting({**layer.tensors, **alpha}, draft)

        layers, zeros = maker.layers(this.counted, keep)
        if not layers:
            raise InputError("the result changes nothing", str(job.output), "check the adapters and their strengths")
        notes = (*dict.fromkeys(sources.notes), *memory_note(job, sources), *maker.notes, *left_out(zeros))
        highest = max(layer.rank for layer in layers.values())
        if job.rules.linear.name == EXACT and highest > HIGH:
            notes = (*notes, Note(f"the exact sum has rank {highest}; --rank energy:0.999 keeps 99.9% of it"))
        made = Outcome(job, inputs, layers, _entries(sources, layers, kept), model=model_of(sources))
        claims = Claims(job, sources, made.told, sum(e.data.nbytes for e in made.entries))
        facts = Facts(coverage(job, sources), spoken(FILE_DTYPES[dtype]), notes, weights=maker.weights)
        return made.finish(reader, draft, facts, lambda part: prove(claims, reader, part, this.counted), this)


def model_of(sources: Sources) -> str:
    """Return the stem of the architecture's file of the base; "" without a base that is known."""
    known = sources.inputs.names.known if sources.inputs else None
    return known.file.stem if known else ""


def left_out(zeros: Sequence[str]) -> list[Note]:
    """Return the note about layers that change nothing, if there are any."""
    more = " …" if len(zeros) > 3 else ""
    return [Note(f"not written, because their change is zero: {', '.join(zeros[:3])}{more}")] if zeros else []


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers: layers, and ranks where the rule alone tells them."""
    sources = open_sources(job)
    check_output(job.output, [p for i in sources.indexes for p in i.files], overwrite=True)
    dtype = output_dtype(job, sources.adapters)
    layers: dict[str, dict[str, Any]] = {}
    for target in (part for whole in sources.targets for part in whole.stored):
        whole = target.vector or job.algorithm == WHOLE
        rank = 0 if whole else planned_rank(job, target) or 0
        layers[target.label] = {"algorithm": WHOLE if whole else FACTORS, "rank": rank}
    own = planned_layers(job, sources, dtype)
    size = planned_size(own, job.rules.linear)
    notes, weights = (*dict.fromkeys(sources.notes), *memory_note(job, sources)), weights_of(job, sources, dtype)
    facts = Facts(coverage(job, sources), spoken(FILE_DTYPES[dtype]), notes, weights=weights)
    return planned(job, facts, layers, size)


def planned_layers(job: AdapterJob, sources: Sources, dtype: torch.dtype) -> list[PlannedLayer]:
    """Return the tensors of every layer: factors at their highest rank, where the numbers decide it."""
    found, kind, spelling = list[PlannedLayer](), FILE_DTYPES[dtype], Spelling.of(sources.adapters[0])
    for target in (part for whole in sources.targets for part in whole.stored):
        (out, cols), whole = target.matrix, target.vector or job.algorithm == WHOLE
        rank = None if whole else planned_rank(job, target)
        highest = most_rank(target) if rank is None else rank  # what the disk has to hold, where numbers decide
        slots = {"diff": (out, cols)} if whole else {"down": (highest, cols), "up": (out, highest)}
        named: list[Tensor] = [
            (spelling.key(target.name, target.parameter, slot), kind, shape) for slot, shape in slots.items()
        ]
        if spelling.alpha and not whole:
            named.append((spelling.key(target.name, target.parameter, "alpha"), "F32", ()))
        found.append(PlannedLayer(named, 0 if whole else highest))
    return found


def planned(job: AdapterJob, facts: Facts, layers: Mapping[str, Mapping[str, Any]], size: int) -> AdapterReport:
    """Return the report of a plan; `size`: the bytes that it would write."""
    return AdapterReport(str(job.output), facts.to, facts.dtype, facts.coverage, layers, 0.0, 1.0, size, 0.0,
                         facts.notes, None, __version__, facts.weights, planned=True)  # fmt: skip


def memory_note(job: AdapterJob, sources: Sources) -> list[Note]:
    """Return the note about the largest change that is decomposed without factors, if it may exceed the limit."""
    tasks = []
    for target in (part for whole in sources.targets for part in whole.stored):
        rule = job.rules.of_layer(target.name, kernel=len(target.shape) > 2)
        cut = job.algorithm != WHOLE and not target.vector and (rule.name != EXACT or job.command == "resize")
        if cut and not (COMBINATIONS[job.method].linear and None not in ranks(target) and not target.values):
            tasks.append((target.label, target.matrix, rule))
    return note(tasks, job.inputs.max_memory)


def planned_rank(job: AdapterJob, target: Target) -> int | None:
    """Return the rank of a layer, or the most that it can be, where headers tell it."""
    rule = job.rules.of_layer(target.name, kernel=len(target.shape) > 2)
    most = most_rank(target)
    if rule.name == EXACT:
        return most
    if rule.name == SAME:
        return max((r or 0 for r in ranks(target)), default=0) or min(target.matrix)
    return min(most, rule.ceiling or most) if rule.name == COUNT else None


def coverage(job: AdapterJob, sources: Sources, kept: Collection[str] = ()) -> dict[str, Any]:
    """Return, by each adapter's path, how many of its modules change how many layers of the output, and what it holds
    beside them that the output lacks. `kept`: what it has of that."""
    found = {}
    for number, (ref, file) in enumerate(zip(job.adapters, sources.adapters, strict=True)):
        layers = [t for t in sources.targets if any(u.patch.adapter == number for u in t.uses)
                  or any(v[0] == number for v in t.values)]  # fmt: skip
        found[f"{ref.path.name}" if ref.path.name not in found else f"{ref.path.name} ({number + 1})"] = {
            "modules": len(file.modules), "layers": len(layers), "strength": ref.strength,
            "ignored": {key: why for key, why in file.ignored.items() if key not in kept},
        }  # fmt: skip
    return found


def output_dtype(job: AdapterJob, adapters: Sequence[AdapterFile]) -> torch.dtype:
    """Return the dtype of the output: as asked, or the one that holds those of all inputs."""
    if job.inputs.dtype != "keep":
        if DTYPES.get(job.inputs.dtype) not in TORCH_DTYPES:
            raise UsageError(f"an adapter cannot be written in {job.inputs.dtype}", "--dtype", "use fp32, fp16 or bf16")
        return TORCH_DTYPES[DTYPES[job.inputs.dtype]]
    own = {info.dtype for a in adapters for m in a.modules for info in m.slots.values() if info.dtype in FLOATS}
    wide = {d for d in own if ITEM_BYTES[d] > 1}
    if len(own) == 1:
        return TORCH_DTYPES[next(iter(own))]
    if {"F16", "BF16"} <= wide or not wide:
        wide |= {"F32"}
    return TORCH_DTYPES[max(wide, key=lambda d: (ITEM_BYTES[d], d))]


def _entries(
    sources: Sources, layers: Mapping[str, Layer], kept: Mapping[str, Mapping[str, Entry]]
) -> list[Entry]:  # fmt: skip
    """Return the tensors of the output in the order of the layers; FitError where two have one name."""
    spelling = Spelling.of(sources.adapters[0])
    found = []
    for target in (part for whole in sources.targets for part in whole.stored):
        if target.label not in layers:
            continue
        for slot, one in kept[target.label].items():
            key = spelling.key(target.name, target.parameter, slot, norm=target.norm)
            found.append(replace(one, name=key))
    if twice := next(unique(found), None):
        raise FitError("two layers of the output would have one name", twice, "give --base, so that names are known")
    return found
