"""How an output is named: the dialect of its tensors, and the modules of the base in its words. That is a dialect of a
program, or the one of the first adapter: its own names and endings, or made as its own are. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

from ..adapters.modules import AdapterFile, Module
from ..adapters.network_settings import rules_of
from ..adapters.suffixes import split_parameter
from ..dtypes import StoredTensor
from ..errors import AmbiguousName, FitError
from ..files.checkpoint import Index
from ..files.folder_layouts import PEFT_PREFIX
from ..matching.patch import Match
from ..models.names import Names
from ..models.prefixes import prefixed
from ..models.weights import RowSlice, WeightView, whole
from ..options import KEEP
from ..text import shown
from .dialects import CANONICAL, DIALECTS, PRODUCT_ALGORITHMS, Dialect
from .groups import OutputModule, Place, Target, meets, modules_at, of_norm, places, whole_place
from .job import FACTORS, WHOLE, AdapterJob
from .output_file import PAIRS


class OutputNames(NamedTuple):
    """How an output is named."""

    to: Dialect
    modules: list[OutputModule]  # the changed ones
    places: list[Place]  # all that the dialect has names for


def output_names(job: AdapterJob, targets: Sequence[Target], names: Names | None, to: Dialect) -> OutputNames:
    """Return the names of a job's output; FitError for a change that the dialect has no name for.

    `names`: those of the base, None where names alone join the adapters. `to`: the dialect, in which PEFT's names may
    get a level more.
    """
    keeps = job.format == KEEP
    if keeps and job.command.combines:
        return OutputNames(to, [OutputModule(place) for target in targets for place in target.places], [])
    assert names is not None, "it has a base, or one is assumed"
    if keeps:
        all_places = [*input_places(targets, names, to)]
        return OutputNames(to, modules_at(targets, all_places), all_places)
    tied = [*heads(targets, names)] if to.whole else []
    all_places = [*places(names, to), *tied]
    modules = modules_at(targets, all_places)
    if not to.from_top:
        return OutputNames(to, modules, all_places)
    if (level := _level(modules, names)) is not None:
        to = replace(to, level=level)
        all_places = [*places(names, to), *tied]
        modules = modules_at(targets, all_places)
    return OutputNames(to, *in_memory(modules, all_places))


def styles_of(name: str) -> frozenset[str]:
    """Return the prefix of a name, and whether the rest has dots."""
    _, body = prefixed(name)[-1]
    return frozenset({f"{name[: len(name) - len(body)].partition('.')[0].rstrip('_0123456789')[:5]}/{'.' in body}"})


MODEL_COMPONENT: Final = "model"
"""The component of a language model, and of every model that is no part of a pipeline."""

WHOLE_ENDINGS: Final = {("diff", "weight"): "diff", ("diff", "bias"): "diff_b"}
"""(slot, parameter) → the name of the ending of a whole change."""


@dataclass(frozen=True)
class InputDialect(Dialect):
    """The spelling of the tensors of one file."""

    def copied(self, module: Module, algorithm: str, parameter: str, slot: str) -> str | None:
        """Return the ending that the tensor has."""
        return module.slots[slot].name.removeprefix(module.name)


def input_dialect(file: AdapterFile) -> Dialect:
    """Return the dialect of an adapter; where its modules are spelled differently, the most frequent endings."""
    rules_of(file)  # refuses what is no change of weights
    kind = file.index.config.get("peft_type")
    if isinstance(kind, str) and kind.lower() in (FACTORS, *PRODUCT_ALGORITHMS):
        return DIALECTS["peft"]
    if kind is not None:
        raise FitError(f"a PEFT folder of {shown(kind)} is kept as it is, with its configuration", str(file.path),
                       "name another dialect with --to")  # fmt: skip
    slots: dict[str, Counter[str]] = {}
    for module in file.modules:
        for slot, info in (*module.slots.items(), *module.shared.items()):
            if info.name.startswith(module.name) and (slot != "diff" or WHOLE in module.complete):
                slot = WHOLE_ENDINGS.get((slot, module.parameter), slot)
                slots.setdefault(slot, Counter())[info.name.removeprefix(module.name)] += 1
    common = {slot: count.most_common(1)[0][0] for slot, count in slots.items()}
    spelling = spelling_of(file)
    endings = {**spelling.endings, **common}
    return InputDialect(
        KEEP, "", "", "", CANONICAL, endings, alpha=spelling.alpha, whole=bool(file.strange), bundles=True
    )


def spelling_of(file: AdapterFile) -> Dialect:
    """Return the spelling of plain factors in the words of an adapter: its own endings, or kohya's."""
    pairs = Counter(pair for m in file.modules if "down" in m.slots for pair in PAIRS
                   if m.slots["down"].name.endswith(pair[0]) or _named(m.slots["down"].name, pair[0]))  # fmt: skip
    down, up = pairs.most_common(1)[0][0] if pairs else PAIRS[0]
    alpha = any("alpha" in m.shared for m in file.modules) or (down, up) == PAIRS[0]
    endings = {**DIALECTS["kohya"].endings, "up": up, "down": down}
    return Dialect(KEEP, "", "", "", CANONICAL, endings, alpha=alpha)


def _named(key: str, ending: str) -> bool:
    """Return whether a key has the ending with the name of an adapter inside: .lora_A.default.weight."""
    first, last = ending.rsplit(".", 1)
    parts = key.rsplit(".", 2)
    return len(parts) == 3 and parts[2] == last and parts[0].endswith(first)


def in_memory(modules: Sequence[OutputModule], everywhere: Sequence[Place]) -> tuple[list[OutputModule], list[Place]]:
    """Return places with the names that an adapter of PEFT has for them: those of the model in memory, which may differ
    from the names in its checkpoint (ViT), and keep a head apart from the embeddings that share its weight.

    Models of images have names of their own in each dialect.
    """
    named: dict[str, set[str]] = {}
    for place, shares, *_ in modules:
        for name in (s.patch.module.name for s in shares if s.is_all(place) and place.component == MODEL_COMPONENT):
            named.setdefault(place.module, set()).add(name)
    memory_names = {module: names.pop().removeprefix(PEFT_PREFIX) for module, names in named.items()
           if len(names) == 1 and next(iter(names)).startswith(PEFT_PREFIX)}  # fmt: skip
    if len({*memory_names.values()}) < len(memory_names):
        return [*modules], [*everywhere]
    renamed = {id(p): p._replace(module=memory_names.get(p.module, p.module)) for p in everywhere}
    return [output._replace(place=renamed[id(output.place)]) for output in modules], [*renamed.values()]


def heads(targets: Sequence[Target], names: Names) -> Iterator[Place]:
    """Yield the heads that an adapter of PEFT trains apart though the base shares their weights with its embeddings."""
    for target in targets:
        if target.key not in names.shapes:
            module, _, parameter = target.key.rpartition(".")
            yield Place(
                PEFT_PREFIX, module, parameter, whole(target.key, target.shape), MODEL_COMPONENT, len(target.shape) == 1
            )


def input_places(targets: Sequence[Target], names: Names, to: Dialect) -> Iterator[Place]:
    """Yield the parameters that an adapter changes, under its own names."""
    prefix = PEFT_PREFIX if to.folder else ""
    labels = set()
    for target in targets:
        for use in target.uses:
            module, view = use.patch.module, use.patch.view
            if (module.name, module.parameter) not in labels:
                labels.add((module.name, module.parameter))
                name, part = module.name.removeprefix(prefix), names.component(target.key)
                yield Place(prefix, name, module.parameter, view, part, of_norm([use]))
        for _, info, _ in target.values:
            name, parameter = split_parameter(info.name.removeprefix(prefix))
            view = whole(target.key, target.shape)
            yield Place(prefix, name, parameter, view, names.component(target.key), len(target.shape) == 1)


def _level(modules: Sequence[OutputModule], names: Names) -> str | None:
    """Return the level above the layers that an adapter of PEFT names itself; None for another adapter."""
    bodies = {k: body for part in names.parts for body, k in part.keys.items() if k.startswith(part.prefix)}
    levels = set()
    for place, shares, *_ in modules:
        (piece, *others) = place.view.row_slices
        body = bodies.get(piece.key, "").rpartition(".")[0]
        for name in (s.patch.module.name for s in shares if s.is_all(place) and body and not others):
            if name.startswith(PEFT_PREFIX) and name.endswith(f".{body}"):
                levels.add(name[len(PEFT_PREFIX) : len(name) - len(body)])
    return levels.pop() if len(levels) == 1 else None


class Words(NamedTuple):
    """The dialect that has most names of an adapter, "" where none has any."""

    dialect: str
    parts: Mapping[str, Sequence[Place]]
    """Weight of the base → its modules there."""
    across: frozenset[str]
    """Weights that share a module with other weights."""


class Naming:
    """Names for modules in the words of the first adapter: its own, those of its dialect, or made as its own are."""

    def __init__(self, matches: Sequence[Match], base: Index, names: Names) -> None:
        self.base, self.names = base, names
        self.module_names: dict[str, str] = {}
        self.pairs: dict[tuple[str, str, bool], int] = {}
        for match in reversed(matches):
            for key, uses in match.uses.items():
                for use in uses:
                    alone = key not in base.tensors  # a head that gets a tensor of its own
                    if use.patch.view.row_slices == (use.piece,) and (alone or whole_of(use.piece, base.tensors[key])):
                        self.module_names[key.rpartition(".")[0]] = use.patch.module.name
            for key, info in match.replaced.items():
                self.module_names.setdefault(key.rpartition(".")[0], _replaced(info.name))
        self.first = {u.patch.module.name for uses in matches[0].uses.values() for u in uses} if matches else set[str]()
        self.first |= {_replaced(info.name) for match in matches[:1] for info in match.replaced.values()}
        for module, name in self.module_names.items():
            if name in self.first:
                pair = common_end(module, name)
                self.pairs[pair] = self.pairs.get(pair, 0) + 1
        self.module_names = {module: name for module, name in self.module_names.items() if name in self.first}
        self.styles = frozenset(style for name in self.first for style in styles_of(name))
        views = [u.patch.view for uses in matches[0].uses.values() for u in uses] if matches else []
        self.spread = {piece.key for v in views if len({p.key for p in v.row_slices}) > 1 for piece in v.row_slices}
        self.fused = KEEP  # the dialect in which several weights of the base are one module; "" for an unknown one
        self.nameless: list[str] = []  # weights that have the base's own name, as they have none in the first's words

    def places(self, target: Target) -> tuple[Place, ...]:
        """Return the modules of the output that have the rows of a weight."""
        key, (module, _, parameter) = target.key, target.key.rpartition(".")
        if module in self.module_names:
            return (self._whole(self.module_names[module], parameter, target),)
        apart = not target.values and len(target.shape) <= 2
        alike, of_dialect = self._parts(target) if apart else (), self._words.parts.get(key, ())
        if alike and (not of_dialect or any(part.module in self.first for part in alike)):
            return alike
        if len(of_dialect) == 1 and self._is_whole(of_dialect[0]):
            return (self._whole(of_dialect[0].module, of_dialect[0].parameter, target),)
        apart = apart and not any(use.piece.transposed for use in target.uses)
        if parts := [part for place in of_dialect if apart and (part := _changed(place, target)) is not None]:
            return tuple(parts)
        name = self._like_first_adapter(module, parameter, key)
        if key in self._words.across or key in self.spread:
            self.fused = self._words.dialect
        elif name == module and not styles_of(name) & self.styles:
            self.nameless.append(key)
        return (self._whole(name, parameter, target),)

    def _whole(self, module: str, parameter: str, target: Target) -> Place:
        """Return a weight as one module, transposed if the base stores it [in, out], such as GPT-2."""
        turned = len(target.shape) == 2 and self._is_turned(module, parameter, target)
        shape = target.shape[::-1] if turned else target.shape
        view = WeightView((RowSlice(target.key, 0, *target.matrix, turned),), shape)
        place = whole_place(module, parameter, view, target.uses)
        return place._replace(component=self.names.component(target.key))

    def _is_turned(self, module: str, parameter: str, target: Target) -> bool:
        with suppress(AmbiguousName):
            if view := self.names.find(module, parameter):
                return view.row_slices[0].transposed
        return bool(target.uses) and all(use.piece.transposed for use in target.uses)

    def _parts(self, target: Target) -> tuple[Place, ...]:
        """Return the modules that are rows of a weight in the adapters' words; () for a weight that is one module
        there, and where they have no such parts, or not in the words of the first adapter."""
        parts, component = dict[int, Place](), self.names.component(target.key)
        for use in target.uses:
            module, piece, view = use.patch.module, use.piece, use.patch.view
            place = Place("", module.name, module.parameter, view, component)
            plain = view.row_slices == (piece,) and not piece.transposed and len(view.shape) <= 2
            other = parts.setdefault(piece.start, place)
            if (
                not plain
                or other.view.row_slices[0].rows != piece.rows
                or (piece.rows,) == (target.shape or (1,))[:1]
                or not styles_of(place.module) & self.styles
            ):
                return ()
        ordered = [part for start in sorted(parts) if (part := _changed(parts[start], target)) is not None]
        apart = all(a.stop <= b.start for (a,), (b,) in pairwise(place.view.row_slices for place in ordered))
        return tuple(ordered) if apart else ()

    def _is_whole(self, place: Place) -> bool:
        """Return whether a module is one whole weight of the base."""
        (piece, *others) = place.view.row_slices
        return not others and whole_of(piece, self.base.tensors.get(piece.key))

    @cached_property
    def _words(self) -> Words:
        """The modules of each weight in the dialect that has most names of the first adapter."""
        best, known = Words("", {}, frozenset()), 0
        for row in DIALECTS.values():
            to = row.of(self.names.known)
            modules = [(to.key(p.prefix, p.module, ""), p) for p in places(self.names, to) if not p.bare]
            if (count := len(self.first & {name for name, _ in modules})) <= known:
                continue
            known, parts_by_key, across = count, dict[str, list[Place]](), set[str]()
            for name, place in modules:
                pieces, keys = place.view.row_slices, {*place.keys}
                if len(keys) > 1 or (any(piece.transposed for piece in pieces) and not self._is_whole(place)):
                    across |= keys
                parts_by_key.setdefault(pieces[0].key, []).append(place._replace(prefix="", module=name))
            parts_by_key = {key: parts for key, parts in parts_by_key.items() if key not in across}
            best = Words(to.name, parts_by_key, frozenset(across))
        return best

    def _like_first_adapter(self, module: str, parameter: str, key: str) -> str:
        """Return a name that is made as the first adapter's are, if it leads to the weight, else the base's own."""
        fitting = [p for p in self.pairs if module.startswith(p[0])]
        if not fitting:
            return module
        start, prefix, flat = max(fitting, key=lambda p: (len(p[0]), self.pairs[p]))
        body = module[len(start) :]
        name = prefix + (body.replace(".", "_") if flat else body)
        try:
            view = self.names.find(name, parameter)
        except AmbiguousName:
            return module
        return name if view is not None and {piece.key for piece in view.row_slices} == {key} else module


def _changed(place: Place, target: Target) -> Place | None:
    """Return a module of some rows of a weight, of a norm if the adapters have it as one; None where none changes."""
    runs = tuple((piece.start, piece.stop) for piece in place.view.row_slices)
    changing = [use for use in target.uses if meets(runs, use.piece)]
    return place._replace(norm=of_norm(changing)) if changing else None


def _replaced(key: str) -> str:
    """Return the module of a tensor that an adapter replaces, by the adapter's name for it."""
    return split_parameter(key)[0].removesuffix(".base_layer")


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
