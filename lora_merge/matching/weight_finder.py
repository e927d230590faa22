"""Finds an adapter's layers in the base, by all names that the files allow. No torch.

Tensors of the base that PEFT stores beside an adapter: the values of the training, which the base may not hold.

PEFT saves the embeddings and the head below its own layer (`base_layer`) whenever one of them is trained or the
vocabulary was resized, and on loading replaces the base's, also where the two differ: new tokens get their first
values before training. A merge does the same and applies changes to the copy. PEFT 0.21, utils/save_and_load.py.

Methods that subtract their start from the weight (PiSSA) store the rest. At strength 1 the merge uses this rest too. At
other strengths the rest would lack all of the start, so the base's weight stays and the formula subtracts its share.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from ..adapters.modules import WRAPPED, Module, Values
from ..adapters.peft.rules import BASE_LAYER
from ..adapters.peft.target_parameters import paths
from ..adapters.suffixes import split_parameter, split_row_part
from ..algorithms import ALGORITHMS
from ..algorithms.base import LAYER
from ..disk.files import StoredTensor
from ..dtypes import flat
from ..errors import AmbiguousName, FitError, MergeError, ShapeMismatch
from ..job import ORDERS, ROW_ORDER
from ..models.names import EXPERTS, Names
from ..models.part_factors import Strengths
from ..models.tied_weights import EMBEDDINGS, TiedPair
from ..models.weights import RowSlice, WeightView, whole
from ..row_ranges import Rows
from ..text import NUMBER
from .common_change import CommonChange, common_change
from .formula import AdapterContext
from .orientation import Place, is_square
from .patch import Patch
from .row_parts import ALL_PARTS, NO_PARTS, PARTLY, NoPlace, heights, place
from .tied_embeddings import EMBEDDING_NAMES, AdapterPair


@dataclass(frozen=True)
class StoredBase:
    """A base as one adapter sees it."""

    path: Path  # of the adapter
    base: Mapping[str, StoredTensor]  # in the shapes that the tensors have for the adapter
    tied: TiedPair | None
    copies: Mapping[str, StoredTensor]  # base key → its copy in the adapter
    replacing: Mapping[str, StoredTensor]  # base key → copy that differs from the base's tensor and replaces it
    at_strength_0: Collection[str]  # base keys of tensors that stay in the output as they are
    without_start: Collection[str]  # tensors with the values of the adapter's copy, without the start
    notes: Mapping[str, str]  # name in the adapter → sentence on how it is used

    @property
    def bases(self) -> dict[str, StoredTensor]:
        """Copies that replace the base's tensors in the output."""
        return {key: info for key, info in self.replacing.items() if key not in self.at_strength_0}

    def view(self, view: WeightView | None) -> WeightView | None:
        """Return a view of the base in the shape that the adapter's copy has."""
        key = view.row_slices[0].key if view else ""
        return whole(key, self.replacing[key].shape) if key in self.replacing else view

    def resized_alone(
        self, names: Names, replaced: Mapping[str, StoredTensor]
    ) -> dict[tuple[RowSlice, ...], MergeError]:
        """Return the errors for embeddings or heads that keep their rows while the adapter resizes the other end."""
        views = [view for end in (*EMBEDDINGS, "lm_head") if (view := names.only(end)) is not None]
        old = {view.row_slices[0].key: view.shape[:1] for view in views}
        new = {key: replaced.get(key, self.base[key]).shape[:1] for key in old}
        grown = {old[key] for key in old if key in self.replacing and new[key] != old[key]}
        left = {v.row_slices: v.row_slices[0].key for v in views if new[v.row_slices[0].key] == v.shape[:1] in grown}
        return {
            pieces: self.resized(f"the adapter does not hold the new rows of {key}") for pieces, key in left.items()
        }

    def lacking(self, patch: Patch) -> MergeError | None:
        """Return the error for a start that was subtracted from tied ends whose rest the adapter does not store."""
        key = patch.view.row_slices[0].key
        ends = {self.tied.info.name, self.tied.stored} if self.tied else set()
        if not ALGORITHMS[patch.algorithm].starts_in_base or key not in ends - {*self.without_start}:
            return None
        return FitError("the start of the adapter was subtracted from tied embeddings, and it does not store the rest",
                        f"{self.path}: {patch.module.where} ({patch.algorithm}), which shares {key}",
                        "save it with save_embedding_layers=True, and merge it at strength 1")  # fmt: skip

    def resized(self, where: str) -> MergeError:
        """Return the error for a base whose vocabulary was resized before training."""
        return ShapeMismatch("the base was resized before training", f"{self.path}: {where}",
                             "resize the base's embeddings to the vocabulary of the training first")  # fmt: skip


def stored_base(
    context: AdapterContext, strengths: Strengths, names: Names, base: Mapping[str, StoredTensor], tied: TiedPair | None
) -> StoredBase:
    """Return the base as the adapter sees it; every copy in the adapter is compared with the base's tensor."""
    stored = [*_stored(context, names, base, tied)]
    complete = {m.name: m.complete for m in reversed(context.adapter.modules)} if stored else {}
    started = {own.name for info, own in stored if _takes_start(context, info, complete)}
    copies: dict[str, StoredTensor] = {}
    replacing: dict[str, StoredTensor] = {}
    notes: dict[str, str] = {}
    without_start, at_strength_0 = set(), set()
    for info, own in stored:
        if own.name not in copies:  # tied ends are one tensor
            copies[own.name] = info
            strength = strengths.factor(own.name, names.component(own.name))
            if info.shape != own.shape or (strength and (strength == 1 or own.name not in started)):
                without_start.add(own.name)
                if how := _difference(info, own, context.values):
                    replacing[own.name] = info
                    notes[info.name] = f"{how}; the values that the adapter was trained on replace them, as in PEFT"
            if not strength:
                at_strength_0.add(own.name)
    if tied is not None and tied.stored and len(ends := {tied.info.name, tied.stored} - copies.keys()) == 1:
        (left,), (copied,) = ends, {tied.info.name, tied.stored} - ends
        if copied in replacing and not context.values.differing(base[tied.stored], tied.info):
            replacing[left] = replacing[copied]  # one tensor in transformers, whatever is loaded later
    shaped = {**base, **{key: replace(base[key], shape=info.shape) for key, info in replacing.items()}}
    pair = replace(tied, info=shaped[tied.info.name]) if tied is not None and tied.info.name in replacing else tied
    return StoredBase(context.adapter.path, shaped, pair, copies, replacing, at_strength_0, without_start, notes)


def _takes_start(context: AdapterContext, info: StoredTensor, complete: Mapping[str, Sequence[str]]) -> bool:
    """Return whether this is a copy of a weight from which a start was subtracted. `complete`: module → its rows."""
    name = info.name.partition(".base_layer.")[0]
    if not complete.get(name):
        return False
    selected = context.rules.of(name).algorithm(name, complete[name])
    return selected is not None and ALGORITHMS[selected].starts_in_base


def _stored(
    context: AdapterContext, names: Names, base: Mapping[str, StoredTensor], tied: TiedPair | None
) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Yield (copy in the adapter, tensor of the base) for whole tensors; the numbers of rows may differ."""
    for info in context.adapter.strange:
        value = context.rules.of(info.name).stored_value(info.name)
        if value is None or value.kind != "copy":
            continue
        view = names.find(*split_parameter(value.target))
        if view is None and tied is not None and f".{value.target}".endswith(f".{tied.head}.weight"):
            view = whole(tied.info.name, tied.info.shape)
        own = base[view.row_slices[0].key] if view else None
        if own is None or view != whole(own.name, own.shape):
            continue
        loaded = value.why == BASE_LAYER or info.shape != own.shape  # PEFT does not load other copies
        if loaded and len(info.shape) == len(own.shape) and info.shape[1:] == own.shape[1:]:
            yield info, own


def _difference(info: StoredTensor, own: StoredTensor, values: Values) -> str:
    """Return the sentence on how a copy differs from the base's tensor; "" if it is equal."""
    if info.shape != own.shape:
        return f"{own.name}: {own.shape[0]} rows become {info.shape[0]}"
    rows = values.differing(info, own)
    return f"{rows} of {own.shape[0]} rows are not those of {own.name}" if rows else ""


NAMED_ORDER: Final = ".default"
"""The end of a module's name under which its rows may have another order than without it (adapters/suffixes.py)."""


class Places:
    """The places of one adapter's modules in the base. `lone`: prefix of the one expert of two in the base."""

    def __init__(
        self, strengths: Strengths, context: AdapterContext, stored: StoredBase, pair: AdapterPair, lone: str
    ) -> None:
        self.names, self._strengths, self.stored, self.pair = strengths.names, strengths, stored, pair
        self.base = {**stored.base, **pair.own}  # with the head's own tensors
        self._rules, self._path, self._lone = context.rules, context.adapter.path, lone
        self._modules = context.adapter.modules
        self._wrapped = {module.name for module in self._modules if module.wrapped}
        self._twins: dict[Rows, StoredTensor | None] = {}  # trained tokens → see `twin`
        self._relatives: dict[tuple[str, ...], dict[str, WeightView]] = {}  # modules → their weights
        self._parts = heights(context.adapter.modules)
        self._found: dict[str, WeightView] = {}  # modules → their weights, once `of` has looked for all
        self._order = context.user_settings.get(ROW_ORDER)
        self.settings: set[str] = set()  # the user's settings that a place depends on

    def look(self, name: str, parameter: str = "weight") -> WeightView | None:
        """Return a parameter by its name; None if the base has none of this name."""
        if self._lone and name.startswith(tuple(EXPERTS)) and not name.startswith(self._lone):
            return None
        names = paths(self._rules.of(name).fields, name.removeprefix(self._lone))
        view = next((v for n in names if (v := self._strengths.find(n, parameter)) is not None), None)
        if view is None and (change := self.change) is not None:
            view = next((v for n in names if (v := self._strengths.find(change(n), parameter)) is not None), None)
        return self.stored.view(view)

    @cached_property
    def change(self) -> CommonChange | None:
        """The common change of names with which the modules match that have no place under their own names."""
        alike: dict[str, list[Module]] = {}
        for module in self._modules:
            if module.parameter == "weight":
                alike.setdefault(NUMBER.sub("#", module.name), []).append(module)
        others = (some for some in alike.values() if not self.pair.is_end(some[0].name))
        lost = [some for some in others if not self._is_known(some[0])]
        return common_change(self.names, lost, self._called) if lost and not self._lone else None

    def _called(self, module: Module) -> str:
        """Return the name under which a module's weight is looked for."""
        return split_parameter(self._rules.of(module.name).targets(split_row_part(module.name)[0])[0])[0]

    def _is_known(self, module: Module) -> bool:
        """Return whether the base has a place, or several, for a module under its own name."""
        targets = self._rules.of(module.name).targets(split_row_part(module.name)[0])
        try:
            return any(self.names.find(*split_parameter(target)) is not None for target in targets)
        except MergeError:
            return True

    def named(self, name: str, parameter: str) -> WeightView | None:
        """Return the parameter of a module by any name that the configuration allows."""
        targets = self._rules.of(name).targets(name) if parameter == "weight" else (f"{name}.{parameter}",)
        if name in self._wrapped:  # the base is the model before its layers were wrapped
            targets = (*targets, f"{name.removesuffix(WRAPPED)}.{parameter}")
        found = (self._in_order(*split_parameter(target)) for target in targets)
        return next((view for view in found if view is not None), None) or self._weight_of_end(name, parameter)

    def _in_order(self, name: str, parameter: str) -> WeightView | None:
        """Return what `look` does, with the rows in the order that the user states where the name has two orders;
        ShapeMismatch where nothing states it."""
        by_heads = self.look(name, parameter)
        plain = name.removesuffix(NAMED_ORDER)
        if plain == name:
            return by_heads
        stacked = self.look(plain, parameter)
        if by_heads is None or stacked is None or by_heads == stacked:
            return by_heads or stacked
        if self._order is None:
            raise ShapeMismatch(
                "the rows of a fused projection have two orders, and its names do not tell which",
                f"{self._path}: {plain} of {stacked.row_slices[0].key}",
                f"state it: --setting {ROW_ORDER}=stacked for an adapter of a base with all of q, then k, then v, as "
                f"single files have them; --setting {ROW_ORDER}=heads for q, k and v head by head, as in the original "
                "shards",
            )
        self.settings.add(ROW_ORDER)
        return by_heads if self._order == ORDERS[0] else stacked

    def find(self, module: Module) -> WeightView | None:
        """Return the weight that the module changes, for a part of a module its rows; ShapeMismatch if it has none."""
        if module.parameter == "weight" and (known := self._found.get(module.name)) is not None:
            return known
        name, number = split_row_part(module.name)
        view = self.named(name, module.parameter)
        if view is None and "diff" in module.slots:  # `.set_weight` and `.diff` may stand behind a parameter
            view = self.look(*split_parameter(name))
        if view is not None and "diff" in module.slots and len(view.shape) == 3:
            view = self.names.value(view)
        if view is None or number is None:
            return view
        try:
            return place(view, number, self._parts.get(name, NO_PARTS), self.names.fused(view))
        except NoPlace as e:
            where = f"{self._path}: {module.where} of {view.row_slices[0].key}: {e}"
            raise ShapeMismatch(PARTLY, where, ALL_PARTS) from e

    def of(self, modules: Iterable[Module]) -> Iterator[Place]:
        """Yield the places of the modules that change a weight of the base."""
        for module in (m for m in modules if m.parameter == "weight"):
            with suppress(MergeError):  # `find` raises this again when the module is placed
                view = self.find(module)
                if view is not None:
                    self._found[module.name] = view
                    yield Place(module, view, None if is_square(view) else self.look(module.name, "bias"))

    def near(self, module: Module, relatives: Sequence[str]) -> dict[str, WeightView]:
        """Return the module's other parameters that its formulas read, and the weights of its relatives."""
        rows = module.complete
        asked = {of for name in rows if (beside := ALGORITHMS[name].beside) for of in beside.values()}
        if not asked and not relatives:
            return {}
        found = {parameter: self.named(split_row_part(module.name)[0], parameter) for parameter in sorted(asked)}
        related = tuple(relatives)
        if related not in self._relatives:
            views = ((f"{LAYER}{n}", self.named(name, "weight")) for n, name in enumerate(related))
            self._relatives[related] = {slot: view for slot, view in views if view is not None}
        return {parameter: view for parameter, view in found.items() if view is not None} | self._relatives[related]

    def widest(self, modules: Iterable[Module]) -> tuple[int, int]:
        """Return (rows, columns), each the largest over the weights whose formula has the setting `widest`."""
        rows = {a for a, row in ALGORITHMS.items() if "widest" in row.settings}
        asking = [m for m in modules if not rows.isdisjoint(m.complete)]
        sizes = [flat(view.shape) for m in asking if (view := self.named(m.name, m.parameter)) is not None]
        return max((s[0] for s in sizes), default=0), max((s[1] for s in sizes), default=0)

    def dtype(self, module: Module) -> str:
        """Return the dtype of a module's weight in the base; "" where it has none."""
        view = self.named(module.name, "weight")
        return self.base[view.row_slices[0].key].dtype if view is not None else ""

    def embeddings(self) -> WeightView | None:
        """Return the embeddings whose weight is also the head's."""
        if self.pair.tied is not None:
            return whole(self.pair.shared, self.pair.tied.info.shape)
        for name in EMBEDDINGS:
            with suppress(AmbiguousName):  # two networks have such a table
                if (view := self.look(name)) is not None:
                    return view
        return None

    @cached_property
    def embeddings_change(self) -> bool:
        """Whether the adapter has a module on the embeddings."""
        shared = self.embeddings()
        return shared is not None and any(self.look(m.name) == shared for m in self._modules)

    def twin(self, name: str, rows: Rows) -> StoredTensor | None:
        """Return what the adapter stores for these tokens of the embeddings, if the module is a head or a table that
        the base does not store: PEFT saves what it ties under all names."""
        if not (self.pair.is_head(name) or name.rpartition(".")[2] in EMBEDDING_NAMES) or self.look(name) is not None:
            return None
        if rows not in self._twins:
            shared, trained = self.embeddings(), self.pair.trained.get(rows, ())
            found = (info for other, info in trained if shared is not None and self.look(other) == shared)
            self._twins[rows] = next(found, None)
        return self._twins[rows]

    def lacks_end(self, name: str) -> bool:
        """Return whether this is the name of a head, or of embeddings that change with it, which the base does not
        store."""
        return self.pair.is_end(name) and self.look(name) is None

    def _weight_of_end(self, name: str, parameter: str) -> WeightView | None:
        """Return the weight of an end that the base does not store: a new one if possible, else the embeddings."""
        if parameter != "weight" or not self.pair.is_end(name):
            return None
        return self.pair.own_weight if self.pair.separates(name) else self.embeddings()
