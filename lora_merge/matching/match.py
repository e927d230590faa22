"""Brings adapter modules and base tensors together: which formula, with which numbers, onto which rows.

Every problem of one kind is gathered and raised once. Nothing here reads weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Final

from ..adapters.file import WRAPPED, Module, twice
from ..adapters.peft.rules import Plain
from ..adapters.peft.target_parameters import paths, saved_inside
from ..adapters.suffixes import apart, part
from ..algorithms import ALGORITHMS, flat
from ..algorithms.frod import LAYER
from ..disk.files import StoredTensor
from ..dtypes import WHOLE
from ..errors import InputError, MergeError, ShapeMismatch
from ..job import Unmatched
from ..models.module_order import type_of
from ..models.names import EXPERTS, Names
from ..models.strengths import Strengths
from ..models.weights import RowSlice, WeightView, whole
from .choose import ALPHA, Patch, Patcher
from .conflicts import TWICE, Doubles
from .growth import GIVE_BIAS, NO_BIAS, bias_beside, grown
from .incomplete import gaps, incomplete
from .misfits import IDLE, UNKNOWN, doubtful, refuse
from .orientation import Place
from .patch import COPY, OFF, ZEROS, Matched, PatchPart
from .relatives import related
from .remarks import LEFT_OUT, TUNED_BIAS, TURNED_BIAS
from .resizing import by_rows, sizes, with_values
from .row_parts import ALL_PARTS, PARTLY, NoPlace, heights, place
from .side_by_side import as_trained
from .stored_base import Seen
from .tied_heads import Heads, shared_layers
from .unstored import unstored

UNUSED: Final = "modules_to_save names a module and one inside it, of which the model used another copy than was saved"
INSIDE: Final = "train it again with modules_to_save naming one of the two; PEFT cannot load this adapter either"


class Matcher:
    """One adapter against one base."""

    def __init__(self, patcher: Patcher, ref: Strengths, names: Names, seen: Seen) -> None:
        self.patcher, self.adapter, self.ref, self.names = patcher, patcher.adapter, ref, names
        self.seen, self.result = seen, Matched(self.adapter, copies=seen.copies, bases=seen.bases)
        self.parts = heights(self.adapter.modules)
        self.lone = ""  # what names begin with that speak of the base, if it is one of two experts
        self.heads = Heads(seen.tied, patcher, ref, self.result, self._look)
        self.base = {**seen.base, **self.heads.own}
        self.odd: dict[tuple[RowSlice, ...], MergeError] = {}  # copies of another shape, by what they are of
        self.set: dict[tuple[RowSlice, ...], StoredTensor] = {}  # what has a new value already, and which
        self.doubles = Doubles(self.adapter.path, patcher.values)
        self.lacking: Mapping[str, str] = {}  # module → the tensor that it should have
        self.failures: list[MergeError] = []  # modules that are incomplete or do not fit

    def match(self, unmatched: Unmatched) -> Matched:
        """All modules placed, or one error that names what is wrong; `skip` leaves out what has no place."""
        modules = [m for m in self.adapter.modules if not self.patcher.rules.of(m.name).is_shared(m.name)]
        told = self.patcher
        told.rules, modules = unstored(told.rules, modules, self.base, told.config)
        self.lone = self.names.lone_expert([m.name for m in modules])
        modules, strange = with_values(modules, self.adapter.strange, told.rules)
        self.result.notes += [EXPERTS[self.lone]] if self.lone else []
        told.widest = self._widest(modules)
        told.rules = told.rules.counting([m.name for m in modules], type_of(told.config))
        told.rules = related(told.rules, modules, self._dtype, told)
        self.lacking = gaps(modules, self.patcher.rules)
        for module in modules:
            self._place(module)
        for info in strange:
            if not self.patcher.rules.holds_for_all(info.name):
                self._replace(info)
        self.odd |= self.seen.halves(self.names, self.result.replaced)
        self.failures += [e for pieces, e in self.odd.items() if pieces not in self.set]  # it has no new value either
        unfit, notes = sizes(self.result.replaced, self.base, self.adapter.path)
        self.failures += unfit
        self.result.notes += notes
        if unmatched == "error" and (refusal := shared_layers(self.patcher)):
            raise refusal
        refuse(self.result, self.names, self.failures, unmatched)
        if unmatched == "error" and (refusal := self.heads.refusal()):
            raise refusal
        doubtful(self.result, self.names, unmatched)
        self.heads.follow()
        self.result.notes += [*self.patcher.notes(), *self.heads.notes()]
        return self.result

    def _seek(self, module: Module) -> WeightView | None:
        """The weight of a module, or its bias to be; None, and in the result why, where it has no place."""
        try:
            view = self._find(module)
        except ShapeMismatch as e:
            self.failures.append(e)
            return None
        if view is None and module.parameter == "bias":
            if self._is_nothing(module):
                return None
            view = self._new_bias(module)
        if view is None or self._is_idle(module, view):
            self.result.unmatched[module.where] = "no such module in the base" if view is None else IDLE
            return None
        return view

    def _is_idle(self, module: Module, view: WeightView) -> bool:
        """Whether this is a difference of 0 to whole numbers, a counter or positions, which cannot be merged."""
        info, own = module.slots.get("diff"), self.base.get(view.pieces[0].key)
        if info is None or own is None or own.dtype not in WHOLE:
            return False
        return self.patcher.values.zero_outside(info, (0, info.shape[0] if info.shape else 1), (0, 0))

    def _place(self, module: Module) -> None:
        if (view := self._seek(module)) is None:
            return
        if self.heads.repeats(module):
            self.result.leave(module, COPY)
            self._count({self.names.component(view.pieces[0].key)})
            return
        slot = self.lacking.get(module.where)
        if slot and not (slot == "alpha" and ALPHA in self.patcher.given):
            self.failures.append(incomplete(f"{module.where} has no {slot}", self.adapter.path))
            return
        larger = self._grow(module, view)
        self.heads.untie(module.name, view)
        patch = self._patch(module, self.heads.origin(larger))
        if patch is None:
            return
        if lacking := self.seen.lacking(patch, self.patcher.residual):
            self.failures.append(lacking)
        self._add(patch, self.heads.key(view))
        if module.parameter == "weight":
            self._place_bias(module, patch)

    def _grow(self, module: Module, view: WeightView) -> WeightView:
        """The weight at the size that the adapter gives it; noted where it is larger than the base's."""
        larger = grown(module, view, self.adapter, self.patcher.values, self.names.architecture)
        if larger is not view:
            self.result.grown[view.pieces[0].key] = larger.shape
            self.result.notes.append(f"{view.pieces[0].key} grows from {list(view.shape)} to {list(larger.shape)}")
        return larger

    def _place_bias(self, module: Module, patch: Patch) -> None:
        """The bias of a layer whose weight was placed, where the formula holds for it too."""
        up = module.slots.get("up")
        torchtune = patch.magnitude is not None and up is not None and up.name.endswith(".lora_b.weight")
        both = ALGORITHMS[patch.algorithm].and_bias or self.patcher.turns_bias(patch.algorithm)
        bias = self._look(module.name, "bias") if both or torchtune else None
        if bias is not None and both:
            beside = {slot: of.matrix for slot, of in patch.beside.items()}
            shapes = ALGORITHMS[patch.algorithm].fit({**patch.module.shapes, **beside}, bias.shape)
            self._add(replace(patch, shapes=shapes, view=bias, magnitude=None))
        if bias is not None and not ALGORITHMS[patch.algorithm].and_bias:
            self.patcher.remark(TUNED_BIAS if torchtune else TURNED_BIAS, module)

    def _look(self, name: str, parameter: str = "weight") -> WeightView | None:
        if self.lone and name.startswith(tuple(EXPERTS)) and not name.startswith(self.lone):
            return None
        names = paths(self.patcher.rules.of(name).fields, name.removeprefix(self.lone))
        found = (self.names.find(n, parameter) for n in names)
        return self.seen.view(next((view for view in found if view is not None), None))

    def _find(self, module: Module) -> WeightView | None:
        """The weight that the module changes, for a part of a module its rows of that; ShapeMismatch if it has none."""
        name, number = part(module.name)
        view = self._named(name, module.parameter)
        if view is None and "diff" in module.slots:  # `.set_weight` and `.diff` may stand behind a parameter
            view = self._look(*apart(name))
        if view is None or number is None:
            return view
        try:
            return place(view, number, self.parts.get(name, {}), self.names.fused(view))
        except NoPlace as e:
            where = f"{self.adapter.path}: {module.where} of {view.pieces[0].key}: {e}"
            raise ShapeMismatch(PARTLY, where, ALL_PARTS) from e

    def places(self) -> Iterator[Place]:
        """Where the modules' weights and biases lie, of those that have a place."""
        for module in (m for m in self.adapter.modules if m.parameter == "weight"):
            with suppress(MergeError):  # which is raised when the module is placed
                view = self._find(module)
                if view is not None:
                    yield Place(module, view, self._look(module.name, "bias"))

    def _named(self, name: str, parameter: str) -> WeightView | None:
        """The parameter of a module, by any of the names that the configuration may mean."""
        targets = self.patcher.rules.of(name).targets(name) if parameter == "weight" else (f"{name}.{parameter}",)
        if name.endswith(WRAPPED):  # the base is the model before its layers were wrapped
            targets = (*targets, f"{name.removesuffix(WRAPPED)}.{parameter}")
        found = (self._look(*apart(target)) for target in targets)
        return next((view for view in found if view is not None), None) or self.heads.find(name, parameter)

    def _widest(self, modules: Sequence[Module]) -> tuple[int, int]:
        """(rows, columns), each the largest of the weights whose formula wants to know."""
        rows = {a for a, row in ALGORITHMS.items() if "widest" in row.settings}
        asking = [m for m in modules if not rows.isdisjoint(m.complete)]
        sizes = [flat(view.shape) for m in asking if (view := self._named(m.name, m.parameter)) is not None]
        return max((s[0] for s in sizes), default=0), max((s[1] for s in sizes), default=0)

    def _patch(self, module: Module, view: WeightView) -> Patch | None:
        try:
            patch = self.patcher.patch(*by_rows(module, view), self._near(module))
            return as_trained(patch, self.names.fused, self.patcher)
        except (InputError, ShapeMismatch) as e:
            places = {piece.key: self.names.component(piece.key) for piece in view.pieces}
            left_out = self.ref.strength and not any(self.ref.factor(*place) for place in places.items())
            if left_out and isinstance(e, ShapeMismatch):
                self.patcher.remark(LEFT_OUT, module)
                self.result.leave(module, OFF)
                self._count(set(places.values()))
            else:
                self.failures.append(e)
            return None

    def _near(self, module: Module) -> dict[str, WeightView]:
        """The module's other parameters in the base, as far as a formula asks for them."""
        wanted = {parameter for name in module.complete for parameter in ALGORITHMS[name].beside.values()}
        found = {parameter: self._named(part(module.name)[0], parameter) for parameter in wanted}
        relatives = self.patcher.rules.relatives.get(module.name, ())  # what no file holds is made of their weights too
        found |= {f"{LAYER}{n}": self._named(name, "weight") for n, name in enumerate(relatives)}
        return {parameter: view for parameter, view in found.items() if view is not None}

    def _dtype(self, module: Module) -> str:
        """The dtype of a module's weight in the base; "" where it has none."""
        view = self._named(module.name, "weight")
        return self.base[view.pieces[0].key].dtype if view is not None else ""

    def _is_nothing(self, module: Module) -> bool:
        """Whether this is what PEFT's GLoRA stores for a bias that the layer does not have; counted, if so."""
        weight = self._named(module.name, "weight")
        if weight is None or not all(info.name.endswith(".zeros") for info in module.slots.values()):
            return False
        self.result.leave(module, ZEROS)
        self._count({self.names.component(piece.key) for piece in weight.pieces})
        return True

    def _add(self, patch: Patch, key: str = "") -> None:
        if self.doubles.repeats(patch):
            self.patcher.remark(TWICE, patch.module)
            self.result.leave(patch.module, COPY)
            self._count({self.names.component(key or piece.key) for piece in patch.view.pieces})
            return
        components = set()
        for piece, start in patch.view.addresses():
            into = key or piece.key
            component = self.names.component(into)
            components.add(component)
            strength = self.ref.factor(into, component)
            if strength:
                self.result.uses.setdefault(into, []).append(PatchPart(patch, piece, start, strength))
            else:  # the tensor stays untouched, byte for byte
                self.result.leave(patch.module, OFF)
        self._count(components)

    def _count(self, components: Collection[str]) -> None:
        """One more module has its place, in these parts of the model."""
        self.result.modules += 1
        for component in components:
            self.result.components[component] = self.result.components.get(component, 0) + 1

    def _new_bias(self, module: Module) -> WeightView | None:
        """A bias for a layer that has none in the base: created as zeros, where a model may read it."""
        if any(ALGORITHMS[name].reads_base for name in module.complete):
            return None  # it changes a bias, and makes none
        weight = self._look(module.name, "weight")
        key = bias_beside(weight, self.base) if weight is not None else ""
        if weight is None or not key:
            return None
        if self.patcher.by_config:
            where = f"{self.adapter.path}: {module.where}: {weight.pieces[0].key} stands alone"
            self.failures.append(ShapeMismatch(NO_BIAS, where, GIVE_BIAS))
        self.result.created[key] = weight.shape[:1], weight.pieces[0].key
        return whole(key, weight.shape[:1])

    def _replace(self, info: StoredTensor) -> None:
        """A tensor without a known suffix: the value of a parameter or of some of its rows, or nothing we know."""
        meant = self.patcher.rules.of(info.name).plain(info.name)
        name, parameter = apart(meant.target if meant else info.name)
        view = self._look(name, parameter) if name else None
        if view is None:  # a bare parameter right below a prefix: `cond_stage_model.model.positional_embedding`
            bare = self._look(info.name)
            view = bare if bare and bare.pieces[0].key.rpartition(".")[2] == parameter else None
        if meant is not None and meant.kind != "value":
            self._leave(info, meant, view)
        elif meant is not None and meant.rows is not None and self.heads.repeats_rows(name, meant.rows):
            self.result.unused[info.name] = COPY
            self._count({"model"})
        elif (view := view or self.heads.place(info, name, parameter, rows=bool(meant and meant.rows))) is None:
            self.result.unmatched[info.name] = UNKNOWN
        elif meant is not None and meant.rows is not None:
            self._replace_rows(info, view, meant.rows)
        elif (first := self.set.setdefault(view.pieces, info)) is info:
            if info.shape == view.shape:
                self.heads.untie(name, view)
            if saved_inside(self.patcher.rules.of(name).fields, info.name) and not self._is_copy(info, view):
                self.failures.append(InputError(UNUSED, f"{self.adapter.path}: {info.name}", INSIDE))
            self._replace_whole(info, Module(name, parameter, {"diff": info}, {}, ("set",)), self.names.value(view))
        elif not self.patcher.values.same(first, info):  # PEFT writes some parameters twice
            self.failures.append(twice(self.adapter.path, first, info))
        else:
            self.result.unused[info.name] = COPY

    def _is_copy(self, info: StoredTensor, view: WeightView) -> bool:
        """Whether a tensor is the base's own."""
        own = self.base[view.pieces[0].key]
        return info.shape == own.shape and not self.patcher.values.differing(info, own)

    def _replace_whole(self, info: StoredTensor, module: Module, view: WeightView) -> None:
        piece = view.pieces[0]
        strength, old = self.ref.factor(piece.key, self.names.component(piece.key)), self.base[piece.key].shape
        all_of_it = len(view.pieces) == 1 and piece.size == prod(old)
        resized = info.shape != old and len(info.shape) == len(old) and info.shape[1:] == old[1:]
        if all_of_it and strength == 1 and not piece.transposed and (resized or info.shape == old):
            self.result.modules += 1
            self.result.replaced[piece.key] = info
        elif (patch := self._patch(module, self.heads.origin(view))) is not None:
            self._add(patch, self.heads.key(view))

    def _replace_rows(self, info: StoredTensor, view: WeightView, rows: Sequence[int]) -> None:
        """Rows of an embedding, one piece each."""
        module = Module(*apart(info.name), {"diff": info}, {}, ("set",))
        key, view = self.heads.key(view), self.heads.origin(view)
        table = view.pieces[0]
        if max(rows, default=0) >= view.shape[0] or len(view.pieces) > 1 or table.transposed:
            self.failures.append(ShapeMismatch(
                "the adapter trains tokens that the base does not have",
                f"{self.adapter.path}: {info.name}: row {max(rows)} of {view.shape[0]}",
                "resize the base's embeddings to the vocabulary of the training first",
            ))  # fmt: skip
            return
        pieces = tuple(RowSlice(table.key, table.start + r, table.start + r + 1, table.cols) for r in rows)
        patch = self._patch(module, WeightView(pieces, (len(rows), table.cols)))
        if patch is not None:
            self._add(patch, key)

    def _leave(self, info: StoredTensor, meant: Plain, view: WeightView | None) -> None:
        """A tensor that a merge does not need; a copy of the base must have the base's shape."""
        if meant.kind == "copy" and view is not None and prod(view.shape) != prod(info.shape):
            where = f"{info.name} is {list(info.shape)}, the base has {list(view.shape)}"
            self.odd[view.pieces] = self.seen.resized(where)
        self.result.unused[info.name] = self.seen.notes.get(info.name, meant.why)
        self.result.notes.append(f"{info.name}: {self.result.unused[info.name]}")
