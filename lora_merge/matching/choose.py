"""Turns modules of an adapter into patches: which formula, in which shapes, with which numbers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import isfinite, isnan, prod
from types import MappingProxyType
from typing import Any, Final

from ..adapters.conv1d import STATE
from ..adapters.file import SCALES, AdapterFile, Module, Values
from ..adapters.kohya_args import Trained, trained
from ..adapters.peft.kinds import STARTED
from ..adapters.peft.numbers import CONFIGURED
from ..adapters.peft.rules import Rules
from ..adapters.peft.target_parameters import TABLES
from ..adapters.shared_slots import repeated
from ..algorithms import ALGORITHMS, Algorithm, DoesNotFit, Shape, dora, flat
from ..algorithms.frod import LAYER
from ..disk.files import StoredTensor
from ..dtypes import WHOLE
from ..errors import InputError, MergeError, ShapeMismatch
from ..job import SETTING
from ..models.weights import WeightView, turned
from ..text import listed
from .diagnosis import grouped
from .incomplete import UNGATHERED, incomplete, lacks
from .orientation import Orientation, Untold
from .remarks import BORROWED, EMPTY, KERNEL_OFT, NO_ALPHA, NO_DORA, OTHER_ALPHA, SHARED_TWICE, ZERO_ALPHA, rebuilt

ALPHA: Final = "lora_alpha"
"""The setting that says α where a file holds none."""

UNTOLD: Final = "the adapter's file does not tell all that its formula needs"
FROM_THE_TRAINING: Final = (
    "put the adapter_config.json of the training beside the adapter, and the base's config.json beside the base"
)
TRAINED_ON: Final = "merge into the checkpoint that the adapter was trained on"
IN_FLOATS: Final = "export the adapter in fp32, fp16 or bf16 with the program that quantised it"
STACKED: Final = ("lora_experts", "lora_experts_transposed", "lora_switch")

ODD: Final = 1e-3
"""An α that no file leaves out: with it, the scale is another than without."""


@dataclass(frozen=True)
class Patch:
    """One formula with its tensors, and the weight it was trained on as pieces of the base."""

    adapter: int
    module: Module
    algorithm: str
    shapes: Mapping[str, Shape]  # per slot, as the formula wants it
    numbers: Mapping[str, float]
    settings: tuple[tuple[str, Any], ...]
    view: WeightView
    magnitude: tuple[dora.Axis, Shape] | None = None  # DoRA: axis, shape
    beside: Mapping[str, WeightView] = field(default_factory=dict)  # slot → where its values lie in the base

    @cached_property
    def grain(self) -> int:
        """How many consecutive rows of ΔW are formed together: 1, those of one expert or one block, or all.

        Factors are cut to a multiple of it, along the axes that the algorithm's `sliced` names.
        """
        row, rows = ALGORITHMS[self.algorithm], self.view.matrix[0]
        limits = {name for name, value in self.numbers.items() if isfinite(value)}
        chosen = self.shapes.keys() | {name for name, value in self.settings if value} | limits
        if row.sliced is None or row.uncut & chosen or (self.magnitude or ("out",))[0] != "out":
            return rows
        entries = [self.shapes[slot][axis] for slot, axis in row.sliced.items() if slot in self.shapes] or [rows]
        count = min(entries)
        if not count or any(n % count for n in (rows, *entries)):
            return rows
        if self.reads_base and count < rows and len(self.view.pieces) > 1:  # they may lie in several tensors
            return rows
        return rows // count

    @property
    def reads_base(self) -> bool:
        """Whether ΔW depends on the base's values."""
        return self.magnitude is not None or ALGORITHMS[self.algorithm].reads_base


class Patcher:
    """Turns modules of one adapter into patches: picks the formula, its shapes and its numbers."""

    def __init__(self, number: int, adapter: AdapterFile, rules: Rules, values: Values) -> None:
        self.number, self.adapter, self.rules, self.values = number, adapter, rules, values
        self.orientation = Orientation(rules, [m for m in adapter.modules if m.parameter == "weight"], self._fits)
        self.model = ""  # the base's type
        self.config: Mapping[str, Any] = {}  # the base's
        self.by_config = False  # whether the model is built from a configuration: it has the layers that were stored
        self.widest: tuple[int, int] = (0, 0)  # see peft.py, point 5
        self._weights = {m.name: m for m in adapter.modules if m.parameter == "weight"}
        self.residual: set[str] = set()  # base tensors in whose place the adapter's own copy is: a start is out of it
        self.given: Mapping[str, Any] = {}  # settings that the user states, because no file does
        self._told: dict[str, Trained] = {}  # by the metadata, per algorithm
        self.used: set[str] = set()  # those that a formula asked for
        self.remarks: dict[str, dict[str, None]] = {}  # what the user should know → modules, each once

    def patch(self, module: Module, view: WeightView, near: Mapping[str, WeightView] = MappingProxyType({})) -> Patch:
        """The patch for a module on the weight it was trained on; `near` has the module's other parameters by name.

        InputError if its own tensors are incomplete or contradict each other, ShapeMismatch if they do not fit the
        weight.
        """
        for slot in repeated(module, self.adapter.path, self.values):
            self.remark(SHARED_TWICE.format(slot=slot), module)
        told = self.rules.of(module.name)
        candidates, chosen = self._candidates(module, view, near)
        reasons = []
        for name, seen in ((n, s) for n in candidates for s in self._ways(module, n, view)):
            if name in STACKED and len(candidates) > 1 and len(seen.shape) != 3:
                continue
            full = self._with_shared(module, told.shared(name, module.name))
            beside = {slot: near[of] for slot, of in ALGORITHMS[name].beside.items() if of in near}
            beside |= {slot: turned(seen, of) for slot, of in near.items() if slot.startswith(LAYER)}
            stored = {**full.shapes, **{slot: of.matrix for slot, of in beside.items()}}
            settings = self._settings(name, told.settings(name, module.name))
            try:
                shapes = _fit(name, tuple(stored.items()), seen.shape, seen.matrix)
                magnitude = self._magnitude(module, name, seen.shape)
                self._check(name, settings, shapes, seen.shape)
                numbers = self._numbers(module, name, shapes, seen.shape)
            except DoesNotFit as e:
                reasons.append(str(e))
                continue
            self._check_factors(full, name)
            self._remember(name, module, shapes, seen.shape)
            told_in_order = tuple(sorted(settings.items()))
            return Patch(self.number, full, name, shapes, numbers, told_in_order, seen, magnitude, beside)
        if not candidates or (chosen is None and module.algorithms[0] not in candidates):
            raise incomplete(lacks(module), self.adapter.path)
        where = f"{self.adapter.path}: {module.where} {_shapes(module)}: {'; or '.join(dict.fromkeys(reasons))}"
        untold = next((r for r in reasons if "--setting" in r or "adapter_config" in r), None)
        if untold is not None:
            raise ShapeMismatch(UNTOLD, where, untold)
        advice = TRAINED_ON + grouped(module.shapes.get("down", ()), view.shape)
        fix = UNGATHERED if (0,) in module.shapes.values() else advice
        raise ShapeMismatch("adapter tensors do not fit the base", where, fix)

    def _candidates(
        self, module: Module, view: WeightView, near: Mapping[str, WeightView] = MappingProxyType({})
    ) -> tuple[Sequence[str], str | None]:
        """(the rows to try, the one that the configuration chose); ShapeMismatch if it does not tell enough."""
        complete, told = module.complete, self.rules.of(module.name)
        try:
            chosen = told.algorithm(module.name, complete, view, self.model)
        except DoesNotFit as e:
            where = f"{self.adapter.path}: {module.where} {_shapes(module)}: {e}"
            raise ShapeMismatch(UNTOLD, where, FROM_THE_TRAINING) from e
        if chosen in STARTED and "lora" in complete and view.pieces[0].key in self.residual:
            chosen = "lora"
        if chosen is None:
            return complete, None
        return [chosen] if _has_all(
            self._with_shared(module, told.shared(chosen, module.name)), chosen, near
        ) else [], chosen

    def _fits(self, module: Module, view: WeightView) -> bool:
        """Whether some formula takes the module's tensors for a weight that is seen so."""
        try:
            rows, _ = self._candidates(module, view)
        except MergeError:
            return False
        full = {name: self._with_shared(module, self.rules.of(module.name).shared(name, module.name)) for name in rows}
        return any(_takes(name, module.shapes, view) for name, module in full.items())

    def _ways(self, module: Module, name: str, view: WeightView) -> Sequence[WeightView]:
        """The weight as the formula may see it; ShapeMismatch if nothing settles which way round it is."""
        try:
            found = [*self.orientation.ways(module, name, view)]
        except Untold as e:
            where = f"{self.adapter.path}: {module.where} on {view.pieces[0].key} {list(view.shape)}: {e}"
            raise ShapeMismatch(UNTOLD, where, STATE) from e
        if self.orientation.used:
            self.used.add(SETTING)
        return found

    def _check_factors(self, module: Module, name: str) -> None:
        """InputError if a tensor that the formula computes with holds whole numbers, whose scale is stored nowhere."""
        integer = {*ALGORITHMS[name].integer_slots, *SCALES, "reshape"}
        for slot, info in {**module.shared, **module.slots}.items():
            if slot not in integer and info.dtype in WHOLE and info.dtype != "BOOL":  # a switch is no number
                where = f"{info.file}: {info.name} is {info.dtype}"
                raise InputError("an adapter's factor holds whole numbers, and no scale for them", where, IN_FLOATS)

    def notes(self) -> list[str]:
        """What the user should know, each with the modules that it is about."""
        return [f"{listed(modules, 2)}: {text}" for text, modules in self.remarks.items()]

    def remark(self, text: str, module: Module) -> None:
        """Note something about a module."""
        self.remarks.setdefault(text, {})[module.where] = None

    def _remember(self, name: str, module: Module, shapes: Mapping[str, Shape], shape: Shape) -> None:
        """What the patch took from the user, and whether its scale is only assumed."""
        row = ALGORITHMS[name]
        if name == "peft_oft" and prod(shape[2:]) > 1:
            self.remark(KERNEL_OFT, module)
        if text := self.trained(name).note:
            self.remark(text, module)
        if any(0 in stored for stored in module.shapes.values()):
            self.remark(EMPTY, module)
        if doubt := self.rules.of(module.name).doubt(name, module.name, shapes):
            self.remark(doubt, module)
        if text := rebuilt(name, shapes):
            self.remark(text, module)
        self.used |= self.given.keys() & row.settings.keys()
        told = {"alpha", "scale_override"} & module.shared.keys() or self._told_by(name, module, shapes)
        if told and self.rules.of(module.name).borrowed and "alpha" not in module.shared:
            self.remark(BORROWED, module)
        if told or "scale" not in row.scalars or not _matters(row, shapes, shape):
            return  # its scale is known, or an alpha would not change it
        if ALPHA in self.given:
            self.used.add(ALPHA)
        else:
            self.remark(NO_ALPHA, module)

    def _numbers(self, module: Module, name: str, shapes: Mapping[str, Shape], shape: Shape) -> Mapping[str, float]:
        row = ALGORITHMS[name]
        alpha = self._number(module, "alpha")
        if alpha is None and "scale" in row.scalars:
            alpha = self.given.get(ALPHA)
        beside = self._weights[module.name].shapes if name == "lora_bias" and module.name in self._weights else {}
        try:
            found = dict(row.numbers(alpha, {**beside, **shapes}, shape))
        except DoesNotFit as e:  # the shapes do, so it is the number
            raise _unusable("alpha", alpha, module.shared.get("alpha")) from e
        if "scale" in found:
            found["scale"] *= self.trained(name).factor
        told = self._told_by(name, module, shapes)
        if name in CONFIGURED and not told:
            raise DoesNotFit("only its adapter_config.json tells its scale; put it beside the adapter")
        if "alpha" in module.shared and "scale" in told and told["scale"] != found["scale"]:
            self.remark(OTHER_ALPHA, module)
        found |= told
        override = self._number(module, "scale_override")
        if override is not None and "scale" in row.scalars:
            found["scale"] = override
        elif alpha == 0 and not told and "scale" in row.scalars and _matters(row, shapes, shape):
            self.remark(ZERO_ALPHA, module)
        return found

    def _told_by(self, name: str, module: Module, shapes: Mapping[str, Shape]) -> Mapping[str, float]:
        """What the configuration says in numbers; of another part's an α beside the tensors is the better one."""
        rules = self.rules.of(module.name)
        return {} if rules.borrowed and "alpha" in module.shared else rules.numbers(name, module.name, shapes)

    def trained(self, name: str) -> Trained:
        """What the file's metadata says about a formula."""
        if name not in self._told:
            self._told[name] = trained(ALGORITHMS[name], self.adapter.index.metadata, str(self.adapter.path))
        return self._told[name]

    def turns_bias(self, name: str) -> bool:
        """Whether the formula was trained on the bias of its layers too, by the metadata."""
        return self.trained(name).turns_bias

    def _number(self, module: Module, slot: str) -> float | None:
        info = module.shared.get(slot)
        if info is None:
            return None
        if prod(info.shape) != 1:
            where = f"{info.file}: {info.name} {list(info.shape)}"
            raise InputError(f"{slot} is not one number", where, "export it again")
        value = self.values.numbers(info)[0]
        infinite = slot != "alpha" and not isfinite(value)  # of alpha it has a meaning in LoKr and OFT
        if info.dtype == "BOOL" or isnan(value) or infinite:
            raise _unusable(slot, value, info)
        return value

    def _with_shared(self, module: Module, keys: Mapping[str, str]) -> Module:
        """The module with the tensors that the file has once for all modules."""
        tensors = self.adapter.index.tensors
        found = {slot: tensors[key] for slot, key in keys.items() if key in tensors}
        return replace(module, slots={**found, **module.slots}) if found else module

    def _settings(self, name: str, told: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration's settings, and the largest weight that the adapter changes with this formula."""
        row = ALGORITHMS[name]
        stated = {k: v for k, v in self.given.items() if k in row.settings}
        return {
            **self.trained(name).settings,
            **told,
            **stated,
            **({"widest": self.widest} if "widest" in row.settings else {}),
        }

    def _check(self, name: str, settings: Mapping[str, Any], shapes: Mapping[str, Shape], shape: Shape) -> None:
        row = ALGORITHMS[name]
        missing = row.missing_settings(settings) or sorted(self.trained(name).partial - self.given.keys())
        if missing:
            raise DoesNotFit(f"the file does not tell {', '.join(missing)}; state it with --setting {missing[0]}=VALUE")
        row.check_given(settings, shapes, shape)

    def _magnitude(self, module: Module, name: str, shape: Shape) -> tuple[dora.Axis, Shape] | None:
        info = module.shared.get("magnitude")
        if info is None:
            return None
        rules = self.rules.of(module.name)
        if rules.kind == "LORA" and rules.fields.get("use_dora") is False and not rules.borrowed:
            self.remark(NO_DORA, module)
            return None
        if name == "lora_embedding" or (name == "lora_transposed" and module.name.rpartition(".")[2] in TABLES):
            # PEFT takes the norm over the vocabulary, mlx-lm over what each token has
            return dora.fit((1, prod(info.shape)), shape, dora.SHAPED)
        return dora.fit(info.shape, shape, dora.SHAPED if info.name.endswith(dora.SHAPED) else "")


def _unusable(slot: str, value: float | None, info: StoredTensor | None) -> InputError:
    where = f"{info.file}: {info.name}" if info else f"--setting {ALPHA}"
    return InputError(f"{slot} is {value}", where, "use an earlier save of the adapter")


def _matters(row: Algorithm, shapes: Mapping[str, Shape], shape: Shape) -> bool:
    """Whether an alpha changes the scale."""
    return row.numbers(None, shapes, shape) != row.numbers(ODD, shapes, shape)


def _takes(name: str, shapes: Mapping[str, Shape], view: WeightView) -> bool:
    try:
        _fit(name, tuple(shapes.items()), view.shape, view.matrix)
    except DoesNotFit:
        return False
    return True


@lru_cache(maxsize=1024)  # a model has thousands of layers of a few shapes
def _fit(
    name: str, stored: tuple[tuple[str, Shape], ...], weight: Shape, matrix: tuple[int, int]
) -> Mapping[str, Shape]:
    """The shapes that the formula wants; DoesNotFit for one that would take stacked experts for one wide matrix."""
    shapes = ALGORITHMS[name].fit(dict(stored), weight)
    if matrix != flat(weight) and name not in STACKED:
        raise DoesNotFit(f"the weight {list(weight)} is stacked experts, which {name} is not made for")
    return shapes


def _has_all(module: Module, name: str, near: Mapping[str, WeightView]) -> bool:
    row = ALGORITHMS[name]
    return all(slot in module.slots or row.beside.get(slot) in near for slot, must in row.slots.items() if must)


def _shapes(module: Module) -> str:
    return ", ".join(f"{slot} {list(shape)}" for slot, shape in module.shapes.items())
