"""The way of an adapter job from its opened inputs to its report: modules are grouped, planned or written, proven and
reported. No torch, unless a module needs it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

from ..adapters.modules import AdapterFile, weight_shape
from ..adapters.suffixes import split
from ..algorithms import ALGORITHMS
from ..change_statistics import Groups
from ..disk.destination import check_output
from ..disk.draft import Draft, Heap
from ..disk.files import sha256
from ..disk.hashes import RunningHashes
from ..disk.reader import Reader
from ..disk.uploads import upload_notes
from ..disk.writer import Room
from ..dtypes import DTYPES, FLOATS, ITEM_BYTES, Shape, spoken
from ..engine.torch_preload import load_library
from ..errors import UsageError
from ..files.checkpoint import Index
from ..matching.formula import ALPHA_SETTING
from ..models.architectures import Architecture
from ..models.blocks import adapter_groups, network_of
from ..models.names import Names
from ..options import KEEP
from ..paths import input_name
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Counting, Progress, Stage, Step, counted
from ..text import Note
from ..version import __version__
from .dialects import Dialect
from .factored_modules import Copies, FactoredModules, factored_modules
from .form import Conversion, facts_of, form_of_module, memory_note, planned_modules, without_data
from .groups import OutputModule, Place, components, with_parts
from .input_adapters import InputAdapters
from .job import FACTORS, AdapterJob, algorithm_in, one_rank
from .metadata import OutputMetadata, planned_size
from .module_tensors import Layer, StoredModule, curve, numbers_of
from .output_file import CONTENTS, Content, Entry, Proof, drafted, expect_room, put, recipe, text_of, unread, write
from .output_modules import Maker, bundled, entries_of, module_groups, named, prefix_name, stored_modules, weights_of
from .output_names import output_names
from .peft.config import FAN_IN_FAN_OUT, config, differing_ranks, expect_one, task_type
from .proof import CombinationClaims, ConversionClaims, prove_combination, prove_conversion
from .rank_rules import COUNT, EXACT
from .report import AdapterReport, numbers_by_block

HIGH: Final = 256
"""The rank from which on a note advises a rank rule: most directions of such a sum are small."""

IDLE_ALPHA: Final = (
    "--alpha {alpha:g} has no effect: the output has a format without alpha; its factors contain the whole scale"
)


Prove: TypeAlias = Callable[[Reader, Path, Counting], Proof]
"""Proof of a command: function of a reader of the inputs, the path of the complete output and a counter of bytes."""


@dataclass(frozen=True)
class RunFacts:
    """The facts of a report, of a run or of a plan, without its layers."""

    coverage: Mapping[str, Any]
    dtype: str
    notes: tuple[Note, ...] = ()
    to: str = "keep"  # the dialect
    weights: int = 0  # bytes of the weights whose changes are computed, in fp64


@dataclass(frozen=True)
class Outcome:
    """The layers that a run has made, before they are written."""

    job: AdapterJob
    inputs: Sequence[Index]  # whose metadata the output keeps, and whose hashes its recipe has
    layers: Mapping[str, Layer]
    entries: Sequence[Entry]
    config: Mapping[str, Any] | None = None  # of a PEFT folder
    architecture: Architecture | None = None  # if it is known
    unchanged: Mapping[str, str] = field(default_factory=dict)  # entries of the metadata as they are

    @cached_property
    def layer_facts(self) -> dict[str, dict[str, Any]]:
        """Layer → its facts in the report."""
        count = len(self.job.adapters)
        return {
            name: {"block": self._groups.block(name), **numbers_of(layer, count)} for name, layer in self.layers.items()
        }

    def finish(self, reader: Reader, draft: Draft, facts: RunFacts, prove: Prove, run: AdapterRun) -> AdapterReport:
        """Complete the output, prove it, and return the report."""
        run.progress(Step("flush", self.job.inputs.output_name))
        numbers = numbers_by_block(self.layer_facts, self._groups)
        numbers |= {"curve": points} if (points := curve(self.layers.values())) else {}
        residual, tensors = numbers["all"]["residual"], put(self.entries, draft)
        known = OutputMetadata(self.job, self.inputs, self.layer_facts, tensors, self.architecture)
        entries = known.entries(
            lambda dropped: recipe(self.job, self.inputs, residual, dropped, run.digest), draft.sha256
        )
        entries |= self.unchanged
        written, proof = write(self.job, reader, draft, Content(tensors, entries, self.config),
                               lambda part: prove(reader, part, run.counted))  # fmt: skip
        times, notes = run.times(), (*facts.notes, *upload_notes(self.job.output))
        return AdapterReport(
            self.job.inputs.output_name, facts.to, facts.dtype, facts.coverage, self.layer_facts, residual,
            1 - residual**2, written, sum(times.values()), notes, proof, __version__, facts.weights, numbers,
            stages=times,
        )  # fmt: skip

    @cached_property
    def _groups(self) -> Groups:
        """The parts and the blocks of the layers; their weights have shapes as far as their tensors show them."""
        slots: dict[str, dict[str, Shape]] = {}
        for entry in self.entries:
            if parts := split(entry.name):
                slots.setdefault(parts[0], {})[parts[1].slot] = entry.shape
        return adapter_groups({name: weight_shape(slots.get(name, {})) for name in self.layers})


class AdapterRun:
    """A run that has begun. While it lasts, its inputs are open and are hashed during all other work."""

    def __init__(self, job: AdapterJob, progress: Progress) -> None:
        self._job, self._watcher, self._output = job, progress, job.inputs.output_name
        self._began: list[tuple[Stage, float]] = []
        self._open, self._hashes = ExitStack(), dict[Path, RunningHashes]()
        self.progress(Step("load", self._output))

    def __enter__(self) -> AdapterRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._open.__exit__(kind, e, tb)

    def progress(self, step: Step) -> None:
        """Pass a step on, and note when its stage began."""
        if not self._began or self._began[-1][0] != step.stage:
            self._began.append((step.stage, time.monotonic()))
        self._watcher(step)

    def times(self) -> dict[str, float]:
        """Return the seconds of each stage until now; one begins where the one before it ends."""
        seconds: dict[str, float] = {}
        ends = (*(at for _, at in self._began[1:]), time.monotonic())
        for (stage, start), end in zip(self._began, ends, strict=True):
            seconds[stage] = seconds.get(stage, 0.0) + end - start
        return seconds

    def hash_adapters(self) -> CheckpointCache:
        """Begin to hash the adapters, during the planning, which uses one core; return their headers."""
        opened = CheckpointCache()
        self.reading([opened.index(ref.path) for ref in self._job.adapters])
        return opened

    def reading(self, indexes: Iterable[Index]) -> Reader:
        """Return a reader of inputs. Those that are not hashed yet are hashed from now on."""
        indexes = [*indexes]
        reader = self._open.enter_context(Reader(indexes))
        files = [f for index in indexes for f in index.files if f not in self._hashes]
        if files:
            hashes = self._open.enter_context(RunningHashes(reader, (), files))
            self._hashes |= dict.fromkeys(files, hashes)
        return reader

    def digest(self, file: Path) -> str:
        """Return the SHA-256 of a file."""
        return self._hashes[file].hexdigest(file) if file in self._hashes else sha256(file)

    def name(self, output: Path) -> None:
        """Name the output, which is known only when the inputs are open, in the steps from now on."""
        self._output = str(output)

    def counted(self, stage: Stage, total: int) -> Callable[[int], object]:
        """Begin a stage of so many bytes; see `progress.counted`."""
        return counted(self.progress, stage, self._output, total)


def left_out(zeros: Sequence[Place]) -> list[Note]:
    """Return the note about layers that change nothing, if there are any."""
    names, more = ", ".join(place.name for place in zeros[:3]), " …" if len(zeros) > 3 else ""
    return [Note(f"not written, because their change is zero: {names}{more}")] if zeros else []


def idle_alpha(job: AdapterJob, *, stored: bool) -> list[Note]:
    """Return the note about a number for α that has no effect. `stored`: whether the output has tensors of α."""
    return [] if stored or isinstance(job.alpha, str) else [Note(IDLE_ALPHA.format(alpha=float(job.alpha)))]


def high_rank(job: AdapterJob, layers: Iterable[Layer]) -> list[Note]:
    """Return the note about an exact sum of a high rank."""
    highest = max(layer.rank for layer in layers)
    if not job.command.combines or job.rules.linear.name != EXACT or highest <= HIGH:
        return []
    return [Note(f"the exact sum has rank {highest}; --rank energy:0.999 keeps 99.9 % of it")]


def idle_rank(job: AdapterJob, ranks: Iterable[int | None]) -> list[Note]:
    """Return the note about a rank to cut to that is higher than all. `ranks`: of the output's layers."""
    highest, rule = max(filter(None, ranks), default=0), job.rules.linear
    if not job.command.cuts or rule.name != COUNT or not 0 < highest < rule.value:
        return []
    return [Note(f"no layer has a rank above {highest}: --rank {rule.value:g} leaves the ranks as they are")]


def planned(job: AdapterJob, facts: RunFacts, layers: Mapping[str, Mapping[str, Any]], size: int) -> AdapterReport:
    """Return the report of a plan; `size`: the bytes that it would write."""
    return AdapterReport(job.inputs.output_name, facts.to, facts.dtype, facts.coverage, layers, 0.0, 1.0, size, 0.0,
                         facts.notes, None, __version__, facts.weights, planned=True,
                         disk=Room.at(job.output, size).facts)  # fmt: skip


def coverage(job: AdapterJob, inputs: InputAdapters, written: Collection[str] = ()) -> dict[str, Any]:
    """Return, by each adapter's path, how many of its modules change how many layers of the output, and what else it
    holds that the output lacks. `written`: what it has of that."""
    facts: dict[str, Any] = {}
    for number, (ref, file) in enumerate(zip(job.adapters, inputs.adapters, strict=True)):
        layers = [t for t in inputs.targets if any(u.patch.adapter == number for u in t.uses)
                  or any(v[0] == number for v in t.values)]  # fmt: skip
        name = input_name(ref.path)
        facts[name if name not in facts else f"{name} ({number + 1})"] = {
            "modules": len(file.modules), "layers": len(layers), "strength": ref.strength,
            "ignored": {key: why for key, why in file.ignored.items() if key not in written},
        }  # fmt: skip
    return facts


def output_dtype(job: AdapterJob, adapters: Sequence[AdapterFile]) -> str:
    """Return the dtype of the output as files name it: as asked, or the one that holds those of all inputs."""
    if job.inputs.dtype != "keep":
        if job.inputs.dtype not in DTYPES:
            raise UsageError(f"an adapter cannot be written in {job.inputs.dtype}", "--dtype", "use fp32, fp16 or bf16")
        return DTYPES[job.inputs.dtype]
    stored = {info.dtype for a in adapters for m in a.modules for info in m.slots.values() if info.dtype in FLOATS}
    wide = {d for d in stored if ITEM_BYTES[d] > 1}
    if len(stored) == 1:
        return next(iter(stored))
    if {"F16", "BF16"} <= wide or not wide:
        wide |= {"F32"}
    return max(wide, key=lambda d: (ITEM_BYTES[d], d))


# The modules of a dialect, for all commands that read adapters.


def grouped(job: AdapterJob, inputs: InputAdapters, to: Dialect) -> Conversion:
    """Return the modules of a dialect that changes become; FitError where headers show that it cannot hold one."""
    # Step 1: the dialect of the output.
    to = to.of(inputs.architecture)
    job, to = named(job, to), one_rank(job, to)
    job = replace(job, algorithm=algorithm_in(job.algorithm, to))
    read = [f for index in inputs.indexes for f in index.files]
    check_output(job.output, read, overwrite=job.inputs.overwrite, folder=to.folder, contents=CONTENTS)
    # Step 2: the modules that the dialect can name, with the rows that each changes.
    to, modules, all_modules = output_names(job, inputs.targets, inputs.names, to)
    if job.command.combines:
        modules = [module for group in components(with_parts(inputs.targets, modules)) for module in group]
    else:
        order, last = {id(m): n for n, m in enumerate(inputs.adapters[0].modules)}, len(inputs.adapters[0].modules)
        modules.sort(key=lambda f: min((order.get(id(s.patch.module), last) for s in f.shares), default=last))
    # Step 3: the rule and the form of each module.
    base_names = inputs.names if inputs.base is not None else None
    job = replace(job, rules=job.rules.on(base_names, _layers(base_names, modules)))
    if to.folder:
        expect_one((module.place.component for module in modules), "the adapter changes", job.output)
    forms = {module.place.label: form_of_module(job, to, module) for module in modules}
    return Conversion(job, to, inputs, modules, all_modules, forms)


def _layers(names: Names | None, modules: Sequence[OutputModule]) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield label, network and names of each layer: its keys in the base, without a base the names of its modules."""
    for place, shares, _, parts in modules:
        if names is not None:
            yield place.label, place.component, place.keys
        else:
            patches = [share.patch for share in shares] or [use.patch for part in parts for use in part.uses]
            named = [patch.module.name for patch in patches] or [place.label]
            yield place.label, network_of(named[0]), named


def write_modules(conversion: Conversion, this: AdapterRun) -> AdapterReport:
    """Write the modules of a dialect: the output appears under its name when it is complete and verified, or not at
    all. `this`: begun before the inputs were opened, so that its times include that."""
    with ExitStack() as stack:
        # Step 1: the modules of the output are planned.
        job, to, inputs, modules, all_modules, _ = conversion
        this.name(job.output)
        indexes = [a.index for a in inputs.adapters]
        rows = [row for module in planned_modules(conversion) for row in module.rows(to)]
        exact = job.command.combines and not job.command.cuts and job.rules.all_are(EXACT)
        if exact or not job.ranked:  # else values decide
            expect_room(job, rows)
        # Step 2: the modules are written to the draft: copied, or else computed.
        reader = this.reading(inputs.indexes)
        draft = stack.enter_context(drafted(job, reader, rows, indexes, folder=to.folder))
        factored = factored_modules(conversion, reader) if job.command.combines else None
        if (make := _without_torch(conversion, reader, factored)) is not None:
            writing = stored_modules(module_groups(conversion), make, draft, this.counted)
        else:
            load_library()
            from .matrix_modules import combiner, computed, converter

            with_torch = combiner(conversion, reader, factored) if factored else partial(converter, conversion, reader)
            heap = stack.enter_context(closing(Heap(job.output.parent, job.inputs.max_memory // 4)))
            into = heap if to.folder else draft  # PEFT may ask for other tensors when all are known
            writing = computed(conversion, with_torch, reader, into, this.counted)
        # Step 3: the header, the proof and the report.
        entries = entries_of(to, writing.whole) + writing.embeddings
        folder_config = config(writing.whole, _before(inputs), all_modules) if to.folder else None
        layers = {prefix_name(to, m.place): m.layer for m in writing.changed}
        outcome = Outcome(job, indexes, layers, entries, folder_config, inputs.architecture)
        notes = (*dict.fromkeys(inputs.notes), *_memory_note(conversion), *writing.notes,
                 *left_out(writing.zeros), *_stated_again(job, writing.changed), *differing_ranks(folder_config),
                 *idle_alpha(job, stored=to.alpha), *high_rank(job, layers.values()),
                 *idle_rank(job, (layer.rank for layer in layers.values())),
                 *(unread(e.name for e in entries) if folder_config is None else ()),
                 *dict.fromkeys(note for module in writing.changed for note in module.layer.notes))  # fmt: skip
        dtype = spoken(Counter(e.dtype for e in entries).most_common(1)[0][0])
        covered = coverage(job, inputs, [entry.name for entry in writing.embeddings])
        facts = RunFacts(covered, dtype, notes, to.name, weights_of(job, modules))
        prove = partial(prove_conversion, ConversionClaims(job, inputs, writing.changed))
        if job.command.combines and to.name == KEEP:
            nbytes = sum(entry.data.nbytes for entry in entries)
            prove = partial(prove_combination, CombinationClaims(job, inputs, modules, outcome.layer_facts, nbytes))
        return outcome.finish(reader, draft, facts, prove, this)


def _without_torch(
    conversion: Conversion, reader: Reader, factored: Callable[[], FactoredModules] | None
) -> Callable[[], Maker] | None:  # fmt: skip
    """Return what makes the modules of a file, for one thread, where headers show that all are copies or sums of stored
    factors; None for others."""
    job, to, inputs, modules, _, forms = conversion
    if to.folder or "up_bias" in to.endings or job.inputs.device not in ("auto", "cpu"):
        return None
    if factored is not None:
        return factored if all(map(factored().has, modules)) else None
    copied = all(form.renamed for form in forms.values()) and not bundled(inputs.adapters[0], to)
    return partial(Copies, to, reader) if copied else None


def plan_modules(conversion: Conversion) -> AdapterReport:
    """Return what `write_modules` would do, from headers alone."""
    job, to, inputs, modules, all_modules, forms = conversion
    every = planned_modules(conversion)  # the modules, then what is added to them
    facts = [facts_of(forms[m.place.label], planned, to) for m, planned in zip(modules, every, strict=False)]
    layers = {prefix_name(to, m.place): module_facts for m, module_facts in zip(modules, facts, strict=True)}
    rows = [(module.rank, module.rows(to)) for module in every]
    size = planned_size(rows, job.rules.linear, [a.index for a in inputs.adapters])
    folder_config = None
    if to.folder:
        kinds = [*(str(module_facts["algorithm"]) for module_facts in facts), *[FACTORS] * (len(every) - len(facts))]
        modules_without_data = [without_data(module, kind, to) for module, kind in zip(every, kinds, strict=True)]
        folder_config = config(modules_without_data, _before(inputs), all_modules)
        size += len(text_of(folder_config))
    kinds_of_tensors = Counter(kind for module in every for _, (kind, _) in sorted(module.tensors.items()))
    dtype = spoken(kinds_of_tensors.most_common(1)[0][0])
    notes = (*dict.fromkeys(inputs.notes), *_memory_note(conversion), *differing_ranks(folder_config),
             *idle_alpha(job, stored=to.alpha), *idle_rank(job, (row["rank"] for row in facts)))  # fmt: skip
    return planned(job, RunFacts(coverage(job, inputs), dtype, notes, to.name, weights_of(job, modules)), layers, size)


def _memory_note(conversion: Conversion) -> list[Note]:
    """Return the note about the largest change that is decomposed without factors, if it may exceed the limit."""
    forms, places = conversion.forms, (module.place for module in conversion.modules)
    layers = ((place.label, place.view.matrix, forms[place.label]) for place in places)
    return memory_note(layers, conversion.job.inputs.max_memory)


def _before(inputs: InputAdapters) -> Mapping[str, Any]:
    """Return the configuration of the first adapter, with the task of the base's model if it lacks one."""
    before, base = inputs.adapters[0].index.config, inputs.base
    stated = {**before, FAN_IN_FAN_OUT: base is None and before.get(FAN_IN_FAN_OUT) is True}  # else the base states it
    return stated if before.get("task_type") else {**stated, "task_type": task_type(base.config if base else {})}


def _stated_again(job: AdapterJob, modules: Sequence[StoredModule]) -> list[Note]:
    """Return the note about settings that the user stated and that copied tensors do not hold."""
    stated, needed = dict(job.inputs.setting), set()
    for module in modules:
        if module.copied:
            needed |= stated.keys() & ALGORITHMS[module.layer.algorithm].settings.keys()
            needed |= {ALPHA_SETTING} & stated.keys() if ".alpha" not in module.tensors else set()
    again = " ".join(f"--setting {name}={stated[name]}" for name in sorted(needed))
    return [Note(f"state {again} again when the output is merged or converted")] if again else []
