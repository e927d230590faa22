"""The names of an output's layers: those of the first adapter, or in its dialect. Without a base, names without their
prefixes join the modules of several adapters. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple, TypeAlias

from ..adapters.modules import AdapterFile, Module
from ..adapters.suffixes import split_parameter
from ..adapters.training_metadata import made_for
from ..dtypes import Shape, StoredTensor
from ..errors import AmbiguousName, FitError, InputError, UsageError
from ..files.checkpoint import Index
from ..matching.patch import Match, PatchPart
from ..models.inferred_base import InferredParameter, UnknownBaseError, candidates, inferred_base
from ..models.names import Names
from ..models.prefixes import prefixed
from ..models.weights import RowSlice
from ..options import KEEP
from .dialects import DIALECTS
from .groups import Place, meets, of_norm, places, whole_place
from .job import GIVE_BASE

NETWORK_ALIASES: Final = {"transformer": "denoiser", "prior": "denoiser", "te": "te1"}


def body_of(name: str) -> str:
    """Return a name that all dialects with the same words share: its network, and its path with underscores."""
    network, body = prefixed(name)[-1]
    return f"{NETWORK_ALIASES.get(network, network)}/{body.replace('.', '_')}"


Joined: TypeAlias = Mapping[tuple[str, str], Sequence[tuple[int, Module]]]
"""Name without its prefix, and parameter → the modules that change it, each with the number of its adapter."""


def joined(files: Sequence[AdapterFile]) -> Joined:
    """Return the modules of adapters, joined by their names alone; UsageError where these do not say which modules are
    the same, FitError for different models."""
    modules: dict[tuple[str, str], list[tuple[int, Module]]] = {}
    for number, file in enumerate(files):
        for module in file.modules:
            modules.setdefault((body_of(module.name), module.parameter), []).append((number, module))
    _check(modules, files)
    return modules


def _check(joined: Joined, files: Sequence[AdapterFile]) -> None:
    for members in joined.values():
        twice = [n for n, _ in members]
        if len(twice) != len(set(twice)):
            raise InputError("two modules of one adapter have one name without prefixes",
                             f"{files[twice[0]].path}: {members[0][1].name}", GIVE_BASE)  # fmt: skip
    known = [(f, frozenset(model.title for model in made_for(f.index, _shapes(f))[0])) for f in files]
    (first, its), *others = [(f, titles) for f, titles in known if titles] or [(files[0], frozenset())]
    if other := next(((f, titles) for f, titles in others if not titles & its), None):
        raise FitError(
            f"two adapters are for different models: {first.path.name} is for {' or '.join(sorted(its))}, "
            f"{other[0].path.name} for {' or '.join(sorted(other[1]))}",
            f"{first.path} and {other[0].path}", "combine adapters of one model",
        )  # fmt: skip
    if any({n for n, _ in members} != {*range(len(files))} for members in joined.values()):
        expect_one_layout([(f.path.name, _changes(f)) for f in files])
    styles = [frozenset(_styles(f)) for f in files]
    for number in range(1, len(files)):
        if styles[number] & styles[0]:
            continue
        if not any({0, number} <= {n for n, _ in members} for members in joined.values()):
            raise UsageError("two adapters in different dialects share no module by name",
                             f"{files[0].path.name} and {files[number].path.name}", GIVE_BASE)  # fmt: skip
    for members in joined.values():
        number, module = members[0]
        if number and not styles_of(module.name) & styles[0]:
            raise UsageError("a module that the first adapter lacks has a name in another dialect",
                             f"{files[number].path}: {module.name}", GIVE_BASE)  # fmt: skip


def expect_one_layout(adapters: Sequence[tuple[str, Sequence[InferredParameter]]]) -> None:
    """Raise UsageError where adapters have names of one model in the words of two layouts, such as its authors' and
    diffusers': a weight would have two names. `adapters`: the name of each, and its changes."""
    if _is_one_layout([change for _, changes in adapters for change in changes]):
        return
    (first, its), *others = adapters
    if not _is_one_layout(its):
        return
    for name, changes in others:
        if _is_one_layout(changes) and not _is_one_layout([*its, *changes]):
            raise UsageError("two adapters name the weights of the model in different words", f"{first} and {name}",
                             GIVE_BASE)  # fmt: skip


def _is_one_layout(changes: Sequence[InferredParameter]) -> bool:
    """Return whether one layout of a known model has all names."""
    changes = [*{(c.module, c.parameter): c for c in changes}.values()]
    try:
        known = candidates(changes)
    except UnknownBaseError:
        return False
    for architecture in known:
        with suppress(UnknownBaseError):
            return bool(inferred_base(changes, architecture))
    return False


def _changes(file: AdapterFile) -> list[InferredParameter]:
    """Return the changes of weights whose shapes an adapter shows."""
    shapes = ((m, m.parameter_shape) for m in file.modules)
    return [InferredParameter(m.name, m.parameter, shape) for m, shape in shapes if shape is not None]


def _styles(file: AdapterFile) -> Iterator[str]:
    for module in file.modules:
        yield from styles_of(module.name)


def styles_of(name: str) -> frozenset[str]:
    """Return the prefix of a name, and whether the rest has dots."""
    _, body = prefixed(name)[-1]
    return frozenset({f"{name[: len(name) - len(body)].partition('.')[0].rstrip('_0123456789')[:5]}/{'.' in body}"})


def _shapes(file: AdapterFile) -> dict[str, Shape]:
    return {m.name: m.parameter_shape or () for m in file.modules if m.parameter == "weight"}


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

    def places(
        self, key: str, shape: Shape, uses: Sequence[PatchPart], values: Sequence[object]
    ) -> tuple[Place, ...]:  # fmt: skip
        """Return the modules of the output that have the rows of a weight."""
        module, _, parameter = key.rpartition(".")
        if module in self.module_names:
            return (self._whole(self.module_names[module], parameter, key, shape, uses),)
        alike, of_dialect = self._parts(shape, uses, values), self._words.parts.get(key, ())
        if alike and (not of_dialect or any(part.module in self.first for part in alike)):
            return alike
        if len(of_dialect) == 1 and self._is_whole(of_dialect[0]):
            return (self._whole(of_dialect[0].module, of_dialect[0].parameter, key, shape, uses),)
        apart = not values and len(shape) <= 2 and not any(use.piece.transposed for use in uses)
        if parts := [part for place in of_dialect if apart and (part := _changed(place, uses)) is not None]:
            return tuple(parts)
        name = self._like_first_adapter(module, parameter, key)
        if key in self._words.across or key in self.spread:
            self.fused = self._words.dialect
        elif name == module and not styles_of(name) & self.styles:
            self.nameless.append(key)
        return (self._whole(name, parameter, key, shape, uses),)

    def _whole(self, module: str, parameter: str, key: str, shape: Shape, uses: Sequence[PatchPart]) -> Place:
        """Return a weight as one module, transposed if the base stores it so."""
        turned = len(shape) == 2 and self._is_turned(module, parameter, uses)
        return whole_place(module, parameter, key, shape, uses, turned=turned)

    def _is_turned(self, module: str, parameter: str, uses: Sequence[PatchPart]) -> bool:
        with suppress(AmbiguousName):
            if view := self.names.find(module, parameter):
                return view.row_slices[0].transposed
        return bool(uses) and all(use.piece.transposed for use in uses)

    def _parts(self, shape: Shape, uses: Sequence[PatchPart], values: Sequence[object]) -> tuple[Place, ...]:
        """Return the modules that are rows of a weight in the adapters' words; () for a weight that is one module
        there, and where they have no such parts, or not in the words of the first adapter."""
        parts: dict[int, Place] = {}
        for use in uses:
            module, piece, view = use.patch.module, use.piece, use.patch.view
            place = Place("", module.name, module.parameter, view)
            plain = view.row_slices == (piece,) and not piece.transposed and len(view.shape) <= 2
            other = parts.setdefault(piece.start, place)
            if (
                not plain
                or other.view.row_slices[0].rows != piece.rows
                or (piece.rows,) == (shape or (1,))[:1]
                or not styles_of(place.module) & self.styles
            ):
                return ()
        ordered = [part for start in sorted(parts) if (part := _changed(parts[start], uses)) is not None]
        apart = all(a.stop <= b.start for (a,), (b,) in pairwise(place.view.row_slices for place in ordered))
        return tuple(ordered) if apart and not values and len(shape) <= 2 else ()

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
                parts_by_key.setdefault(pieces[0].key, []).append(Place("", name, place.parameter, place.view))
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


def _changed(place: Place, uses: Sequence[PatchPart]) -> Place | None:
    """Return a module of some rows of a weight, of a norm if the adapters have it as one; None where none changes."""
    runs = tuple((piece.start, piece.stop) for piece in place.view.row_slices)
    changing = [use for use in uses if meets(runs, use.piece)]
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
