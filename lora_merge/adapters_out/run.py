"""Runs `combine` and `resize`: layer by layer, changes are computed, combined, cut to a rank and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod, sqrt
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..adapters.file import AdapterFile
from ..algorithms import ALGORITHMS
from ..disk.destination import check_output
from ..disk.reader import Reader
from ..disk.spool import Heap
from ..dtypes import DTYPES, FLOATS, ITEM_BYTES
from ..engine.devices import place
from ..engine.placement import FILE_DTYPES, TORCH_DTYPES
from ..engine.tensors import TensorCache
from ..engine.torch_state import undisturbed
from ..errors import FitError, InputError, TooLarge, UsageError
from ..files.checkpoint import Index
from ..methods import ADDED, COMBINATIONS, UNDIRECTED
from ..planning.combining import Combining
from ..progress import Counting, Progress, Stage, Step, counted, unwatched
from ..version import __version__
from .changes import Evaluator
from .job import FACTORS, WHOLE, AdapterJob
from .layers import Cut, Layer, Storage, Wanted, combine, numbers_of, shared_out
from .proof import Claims, prove
from .rank_rules import COUNT, EXACT, SAME
from .report import AdapterReport
from .sources import Sources, Target, open_sources
from .truncation.factored import STORED_IN_16
from .written import Content, Entry, Proof, Spelling, metadata, unique, write

HIGH: Final = 256
"""The rank from which on a note advises a rank rule: most directions of such a sum are small."""


@dataclass(frozen=True)
class Facts:
    """What a report of a run or of a plan tells beside its layers."""

    coverage: Mapping[str, Any]
    dtype: str
    notes: tuple[str, ...] = ()
    to: str = "keep"  # the dialect


@dataclass(frozen=True)
class Outcome:
    """The layers that a run has made, before they are written."""

    job: AdapterJob
    inputs: Sequence[Index]  # whose metadata the output keeps, and whose hashes its recipe has
    layers: Mapping[str, Layer]
    entries: Sequence[Entry]
    config: Mapping[str, Any] | None = None  # of a PEFT folder

    @cached_property
    def told(self) -> dict[str, dict[str, Any]]:
        """Layer → what the report tells of it."""
        return {name: numbers_of(layer) for name, layer in self.layers.items()}

    def finish(self, reader: Reader, facts: Facts, prove: Callable[[Path], Proof], run: Run) -> AdapterReport:
        """Write the output, prove it, and return the report."""
        squares, lost = (sum(getattr(layer, what) for layer in self.layers.values()) for what in ("squares", "lost"))
        residual = sqrt(lost / squares) if squares else 0.0
        entries = metadata(self.job, self.inputs, [*self.told.values()], residual)
        written, proof = write(self.job, reader, Content(self.entries, entries, self.config), prove, run.progress)
        return AdapterReport(
            str(self.job.output), facts.to, facts.dtype, facts.coverage, self.told, residual, 1 - residual**2, written,
            time.monotonic() - run.started, facts.notes, proof, __version__,
        )  # fmt: skip


class Run:
    """A run that has begun."""

    def __init__(self, job: AdapterJob, progress: Progress) -> None:
        self.started, self.progress = time.monotonic(), progress
        self._output = str(job.output)
        progress(Step("load", self._output))

    def counted(self, stage: Stage, total: int) -> Callable[[int], object]:
        """Begin a stage of so many bytes; see `progress.counted`."""
        return counted(self.progress, stage, self._output, total)


@undisturbed()
def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Run a job: the output appears under its name when it is complete and verified, or not at all."""
    this = Run(job, progress)
    sources = open_sources(job)
    files = [p for i in sources.indexes for p in i.files]
    check_output(job.output, files, overwrite=job.inputs.overwrite, spared=files)
    inputs = [a.index for a in sources.adapters]
    dtype = output_dtype(job, sources.adapters)
    with ExitStack() as stack:
        reader = stack.enter_context(Reader(sources.indexes))
        cache = TensorCache(reader, frozenset(p for i in inputs for p in i.files))
        maker = Maker(job, sources, Evaluator(sources, cache, place("cpu", "F64")), dtype)
        heap = stack.enter_context(closing(Heap(job.output.parent, job.inputs.max_memory // 4)))
        kept: dict[str, dict[str, Entry]] = {}
        layers, zeros = maker.layers(this.counted, lambda name, layer: kept.update({name: waiting(layer, heap)}))
        if not layers:
            raise InputError("the result changes nothing", str(job.output), "check the adapters and their strengths")
        notes = (*dict.fromkeys(sources.notes), *maker.notes, *left_out(zeros))
        highest = max(layer.rank for layer in layers.values())
        if job.rules.linear.name == EXACT and highest > HIGH:
            notes = (*notes, f"the exact sum has rank {highest}; --rank energy:0.999 keeps 99.9 % of it")
        made = Outcome(job, inputs, layers, _entries(sources, layers, kept))
        claims = Claims(job, sources, made.told, sum(e.data.nbytes for e in made.entries))
        facts = Facts(coverage(job, sources), FILE_DTYPES[dtype], notes)
        return made.finish(reader, facts, lambda part: prove(claims, reader, part, this.counted), this)


def left_out(zeros: Sequence[str]) -> list[str]:
    """Return the note about layers that change nothing, if there are any."""
    more = " …" if len(zeros) > 3 else ""
    return [f"not written, because their change is zero: {', '.join(zeros[:3])}{more}"] if zeros else []


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers: layers, and ranks where the rule alone tells them."""
    sources = open_sources(job)
    check_output(job.output, overwrite=True, spared=[p for i in sources.indexes for p in i.files])
    dtype = output_dtype(job, sources.adapters)
    layers: dict[str, dict[str, Any]] = {}
    size = 0
    for target in sources.targets:
        rank = planned_rank(job, target)
        out, cols = target.matrix
        whole = len(target.shape) < 2 or job.algorithm == WHOLE
        layers[target.label] = {"algorithm": WHOLE if whole else FACTORS, "rank": 0 if whole else rank or 0}
        highest = most_rank(target) if rank is None else rank  # what the disk has to hold, where numbers decide
        size += (out * cols if whole else (out + cols) * highest) * dtype.itemsize
    facts = Facts(coverage(job, sources), FILE_DTYPES[dtype], tuple(dict.fromkeys(sources.notes)))
    return planned(job, facts, layers, size)


def planned(job: AdapterJob, facts: Facts, layers: Mapping[str, Mapping[str, Any]], size: int) -> AdapterReport:
    """Return the report of a plan; `size`: the bytes that it would write."""
    return AdapterReport(str(job.output), facts.to, facts.dtype, facts.coverage, layers, 0.0, 1.0, size, 0.0,
                         facts.notes, None, __version__, planned=True)  # fmt: skip


def planned_rank(job: AdapterJob, target: Target) -> int | None:
    """Return the rank of a layer, or the most that it can be, where headers tell it."""
    rule = job.rules.of_layer(target.name, kernel=len(target.shape) > 2)
    most = most_rank(target)
    if rule.name == EXACT:
        return most
    if rule.name == SAME:
        return max((r or 0 for r in _ranks(target)), default=0) or min(target.matrix)
    return min(most, rule.ceiling or most) if rule.name == COUNT else None


def most_rank(target: Target) -> int:
    """Return the highest rank that the change of a layer can have."""
    ranks, short = _ranks(target), min(target.matrix)
    return min(short, sum(r or 0 for r in ranks)) if ranks and None not in ranks else short


def _ranks(target: Target) -> list[int | None]:
    """Return the rank of each change of a layer; None for one that is not a product of factors."""
    found = []
    for use in target.uses:
        low = ALGORITHMS[use.patch.algorithm].low_rank
        found.append(low.rank(use.patch.shapes, use.patch.view.shape) if low and use.patch.magnitude is None else None)
    return found


def coverage(job: AdapterJob, sources: Sources) -> dict[str, Any]:
    """Return, by each adapter's path, how many of its modules change how many layers of the output."""
    found = {}
    for number, (ref, file) in enumerate(zip(job.adapters, sources.adapters, strict=True)):
        layers = [t for t in sources.targets if any(u.patch.adapter == number for u in t.uses)
                  or any(v[0] == number for v in t.values)]  # fmt: skip
        found[f"{ref.path.name}" if ref.path.name not in found else f"{ref.path.name} ({number + 1})"] = {
            "modules": len(file.modules), "layers": len(layers), "strength": ref.strength,
            "ignored": dict(file.ignored),
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


@dataclass
class Maker:
    """Makes the layers of one job."""

    job: AdapterJob
    sources: Sources
    evaluator: Evaluator
    dtype: torch.dtype

    def __post_init__(self) -> None:
        stored = [i.dtype for a in self.sources.adapters for m in a.modules for i in m.slots.values()]
        self.noise = STORED_IN_16 if stored and all(ITEM_BYTES.get(d, 4) <= 2 for d in stored) else 0.0
        self.combining = Combining(COMBINATIONS[self.job.method], self.job.numbers, self.sources.adapters)
        self.notes: list[str] = []

    def layers(self, begin: Counting, keep: Callable[[str, Layer], object]) -> tuple[dict[str, Layer], list[str]]:
        """Return the layers by label, without their tensors, which `keep` is given; and the labels of those whose
        change is zero."""
        together, numbers = self.job.rules.together, sum(prod(t.shape) for t in self.sources.targets)
        told = begin("make", numbers * self.dtype.itemsize * (1 + together))
        ranks = self._shared_out(told) if together else {}
        found: dict[str, Layer] = {}
        zeros = []
        for target in self.sources.targets:
            name = target.label
            layer = self._made(target, ranks.get(name))
            if layer is None:
                zeros.append(name)
            else:
                keep(name, layer)
                found[name] = replace(layer, tensors={})
            self._next(target, told)
        return found, zeros

    def _made(self, target: Target, rank: int | None) -> Layer | None:
        """Return the layer of a weight; None where its change is zero."""
        wanted = self._wanted(target)
        if wanted is None or wanted.squares <= 0:
            return None
        layer = self._layer(target, wanted, rank)
        if any(not bool(torch.isfinite(t).all()) for t in layer.tensors.values()):
            raise TooLarge("a number is too large for the dtype of the output", f"{self.job.output}: {target.label}",
                           "write it with --dtype fp32 or bf16")  # fmt: skip
        return None if layer.algorithm == FACTORS and not layer.rank else layer

    def _next(self, target: Target, told: Callable[[int], object]) -> None:
        """Report a weight as done, and forget what was read for it."""
        told(prod(target.shape) * self.dtype.itemsize)
        self.evaluator.forget()

    def _wanted(self, target: Target) -> Wanted | None:
        changes = [c for c in self.evaluator.changes(target) if c.strength]
        uses = [[u for u in target.uses if u.patch.adapter == c.adapter] for c in changes]
        seeds = [self.combining.seed(c.adapter, own) for c, own in zip(changes, uses, strict=True)]
        if len(target.shape) < 2 and self.job.method in UNDIRECTED:
            text = f"{self.job.method}: {ADDED}"
            self.notes += [] if text in self.notes else [text]
        return combine(self.job, target, changes, seeds) if changes else None

    def _layer(self, target: Target, wanted: Wanted, rank: int | None) -> Layer:
        rule = self.job.rules.of_layer(target.name, kernel=_has_kernel(target))
        if self.job.command == "resize" and rule.name == EXACT:
            rule = replace(rule, name="energy", value=1.0)
        storage = Storage(self.job.algorithm, self.dtype, self.noise)
        layer = storage.layer(target, wanted, Cut(rule, rank))
        alpha = self._alpha(target, layer.rank) if layer.rank else None
        return layer if alpha is None else storage.layer(target, wanted, Cut(rule, rank, alpha))

    def _alpha(self, target: Target, rank: int) -> float | None:
        """Return α of a layer; None where it equals the rank."""
        if not isinstance(self.job.alpha, str):
            return float(self.job.alpha)
        if self.job.alpha == "rank" or len(target.uses) != 1:
            return None
        patch = target.uses[0].patch
        scale = patch.numbers.get("scale")
        plain = ALGORITHMS[patch.algorithm].rank is not None and {"up", "down"} <= patch.shapes.keys()
        return rank * scale if plain and scale and scale > 0 and patch.magnitude is None else None

    def _shared_out(self, told: Callable[[int], object]) -> dict[str, int]:
        """Return the rank of every layer for the rule `size`."""
        return shared_out(self.job.rules.linear, self._matrices(told), self.dtype.itemsize, self.noise)

    def _matrices(self, told: Callable[[int], object]) -> Iterator[tuple[str, Wanted]]:
        for target in self.sources.targets:
            wanted = self._wanted(target) if len(target.shape) > 1 else None
            if wanted is not None:
                yield target.label, wanted
            self._next(target, told)


def _has_kernel(target: Target) -> bool:
    return any(n > 1 for n in target.shape[2:])


def waiting(layer: Layer, heap: Heap) -> dict[str, Entry]:
    """Return the tensors of a layer by their slots; their bytes wait."""
    made = {slot: entry(slot, tensor) for slot, tensor in layer.tensors.items()}
    return {slot: replace(e, data=heap.put(e.data)) for slot, e in made.items() if isinstance(e.data, memoryview)}


def _entries(
    sources: Sources, layers: Mapping[str, Layer], kept: Mapping[str, Mapping[str, Entry]]
) -> list[Entry]:  # fmt: skip
    """Return the tensors of the output in the order of the layers; FitError where two have one name."""
    spelling = Spelling.of(sources.adapters[0])
    found = []
    for target in sources.targets:
        layer = layers.get(target.label)
        if layer is None:
            continue
        tensors = dict(kept[target.label])
        odd = layer.alpha is not None and layer.alpha != layer.rank
        if layer.rank and (spelling.alpha or odd):
            tensors["alpha"] = entry("alpha", torch.tensor(layer.alpha, dtype=torch.float32))
        for slot in sorted(tensors):
            found.append(replace(tensors[slot], name=spelling.key(target.name, target.parameter, slot)))
    if twice := next(unique(found), None):
        raise FitError("two layers of the output would have one name", twice, "give --base, so that names are known")
    return found


def entry(name: str, tensor: Tensor) -> Entry:
    """Return a tensor as it is written."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return Entry(name, FILE_DTYPES[tensor.dtype], tuple(tensor.shape), memoryview(raw))  # type: ignore[arg-type]
