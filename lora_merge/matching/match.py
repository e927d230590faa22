"""Matches the modules of one adapter with the base: which formula, with which scalars, changes which rows.

`match_adapter` first gathers the facts that hold for all modules, then matches module by module, then the parameters
that are stored as whole values. What happens to each is collected in a `MatchDraft`; one error lists all problems of
one kind. Nothing here reads weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

from ..adapters.modules import AdapterFile, Module, two_in_one_slot
from ..adapters.network_settings import rules_of
from ..adapters.peft.rules import StoredValue
from ..adapters.peft.target_parameters import saved_inside
from ..adapters.suffixes import split_parameter
from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS
from ..dtypes import Shape, StoredTensor
from ..errors import InputError, MergeError, RemoteError, ShapeMismatch
from ..files.checkpoint import Index
from ..models.module_order import type_of
from ..models.names import WAN_EXPERTS, Names
from ..models.part_factors import Strengths
from ..models.tied_weights import TiedPair, tied
from ..models.weights import RowSlice, WeightView, whole
from ..options import Unmatched
from ..report import LEFT_OUT
from ..row_ranges import RowNumbers
from ..text import Note, listed, several
from .conflicts import TWICE, DuplicateCheck
from .fit_errors import STRANGE, ZERO_OF_INTEGERS, check_scales, check_variant, raise_problems
from .formula import ALPHA_SETTING, AdapterContext, choose
from .layer_order import layer_relatives, unnamed_layers
from .missing_tensors import Gap, gaps, incomplete
from .orientation import BaseLayers, base_types
from .patch import COPY, NO_LAYER, OFF, ZEROS, Match, Patch, PatchPart
from .split_layers import as_trained
from .stored_base import stored_base
from .tied_embeddings import SAVED_TWICE, AdapterPair, separate, shared_layers
from .unknown_names import factor_pairs
from .values import as_rows, chosen_rows, is_copy, is_fixed, is_zero, resized_values, with_values
from .weight_finder import WeightFinder, grown

TUNED_BIAS: Final = Note("torchtune's forward pass of DoRA scales the bias too, its merge does not; nor does this one")
TURNED_BIAS: Final = Note("trained in bypass mode, so its bias is changed with it; other programs leave the bias")

NO_BIAS: Final = "the adapter trains a bias that the model's layers do not have, so the model would ignore it"
GIVE_BIAS: Final = (
    "train without it (lora_bias), or give the base biases of zeros first, if its config.json has an entry for them "
    "(attention_bias, mlp_bias); else it can only be applied when the model runs"
)

NEW_BIAS: Final = "{names}: the base has no such bias; a model whose layers have none ignores it"

TRAINED_TWICE: Final = (
    "modules_to_save names a module and one inside it, and the model used another copy of the inner one than was saved"
)
TRAIN_ONE_COPY: Final = (
    "train it again with modules_to_save naming one of the two; PEFT cannot load this adapter either"
)


class KnownBase(NamedTuple):
    """The facts about a base that are the same for every adapter."""

    names: Names
    tensors: Mapping[str, StoredTensor]
    tied: TiedPair | None

    @classmethod
    def of(cls, base: Index, names: Names) -> KnownBase:
        """Return the facts about a base."""
        return cls(names, base.tensors, tied(names, base.tensors, base.config))


def adapter_context(  # noqa: PLR0913, PLR0917  # an adapter, a base and the user's settings
    number: int, adapter: AdapterFile, values: FileValues, base: Index, names: Names, settings: Mapping[str, Any]
) -> AdapterContext:
    """Return the facts about an adapter that are known without the base's tensors. `number`: its position among those
    of the job."""
    model = str(base.config.get("model_type") or ("gpt_oss" if names.architecture == "GPT-OSS" else ""))
    return AdapterContext(number, adapter, rules_of(adapter), values, base.config, model, settings)


def match_adapter(facts: AdapterContext, base: KnownBase, strengths: Strengths, unmatched: Unmatched) -> Match:
    """Return the changes that one adapter makes to the base; with `skip`, without the modules that match nothing.

    `facts`: what is known about the adapter without the base's tensors.
    """
    names, adapter = base.names, facts.adapter
    # The base as this adapter sees it: with the tensors that PEFT saved for it, and a head that may be separated.
    stored = stored_base(facts, strengths, names, base.tensors, base.tied)
    pair = AdapterPair(stored.tied, facts)
    # The modules: also the ones that no key names, or whose keys have no known ending.
    modules = [m for m in adapter.modules if not facts.rules.of(m.name).is_shared(m.name)]
    rules, modules = unnamed_layers(facts.rules, modules, {**stored.base, **pair.new_tensors}, facts.config)
    lone = names.lone_expert([m.name for m in modules])
    finder = WeightFinder(strengths, replace(facts, rules=rules), stored, pair, lone)
    modules, strange = with_values(modules, adapter.strange, rules)
    unnamed, strange = factor_pairs(names, strange, adapter.path)
    modules += unnamed
    # Facts of one module that depend on the other modules.
    widest = finder.widest(modules)
    rules = rules.counting([m.name for m in modules], type_of(facts.config))
    rules = layer_relatives(rules, modules, finder.dtype, facts)
    layers = BaseLayers(base_types(facts.config), names.recognised, partial(finder.of, adapter.modules))
    context = replace(facts, rules=rules, base=layers, without_start=stored.without_start, widest=widest)
    # Match the modules, then the whole values.
    matcher = ModuleMatcher(context, strengths, finder, gaps(modules, rules))
    for module in modules:
        matcher.match(module)
    for info in strange:
        if not rules.holds_for_all(info.name):
            matcher.match_value(info)
    notes = [WAN_EXPERTS[lone]] if lone else [finder.change.note] if finder.change else []
    return matcher.result(notes, unmatched)


@dataclass
class MatchDraft:
    """The match of one adapter while its modules are matched; the fields that `Match` has too are described there."""

    uses: dict[str, list[PatchPart]] = field(default_factory=dict)
    replaced: dict[str, StoredTensor] = field(default_factory=dict)
    created: dict[str, tuple[Shape, str]] = field(default_factory=dict)
    grown: dict[str, Shape] = field(default_factory=dict)
    matched: list[str] = field(default_factory=list)
    unmatched: dict[str, str] = field(default_factory=dict)
    components: Counter[str] = field(default_factory=Counter)
    applied: Counter[tuple[str, float]] = field(default_factory=Counter)
    unused: dict[str, str] = field(default_factory=dict)
    settings: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)
    remarks: dict[Note, dict[str, None]] = field(default_factory=dict)  # sentence for the user → its modules
    ends: dict[str, str] = field(default_factory=dict)  # module that changes one end of tied embeddings → that tensor
    failures: list[MergeError] = field(default_factory=list)  # modules that are incomplete or do not fit
    unfit: list[list[str]] = field(default_factory=list)  # of modules of another shape: the weights that they change
    shape_errors: dict[tuple[RowSlice, ...], MergeError] = field(default_factory=dict)  # copies of another shape

    def remark(self, text: Note, module: Module) -> None:
        """Record a sentence on a module."""
        self.remarks.setdefault(text, {})[module.where] = None

    def count(self, name: str, components: Collection[str]) -> None:
        """Count a matched module and the components of the model that it changes."""
        self.matched.append(name)
        for component in components:  # Counter.update takes five calls for one component
            self.components[component] += 1

    def leave_unused(self, module: Module, why: str, components: Collection[str] = ()) -> None:
        """Record why the tensors of a matched module change nothing; count it, if its components are passed."""
        self.unused |= dict.fromkeys((info.name for info in module.tensors), why)
        if components:
            self.count(module.where, components)

    def note_unused(self, info: StoredTensor, why: str) -> None:
        """Record and report why one tensor changes nothing."""
        self.unused[info.name] = why
        self.notes.append(Note(f"{info.name}: {why}"))


class ModuleMatcher:
    """Matches the modules and values of one adapter with the base, one after the other, and records them in `draft`."""

    def __init__(
        self, context: AdapterContext, strengths: Strengths, finder: WeightFinder, lacks: Mapping[str, Gap]
    ) -> None:
        self.draft = MatchDraft()
        self.context, self.strengths, self.finder = context, strengths, finder
        self.names, self.stored, self.pair = finder.names, finder.stored, finder.pair
        self.path, self.values, self.base = context.adapter.path, context.values, finder.base
        self.lacks = lacks  # module → the tensor that it should have
        self.duplicates = DuplicateCheck(self.path, self.values)
        self.new_values: dict[tuple[RowSlice, ...], StoredTensor] = {}  # parameters with a new value
        self.replaced_runs = 0  # of consecutive rows, so far
        self.has_elements = any(info.nbytes for info in context.adapter.index.tensors.values())

    def result(self, notes: Sequence[Note], unmatched: Unmatched) -> Match:
        """Return the frozen match, or raise one error that lists the problems."""
        draft = self.draft
        # Sizes that are right only together: embeddings with their head, values with their biases.
        errors = draft.shape_errors | self.stored.resized_alone(self.names, draft.replaced)
        draft.failures += [errors[rows] for rows in errors if rows not in self.new_values]  # a value sets the shape
        unfit, resized = resized_values(draft.replaced, self.base, self.path)
        draft.failures += unfit
        if unmatched == "error" and (refusal := shared_layers(self.context)):
            raise refusal
        # Freeze the match; raise what is wrong with it.
        match = Match(
            self.context.adapter, draft.uses, draft.replaced, self.stored.copies, self.stored.bases, draft.created,
            draft.grown, draft.matched, draft.unmatched, draft.components, draft.unused,
            (*notes, *draft.notes, *resized), frozenset(draft.settings | self.finder.settings), draft.applied,
        )  # fmt: skip
        raise_problems(match, self.names, draft.failures, draft.unfit, unmatched)
        if not (draft.replaced or self.stored.bases):
            check_scales((part.patch for part in match.parts), self.path, self.context.rules)
        # Separate the head from the embeddings if the adapter changes one of them.
        match = separate(self.pair, draft.ends, match, self.strengths, unmatched)
        # The notes: on the variant of the model, on single modules, on new tensors.
        variant = check_variant(match, self.names, unmatched)
        remarks = [Note(f"{several([*modules])}: {text}") for text, modules in draft.remarks.items()]
        new = [name for name in draft.created if name in draft.uses]
        remarks += [Note(NEW_BIAS.format(names=listed(new, 2)))] if new else []
        return replace(match, notes=(*match.notes, *([variant] if variant else []), *remarks))

    def match(self, module: Module) -> None:
        """Match one module: find its weight and formula and record the patch."""
        if (view := self._find_or_create(module)) is None:
            return
        # A copy for the other end of tied embeddings.
        if self.pair.changes_both(module.name) and self.finder.lacks_end(module.name) and self.finder.embeddings_change:
            self.draft.notes.append(Note(SAVED_TWICE.format(name=module.name)))
            self.draft.leave_unused(module, COPY, {self.names.component(view.row_slices[0].key)})
            return
        # A tensor that the other modules of the file have.
        gap = self.lacks.get(module.where)
        if gap and not (gap.slot == "alpha" and ALPHA_SETTING in self.context.user_settings):
            self.draft.failures.append(incomplete(f"{module.where} has no {gap.key}", self.path))
            return
        # The formula, on the weight at the adapter's size.
        larger = self._grow(module, view)
        self._untie(module.name, view)
        if (patch := self._patch(module, self.pair.start_of(larger))) is None:
            return
        if lacking := self.stored.lacking(patch):
            self.draft.failures.append(lacking)
        self._add(patch, self.pair.key(view))
        if module.parameter == "weight":
            self._match_bias(module, patch)

    def _find_or_create(self, module: Module) -> WeightView | None:
        """Return the parameter of a module, or its new bias; None if it matches nothing, and the reason is recorded."""
        try:
            view = self.finder.find(module)
        except ShapeMismatch as e:
            self.draft.failures.append(e)
            return None
        if view is None and module.parameter == "bias":
            if self._is_for_no_bias(module):
                return None
            view = self._new_bias(module)
        if view is None or is_zero(module, self.base.get(view.row_slices[0].key), self.values):
            self._lose(module.where, module.tensors, "no such module in the base" if view is None else ZERO_OF_INTEGERS)
            return None
        return view

    def _lose(self, name: str, tensors: Collection[StoredTensor], why: str) -> None:
        """Record a module that matches nothing, or a tensor; it is left out if its network has factor 0."""
        if self.strengths.leaves_out(name):
            self.draft.unused |= dict.fromkeys((info.name for info in tensors), OFF)
            self.draft.remarks.setdefault(LEFT_OUT, {})[name] = None
            self.draft.applied[self.names.network_of(name), 0.0] += 1
        elif self.has_elements and not any(info.nbytes for info in tensors):
            self.draft.unused |= dict.fromkeys((info.name for info in tensors), NO_LAYER)
        else:
            self.draft.unmatched[name] = why

    def _untie(self, name: str, view: WeightView) -> None:
        """Record a module that may change one end of tied embeddings alone."""
        key = view.row_slices[0].key
        is_end = (self.pair.tied is not None and key == self.pair.shared) or self.finder.lacks_end(name)
        if is_end and not self.pair.changes_both(name) and not key.endswith(".bias"):
            self.draft.ends[name] = key

    def _grow(self, module: Module, view: WeightView) -> WeightView:
        """Return the weight at the adapter's size; add a note if it is larger than in the base."""
        larger = grown(module, view, self.context.adapter, self.values, self.names.architecture)
        if larger is not view:
            self.draft.grown[key := view.row_slices[0].key] = larger.shape
            self.draft.notes.append(Note(f"{key} grows from {list(view.shape)} to {list(larger.shape)}"))
        return larger

    def _patch(self, module: Module, view: WeightView) -> Patch | None:
        """Return the patch of a module; None if no formula fits, which is recorded."""
        try:
            near = self.finder.near(module, self.context.rules.relatives.get(module.name, ()))
            choice = choose(*as_rows(module, view), self.context, near)
            patch, remarks = as_trained(choice.patch, self.names.fused, self.context)
        except RemoteError:
            raise
        except (InputError, ShapeMismatch) as e:
            self._record_misfit(module, view, e)
            return None
        self.draft.settings |= choice.settings
        for text in (*choice.remarks, *remarks):
            self.draft.remark(text, module)
        return patch

    def _record_misfit(self, module: Module, view: WeightView, error: MergeError) -> None:
        """Record a module that does not fit; it is left out if all that it changes has strength 0."""
        components = {piece.key: self.names.component(piece.key) for piece in view.row_slices}
        left_out = self.strengths.strength and not any(self.strengths.factor(*part) for part in components.items())
        if left_out and isinstance(error, ShapeMismatch):
            self.draft.remark(LEFT_OUT, module)
            self.draft.leave_unused(module, OFF, set(components.values()))
        else:
            self.draft.failures.append(error)
            self.draft.unfit += [[*components]] if isinstance(error, ShapeMismatch) else []

    def _add(self, patch: Patch, key: str = "") -> None:
        """Record a patch for every tensor that it changes. `key`: the new tensor that takes the change instead."""
        if self.duplicates.repeats(patch):
            self.draft.remark(TWICE, patch.module)
            components = {self.names.component(key or piece.key) for piece in patch.view.row_slices}
            self.draft.leave_unused(patch.module, COPY, components)
            return
        added = set()
        for piece, start in patch.view.addresses():
            into = key or piece.key
            strength = self.strengths.factor(into, component := self.names.component(into))
            added.add((component, strength))
            if strength:
                self.draft.uses.setdefault(into, []).append(PatchPart(patch, piece, start, strength))
            else:  # the tensor stays untouched, byte for byte
                self.draft.leave_unused(patch.module, OFF)
        for component_strength in added:
            self.draft.applied[component_strength] += 1
        self.draft.count(patch.module.where, {component for component, _ in added})

    def _match_bias(self, module: Module, patch: Patch) -> None:
        """Add a patch for the bias of a layer whose weight was matched, if the formula changes both."""
        up, on_input = module.slots.get("up"), module.slots.get("on_input")
        if on_input is not None and any(self.values.elements(on_input)):
            return  # (IA)³ of inputs
        row = ALGORITHMS[patch.algorithm]
        torchtune = patch.magnitude is not None and up is not None and up.name.endswith(".lora_b.weight")
        both = row.also_bias or self.context.arguments(patch.algorithm).turns_bias
        bias = self.finder.look(module.name, "bias") if both or torchtune else None
        if bias is not None and both:
            base_shapes = {slot: other.matrix for slot, other in patch.base_slots.items()}
            shapes = row.fitted_shapes({**patch.module.shapes, **base_shapes}, bias.shape)
            self._add(replace(patch, shapes=shapes, view=bias, magnitude=None))
        if bias is not None and not row.also_bias:
            self.draft.remark(TUNED_BIAS if torchtune else TURNED_BIAS, module)

    def _is_for_no_bias(self, module: Module) -> bool:
        """Return whether these are zeros for a layer without bias (PEFT's LoRA and GLoRA); count the module if so."""
        weight, keys = self.finder.named(module.name, "weight"), (info.name for info in module.slots.values())
        if weight is None or not (all(k.endswith(".zeros") for k in keys) or is_zero(module, None, self.values)):
            return False
        self.draft.leave_unused(module, ZEROS, {self.names.component(piece.key) for piece in weight.row_slices})
        return True

    def _new_bias(self, module: Module) -> WeightView | None:
        """Return a new bias of zeros for a layer without one; None if none can be created."""
        if any(ALGORITHMS[name].reads_base for name in module.complete):
            return None  # the formula changes an existing bias
        weight = self.finder.look(module.name, "weight")
        key = bias_beside(weight, self.base) if weight is not None else ""
        if weight is None or not key:
            return None
        if self.context.by_config:
            where = f"{self.path}: {module.where}: {weight.row_slices[0].key} has no weight next to it"
            self.draft.failures.append(ShapeMismatch(NO_BIAS, where, GIVE_BIAS))
        self.draft.created[key] = weight.shape[:1], weight.row_slices[0].key
        return whole(key, weight.shape[:1])

    def match_value(self, info: StoredTensor) -> None:
        """Match a tensor without a known suffix: a new value of a parameter or of some rows, else unmatched."""
        # What the configuration says about it, and the parameter that its name means.
        value = self.context.rules.of(info.name).stored_value(info.name)
        name, parameter = split_parameter(value.target if value else info.name)
        view = self.finder.look(name, parameter) if name else None
        if view is None:  # a bare parameter right below a prefix: `cond_stage_model.model.positional_embedding`
            bare = self.finder.look(info.name)
            view = bare if bare and bare.row_slices[0].key.rpartition(".")[2] == parameter else None
        # A tensor that the merge does not need, or has already.
        if value is not None and value.kind != "value":
            self._record_unneeded(info, value, view)
        elif value is not None and value.rows is not None and (twin := self.finder.twin(name, value.rows)):
            self._leave_out_twin(info, name, twin)
        # No match; else some rows of a parameter; else a whole parameter, once.
        elif (view := view or self._place_in_head(info, name, parameter, rows=bool(value and value.rows))) is None:
            self._lose(info.name, [info], STRANGE)
        elif value is not None and value.rows is not None:
            self._replace_rows(info, view, value.rows)
        elif (first := self.new_values.setdefault(view.row_slices, info)) is info:
            self._replace_parameter(info, name, parameter, view)
        elif not self.values.same(first, info):  # PEFT writes some parameters twice
            self.draft.failures.append(two_in_one_slot(self.path, first, info))
        else:
            self.draft.unused[info.name] = COPY

    def _record_unneeded(self, info: StoredTensor, value: StoredValue, view: WeightView | None) -> None:
        """Record a tensor that the merge does not need; a copy of the base must have the base's shape."""
        if value.kind == "copy" and view is not None and prod(view.shape) != prod(info.shape):
            where = f"{info.name} is {list(info.shape)}, the base has {list(view.shape)}"
            self.draft.shape_errors[view.row_slices] = self.stored.resized(where)
        self.draft.note_unused(info, self.stored.notes.get(info.name, value.why))

    def _leave_out_twin(self, info: StoredTensor, name: str, twin: StoredTensor) -> None:
        """Leave out trained tokens that the adapter stores for the embeddings too; they must be equal."""
        if self.values.same(twin, info):
            self.draft.notes.append(Note(SAVED_TWICE.format(name=name)))
            self.draft.unused[info.name] = COPY
            self.draft.count(info.name, {"model"})
        else:
            self.draft.failures.append(two_in_one_slot(self.path, twin, info))

    def _place_in_head(self, info: StoredTensor, name: str, parameter: str, *, rows: bool) -> WeightView | None:
        """Return the view of a value for a head that the base does not store."""
        view = self.pair.view_of(info, name, parameter, rows=rows)
        if view is not None and self.pair.key(view):
            self.draft.ends[info.name] = self.pair.key(view)
        return view

    def _replace_rows(self, info: StoredTensor, view: WeightView, rows: RowNumbers) -> None:
        """Add a patch that replaces rows of an embedding, one piece for each run of rows."""
        module = Module.of_value(*split_parameter(info.name), info)
        key, view = self.pair.key(view), self.pair.start_of(view)
        self.replaced_runs += len(rows.runs)
        try:
            some = chosen_rows(info, view, rows, self.replaced_runs)
        except MergeError as e:
            self.draft.failures.append(e)
        else:
            if (patch := self._patch(module, some)) is not None:
                self._add(patch, key)

    def _replace_parameter(self, info: StoredTensor, name: str, parameter: str, view: WeightView) -> None:
        """Replace a parameter: its whole tensor if possible, else by a patch."""
        if info.shape == view.shape:
            self._untie(name, view)
        inside = saved_inside(self.context.rules.of(name).fields, info.name)
        if inside and not is_copy(info, self.base[view.row_slices[0].key], self.values):
            self.draft.failures.append(InputError(TRAINED_TWICE, f"{self.path}: {info.name}", TRAIN_ONE_COPY))
        view = self.names.value(view)
        piece, component = view.row_slices[0], self.names.component(view.row_slices[0].key)
        strength, weight = self.strengths.factor(piece.key, component), self.base[piece.key]
        if is_fixed(info, view, weight, self.values, strength):
            self.draft.applied[component, strength] += 1
            self.draft.count(info.name, {component})
            if strength:
                self.draft.replaced[piece.key] = info
            self.draft.unused |= {} if strength else {info.name: OFF}
        elif (patch := self._patch(Module.of_value(name, parameter, info), self.pair.start_of(view))) is not None:
            self._add(patch, self.pair.key(view))


def bias_beside(weight: WeightView, base: Mapping[str, StoredTensor]) -> str:
    """Return the name of the bias that a layer lacks, if the layer is one whole tensor, else ""."""
    piece = weight.row_slices[0]
    whole_tensor = weight.shape[:1] == (piece.rows,) and piece.size == prod(base[piece.key].shape)
    named = len(weight.row_slices) == 1 and piece.key.endswith(".weight")
    return piece.key.removesuffix("weight") + "bias" if named and whole_tensor else ""
