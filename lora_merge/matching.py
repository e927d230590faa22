"""Brings adapter modules and base tensors together: which formula, with which numbers, onto which rows.

Every problem of one kind is gathered and raised once. Nothing here reads weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .adapter import AdapterFile, Module, Numbers
from .algorithms import ALGORITHMS, DoesNotFit, Shape, dora
from .conventions import part
from .errors import FitError, InputError, MergeError, ShapeMismatch, UnmatchedModules
from .header import TensorInfo
from .job import Adapter, Unmatched
from .names import Names
from .peft import Rules
from .views import Piece, View, rows_of

SHOWN = 5  # how many names an error message lists


@dataclass(frozen=True)
class Patch:
    """One formula with its tensors, and the weight it was trained on as pieces of the base."""

    adapter: int
    module: Module
    algorithm: str
    shapes: Mapping[str, Shape]  # per slot, as the formula wants it
    numbers: Mapping[str, float]
    settings: tuple[tuple[str, Any], ...]
    view: View
    magnitude: tuple[dora.Axis, Shape] | None = None  # DoRA: axis, shape

    @property
    def sliceable(self) -> bool:
        """Whether rows of ΔW can be computed from the same rows of the base alone."""
        axis = self.magnitude[0] if self.magnitude else "out"
        return ALGORITHMS[self.algorithm].sliced is not None and axis == "out"

    @property
    def reads_base(self) -> bool:
        """Whether ΔW depends on the base's values."""
        return self.magnitude is not None or ALGORITHMS[self.algorithm].reads_base


@dataclass(frozen=True)
class Use:
    """A patch where it meets one stored tensor: piece `piece` of its view starts at view row `start`."""

    patch: Patch
    piece: Piece
    start: int
    strength: float


@dataclass
class Matched:
    """What one adapter does to the base."""

    adapter: AdapterFile
    uses: dict[str, list[Use]] = field(default_factory=dict)  # base key → uses
    replaced: dict[str, TensorInfo] = field(default_factory=dict)  # output key → the tensor that takes its place
    created: dict[str, tuple[Shape, str]] = field(default_factory=dict)  # tensors the base lacks → shape, sibling
    modules: int = 0  # how many modules found their place
    unmatched: dict[str, str] = field(default_factory=dict)  # module → reason
    components: dict[str, int] = field(default_factory=dict)  # component → modules
    notes: list[str] = field(default_factory=list)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms in use, the most frequent first."""
        seen = Counter(u.patch.algorithm for uses in self.uses.values() for u in uses)
        return (*(name for name, _ in seen.most_common()), *(["replacement"] if self.replaced else []))

    @property
    def total(self) -> int:
        """Modules in the adapter."""
        return self.modules + len(self.unmatched)


class Patcher:
    """Turns modules of one adapter into patches: picks the formula, its shapes and its numbers."""

    def __init__(self, number: int, adapter: AdapterFile, rules: Rules, numbers: Numbers) -> None:
        self.number, self.adapter, self.rules, self.read = number, adapter, rules, numbers

    def patch(self, module: Module, view: View) -> Patch:
        """The patch for a module on the weight it was trained on.

        InputError if its own tensors are incomplete, ShapeMismatch if they do not fit the weight.
        """
        complete = module.complete()
        chosen = self.rules.algorithm(module.name, complete)
        candidates = complete if chosen is None else [chosen]
        if not candidates:
            raise InputError("the adapter is incomplete", f"{self.adapter.path}: {_incomplete(module)}",
                             "export or download it again")  # fmt: skip
        reasons = []
        for name in candidates:
            try:
                shapes = ALGORITHMS[name].fit(module.shapes, view.shape)
                magnitude = self._magnitude(module, view.shape)
            except DoesNotFit as e:
                reasons.append(str(e))
                continue
            settings = tuple(sorted(self.rules.settings(name, module.name).items()))
            numbers = self._numbers(module, name, shapes, view.shape)
            return Patch(self.number, module, name, shapes, numbers, settings, view, magnitude)
        raise ShapeMismatch("adapter tensors do not fit the base",
                            f"{self.adapter.path}: {module.where} {_shapes(module)}: {reasons[0]}",
                            "merge into the checkpoint that the adapter was trained on")  # fmt: skip

    def _numbers(self, module: Module, name: str, shapes: Mapping[str, Shape], shape: Shape) -> Mapping[str, float]:
        row = ALGORITHMS[name]
        found = dict(row.numbers(self._number(module, "alpha"), shapes, shape))
        found |= self.rules.of(module.name).numbers(name, module.name, shapes)
        override = self._number(module, "scale_override")
        if override is not None and "scale" in row.scalars:
            found["scale"] = override
        return found

    def _number(self, module: Module, slot: str) -> float | None:
        info = module.shared.get(slot)
        if info is None:
            return None
        if prod(info.shape) != 1:
            raise InputError(
                f"{slot} is not one number", f"{info.file}: {info.name} {list(info.shape)}", "export it again"
            )
        return self.read(info)[0]

    def _magnitude(self, module: Module, shape: Shape) -> tuple[dora.Axis, Shape] | None:
        info = module.shared.get("magnitude")
        if info is None:
            return None
        return dora.fit(info.shape, shape, ".dora_scale" if info.name.endswith(".dora_scale") else "")


class Matcher:
    """One adapter against one base."""

    def __init__(self, patcher: Patcher, ref: Adapter, names: Names, base: Mapping[str, TensorInfo]) -> None:
        self.patcher, self.adapter, self.ref, self.names, self.base = patcher, patcher.adapter, ref, names, base
        self.result = Matched(self.adapter)
        self.failures: list[MergeError] = []  # modules that are incomplete or do not fit

    def match(self, unmatched: Unmatched) -> Matched:
        """All modules placed, or one error that names what is wrong; `skip` leaves out what has no place."""
        for module in self.adapter.modules:
            self._place(module)
        for info in self.adapter.strange:
            self._replace(info)
        self._raise(unmatched)
        return self.result

    def _place(self, module: Module) -> None:
        view = self._find(module)
        if view is None and module.parameter == "bias":
            view = self._new_bias(module)
        if view is None:
            self.result.unmatched[module.where] = "no such module in the base"
            return
        patch = self._patch(module, view)
        if patch is None:
            return
        self._add(patch)
        if getattr(ALGORITHMS[patch.algorithm], "and_bias", False):
            bias = self.names.find(module.name, "bias")
            if bias is not None:
                self._add(_with_view(patch, bias))

    def _find(self, module: Module) -> View | None:
        """The weight that the module changes; for part k of a module, the rows below parts 0 … k − 1."""
        name, number = part(module.name)
        view = self.names.find(name, module.parameter)
        if view is None or number is None:
            return view
        heights = {part(m.name)[1]: _height(m) for m in self.adapter.modules if part(m.name)[0] == name}
        start = sum(heights.get(k, 0) for k in range(number))
        stop = start + heights[number]
        fits = stop <= view.shape[0] and not any(p.transposed for p in view.pieces)
        return rows_of(view, start, stop) if fits else None

    def _patch(self, module: Module, view: View) -> Patch | None:
        try:
            return self.patcher.patch(module, view)
        except (InputError, ShapeMismatch) as e:
            self.failures.append(e)
            return None

    def _add(self, patch: Patch) -> None:
        start, components = 0, set()
        for piece in patch.view.pieces:
            component = self.names.component(piece.key)
            components.add(component)
            strength = self.ref.factor(piece.key, component)
            if strength:  # at 0 the tensor stays untouched, byte for byte
                self.result.uses.setdefault(piece.key, []).append(Use(patch, piece, start, strength))
            start += piece.rows
        self.result.modules += 1
        for component in components:
            self.result.components[component] = self.result.components.get(component, 0) + 1

    def _new_bias(self, module: Module) -> View | None:
        """A bias for a layer that has none in the base: created as zeros, if the layer is one whole tensor."""
        weight = self.names.find(module.name, "weight")
        if weight is None or len(weight.pieces) != 1 or not weight.pieces[0].key.endswith(".weight"):
            return None
        piece, rows = weight.pieces[0], weight.shape[0]
        if piece.rows != rows or (piece.stop - piece.start) * piece.cols != prod(self.base[piece.key].shape):
            return None
        key = piece.key.removesuffix("weight") + "bias"
        self.result.created[key] = (rows,), piece.key
        return View((Piece(key, 0, rows, 1),), (rows,))

    def _replace(self, info: TensorInfo) -> None:
        """A tensor without a known suffix: under PEFT's rules a whole parameter, else nothing we know."""
        name, _, parameter = info.name.rpartition(".")
        view = self.names.find(name, parameter) if name else None
        if view is None:
            self.result.unmatched[info.name] = "unknown tensor"
            return
        piece = view.pieces[0]
        strength = self.ref.factor(piece.key, self.names.component(piece.key))
        self.result.modules += 1
        if strength == 0:
            return
        whole = len(view.pieces) == 1 and not piece.transposed
        if whole and strength == 1 and (piece.stop - piece.start) * piece.cols == prod(self.base[piece.key].shape):
            self.result.replaced[piece.key] = info
        else:
            module = Module(name, parameter, {"diff": info}, {}, ("set",))
            patch = self._patch(module, view)
            if patch is not None:
                self.result.modules -= 1
                self._add(patch)

    def _raise(self, unmatched: Unmatched) -> None:
        path, result = self.adapter.path, self.result
        if self.failures:
            worst = self.failures[0]
            same = [e.where.removeprefix(f"{path}: ") for e in self.failures if type(e) is type(worst)]
            raise type(worst)(worst.what, f"{path}: {_some(same)}", worst.fix)
        if result.modules == 0:
            shapes = {m.name: s for m in self.adapter.modules for s in m.shapes.values()}
            raise UnmatchedModules(
                f"no module of the adapter is in the base (0 of {result.total})",
                f"{path}: {_some(list(result.unmatched))}; the base is {self.names.architecture}",
                self.names.explain(list(result.unmatched), shapes),
            )
        if result.unmatched and unmatched == "error":
            shapes = {m.name: s for m in self.adapter.modules for s in m.shapes.values()}
            raise UnmatchedModules(
                f"{len(result.unmatched)} of {result.total} adapter modules have no place in the base",
                f"{path}: {_some(list(result.unmatched))}; the base is {self.names.architecture}",
                f"{self.names.explain(list(result.unmatched), shapes)}; or leave them out with --unmatched skip",
            )


def check_replacements(refs: Sequence[Adapter], matched: Sequence[Matched]) -> None:
    """FitError if two adapters replace the same parameter: there is no sum of two replacements."""
    seen: dict[str, int] = {}
    for number, one in enumerate(matched):
        for key in one.replaced:
            if key in seen or any(key in m.uses for m in matched):
                raise FitError("a parameter is replaced as a whole and changed again", f"{key}: by {refs[number].path}",
                               "merge the adapters one after the other")  # fmt: skip
            seen[key] = number


def _with_view(patch: Patch, view: View) -> Patch:
    row = ALGORITHMS[patch.algorithm]
    shapes = row.fit(patch.module.shapes, view.shape)
    return Patch(patch.adapter, patch.module, patch.algorithm, shapes, patch.numbers, patch.settings, view)


def _height(module: Module) -> int:
    """Rows that a part of a module writes, from its own tensors."""
    shapes = module.shapes
    if "up" in shapes:
        return shapes["up"][0]
    return prod(shapes["blocks"][:2]) if "blocks" in shapes else 0


def _incomplete(module: Module) -> str:
    """Which partner is missing for the closest row of the table."""
    known = [ALGORITHMS[a] for a in module.algorithms if a in ALGORITHMS]
    gaps = sorted(
        ([s for s, required in row.slots.items() if required and s not in module.slots] for row in known), key=len
    )
    have = ", ".join(sorted(module.slots)) or "alpha"
    if not gaps or not gaps[0]:
        return f"{module.where} mixes tensors of different algorithms ({have})"
    return f"{module.where} has {have} but no {', '.join(gaps[0])}"


def _shapes(module: Module) -> str:
    return ", ".join(f"{slot} {list(shape)}" for slot, shape in module.shapes.items())


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
