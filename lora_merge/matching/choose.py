"""Turns modules of an adapter into patches: which formula, in which shapes, with which numbers. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from math import isfinite, isinf, isnan, prod
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..adapters.conv1d import STATE
from ..adapters.file import SCALES, Module, Values
from ..adapters.kohya_args import is_norm_limit
from ..adapters.peft.target_parameters import TABLES
from ..adapters.shared_slots import repeated
from ..adapters.stated import aside_remark
from ..algorithms import ALGORITHMS, Algorithm, DoesNotFit, dora
from ..algorithms.base import expect
from ..algorithms.boft import BOFT
from ..algorithms.frod import LAYER
from ..algorithms.ia3 import IA3, groups_of
from ..algorithms.lokr import LOKR
from ..algorithms.lora import LORA
from ..algorithms.lora_bias import LORA_BIAS
from ..algorithms.oft import DIAG_OFT
from ..algorithms.peft_oft import PEFT_OFT
from ..algorithms.tlora import TLORA
from ..disk.files import StoredTensor
from ..dtypes import WHOLE, spoken
from ..errors import InputError, ShapeMismatch, UsageError
from ..job import SETTING
from ..models.weights import WeightView, turned
from ..shapes import Shape
from ..text import Note
from .context import LACKS_FACTS, AdapterContext, fit, shapes_of
from .diagnosis import advice_for_groups
from .incomplete import UNGATHERED, incomplete, lacks
from .orientation import Undecided
from .patch import Patch
from .remarks import (
    BORROWED,
    BYPASSED,
    EMPTY,
    KERNEL_OFT,
    MAY_HAVE_GROUPS,
    NO_ALPHA,
    NO_DORA,
    NORM_LIMIT,
    OTHER_ALPHA,
    SHARED_TWICE,
    UNSCALED,
    ZERO_ALPHA,
    rebuilt,
)
from .resizing import is_copy

ALPHA: Final = "lora_alpha"
"""The setting by which the user states α where a file holds none."""

TRAINED_ON: Final = "merge into the checkpoint that the adapter was trained on"
IN_FLOATS: Final = "export the adapter in fp32, fp16 or bf16 with the program that quantised it"

ROTATIONS: Final = (DIAG_OFT.name, BOFT.name)
UNLIKE_IN_GROUPS: Final = (LOKR.name, TLORA.name)
"""Formulas that compute something else in bypass mode where a convolution has groups. LoHa does not, and LoRA turns
the mode off there (lycoris/modules/{lokr,tlora,loha,locon}.py)."""
ONLY_IN_BYPASS: Final = (
    "its factors fit {groups} groups of inputs of {shape}, which LyCORIS trains in bypass mode alone, and no metadata "
    "says that it was on"
)
UNHOLDABLE: Final = "apply it when the model runs: no weight holds this change"

SOME_ALPHA: Final = 1e-3
"""An α that equals no rank: a formula whose scale depends on α has another scale with it than without α."""

LEAST_FP32: Final = 2.0**-149
LARGEST_FP32: Final = (2 - 2.0**-23) * 2.0**127
"""The smallest and the largest number of fp32 above zero."""


class Choice(NamedTuple):
    """The patch for a module, and what goes with it."""

    patch: Patch
    remarks: tuple[Note, ...]  # sentences about the module for the user
    settings: frozenset[str]  # the user's settings that the patch depends on


def choose(
    module: Module, view: WeightView, context: AdapterContext, near: Mapping[str, WeightView] = MappingProxyType({})
) -> Choice:
    """Return the patch of a module on the weight that it changes; `near` has the module's other parameters by name.

    InputError if its own tensors are incomplete or contradict each other, ShapeMismatch if they do not fit the weight.
    """
    return _Chooser(module, context).choose(view, near)


def check_settings(given: Mapping[str, Any], used: Collection[str]) -> None:
    """Raise UsageError for a setting of the user that no module uses."""
    if unused := sorted(given.keys() - used):
        raise UsageError(f"no module of the adapters uses {unused[0]}", f"--setting {unused[0]}",
                         "leave it out: the file states it, or its formula has no such setting")  # fmt: skip


class _Chooser:
    """The choice of a formula for one module, with the remarks and settings found so far."""

    def __init__(self, module: Module, context: AdapterContext) -> None:
        self.module, self.context = module, context
        self.rules = context.rules.of(module.name)
        self.path = context.adapter.path
        self.remarks: list[Note] = []
        self.settings: set[str] = set()

    def choose(self, view: WeightView, near: Mapping[str, WeightView]) -> Choice:
        """See `choose`."""
        module, context = self.module, self.context
        context.stated.check(module)
        for slot in repeated(module, self.path, context.values):
            self.remarks.append(Note(SHARED_TWICE.format(slot=slot)))
        candidates, chosen = context.candidates(module, view, near)
        reasons = []
        for name, tried in ((n, s) for n in candidates for s in self._ways(n, view)):
            if ALGORITHMS[name].stacked and len(candidates) > 1 and len(tried.shape) != 3:
                continue
            full = context.with_shared(module, name)
            beside, stored = {}, full.shapes
            if near:
                beside = {slot: near[of] for slot, of in ALGORITHMS[name].beside.items() if of in near}
                beside |= {slot: turned(tried, of) for slot, of in near.items() if slot.startswith(LAYER)}
                stored = {**stored, **{slot: of.matrix for slot, of in beside.items()}}
            settings = self._settings(name)
            try:
                shapes = fit(name, tuple(stored.items()), tried.shape, tried.matrix)
                magnitude = self._magnitude(name, tried.shape)
                self._check(name, settings, shapes, tried.shape)
                self._check_groups(name, shapes, tried.shape)
                configured = self._configured(name, shapes)
                numbers = self._numbers(name, shapes, tried.shape, configured)
            except DoesNotFit as e:
                reasons.append(str(e))
                continue
            self._check_factors(full, name)
            self._add_remarks(name, shapes, tried.shape)
            self._add_scale_remarks(name, shapes, tried.shape, configured)
            in_order = tuple(sorted(settings.items()))
            patch = Patch(context.number, full, name, shapes, numbers, in_order, tried, magnitude, beside)
            return Choice(patch, tuple(self.remarks), frozenset(self.settings))
        if not candidates or (chosen is None and module.algorithms[0] not in candidates):
            raise incomplete(lacks(module), self.path)
        where = f"{self.path}: {module.where} {shapes_of(module)}: {'; or '.join(dict.fromkeys(reasons))}"
        to_state = next((r for r in reasons if "--setting" in r or "adapter_config" in r), None)
        if to_state is not None:
            raise ShapeMismatch(LACKS_FACTS, where, to_state)
        advice = TRAINED_ON + advice_for_groups(module.shapes.get("down", ()), view.shape)
        fix = UNGATHERED if (0,) in module.shapes.values() else advice
        raise ShapeMismatch("adapter tensors do not fit the base", where, fix)

    def _ways(self, name: str, view: WeightView) -> Sequence[WeightView]:
        """Return the views of the weight to try; ShapeMismatch if its orientation stays unknown."""
        try:
            found, stated = self.context.orientation.ways(self.module, name, view)
        except Undecided as e:
            where = f"{self.path}: {self.module.where} on {view.row_slices[0].key} {list(view.shape)}: {e}"
            raise ShapeMismatch(LACKS_FACTS, where, STATE) from e
        self.settings |= {SETTING} if stated else set()
        return found

    def _check_factors(self, module: Module, name: str) -> None:
        """Raise InputError if a factor of the formula holds whole numbers, because no scale for them is stored."""
        if not self.context.has_whole_numbers:
            return
        for slot, info in chain(module.shared.items(), module.slots.items()):
            if info.dtype not in WHOLE or info.dtype == "BOOL":  # a switch is not a number
                continue
            if slot not in {*ALGORITHMS[name].integer_slots, *SCALES, "reshape"}:
                where = f"{info.file}: {info.name} is {spoken(info.dtype)}"
                raise InputError("an adapter's factor holds whole numbers, and no scale for them", where, IN_FLOATS)

    def _add_remarks(self, name: str, shapes: Mapping[str, Shape], shape: Shape) -> None:
        """Add the remarks on the patch, and the user's settings that it depends on."""
        row = ALGORITHMS[name]
        if name == PEFT_OFT.name and prod(shape[2:]) > 1:
            self.remarks.append(KERNEL_OFT)
        if text := self.context.trained(name).note:
            self.remarks.append(text)
        if any(0 in stored for stored in self.module.shapes.values()):
            self.remarks.append(EMPTY)
        if doubt := self.rules.doubt(name, self.module.name, shapes):
            self.remarks.append(doubt)
        if text := rebuilt(name, shapes):
            self.remarks.append(text)
        self.settings |= self.context.given.keys() & row.settings.keys()

    def _add_scale_remarks(
        self, name: str, shapes: Mapping[str, Shape], shape: Shape, configured: Mapping[str, float]
    ) -> None:
        """Add the remarks on the place that the scale is from."""
        row = ALGORITHMS[name]
        if self.rules.aside and configured.get("scale", 1.0) != 1:
            self.remarks.append(aside_remark(self.rules.fields.where))
        known = {"alpha", "scale_override"} & self.module.shared.keys() or configured
        if known and self.rules.borrowed and "alpha" not in self.module.shared:
            self.remarks.append(BORROWED)
        if known or "scale" not in row.scalars or not _matters(row, shapes, shape):
            return  # the scale is known, or no alpha would change it
        if ALPHA in self.context.given:
            self.settings.add(ALPHA)
        elif self.context.stated.used:
            self.remarks.append(aside_remark(self.context.stated.used))
        else:
            self.remarks.append(NO_ALPHA)

    def _numbers(
        self, name: str, shapes: Mapping[str, Shape], shape: Shape, configured: Mapping[str, float]
    ) -> Mapping[str, float]:
        row = ALGORITHMS[name]
        alpha = self._number("alpha")
        override = self._number("scale_override")
        if alpha is None and "scale" in row.scalars:
            alpha = self.context.given.get(ALPHA)
            unknown = alpha is None and not configured and override is None
            if unknown and self.context.stated.settles and _matters(row, shapes, shape):
                alpha = self.context.stated.alpha(row.rank(shapes) if row.rank else 0)
        weight = self.context.weights.get(self.module.name) if name == LORA_BIAS.name else None
        try:
            found = dict(row.scalars_from(alpha, {**(weight.shapes if weight else {}), **shapes}, shape))
        except DoesNotFit as e:  # the shapes fit, so the alpha does not
            raise _unusable("alpha", alpha, self.module.shared.get("alpha")) from e
        if is_norm_limit(name, self.module.name, alpha, self.context.adapter.index.metadata):
            found["limit"] = float(alpha or 0)
            self.remarks.append(NORM_LIMIT)
        if "scale" in found:
            found["scale"] = self._as_trained(name, found["scale"])
        if row.scale_from_config and not configured:
            raise DoesNotFit("only its adapter_config.json tells its scale; put it beside the adapter")
        if "alpha" in self.module.shared and "scale" in configured and configured["scale"] != found["scale"]:
            self.remarks.append(OTHER_ALPHA)
        found |= configured
        if override is not None and "scale" in row.scalars:
            found["scale"] = override
        elif alpha == 0 and not configured and "scale" in row.scalars and _matters(row, shapes, shape):
            self.remarks.append(ZERO_ALPHA)
        return found

    def _as_trained(self, name: str, scale: float) -> float:
        """Return the scale with the trainer's arguments taken into account."""
        trained = self.context.trained(name)
        if trained.no_scale:
            self.remarks.append(UNSCALED)
        return 1.0 if trained.no_scale else scale * trained.factor

    def _configured(self, name: str, shapes: Mapping[str, Shape]) -> Mapping[str, float]:
        """Return the configuration's numbers; none if α of the file or of the user counts more. The user's α takes the
        place of a configured α of 0."""
        rules, has_alpha = self.rules, "alpha" in self.module.shared
        better = has_alpha if rules.borrowed else rules.aside and (has_alpha or ALPHA in self.context.given)
        if better:
            return {}
        found = rules.numbers(name, self.module.name, shapes)
        if found.get("scale") == 0 and ALPHA in self.context.given:
            self.settings.add(ALPHA)
            return rules.with_alpha(self.context.given[ALPHA]).numbers(name, self.module.name, shapes)
        return found

    def _number(self, slot: str) -> float | None:
        info = self.module.shared.get(slot)
        if info is None:
            return None
        if prod(info.shape) != 1:
            where = f"{info.file}: {info.name} {list(info.shape)}"
            raise InputError(f"{slot} is not one number", where, "export it again")
        value = self.context.values.numbers(info)[0]
        infinite = slot != "alpha" and not isfinite(value)  # an infinite alpha is allowed in LoKr and OFT
        if info.dtype == "BOOL" or isnan(value) or infinite or not _in_fp32(value):
            raise _unusable(slot, value, info)
        return float(value)

    def _settings(self, name: str) -> dict[str, Any]:
        """Return the formula's settings from metadata, configuration and user, and `widest` if the formula needs it."""
        row = ALGORITHMS[name]
        if not row.settings:
            return {}
        stated = {k: v for k, v in self.context.given.items() if k in row.settings}
        return {
            **self.context.trained(name).settings,
            **self.rules.settings(name, self.module.name),
            **stated,
            **({"widest": self.context.widest} if "widest" in row.settings else {}),
        }

    def _check(self, name: str, settings: Mapping[str, Any], shapes: Mapping[str, Shape], shape: Shape) -> None:
        row = ALGORITHMS[name]
        partial = self.context.trained(name).partial - self.context.given.keys() if row.settings else ()
        if missing := row.missing_settings(settings) or sorted(partial):
            raise DoesNotFit(f"the file does not tell {', '.join(missing)}; state it with --setting {missing[0]}=VALUE")
        row.check_given(settings, shapes, shape)

    def _check_groups(self, name: str, shapes: Mapping[str, Shape], shape: Shape) -> None:
        """Raise DoesNotFit, or add a remark, where bypass mode changed a convolution that may have groups."""
        trained = self.context.trained(name)
        bypassed = trained.turns_bias
        decomposed = name == LORA.name and trained.no_magnitude and "magnitude" in self.module.shared
        if len(shape) > 2 and (decomposed or trained.no_scale or (trained.bypass and name in UNLIKE_IN_GROUPS)):
            self.remarks.append(MAY_HAVE_GROUPS)
        on_input = self.module.slots.get("on_input")
        if name == IA3.name and on_input is not None and any(self.context.values.numbers(on_input)):
            groups = groups_of(prod(shapes["diff"]), shape)
            expect(holds=bypassed or groups < 2, otherwise=ONLY_IN_BYPASS.format(groups=groups, shape=list(shape)))
        if name not in ROTATIONS or not bypassed or len(shape) < 3 or shapes["blocks"][-1] < 2:
            return
        if shape[1] == 1 < shape[0]:
            where = f"{self.path}: {self.module.where} on {list(shape)}, where each output has one input channel"
            raise ShapeMismatch("outputs of different groups were mixed in bypass mode", where, UNHOLDABLE)
        self.remarks.append(MAY_HAVE_GROUPS)

    def _magnitude(self, name: str, shape: Shape) -> tuple[dora.Axis, Shape] | None:
        info = self.module.shared.get("magnitude")
        if info is None:
            return None
        rules = self.rules
        if rules.kind == "LORA" and rules.fields.get("use_dora") is False and not (rules.borrowed or rules.aside):
            self.remarks.append(NO_DORA)
            return None
        if self.context.trained(name).no_magnitude:
            self.remarks.append(BYPASSED)
            return None
        row = ALGORITHMS[name]
        if row.of_table or (row.in_out and self.module.name.rpartition(".")[2] in TABLES):
            # PEFT takes the norm over the vocabulary, mlx-lm over the entries of each token
            return dora.fit((1, prod(info.shape)), shape, dora.SHAPED)
        if self.context.trained(name).of_inputs:
            return dora.fit((1, prod(info.shape)), shape, dora.SHAPED)
        return dora.fit(info.shape, shape, dora.SHAPED if info.name.endswith(dora.SHAPED) else "")


def is_fixed(info: StoredTensor, view: WeightView, own: StoredTensor, values: Values, strength: float) -> bool:
    """Return whether a value takes the place of a whole tensor of the base as it is, or not at all: at strength 1, and
    whole numbers that have no halfway, such as a counter, or that are the base's."""
    (piece, *others), fits = view.row_slices, (len(info.shape), *info.shape[1:]) == (len(own.shape), *own.shape[1:])
    if others or piece.transposed or piece.size != prod(own.shape) or not fits:
        return False
    if strength == 1 or info.dtype not in WHOLE:
        return strength == 1
    return not (strength and info.shape) or is_copy(info, own, values)


def _in_fp32(value: float) -> bool:
    """Return whether a number is in the range of fp32, zero or infinite."""
    return value == 0.0 or isinf(value) or LEAST_FP32 <= abs(value) <= LARGEST_FP32


def _unusable(slot: str, value: float | None, info: StoredTensor | None) -> InputError:
    where = f"{info.file}: {info.name}" if info else f"--setting {ALPHA}"
    odd = value is not None and isfinite(value) and not _in_fp32(value)
    what = f"{slot} is {value}, out of the range of fp32" if odd else f"{slot} is {value}"
    return InputError(what, where, "use an earlier save of the adapter")


def _matters(row: Algorithm, shapes: Mapping[str, Shape], shape: Shape) -> bool:
    """Return whether an alpha changes the scale."""
    return row.scalars_from(None, shapes, shape) != row.scalars_from(SOME_ALPHA, shapes, shape)
