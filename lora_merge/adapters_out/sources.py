"""The changes that meet on each weight: the modules of all adapters, joined by the base or by their names. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

from ..adapters.file import AdapterFile, FileValues, Module
from ..adapters.peft.rules import rules
from ..algorithms import ALGORITHMS, Shape, flat
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..errors import FitError, ShapeMismatch, UsageError
from ..files.checkpoint import Index
from ..job import Adapter
from ..matching.choose import choose
from ..matching.context import AdapterContext
from ..matching.incomplete import gaps, incomplete
from ..matching.patch import Match, PatchPart
from ..models.chosen import Chosen
from ..models.module_blocks import network_of
from ..models.weights import RowSlice, Weight, whole
from ..planning.cache import CheckpointCache
from ..planning.make_plan import Inputs, match, open_inputs
from ..planning.plan import weights
from ..text import listed, plural
from .job import AdapterJob
from .joining.names import GIVE_BASE, body_of, check_joined, shape_of, styles_of

NO_SHAPE: Final = "the shape of a weight is not in the adapter's file"


class Part(NamedTuple):
    """Rows of a weight that are a module of their own in the adapters, such as q of a fused qkv."""

    name: str
    parameter: str
    start: int
    rows: int


@dataclass(frozen=True)
class Target:
    """One weight of the model with everything that changes it. `name` and `parameter` are its name in the output."""

    name: str
    parameter: str
    shape: Shape
    uses: tuple[PatchPart, ...]
    values: tuple[tuple[int, StoredTensor, float], ...] = ()  # (adapter, new value of the whole weight, strength)
    key: str = ""  # in the base
    parts: tuple[Part, ...] = ()  # as which the change is stored; (): as one
    first: int = 0  # the row of the base's weight with which it begins

    @property
    def stored(self) -> tuple[Target, ...]:
        """The layers of the output that the change of the weight becomes."""
        return tuple(
            replace(self, name=p.name, parameter=p.parameter, shape=(p.rows, *self.shape[1:]), parts=(), first=p.start,
                    uses=tuple(use for use in self.uses if use.piece.start == p.start))
            for p in self.parts
        ) or (self,)  # fmt: skip

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) as the uses see the weight; stacked experts [E, out, in] are E·out rows."""
        cols = self.uses[0].piece.cols if self.uses else 0
        return (prod(self.shape) // cols, cols) if cols else flat(self.shape)

    @property
    def stacked(self) -> bool:
        """Whether the weight is that of several experts."""
        return self.matrix != flat(self.shape)

    @property
    def vector(self) -> bool:
        """Whether it has no factors: one axis, or a bias of any shape, such as [1, out, 1, 1]."""
        return len(self.shape) < 2 or self.parameter == "bias"

    @property
    def label(self) -> str:
        """The name of the layer for reports."""
        return self.name if self.parameter == "weight" else f"{self.name}.{self.parameter}"


@dataclass(frozen=True)
class Sources:
    """All weights that the adapters of a job change, with what is needed to read them."""

    adapters: tuple[AdapterFile, ...]
    targets: tuple[Target, ...]
    weights: Mapping[str, Weight]
    indexes: tuple[Index, ...]
    notes: tuple[str, ...] = ()
    architecture: str = ""
    inputs: Inputs | None = None  # with the base and its names; None where names alone join the adapters


def open_sources(job: AdapterJob, opened: CheckpointCache | None = None) -> Sources:
    """Return the weights that the job's adapters change, from headers; errors as for `merge`. `opened`: checkpoints
    that are open already."""
    opened = opened or CheckpointCache()
    found = on_base(open_inputs(job.inputs, opened, merged=False)) if job.base else _without_base(job, opened)
    return chosen_of(job, found)


def chosen_of(job: AdapterJob, sources: Sources) -> Sources:
    """Return the sources with the weights that `--include` and `--exclude` choose, and a note of how many they leave;
    without a base, names and networks are those of the modules."""
    chosen = Chosen(job.include, job.exclude)
    if not chosen:
        return sources
    named = []
    for target in sources.targets:
        modules = (target.name, *(u.patch.module.name for u in target.uses))
        real = sources.inputs if job.base is not None else None
        named.append((real.names.component(target.key), (target.key,)) if real else (network_of(target.name), modules))
    labels = {label for label, _ in named}
    if job.base is not None and sources.inputs:
        chosen.on_base(sources.inputs.names)
    else:
        chosen.by_prefix(labels)
    chosen.check(labels, "the adapter")
    kept = tuple(t for t, (label, names) in zip(sources.targets, named, strict=True) if chosen.takes(label, names))
    if not kept:
        raise UsageError("no module is chosen", "--include and --exclude", "choose other parts of the model")
    left = len(sources.targets) - len(kept)
    note = [f"left out by --include and --exclude: {plural(left, 'weight')}"] if left else []
    return replace(sources, targets=kept, notes=(*sources.notes, *note))


def reshaped(key: str) -> FitError:
    """Return the error for a weight of the base to which an adapter gives another shape."""
    what = "an adapter gives a weight another shape, which a file of an adapter cannot say"
    return FitError(what, key, "merge it into the base instead")


def on_base(inputs: Inputs, *, stored: bool = True, every_setting: bool = True) -> Sources:
    """Join by the weights of the base: every dialect, fused or split names, and formulas that read the base.

    `stored`: whether the base is a checkpoint whose weights can be read. `every_setting`: whether a setting that no
    formula uses is a mistake.
    """
    matched = match(inputs, every_setting=every_setting)
    base, found = matched.inputs.base, matched.adapters
    if grown := sorted({key for one in found for key in one.grown}):
        raise reshaped(grown[0])
    own = weights(base, found)
    names = Naming(found, base)
    keys = [k for k in own if any(k in one.uses or k in one.replaced for one in found)]
    targets = []
    for key in keys:
        uses = tuple(use for one in found for use in one.uses.get(key, ()))
        values = tuple((n, one.replaced[key], 1.0) for n, one in enumerate(found) if key in one.replaced)
        module, _, parameter = key.rpartition(".")
        targets.append(
            Target(
                names.of(module),
                parameter,
                own[key].shape,
                uses,
                values,
                key,
                names.parts(own[key].shape, uses, values),
            )
        )
    notes = tuple(note for one in found for note in (*one.adapter.notes, *one.notes))
    indexes = (*([base] if stored else []), *(m.adapter.index for m in found))
    return Sources(inputs.adapters, tuple(targets), own, indexes, notes, inputs.names.architecture, inputs)


class Naming:
    """Names for modules in the words of the first adapter: its own, or made as its own are made."""

    def __init__(self, found: Sequence[Match], base: Index) -> None:
        self.own: dict[str, str] = {}
        self.pairs: dict[tuple[str, str, bool], int] = {}
        for one in reversed(found):
            for key, uses in one.uses.items():
                for use in uses:
                    if use.patch.view.row_slices == (use.piece,) and whole_of(use.piece, base.tensors.get(key)):
                        self.own[key.rpartition(".")[0]] = use.patch.module.name
        first = {u.patch.module.name for uses in found[0].uses.values() for u in uses} if found else set()
        for module, name in self.own.items():
            if name in first:
                pair = common_end(module, name)
                self.pairs[pair] = self.pairs.get(pair, 0) + 1
        self.own = {module: name for module, name in self.own.items() if name in first}
        self.styles = frozenset(style for name in first for style in styles_of(name))

    def parts(self, shape: Shape, uses: Sequence[PatchPart], values: Sequence[object]) -> tuple[Part, ...]:
        """Return the modules that are rows of a weight in the adapters' words; () for a weight that is one module
        there, and where they have no such parts, or not in the words of the first adapter."""
        found: dict[int, Part] = {}
        for use in uses:
            module, piece = use.patch.module, use.piece
            part = Part(module.name, module.parameter, piece.start, piece.stop - piece.start)
            plain = use.patch.view.row_slices == (piece,) and not piece.transposed and len(use.patch.view.shape) <= 2
            other = found.setdefault(piece.start, part)
            if (
                not plain
                or other.rows != part.rows
                or (part.rows,) == (shape or (1,))[:1]
                or not styles_of(part.name) & self.styles
            ):
                return ()
        ordered = [found[start] for start in sorted(found)]
        apart = all(a.start + a.rows <= b.start for a, b in pairwise(ordered))
        return tuple(ordered) if apart and not values and len(shape) <= 2 else ()

    def of(self, module: str) -> str:
        """Return the output's name of a module of the base."""
        if module in self.own:
            return self.own[module]
        fitting = [p for p in self.pairs if module.startswith(p[0])]
        if not fitting:
            return module
        start, prefix, flat = max(fitting, key=lambda p: (len(p[0]), self.pairs[p]))
        body = module[len(start) :]
        return prefix + (body.replace(".", "_") if flat else body)


def whole_of(piece: RowSlice, info: StoredTensor | None) -> bool:
    """Return whether a row slice is a whole stored tensor."""
    return info is not None and piece.start == 0 and piece.size == prod(info.shape)


def common_end(module: str, name: str) -> tuple[str, str, bool]:
    """Return (what only the base's name begins with, what only the adapter's does, whether dots became underscores)."""
    flat = "." in module and "." not in name.rpartition("lora_")[2]
    shown = module.replace(".", "_") if flat else module
    n = 0
    while n < min(len(shown), len(name)) and shown[-1 - n] == name[-1 - n]:
        n += 1
    while n and module[len(module) - n - 1 : len(module) - n] not in ("", "."):  # begin with a whole level
        n -= 1
    return module[: len(module) - n], name[: len(name) - n], flat


def _without_base(job: AdapterJob, opened: CheckpointCache) -> Sources:
    """Join by names without their prefixes; only formulas that do not read the base, of shapes that files show."""
    files = tuple(opened.adapter(ref.path) for ref in job.adapters)
    joined: dict[tuple[str, str], list[tuple[int, Module]]] = {}
    for number, file in enumerate(files):
        check_complete(file)
        if file.strange:
            raise UsageError("an adapter replaces whole tensors of the base", f"{file.path}: {file.strange[0].name}",
                             GIVE_BASE)  # fmt: skip
        for module in file.modules:
            joined.setdefault((body_of(module.name), module.parameter), []).append((number, module))
    check_joined(joined, files)
    kept, targets, remarks = CheckpointWeights(), [], dict[str, dict[str, None]]()
    with Reader(f.index for f in files) as reader:
        contexts = [_context(n, f, FileValues(reader)) for n, f in enumerate(files)]
        for (body, parameter), members in joined.items():
            name = members[0][1].name
            target, said = _joined_target(name, parameter, members, contexts, job.adapters)
            for where, text in said:
                remarks.setdefault(text, {})[where] = None
            kept.add(f"{body}.{parameter}", target)
            targets.append(target)
    notes = (*(note for f in files for note in f.notes), *(f"{listed(m, 2)}: {text}" for text, m in remarks.items()))
    return Sources(files, tuple(targets), kept.weights, tuple(f.index for f in files), notes)


class CheckpointWeights:
    """Stands in for a base that was not given: the shapes of its weights are known, their values are not."""

    def __init__(self) -> None:
        self.weights: dict[str, Weight] = {}

    def add(self, key: str, target: Target) -> None:
        """Remember the shape of a target's weight."""
        info = next(iter(target.uses[0].patch.module.slots.values()))
        self.weights[key] = Weight(target.shape, StoredTensor(key, info.dtype, target.shape, info.source, 0, 0))


def _context(number: int, file: AdapterFile, values: FileValues) -> AdapterContext:
    found = rules(file.index.config, str(file.path), file.index.metadata)
    return AdapterContext(number, file, found, values)


def _joined_target(
    name: str, parameter: str, members: Sequence[tuple[int, Module]], contexts: Sequence[AdapterContext],
    refs: Sequence[Adapter],
) -> tuple[Target, list[tuple[str, str]]]:  # fmt: skip
    """Return the change of one parameter by all adapters, and a module and a sentence for each remark on them."""
    shape = next(filter(None, (shape_of(m) for _, m in members)), None)
    if shape is None:
        raise UsageError(NO_SHAPE, f"{contexts[0].adapter.path}: {name}", GIVE_BASE)
    view, uses, said = whole(f"{body_of(name)}.{parameter}", shape), [], []
    for number, module in members:
        context = contexts[number]
        try:
            patch, remarks, _ = choose(module, view, context, {parameter: view})
        except ShapeMismatch as e:
            raise FitError(e.what, e.where, "these adapters are for different models") from e
        if patch.reads_base or patch.beside or ALGORITHMS[patch.algorithm].is_rebuilt(patch.shapes):
            raise UsageError(f"ΔW of {patch.algorithm if patch.magnitude is None else 'DoRA'} depends on the base",
                             f"{context.adapter.path}: {module.where}", GIVE_BASE)  # fmt: skip
        if refs[number].parts:
            raise UsageError("parts of a model are known from its base", f"--strength-for {refs[number].parts[0][0]}",
                             GIVE_BASE)  # fmt: skip
        uses.append(PatchPart(patch, patch.view.row_slices[0], 0, refs[number].strength))
        said += [(module.where, text) for text in remarks]
    return Target(name, parameter, shape, tuple(uses)), said


def check_complete(file: AdapterFile) -> None:
    """Raise InputError if a module lacks a tensor that the others have."""
    lacking = gaps(file.modules, rules(file.index.config, str(file.path), file.index.metadata))
    for where, gap in lacking.items():
        raise incomplete(f"{where} has no {gap.key}", file.path)
