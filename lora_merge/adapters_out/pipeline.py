"""A run that writes an adapter: its times and hashes, the facts of its report, and how its output is completed. No
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

from ..adapters.modules import AdapterFile, weight_shape
from ..adapters.suffixes import split
from ..change_statistics import Groups
from ..disk.draft import Draft
from ..disk.files import sha256
from ..disk.hashes import RunningHashes
from ..disk.reader import Reader
from ..disk.uploads import upload_notes
from ..disk.writer import Room
from ..dtypes import DTYPES, FLOATS, ITEM_BYTES, Shape
from ..errors import UsageError
from ..files.checkpoint import Index
from ..models.blocks import adapter_groups
from ..paths import input_name
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Counting, Progress, Stage, Step, counted
from ..text import Note
from ..version import __version__
from .groups import Place
from .job import AdapterJob
from .metadata import Known
from .module_tensors import Layer, curve, numbers_of
from .output_file import Content, Entry, Proof, put, recipe, write
from .rank_rules import COUNT, EXACT
from .report import AdapterReport, numbers_by_block
from .sources import Sources

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
    model: str = ""  # the stem of the architecture's file; "" where it is unknown
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
        known = Known(self.job, self.inputs, self.layer_facts, tensors, self.model)
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


def model_of(sources: Sources) -> str:
    """Return the stem of the architecture's file of the base; "" without a base that is known."""
    known = sources.inputs.names.known if sources.inputs else None
    return known.file.stem if known else ""


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


def coverage(job: AdapterJob, sources: Sources, written: Collection[str] = ()) -> dict[str, Any]:
    """Return, by each adapter's path, how many of its modules change how many layers of the output, and what else it
    holds that the output lacks. `written`: what it has of that."""
    facts: dict[str, Any] = {}
    for number, (ref, file) in enumerate(zip(job.adapters, sources.adapters, strict=True)):
        layers = [t for t in sources.targets if any(u.patch.adapter == number for u in t.uses)
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
