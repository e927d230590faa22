"""Chooses the formula of one module on one weight, by ordered filters that each have a name and a reason to refuse.

The ending of a key says which rows of ALGORITHMS may read its tensor (adapters/suffixes.py). Two groups of filters
follow. The first needs no values and leaves some of these rows:

* slots: the row reads all slots of the module, and lacks none;
* configuration: it is the row that the PEFT configuration selects, if it selects one (adapters/peft/rules.py);
* tensors: its required slots are in the file, or the base fills them.

Each row is then tried on each view of the weight, [out, in] and [in, out], that may be right (orientation.py):

* experts: a formula for stacked experts has a stack before it, unless no other row is left;
* shapes: the tensors have the shapes that the formula needs for the weight;
* magnitude: DoRA's magnitude has a number for each row or column;
* settings: every setting is known, and belongs to these shapes;
* groups: LyCORIS' bypass mode did not change a convolution with groups in a way that no weight can hold;
* configured scale, scale: the configuration does not contradict the tensors, and the scale is known.

The first row that passes all of them is the formula of the module; if none does, the error has the reasons. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from math import isfinite, isinf, isnan, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ..adapters.kohya_args import DYLORA, NetworkArguments, is_norm_limit, network_arguments
from ..adapters.modules import SCALE_SLOTS, AdapterFile, Module
from ..adapters.network_settings import Statement, aside_remark, statement
from ..adapters.peft.methods import SHARED_SLOTS_OF_ROW
from ..adapters.peft.rules import PeftRules
from ..adapters.peft.target_parameters import MLX_EMBEDDINGS
from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS, DoesNotFit, dora
from ..algorithms.base import LAYER_SLOT, expect
from ..dtypes import WHOLE_DTYPES, Shape, StoredTensor, flat, spoken
from ..errors import InputError, MergeError, ShapeMismatch, UsageError
from ..job import SETTING
from ..models.weights import WeightView, turned
from ..report import LOST_ALPHA
from ..text import Note
from .fit_errors import advice_for_groups
from .missing_tensors import UNGATHERED, incomplete, lacks
from .orientation import NO_FACTS, STATE_ORIENTATION, BaseLayers, Orientation, Undecided
from .patch import Patch

FLAT_NAME: Final = re.compile(r"(?:lora_(?:unet|te[1-4]?|prior_unet|prior_te|transformer)|lycoris)_[^.]+$")
"""A module's name as sd-scripts, LyCORIS, OneTrainer and musubi-tuner write it: all of these store alpha. Versions of
sd-scripts before alpha existed wrote an entry `ss_network_module` into the metadata, and trained with scale 1."""

NO_ALPHA: Final = Note(
    "no alpha is stored, so it counts as trained with scale 1 (alpha = rank); if it was another, state it with "
    "--setting lora_alpha=VALUE"
)
ZERO_ALPHA: Final = Note("the stored alpha is 0, which means alpha = rank (scale 1), as in the trainers")
BORROWED: Final = Note("its alpha is from the file's header, which calls this part of the model by another name")
OTHER_ALPHA: Final = Note(
    "its configuration gives another scale than the stored alpha; the configuration is used, as in PEFT"
)
DORA_OFF: Final = Note("its configuration turns DoRA off, so its magnitude is left out, as in PEFT")
BYPASSED: Final = Note(
    "trained in bypass mode, in which its magnitude has no effect, so it is left out; other programs use it"
)
EMPTY: Final = Note("it has a tensor without elements (rank 0), which changes nothing")
UNSCALED: Final = Note(
    "trained in bypass mode, in which DyLoRA has no scale: its alpha is left out; other programs use it"
)
NORM_LIMIT: Final = Note(
    "its alpha of 1 is taken for the limit of the rotation's norm, as ComfyUI's own training node stores it; LyCORIS "
    "and sd-scripts, whose names are flat, mean alpha times the number of outputs"
)
MAY_HAVE_GROUPS: Final = Note(
    "LyCORIS trains a convolution with groups in another way in bypass mode; the merge is right if that convolution "
    "has one group, which no file states"
)
SHARED_TWICE: Final = "its {slot} is stored twice under different names, with equal values; it is used once"
ALPHA_SETTING: Final = "lora_alpha"
"""The setting by which the user states α if a file has none."""

TRAINED_ON: Final = "merge into the checkpoint that the adapter was trained on"
IN_FLOATS: Final = "export the adapter in fp32, fp16 or bf16 with the program that quantised it"

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

LACKS_FACTS: Final = "the adapter's file lacks values that its formula needs"
FROM_THE_TRAINING: Final = (
    "put the adapter_config.json of the training next to the adapter, and the base's config.json next to the base"
)

OF_ROW: Final = "experts"
"""The filter of candidates whose reason is about the row of ALGORITHMS, not about shapes and values of tensors."""

STATED_BY: Final = ("--setting", "adapter_config")
"""A reason with one of these texts names the place from which the missing fact can come."""

KEEP_ONE: Final = "remove the one that the adapter was not trained with, or export it again"


@dataclass(frozen=True)
class AdapterContext:
    """One adapter with the facts from its files, the base's files and the user's settings."""

    number: int  # position among the job's adapters
    adapter: AdapterFile
    rules: PeftRules
    values: FileValues
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json of the base
    model: str = ""  # architecture or model type of the base
    user_settings: Mapping[str, Any] = field(default_factory=dict)  # of --setting
    base: BaseLayers = NO_FACTS  # layers of the base
    without_start: Collection[str] = frozenset()  # tensors with the values of the adapter's copy, without the start
    widest: tuple[int, int] = (0, 0)  # most rows and columns of the weights whose formula needs it
    _arguments: dict[str, NetworkArguments] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        return not (WHOLE_DTYPES - {"BOOL"}).isdisjoint({info.dtype for info in self.adapter.index.tensors.values()})

    @cached_property
    def stated(self) -> Statement:
        """What the adapter's header and the files next to it state about the scale."""
        return statement(self.adapter)

    @cached_property
    def dylora(self) -> bool:
        """Whether a convolution has the shapes that LyCORIS' DyLoRA saves; then the linear layers are DyLoRA too."""
        factors = (
            m.shapes for m in self.adapter.modules if any(DYLORA in ALGORITHMS[a].scale_words for a in m.algorithms)
        )
        return any(len(shapes.get("up", ())) == 2 < len(shapes.get("down", ())) for shapes in factors)

    @cached_property
    def orientation(self) -> Orientation:
        """Decides the orientation of each layer's weight."""
        return Orientation(self.rules, self.weights.values(), self._fits, self.base, self.user_settings.get(SETTING))

    def arguments(self, formula: str) -> NetworkArguments:
        """Return the trainer's arguments for a formula, from the file's metadata."""
        if formula not in self._arguments:
            metadata, path = self.adapter.index.metadata, str(self.adapter.path)
            self._arguments[formula] = network_arguments(ALGORITHMS[formula], metadata, path)
        return self._arguments[formula]

    def _fits(self, module: Module, view: WeightView) -> bool:
        """Return whether some formula accepts the module's tensors for this view of the weight."""
        site = Site(module, view, {}, self)
        try:
            rows = site.rows()
        except MergeError:
            return False
        return any(takes(name, site.with_shared(name), view) for name in rows.names)


@lru_cache(maxsize=1024)  # a model has thousands of layers of a few shapes
def fit(
    formula: str, stored: tuple[tuple[str, Shape], ...], weight: Shape, matrix: tuple[int, int]
) -> Mapping[str, Shape]:
    """Return the shapes as the formula needs them; DoesNotFit for stacked experts in a formula for one matrix."""
    row = ALGORITHMS[formula]
    shapes = row.fitted_shapes(dict(stored), weight)
    if matrix != flat(weight) and row.layout != "experts":
        raise DoesNotFit(f"the weight {list(weight)} is stacked experts, which {formula} does not support")
    return shapes


def takes(formula: str, module: Module, view: WeightView) -> bool:
    """Return whether a formula accepts the shapes of a module's tensors for this view of a weight."""
    try:
        fit(formula, tuple(module.shapes.items()), view.shape, view.matrix)
    except DoesNotFit:
        return False
    return True


def shapes_of(module: Module) -> str:
    """Return the shapes of a module's tensors, for a message."""
    return ", ".join(f"{slot} {list(shape)}" for slot, shape in module.shapes.items())


class Refusal(NamedTuple):
    """The filter that refused a formula for a module, and why."""

    filter: str
    reason: str


class CandidateRows(NamedTuple):
    """The rows of ALGORITHMS for one module that are left before shapes and values are looked at."""

    names: Sequence[str]
    selected: str | None  # the row that the PEFT configuration selects; None if it selects none


class FormulaChoice(NamedTuple):
    """The patch for a module, and what goes with it."""

    patch: Patch
    remarks: tuple[Note, ...]  # sentences about the module for the user
    settings: frozenset[str]  # the user's settings that the patch depends on


def choose(
    module: Module, view: WeightView, context: AdapterContext, near: Mapping[str, WeightView] = MappingProxyType({})
) -> FormulaChoice:
    """Return the patch of a module on the weight that it changes: the first formula that passes all filters.

    `near` has the module's other parameters by name. InputError if its own tensors are incomplete or contradict each
    other, ShapeMismatch if they do not fit the weight.
    """
    site = Site(module, view, near, context)
    # The module's own tensors must not contradict each other, whatever the formula.
    context.stated.check(module)
    twice = [Note(SHARED_TWICE.format(slot=slot)) for slot in repeated(module, context.adapter.path, context.values)]
    # Try every row that is left on every view of the weight.
    rows, refused = site.rows(), list[Refusal]()
    for candidate in site.candidates(rows):
        if (refusal := candidate.refusal()) is None:
            return candidate.choice(twice)
        refused.append(refusal)
    raise site.error(rows, refused)


def check_settings(user_settings: Mapping[str, Any], used: Collection[str]) -> None:
    """Raise UsageError for a setting of the user that no module uses."""
    if unused := sorted(user_settings.keys() - used):
        raise UsageError(f"no module of the adapters uses {unused[0]}", f"`--setting {unused[0]}`",
                         "leave it out: the file states it, or its formula has no such setting")  # fmt: skip


class Site(NamedTuple):
    """One module on the weight that it changes, with the filters that need no values."""

    module: Module
    view: WeightView
    near: Mapping[str, WeightView]  # the module's other parameters that formulas read, and the weights of its relatives
    context: AdapterContext

    @property
    def rules(self) -> PeftRules:
        """What the PEFT configuration means for this module."""
        return self.context.rules.of(self.module.name)

    @property
    def where(self) -> str:
        """The adapter and the module, for messages."""
        return f"{self.context.adapter.path}: {self.module.where}"

    def with_shared(self, formula: str) -> Module:
        """Return the module with the shared tensors of the file that a formula takes."""
        module = self.module
        if formula not in SHARED_SLOTS_OF_ROW:
            return module
        keys, tensors = self.rules.shared(formula, module.name), self.context.adapter.index.tensors
        shared = {slot: tensors[key] for slot, key in keys.items() if key in tensors}
        return replace(module, slots={**shared, **module.slots}) if shared else module

    def rows(self) -> CandidateRows:
        """Return the rows that the filters `slots`, `configuration` and `tensors` leave.

        ShapeMismatch if the files do not hold enough to decide, InputError if the configuration is for other tensors.
        """
        # slots: the rows that read all slots of the module and lack none.
        complete = self.module.complete
        # configuration: the row that it selects.
        try:
            selected = self.rules.algorithm(self.module.name, complete, self.view, self.context.model)
        except DoesNotFit as e:
            raise ShapeMismatch(LACKS_FACTS, f"{self.where} {shapes_of(self.module)}: {e}", FROM_THE_TRAINING) from e
        stack = len(self.module.shapes.get("up", ())) == 3
        if selected is not None and ALGORITHMS[selected].layout == "experts" and stack:
            # Other programs store the same factors as stacks, under PEFT's names.
            return CandidateRows([name for name in complete if ALGORITHMS[name].layout == "experts"], None)
        if selected is not None:
            without_start = ALGORITHMS[selected].without_start
            if without_start in complete and self.view.row_slices[0].key in self.context.without_start:
                selected = without_start
        # tensors: the rows whose required slots are stored, or filled from the base.
        names, stored = complete if selected is None else (selected,), self.module.slots.keys()
        left = [name for name in names if ALGORITHMS[name].required <= stored or not self._lacking(name)]
        return CandidateRows(left, selected)

    def _lacking(self, formula: str) -> list[str]:
        """Return the required slots of a formula that neither the file has nor the base fills."""
        row = ALGORITHMS[formula]
        lacking = row.required - self.with_shared(formula).slots.keys()
        return sorted(slot for slot in lacking if row.base_slots.get(slot) not in self.near)

    def candidates(self, rows: CandidateRows) -> Iterator[Candidate]:
        """Yield each row with each view of the weight that may be right.

        ShapeMismatch if the weight's orientation stays unknown.
        """
        for name in rows.names:
            views, by_user = self._views(name)
            for view in views:
                yield Candidate(self, name, view, {SETTING} if by_user else set(), alone=len(rows.names) == 1)

    def _views(self, formula: str) -> tuple[Sequence[WeightView], bool]:
        """Return (the views of the weight to try, whether the user's setting decided)."""
        try:
            return self.context.orientation.ways(self.module, formula, self.view)
        except Undecided as e:
            where = f"{self.where} on {self.view.row_slices[0].key} {list(self.view.shape)}: {e}"
            raise ShapeMismatch(LACKS_FACTS, where, STATE_ORIENTATION) from e

    def error(self, rows: CandidateRows, refused: Sequence[Refusal]) -> MergeError:
        """Return the error for a module of which every formula is refused; `refused`: the candidates."""
        module, path = self.module, self.context.adapter.path
        # The formula that the keys were written for lacks a tensor: the reasons of the others would mislead.
        if not rows.names or (rows.selected is None and module.algorithms[0] not in rows.names):
            return incomplete(lacks(module), path)
        reasons = [*dict.fromkeys(refusal.reason for refusal in refused if refusal.filter != OF_ROW)]
        sizes = "" if all(re.search(r"\d", reason) for reason in reasons) else f" {shapes_of(module)}"
        where = f"{self.where}{sizes}: {'; or '.join(reasons)}"
        # A fact is missing that a file or the user can state.
        to_state = next((reason for reason in reasons if any(place in reason for place in STATED_BY)), None)
        if to_state is not None:
            return ShapeMismatch(LACKS_FACTS, where, to_state)
        advice = TRAINED_ON + advice_for_groups(module.shapes.get("down", ()), self.view.shape)
        fix = UNGATHERED if (0,) in module.shapes.values() else advice
        return ShapeMismatch("adapter tensors do not fit the base", where, fix)


class Candidate:
    """One formula on one view of the weight: each filter fills in what it decides, or raises DoesNotFit."""

    shapes: Mapping[str, Shape]
    arguments: NetworkArguments  # of the trainer
    magnitude: tuple[dora.Axis, Shape] | None  # None without one that has an effect
    configured: Mapping[str, float]  # scalars of the configuration
    scalars: Mapping[str, float]

    def __init__(self, site: Site, formula: str, view: WeightView, used_settings: set[str], *, alone: bool) -> None:
        self.site, self.context, self.rules = site, site.context, site.rules
        self.formula, self.row, self.view = formula, ALGORITHMS[formula], view
        self.alone = alone  # whether no other row is left
        self.module = site.with_shared(formula)
        self.base_slots: dict[str, WeightView] = {}  # slot → weight of the base that fills it
        if site.near:
            self.base_slots = {slot: site.near[name] for slot, name in self.row.base_slots.items() if name in site.near}
            self.base_slots |= {
                slot: turned(view, other) for slot, other in site.near.items() if slot.startswith(LAYER_SLOT)
            }
        self.settings = self._settings()
        self.remarks: list[Note] = []
        self.used_settings = used_settings  # settings of the user

    def refusal(self) -> Refusal | None:
        """Run the filters in order; return the refusal of the first that does not pass."""
        for name, passes in FILTERS:
            try:
                passes(self)
            except DoesNotFit as e:
                return Refusal(name, str(e))
        return None

    def choice(self, remarks: Sequence[Note]) -> FormulaChoice:
        """Return the patch, with these remarks on the module and those on the formula."""
        self._check_factors()
        self._add_remarks()
        self._add_scale_remarks()
        settings = tuple(sorted(self.settings.items()))
        patch = Patch(
            self.context.number, self.module, self.formula, self.shapes, self.scalars, settings, self.view,
            self.magnitude, self.base_slots,
        )  # fmt: skip
        return FormulaChoice(patch, (*remarks, *self.remarks), frozenset(self.used_settings))

    def expect_experts(self) -> None:
        """Refuse a formula for stacked experts on another weight, if another row is left."""
        unstacked = self.row.layout == "experts" and len(self.view.shape) != 3
        expect(holds=self.alone or not unstacked, otherwise="the weight is no stack of experts")

    def fit_shapes(self) -> None:
        """Fit the tensors, and the weights of the base that fill slots, to the formula."""
        stored = self.module.shapes
        if self.base_slots:
            stored = {**stored, **{slot: other.matrix for slot, other in self.base_slots.items()}}
        self.shapes = fit(self.formula, tuple(stored.items()), self.view.shape, self.view.matrix)
        self.arguments = self.context.arguments(self.formula)  # damaged metadata matters only if the shapes fit

    def fit_magnitude(self) -> None:
        """Fit DoRA's magnitude to the weight, if it has an effect."""
        info, shape = self.module.shared.get("magnitude"), self.view.shape
        self.magnitude = None
        if info is None:
            return
        if self.rules.denies("magnitude"):
            self.remarks.append(DORA_OFF)
        elif self.arguments.no_magnitude:
            self.remarks.append(BYPASSED)
        elif self._is_of_table or self.arguments.of_inputs:
            self.magnitude = dora.fit((1, prod(info.shape)), shape, dora.SHAPED)
        else:
            self.magnitude = dora.fit(info.shape, shape, dora.SHAPED if info.name.endswith(dora.SHAPED) else "")

    @property
    def _is_of_table(self) -> bool:
        """Whether it changes embeddings. PEFT takes the norm over the vocabulary, mlx-lm over each token's entries."""
        in_table = self.row.layout == "in_out" and self.module.name.rpartition(".")[2] in MLX_EMBEDDINGS
        return in_table or self.row.layout == "table"

    def _settings(self) -> dict[str, Any]:
        """Return the formula's settings from metadata, configuration and user, and `widest` if the formula needs it."""
        known = self.row.settings
        if not known:
            return {}
        return {
            **self.context.arguments(self.formula).settings,
            **self.rules.settings(self.formula, self.module.name),
            **{name: value for name, value in self.context.user_settings.items() if name in known},
            **({"widest": self.context.widest} if "widest" in known else {}),
        }

    def check_settings(self) -> None:
        """Refuse settings that no file states, or that contradict the shapes."""
        partial = self.arguments.partial - self.context.user_settings.keys() if self.row.settings else ()
        if missing := self.row.missing_settings(self.settings) or sorted(partial):
            raise DoesNotFit(
                f"the file does not state {', '.join(missing)}; give it with `--setting {missing[0]}=VALUE`"
            )
        self.row.checks.check_settings(self.settings, self.shapes, self.view.shape)

    def check_groups(self) -> None:
        """Refuse, or remark on, a change of a convolution that may have groups and was trained in bypass mode."""
        bypass, arguments, shape = self.row.bypass, self.arguments, self.view.shape
        # The mode was off if the convolution has groups, or computed something else.
        off = bypass.groups == "off" and arguments.no_magnitude and "magnitude" in self.module.shared
        other = bypass.groups == "other" and arguments.bypass
        if len(shape) > 2 and (off or other or arguments.no_scale):
            self.remarks.append(MAY_HAVE_GROUPS)
        # Factors of the inputs of several groups.
        on_input = self.module.slots.get("on_input")
        if on_input is not None and any(self.context.values.elements(on_input)):
            groups = bypass.input_groups(self.shapes, shape)
            expect(holds=arguments.bypass or groups < 2, otherwise=ONLY_IN_BYPASS.format(groups=groups, shape=[*shape]))
        # A rotation of the output of all groups.
        if not (bypass.groups == "mixed" and arguments.bypass) or len(shape) < 3 or self.shapes["blocks"][-1] < 2:
            return
        if shape[1] == 1 < shape[0]:
            where = f"{self.site.where} on {list(shape)}: each output has one input channel"
            raise ShapeMismatch("outputs of different groups were mixed in bypass mode", where, UNHOLDABLE)
        self.remarks.append(MAY_HAVE_GROUPS)

    def read_configuration(self) -> None:
        """Read the configuration's scalars; none if α of the file or of the user counts more. The user's α takes the
        place of a configured α of 0."""
        rules, name, shapes = self.rules, self.module.name, self.shapes
        has_alpha, user = "alpha" in self.module.shared, self.context.user_settings
        self.configured = {}
        if has_alpha if rules.borrowed else rules.aside and (has_alpha or ALPHA_SETTING in user):
            return
        self.configured = rules.scalars(self.formula, name, shapes)
        if self.configured.get("scale") == 0 and ALPHA_SETTING in user:
            self.used_settings.add(ALPHA_SETTING)
            self.configured = rules.with_alpha(user[ALPHA_SETTING]).scalars(self.formula, name, shapes)

    def read_scalars(self) -> None:
        """Decide the scalars of the formula: from α, from the configuration, or from a stored scale."""
        row, shapes, shape, configured = self.row, self.shapes, self.view.shape, self.configured
        alpha, override = self._number("alpha"), self._number("scale_override")
        if alpha is None and "scale" in row.scalars:
            alpha = self._stated_alpha(needed=not configured and override is None)
        # The formula's rule for α; a bias takes the rank of the factors of its module.
        weight = self.context.weights.get(self.module.name) if row.part_of_lora else None
        try:
            scalars = dict(row.scalars_from(alpha, {**(weight.shapes if weight else {}), **shapes}, shape))
        except DoesNotFit as e:  # the shapes fit, so the alpha does not
            raise _unusable("alpha", alpha, self.module.shared.get("alpha")) from e
        # What the trainer made of α.
        if is_norm_limit(row, self.module.name, alpha, self.context.adapter.index.metadata):
            scalars["limit"] = float(alpha or 0)
            self.remarks.append(NORM_LIMIT)
        if "scale" in scalars:
            if self.arguments.no_scale:
                self.remarks.append(UNSCALED)
            scalars["scale"] = 1.0 if self.arguments.no_scale else scalars["scale"] * self.arguments.factor
        # The configuration's scalars, and a stored scale, count more.
        if row.scale_from_config and not configured:
            raise DoesNotFit("the scale is stored only in adapter_config.json; copy it into the adapter's folder")
        if "alpha" in self.module.shared and "scale" in configured and configured["scale"] != scalars["scale"]:
            self.remarks.append(OTHER_ALPHA)
        scalars |= configured
        if override is not None and "scale" in row.scalars:
            scalars["scale"] = override
        elif alpha == 0 and not configured and self._alpha_matters:
            self.remarks.append(ZERO_ALPHA)
        self.scalars = scalars

    def _stated_alpha(self, *, needed: bool) -> float | None:
        """Return α as the user states it, else, if it is needed, as the header or a file next to the adapter does."""
        alpha: float | None = self.context.user_settings.get(ALPHA_SETTING)
        if alpha is None and needed and self.context.stated.settles and self._alpha_matters:
            return self.context.stated.alpha(self.row.rank(self.shapes) if self.row.rank else 0)
        return alpha

    @property
    def _alpha_matters(self) -> bool:
        """Whether an α changes the scale."""
        row, shapes, shape = self.row, self.shapes, self.view.shape
        return "scale" in row.scalars and (
            row.scalars_from(None, shapes, shape) != row.scalars_from(SOME_ALPHA, shapes, shape)
        )

    def _number(self, slot: str) -> float | None:
        """Return the one number in a shared slot of the module; None without such a tensor."""
        info = self.module.shared.get(slot)
        if info is None:
            return None
        if prod(info.shape) != 1:
            where = f"{info.file}: {info.name} {list(info.shape)}"
            raise InputError(f"{slot} is not one number", where, "export it again")
        value = self.context.values.elements(info)[0]
        infinite = slot != "alpha" and not isfinite(value)  # an infinite alpha is allowed in LoKr and OFT
        if info.dtype == "BOOL" or isnan(value) or infinite or not _in_fp32(value):
            raise _unusable(slot, value, info)
        return float(value)

    def _check_factors(self) -> None:
        """Raise InputError if a factor of the formula holds whole numbers, because no scale for them is stored."""
        if not self.context.has_whole_numbers:
            return
        for slot, info in chain(self.module.shared.items(), self.module.slots.items()):
            if info.dtype not in WHOLE_DTYPES or info.dtype == "BOOL":  # a switch is not a number
                continue
            if slot not in {*self.row.integer_slots, *SCALE_SLOTS, "reshape"}:
                where = f"{info.file}: {info.name} is {spoken(info.dtype)}"
                raise InputError("an adapter's factor contains whole numbers without a scale", where, IN_FLOATS)

    def _add_remarks(self) -> None:
        """Add the remarks on the patch, and the user's settings that it depends on."""
        row, shapes = self.row, self.shapes
        if row.kernel_note and prod(self.view.shape[2:]) > 1:
            self.remarks.append(Note(row.kernel_note))
        if self.arguments.note:
            self.remarks.append(self.arguments.note)
        if any(0 in stored for stored in self.site.module.shapes.values()):
            self.remarks.append(EMPTY)
        if doubt := self.rules.doubt(self.formula, self.module.name, shapes):
            self.remarks.append(doubt)
        if row.rebuild and row.is_rebuilt(shapes):
            self.remarks.append(Note(row.rebuild.note))
        self.used_settings |= self.context.user_settings.keys() & row.settings.keys()

    def _add_scale_remarks(self) -> None:
        """Add the remarks on the place that the scale is from."""
        shared = self.module.shared
        if self.rules.aside and self.configured.get("scale", 1.0) != 1:
            self.remarks.append(aside_remark(self.rules.fields.where))
        known = {"alpha", "scale_override"} & shared.keys() or self.configured
        if known and self.rules.borrowed and "alpha" not in shared:
            self.remarks.append(BORROWED)
        if known or not self._alpha_matters:
            return
        if ALPHA_SETTING in self.context.user_settings:
            self.used_settings.add(ALPHA_SETTING)
        elif self.context.stated.used:
            self.remarks.append(aside_remark(self.context.stated.used))
        else:
            lost = FLAT_NAME.match(self.module.name) and "ss_network_module" not in self.context.adapter.index.metadata
            self.remarks.append(LOST_ALPHA if lost else NO_ALPHA)


FILTERS: Final[tuple[tuple[str, Callable[[Candidate], None]], ...]] = (
    (OF_ROW, Candidate.expect_experts),
    ("shapes", Candidate.fit_shapes),
    ("magnitude", Candidate.fit_magnitude),
    ("settings", Candidate.check_settings),
    ("groups", Candidate.check_groups),
    ("configured scale", Candidate.read_configuration),
    ("scale", Candidate.read_scalars),
)
"""The filters of one formula on one view of the weight, in order; each may use what the filters before it decided."""


def repeated(module: Module, path: Path, values: FileValues) -> Iterator[str]:
    """Yield the slots that have several equal tensors; InputError for tensors that are not equal."""
    for slot, other in module.repeated:
        if not _same(slot, module.shared[slot], other, values):
            where = f"{path}: {module.shared[slot].name} and {other.name}"
            raise InputError(f"two tensors give the {slot} of one module, and are not equal", where, KEEP_ONE)
        yield slot


def _same(slot: str, first: StoredTensor, second: StoredTensor, values: FileValues) -> bool:
    """Return whether two tensors of one slot are equal: single values as numbers, others byte for byte.

    Magnitudes must also be of the same axis, as [out] and [out, 1] are.
    """
    if prod(first.shape) == prod(second.shape) == 1:
        return values.elements(first) == values.elements(second)
    if slot != "magnitude":
        return values.same(first, second)
    flat = [replace(info, shape=(prod(info.shape),)) for info in (first, second)]
    return _is_of_inputs(first) == _is_of_inputs(second) and values.same(*flat)


def _is_of_inputs(info: StoredTensor) -> bool:
    """Return whether a magnitude has a number for each input; see algorithms/dora.py."""
    return info.name.endswith(dora.SHAPED) and len(info.shape) > 1 and info.shape[0] != prod(info.shape)


def _in_fp32(value: float) -> bool:
    """Return whether a number is in the range of fp32, zero or infinite."""
    return value == 0.0 or isinf(value) or LEAST_FP32 <= abs(value) <= LARGEST_FP32


def _unusable(slot: str, value: float | None, info: StoredTensor | None) -> InputError:
    where = f"{info.file}: {info.name}" if info else f"`--setting {ALPHA_SETTING}`"
    odd = value is not None and isfinite(value) and not _in_fp32(value)
    what = f"{slot} is {value}, too large for fp32" if odd else f"{slot} is {value}"
    return InputError(what, where, "use an earlier save of the adapter")
