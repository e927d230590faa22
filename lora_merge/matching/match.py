"""Matches adapter modules with base tensors: which formula, with which numbers, changes which rows.

One error lists all problems of one kind. Nothing here reads weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Final, NamedTuple

from ..adapters.modules import Module, two_in_one_slot
from ..adapters.peft.rules import StoredValue
from ..adapters.peft.target_parameters import saved_inside
from ..adapters.suffixes import split_parameter
from ..algorithms import ALGORITHMS
from ..disk.files import StoredTensor
from ..dtypes import Shape
from ..errors import InputError, MergeError, ShapeMismatch
from ..models.module_order import type_of
from ..models.names import EXPERTS, Names
from ..models.part_factors import Strengths
from ..models.tied_weights import TiedPair
from ..models.weights import RowSlice, WeightView, whole
from ..options import Unmatched
from ..row_ranges import Rows
from ..text import Note, listed
from .biases import GIVE_BIAS, NEW_BIAS, NO_BIAS, TUNED_BIAS, TURNED_BIAS, bias_beside
from .conflicts import TWICE, DuplicateCheck
from .fit_errors import IDLE, STRANGE, check_scales, check_variant, raise_problems
from .formula import ALPHA, AdapterContext, choose
from .layer_order import related, unstored
from .missing_tensors import Gap, gaps, incomplete
from .orientation import Base, base_types
from .pairs import pairs
from .patch import COPY, NO_LAYER, OFF, ZEROS, Match, Patch, PatchPart
from .resizing import grown, sizes
from .row_parts import chosen_rows
from .side_by_side import as_trained
from .tied_embeddings import AGAIN, AdapterPair, separate, shared_layers
from .values import as_rows, is_copy, is_fixed, is_zero, with_values
from .weight_finder import Places, stored_base

LEFT_OUT: Final = Note("it does not fit the base, and is left out because its strength is 0")

UNUSED: Final = "modules_to_save names a module and one inside it, of which the model used another copy than was saved"
INSIDE: Final = "train it again with modules_to_save naming one of the two; PEFT cannot load this adapter either"


class KnownBase(NamedTuple):
    """The facts about a base that are the same for every adapter."""

    names: Names
    tensors: Mapping[str, StoredTensor]
    tied: TiedPair | None


def match_adapter(unplaced: AdapterContext, base: KnownBase, strengths: Strengths, unmatched: Unmatched) -> Match:
    """Return the changes that one adapter makes to the base; with `skip`, without the modules that have no place.

    `unplaced`: the facts about the adapter that are known without the base's tensors.
    """
    names, adapter = base.names, unplaced.adapter
    stored = stored_base(unplaced, strengths, names, base.tensors, base.tied)
    pair = AdapterPair(stored.tied, unplaced)
    modules = [m for m in adapter.modules if not unplaced.rules.of(m.name).is_shared(m.name)]
    rules, modules = unstored(unplaced.rules, modules, {**stored.base, **pair.own}, unplaced.config)
    lone = names.lone_expert([m.name for m in modules])
    places = Places(strengths, replace(unplaced, rules=rules), stored, pair, lone)
    modules, strange = with_values(modules, adapter.strange, rules)
    unnamed, strange = pairs(names, strange, adapter.path)
    modules += unnamed
    widest = places.widest(modules)
    rules = rules.counting([m.name for m in modules], type_of(unplaced.config))
    rules = related(rules, modules, places.dtype, unplaced)
    layers = Base(base_types(unplaced.config), names.recognised, partial(places.of, adapter.modules))
    context = replace(unplaced, rules=rules, base=layers, without_start=stored.without_start, widest=widest)
    builder = MatchBuilder(context, strengths, places, gaps(modules, rules))
    for module in modules:
        builder.place(module)
    for info in strange:
        if not rules.holds_for_all(info.name):
            builder.replace(info)
    notes = [EXPERTS[lone]] if lone else [places.change.note] if places.change else []
    return builder.match(notes, unmatched)


class MatchBuilder:
    """Collects the changes that one adapter makes to the base, module by module."""

    def __init__(self, context: AdapterContext, strengths: Strengths, places: Places, lacks: Mapping[str, Gap]) -> None:
        self.context, self.strengths, self.places = context, strengths, places
        self.names, self.stored, self.pair = places.names, places.stored, places.pair
        self.path, self.values, self.base = context.adapter.path, context.values, places.base
        self.lacks = lacks  # module → the tensor that it should have
        self.uses: dict[str, list[PatchPart]] = {}
        self.replaced: dict[str, StoredTensor] = {}
        self.created: dict[str, tuple[Shape, str]] = {}
        self.grown: dict[str, Shape] = {}
        self.unmatched: dict[str, str] = {}
        self.components: Counter[str] = Counter()
        self.applied: Counter[tuple[str, float]] = Counter()
        self.unused: dict[str, str] = {}
        self.placed: list[str] = []
        self.notes: list[Note] = []
        self.remarks: dict[Note, dict[str, None]] = {}  # sentence for the user → its modules
        self.settings: set[str] = set()  # the user's settings that a formula needed
        self.ends: dict[str, str] = {}  # module that changes one end of tied embeddings → that tensor
        self.shape_errors: dict[tuple[RowSlice, ...], MergeError] = {}  # errors for copies of another shape
        self.new_values: dict[tuple[RowSlice, ...], StoredTensor] = {}  # parameters with a new value
        self.duplicates = DuplicateCheck(self.path, self.values)
        self.has_elements = any(info.nbytes for info in context.adapter.index.tensors.values())
        self.replaced_runs = 0  # of consecutive rows, so far
        self.failures: list[MergeError] = []  # modules that are incomplete or do not fit
        self.unfit: list[list[str]] = []  # for each module of another shape, the weights of the base that it changes

    def match(self, notes: Sequence[Note], unmatched: Unmatched) -> Match:
        """Return the frozen match, or raise one error that lists the problems."""
        errors = self.shape_errors | self.stored.resized_alone(self.names, self.replaced)
        self.failures += [errors[p] for p in errors if p not in self.new_values]  # a new value settles the shape
        unfit, resized = sizes(self.replaced, self.base, self.path)
        self.failures += unfit
        if unmatched == "error" and (refusal := shared_layers(self.context)):
            raise refusal
        made = Match(
            self.context.adapter, self.uses, self.replaced, self.stored.copies, self.stored.bases, self.created,
            self.grown, self.placed, self.unmatched, self.components, self.unused, (*notes, *self.notes, *resized),
            frozenset(self.settings | self.places.settings), self.applied,
        )  # fmt: skip
        raise_problems(made, self.names, self.failures, self.unfit, unmatched)
        if not (self.replaced or self.stored.bases):
            patches = (use.patch for uses in self.uses.values() for use in uses)
            check_scales(patches, self.path, self.context.rules)
        made = separate(self.pair, self.ends, made, self.strengths, unmatched)
        why = check_variant(made, self.names, unmatched)
        remarks = [Note(f"{listed(modules, 2)}: {text}") for text, modules in self.remarks.items()]
        new = [name for name in self.created if name in self.uses]
        remarks += [Note(NEW_BIAS.format(names=listed(new, 2)))] if new else []
        return replace(made, notes=(*made.notes, *([why] if why else []), *remarks))

    def _remark(self, text: Note, module: Module) -> None:
        self.remarks.setdefault(text, {})[module.where] = None

    def _leave_unused(self, module: Module, why: str, components: Collection[str] = ()) -> None:
        """Record why the tensors of a placed module change nothing; count it, if its components are given."""
        self.unused |= dict.fromkeys((info.name for info in module.tensors), why)
        if components:
            self._count(module.where, components)

    def _find_or_create(self, module: Module) -> WeightView | None:
        """Return the parameter of a module, or its new bias; None where it has no place, and the reason is recorded."""
        try:
            view = self.places.find(module)
        except ShapeMismatch as e:
            self.failures.append(e)
            return None
        if view is None and module.parameter == "bias":
            if self._is_for_no_bias(module):
                return None
            view = self._new_bias(module)
        if view is None or is_zero(module, self.base.get(view.row_slices[0].key), self.values):
            self._lose(module.where, module.tensors, "no such module in the base" if view is None else IDLE)
            return None
        return view

    def _lose(self, name: str, tensors: Collection[StoredTensor], why: str) -> None:
        """Record a module without a place, or a tensor; it is left out if its network has factor 0."""
        if self.strengths.leaves_out(name):
            self.unused |= dict.fromkeys((info.name for info in tensors), OFF)
            self.remarks.setdefault(LEFT_OUT, {})[name] = None
        elif self.has_elements and not any(info.nbytes for info in tensors):
            self.unused |= dict.fromkeys((info.name for info in tensors), NO_LAYER)
        else:
            self.unmatched[name] = why

    def place(self, module: Module) -> None:
        """Place one module: find its weight and formula and record the patch."""
        if (view := self._find_or_create(module)) is None:
            return
        if self.pair.changes_both(module.name) and self.places.lacks_end(module.name) and self.places.embeddings_change:
            self.notes.append(Note(AGAIN.format(name=module.name)))
            self._leave_unused(module, COPY, {self.names.component(view.row_slices[0].key)})
            return
        gap = self.lacks.get(module.where)
        if gap and not (gap.slot == "alpha" and ALPHA in self.context.user_settings):
            self.failures.append(incomplete(f"{module.where} has no {gap.key}", self.path))
            return
        larger = self._grow(module, view)
        self._untie(module.name, view)
        if (patch := self._patch(module, self.pair.start_of(larger))) is None:
            return
        if lacking := self.stored.lacking(patch):
            self.failures.append(lacking)
        self._add(patch, self.pair.key(view))
        if module.parameter == "weight":
            self._place_bias(module, patch)

    def _leave_out_twin(self, info: StoredTensor, name: str, twin: StoredTensor) -> None:
        """Leave out trained tokens that the adapter stores for the embeddings too; they are equal."""
        if self.values.same(twin, info):
            self.notes.append(Note(AGAIN.format(name=name)))
            self.unused[info.name] = COPY
            return self._count(info.name, {"model"})
        return self.failures.append(two_in_one_slot(self.path, twin, info))

    def _untie(self, name: str, view: WeightView) -> None:
        """Record a module that may change one end of tied embeddings alone."""
        key = view.row_slices[0].key
        is_end = (self.pair.tied is not None and key == self.pair.shared) or self.places.lacks_end(name)
        if is_end and not self.pair.changes_both(name) and not key.endswith(".bias"):
            self.ends[name] = key

    def _place_in_head(self, info: StoredTensor, name: str, parameter: str, *, rows: bool) -> WeightView | None:
        """Return the place of a value for a head that the base does not store."""
        view = self.pair.place(info, name, parameter, rows=rows)
        if view is not None and self.pair.key(view):
            self.ends[info.name] = self.pair.key(view)
        return view

    def _grow(self, module: Module, view: WeightView) -> WeightView:
        """Return the weight at the adapter's size; add a note where it is larger than in the base."""
        larger = grown(module, view, self.context.adapter, self.values, self.names.architecture)
        if larger is not view:
            self.grown[key := view.row_slices[0].key] = larger.shape
            self.notes.append(Note(f"{key} grows from {list(view.shape)} to {list(larger.shape)}"))
        return larger

    def _place_bias(self, module: Module, patch: Patch) -> None:
        """Add a patch for the bias of a layer whose weight was placed, if the formula changes both."""
        up, on_input = module.slots.get("up"), module.slots.get("on_input")
        if on_input is not None and any(self.values.numbers(on_input)):
            return  # (IA)³ of inputs
        torchtune = patch.magnitude is not None and up is not None and up.name.endswith(".lora_b.weight")
        both = ALGORITHMS[patch.algorithm].also_bias or self.context.arguments(patch.algorithm).turns_bias
        bias = self.places.look(module.name, "bias") if both or torchtune else None
        if bias is not None and both:
            beside = {slot: of.matrix for slot, of in patch.beside.items()}
            shapes = ALGORITHMS[patch.algorithm].fitted_shapes({**patch.module.shapes, **beside}, bias.shape)
            self._add(replace(patch, shapes=shapes, view=bias, magnitude=None))
        if bias is not None and not ALGORITHMS[patch.algorithm].also_bias:
            self._remark(TUNED_BIAS if torchtune else TURNED_BIAS, module)

    def _patch(self, module: Module, view: WeightView) -> Patch | None:
        try:
            near = self.places.near(module, self.context.rules.relatives.get(module.name, ()))
            chosen = choose(*as_rows(module, view), self.context, near)
            patch, remarks = as_trained(chosen.patch, self.names.fused, self.context)
        except (InputError, ShapeMismatch) as e:
            places = {piece.key: self.names.component(piece.key) for piece in view.row_slices}
            left_out = self.strengths.strength and not any(self.strengths.factor(*place) for place in places.items())
            if left_out and isinstance(e, ShapeMismatch):
                self._remark(LEFT_OUT, module)
                self._leave_unused(module, OFF, set(places.values()))
            else:
                self.failures.append(e)
                self.unfit += [[*places]] if isinstance(e, ShapeMismatch) else []
            return None
        self.settings |= chosen.settings
        for text in (*chosen.remarks, *remarks):
            self._remark(text, module)
        return patch

    def _is_for_no_bias(self, module: Module) -> bool:
        """Return whether these are zeros for a layer without bias (PEFT's LoRA and GLoRA); count the module if so."""
        weight, named = self.places.named(module.name, "weight"), (i.name for i in module.slots.values())
        if weight is None or not (all(n.endswith(".zeros") for n in named) or is_zero(module, None, self.values)):
            return False
        self._leave_unused(module, ZEROS, {self.names.component(piece.key) for piece in weight.row_slices})
        return True

    def _add(self, patch: Patch, key: str = "") -> None:
        if self.duplicates.repeats(patch):
            self._remark(TWICE, patch.module)
            self._leave_unused(patch.module, COPY, {self.names.component(key or p.key) for p in patch.view.row_slices})
            return
        added = set()
        for piece, start in patch.view.addresses():
            into = key or piece.key
            strength = self.strengths.factor(into, component := self.names.component(into))
            added.add((component, strength))
            if strength:
                self.uses.setdefault(into, []).append(PatchPart(patch, piece, start, strength))
            else:  # the tensor stays untouched, byte for byte
                self._leave_unused(patch.module, OFF)
        self.applied.update(added)
        self._count(patch.module.where, {component for component, _ in added})

    def _count(self, name: str, components: Collection[str]) -> None:
        """Count a placed module and the components of the model that it changes."""
        self.placed.append(name)
        self.components.update(components)

    def _new_bias(self, module: Module) -> WeightView | None:
        """Return a new bias of zeros for a layer without one; None where none can be created."""
        if any(ALGORITHMS[name].reads_base for name in module.complete):
            return None  # the formula changes an existing bias
        weight = self.places.look(module.name, "weight")
        key = bias_beside(weight, self.base) if weight is not None else ""
        if weight is None or not key:
            return None
        if self.context.by_config:
            where = f"{self.path}: {module.where}: {weight.row_slices[0].key} stands alone"
            self.failures.append(ShapeMismatch(NO_BIAS, where, GIVE_BIAS))
        self.created[key] = weight.shape[:1], weight.row_slices[0].key
        return whole(key, weight.shape[:1])

    def replace(self, info: StoredTensor) -> None:
        """Place a tensor without a known suffix: a new value of a parameter or of some rows, else unmatched."""
        value = self.context.rules.of(info.name).stored_value(info.name)
        name, parameter = split_parameter(value.target if value else info.name)
        view = self.places.look(name, parameter) if name else None
        if view is None:  # a bare parameter right below a prefix: `cond_stage_model.model.positional_embedding`
            bare = self.places.look(info.name)
            view = bare if bare and bare.row_slices[0].key.rpartition(".")[2] == parameter else None
        if value is not None and value.kind != "value":
            self._record_unneeded(info, value, view)
        elif value is not None and value.rows is not None and (twin := self.places.twin(name, value.rows)):
            self._leave_out_twin(info, name, twin)
        elif (view := view or self._place_in_head(info, name, parameter, rows=bool(value and value.rows))) is None:
            self._lose(info.name, [info], STRANGE)
        elif value is not None and value.rows is not None:
            self._replace_rows(info, view, value.rows)
        elif (first := self.new_values.setdefault(view.row_slices, info)) is info:
            if info.shape == view.shape:
                self._untie(name, view)
            inside = saved_inside(self.context.rules.of(name).fields, info.name)
            if inside and not is_copy(info, self.base[view.row_slices[0].key], self.values):
                self.failures.append(InputError(UNUSED, f"{self.path}: {info.name}", INSIDE))
            self._replace_whole(info, Module.of_value(name, parameter, info), self.names.value(view))
        elif not self.values.same(first, info):  # PEFT writes some parameters twice
            self.failures.append(two_in_one_slot(self.path, first, info))
        else:
            self.unused[info.name] = COPY

    def _replace_whole(self, info: StoredTensor, module: Module, view: WeightView) -> None:
        piece, component = view.row_slices[0], self.names.component(view.row_slices[0].key)
        strength, own = self.strengths.factor(piece.key, component), self.base[piece.key]
        if is_fixed(info, view, own, self.values, strength):
            self.applied[component, strength] += 1
            self._count(info.name, {component})
            if strength:
                self.replaced[piece.key] = info
            self.unused |= {} if strength else {info.name: OFF}
        elif (patch := self._patch(module, self.pair.start_of(view))) is not None:
            self._add(patch, self.pair.key(view))

    def _replace_rows(self, info: StoredTensor, view: WeightView, rows: Rows) -> None:
        """Add a patch that replaces rows of an embedding, one piece for each run of rows."""
        module = Module.of_value(*split_parameter(info.name), info)
        key, view = self.pair.key(view), self.pair.start_of(view)
        self.replaced_runs += len(rows.runs)
        try:
            some = chosen_rows(info, view, rows, self.replaced_runs)
        except MergeError as e:
            self.failures.append(e)
        else:
            if (patch := self._patch(module, some)) is not None:
                self._add(patch, key)

    def _record_unneeded(self, info: StoredTensor, value: StoredValue, view: WeightView | None) -> None:
        """Record a tensor that the merge does not need; a copy of the base must have the base's shape."""
        if value.kind == "copy" and view is not None and prod(view.shape) != prod(info.shape):
            where = f"{info.name} is {list(info.shape)}, the base has {list(view.shape)}"
            self.shape_errors[view.row_slices] = self.stored.resized(where)
        self.unused[info.name] = self.stored.notes.get(info.name, value.why)
        self.notes.append(Note(f"{info.name}: {self.unused[info.name]}"))
