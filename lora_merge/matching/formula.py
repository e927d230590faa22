"""Turns modules of an adapter into patches: which formula, in which shapes, with which numbers. No torch.

Remarks for the user on single modules of an adapter; none of them is an error.

The facts about one adapter on one base that are known before its first module is placed. No torch.

Several tensors for one shared slot of a module (alpha, magnitude, shape): they must be equal. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from math import isfinite, isinf, isnan, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..adapters.kohya_args import Trained, is_norm_limit, trained
from ..adapters.modules import SCALES, AdapterFile, Module, Values
from ..adapters.peft.methods import SHARED
from ..adapters.peft.rules import PeftRules
from ..adapters.peft.target_parameters import TABLES
from ..adapters.stated import Statement, aside_remark, statement
from ..algorithms import ALGORITHMS, Algorithm, DoesNotFit, Shapes, dora
from ..algorithms.adamss import ADAMSS
from ..algorithms.base import expect
from ..algorithms.boft import BOFT
from ..algorithms.frod import FROD, LAYER
from ..algorithms.ia3 import IA3, groups_of
from ..algorithms.lokr import LOKR
from ..algorithms.lora import LORA
from ..algorithms.lora_bias import LORA_BIAS
from ..algorithms.lora_experts import LORA_EXPERTS, LORA_EXPERTS_TRANSPOSED
from ..algorithms.lora_stacked import STACKED
from ..algorithms.oft import DIAG_OFT
from ..algorithms.peft_oft import PEFT_OFT
from ..algorithms.psoft import PSOFT
from ..algorithms.supertuning import SUPERTUNING
from ..algorithms.tlora import TLORA
from ..algorithms.unilora import UNILORA
from ..disk.files import StoredTensor
from ..dtypes import WHOLE, Shape, flat, spoken
from ..errors import InputError, MergeError, ShapeMismatch, UsageError
from ..job import SETTING
from ..models.weights import WeightView, turned
from ..text import Note
from .fit_errors import advice_for_groups
from .missing_tensors import UNGATHERED, incomplete, lacks
from .orientation import NO_FACTS, STATE, Base, Orientation, Undecided
from .patch import Patch
from .resizing import is_copy

NO_ALPHA: Final = Note(
    "no alpha is stored, so it counts as trained with scale 1 (alpha = rank); if it was another, state it with "
    "--setting lora_alpha=VALUE"
)
ZERO_ALPHA: Final = Note("the stored alpha is 0, which means alpha = rank (scale 1), as in the trainers")
BORROWED: Final = Note("its alpha is from the file's header, which calls this part of the model by another name")
OTHER_ALPHA: Final = Note(
    "its configuration gives another scale than the stored alpha; the configuration is used, as in PEFT"
)
NO_DORA: Final = Note("its configuration turns DoRA off, so its magnitude is left out, as in PEFT")
BYPASSED: Final = Note(
    "trained in bypass mode, where its magnitude has no effect, so it is left out; other programs use it"
)
LEFT_OUT: Final = Note("it does not fit the base, and is left out because its strength is 0")
EMPTY: Final = Note("it has a tensor without elements (rank 0), which changes nothing")
UNSCALED: Final = Note(
    "trained in bypass mode, where DyLoRA has no scale: its alpha is left out; other programs use it"
)
KERNEL_OFT: Final = Note("PEFT's forward pass of OFT on a kernel is not a convolution; this is what PEFT merges it to")
NORM_LIMIT: Final = Note(
    "its alpha of 1 is taken for the limit of the rotation's norm, as ComfyUI's own training node stores it; LyCORIS "
    "and sd-scripts, whose names are flat, mean alpha times the number of outputs"
)
TUNED_BIAS: Final = Note("torchtune's forward pass of DoRA scales the bias too, its merge does not; nor does this one")
TURNED_BIAS: Final = Note("trained in bypass mode, so its bias is changed with it; other programs leave the bias")
MAY_HAVE_GROUPS: Final = Note(
    "LyCORIS trains a convolution with groups in another way in bypass mode; the merge is right if that convolution "
    "has one group, which no file tells"
)
SHARED_TWICE: Final = "its {slot} is stored twice under different names, with equal values; it is used once"
DYLORA: Final = Note(
    "an up factor of its file has no axes of a kernel, as LyCORIS' DyLoRA saves it, and no metadata tells: scaled by "
    "alpha / rank, as LyCORIS loads DyLoRA; it trains its last block with alpha / number of blocks"
)

SAME_MACHINE: Final = "taken as PEFT takes them when it loads the adapter on a CPU; on other devices it may find others"

REBUILT: Final[Mapping[str, Note]] = MappingProxyType(
    {
        SUPERTUNING.name: Note(
            f"its places are not stored (save_precomputed_indices): those of the largest weights, {SAME_MACHINE}"
        ),
        PSOFT.name: Note(f"its factors are singular vectors of the base, {SAME_MACHINE}"),
        UNILORA.name: Note(
            "it is not stored (save_indices): taken for one of the layers that its configuration means, in the order "
            "of the model's own class"
        ),
        FROD.name: Note(
            f"its basis is not stored (save_projection), and made of the layers of its kind: {SAME_MACHINE}"
        ),
        ADAMSS.name: Note(f"its groups of rows are clusters in the base, {SAME_MACHINE}"),
    }
)
"""Row of ALGORITHMS that computes slots from the base (`Algorithm.rebuild`) → the remark on it."""


def rebuilt(name: str, shapes: Shapes) -> Note | None:
    """Return the remark on a module whose file lacks such slots; None where the file has them."""
    return REBUILT[name] if ALGORITHMS[name].is_rebuilt(shapes) else None


EXPERTS: Final = (LORA_EXPERTS.name, LORA_EXPERTS_TRANSPOSED.name)

LACKS_FACTS: Final = "the adapter's file does not hold all that its formula needs"
FROM_THE_TRAINING: Final = (
    "put the adapter_config.json of the training beside the adapter, and the base's config.json beside the base"
)


@dataclass(frozen=True)
class AdapterContext:
    """One adapter with the facts from its files, the base's files and the user's settings."""

    number: int  # position among the job's adapters
    adapter: AdapterFile
    rules: PeftRules
    values: Values
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json of the base
    model: str = ""  # architecture or model type of the base
    given: Mapping[str, Any] = field(default_factory=dict)  # settings that the user states
    base: Base = NO_FACTS  # layers of the base
    without_start: Collection[str] = frozenset()  # tensors with the values of the adapter's copy, without the start
    widest: tuple[int, int] = (0, 0)  # most rows and columns of the weights whose formula needs it
    _trained: dict[str, Trained] = field(default_factory=dict, init=False, repr=False, compare=False)  # cache

    @property
    def by_config(self) -> bool:
        """Whether the base has a configuration from which its model is built, with the layers that are stored."""
        return not {"model_type", "_class_name"}.isdisjoint(self.config)

    @cached_property
    def weights(self) -> Mapping[str, Module]:
        """Modules that change a weight, by name."""
        return {m.name: m for m in self.adapter.modules if m.parameter == "weight"}

    @cached_property
    def has_whole_numbers(self) -> bool:
        """Whether a tensor of the file holds whole numbers; a switch is not a number."""
        return any(info.dtype in WHOLE and info.dtype != "BOOL" for info in self.adapter.index.tensors.values())

    @cached_property
    def stated(self) -> Statement:
        """What the adapter's header and the files next to it state about the scale."""
        return statement(self.adapter)

    @cached_property
    def dylora(self) -> bool:
        """Whether a convolution has the shapes that LyCORIS' DyLoRA saves; then the linear layers are DyLoRA too."""
        pairs = (m.shapes for m in self.adapter.modules if LORA.name in m.algorithms)
        return any(len(shapes.get("up", ())) == 2 < len(shapes.get("down", ())) for shapes in pairs)

    @cached_property
    def orientation(self) -> Orientation:
        """Finds the orientation of each layer's weight."""
        return Orientation(self.rules, self.weights.values(), self._fits, self.base, self.given.get(SETTING))

    def trained(self, name: str) -> Trained:
        """Return the trainer's arguments for a formula, from the file's metadata."""
        if name not in self._trained:
            self._trained[name] = trained(ALGORITHMS[name], self.adapter.index.metadata, str(self.adapter.path))
        return self._trained[name]

    def with_shared(self, module: Module, name: str) -> Module:
        """Return the module with the shared tensors of the file that a formula takes."""
        if name not in SHARED:
            return module
        keys, tensors = self.rules.of(module.name).shared(name, module.name), self.adapter.index.tensors
        found = {slot: tensors[key] for slot, key in keys.items() if key in tensors}
        return replace(module, slots={**found, **module.slots}) if found else module

    def candidates(
        self, module: Module, view: WeightView, near: Mapping[str, WeightView] = MappingProxyType({})
    ) -> tuple[Sequence[str], str | None]:
        """Return (the rows of ALGORITHMS to try, the row that the configuration selects or None).

        ShapeMismatch if the files do not hold enough to decide.
        """
        complete, rules = module.complete, self.rules.of(module.name)
        try:
            chosen = rules.algorithm(module.name, complete, view, self.model)
        except DoesNotFit as e:
            where = f"{self.adapter.path}: {module.where} {shapes_of(module)}: {e}"
            raise ShapeMismatch(LACKS_FACTS, where, FROM_THE_TRAINING) from e
        if chosen is None:
            stored = module.slots.keys()
            return [
                n for n in complete
                if ALGORITHMS[n].required <= stored or _has_required(self.with_shared(module, n), n, near)
            ], None  # fmt: skip
        if chosen in EXPERTS and len(module.shapes.get("up", ())) == 3:  # other programs' form of the same factors
            return [row.name for row in STACKED if row.name in complete], None
        left = ALGORITHMS[chosen].starts_in_base and view.row_slices[0].key in self.without_start
        chosen = LORA.name if left and LORA.name in complete else chosen
        return [chosen] if _has_required(self.with_shared(module, chosen), chosen, near) else [], chosen

    def _fits(self, module: Module, view: WeightView) -> bool:
        """Return whether some formula accepts the module's tensors for this view of the weight."""
        try:
            rows, _ = self.candidates(module, view)
        except MergeError:
            return False
        return any(_formula_takes(name, self.with_shared(module, name).shapes, view) for name in rows)


@lru_cache(maxsize=1024)  # a model has thousands of layers of a few shapes
def fit(
    name: str, stored: tuple[tuple[str, Shape], ...], weight: Shape, matrix: tuple[int, int]
) -> Mapping[str, Shape]:
    """Return the shapes as the formula needs them; DoesNotFit for stacked experts in a formula for one matrix."""
    shapes = ALGORITHMS[name].fitted_shapes(dict(stored), weight)
    if matrix != flat(weight) and not ALGORITHMS[name].stacked:
        raise DoesNotFit(f"the weight {list(weight)} is stacked experts, which {name} does not support")
    return shapes


def shapes_of(module: Module) -> str:
    """Return the shapes of a module's tensors, for a message."""
    return ", ".join(f"{slot} {list(shape)}" for slot, shape in module.shapes.items())


def _formula_takes(name: str, shapes: Mapping[str, Shape], view: WeightView) -> bool:
    try:
        fit(name, tuple(shapes.items()), view.shape, view.matrix)
    except DoesNotFit:
        return False
    return True


def _has_required(module: Module, name: str, near: Mapping[str, WeightView]) -> bool:
    """Return whether the module has the slots that a formula requires, or the base has weights that fill them."""
    row = ALGORITHMS[name]
    return all(row.beside.get(slot) in near for slot in row.required - module.slots.keys())


KEEP_ONE: Final = "remove the one that the adapter was not trained with, or export it again"


def repeated(module: Module, path: Path, values: Values) -> Iterator[str]:
    """Yield the slots that have several equal tensors; InputError for tensors that are not equal."""
    for slot, other in module.repeated:
        if not _same(slot, module.shared[slot], other, values):
            where = f"{path}: {module.shared[slot].name} and {other.name}"
            raise InputError(f"two tensors give the {slot} of one module, and are not equal", where, KEEP_ONE)
        yield slot


def _same(slot: str, one: StoredTensor, other: StoredTensor, values: Values) -> bool:
    """Return whether two tensors of one slot are equal: single numbers by value, others byte for byte.

    Magnitudes are equal if they also lie along the same axis, [out] and [out, 1] for example.
    """
    if prod(one.shape) == prod(other.shape) == 1:
        return values.numbers(one) == values.numbers(other)
    if slot != "magnitude":
        return values.same(one, other)
    flat = [replace(info, shape=(prod(info.shape),)) for info in (one, other)]
    return _is_of_inputs(one) == _is_of_inputs(other) and values.same(*flat)


def _is_of_inputs(info: StoredTensor) -> bool:
    """Return whether a magnitude lies along the input axis; see algorithms/dora.py."""
    return info.name.endswith(dora.SHAPED) and len(info.shape) > 1 and info.shape[0] != prod(info.shape)


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
