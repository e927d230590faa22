"""Finds the weights of an adapter's modules in the base, by all names that the files allow. No torch.

`WeightFinder.find` returns the rows that a module changes. It asks these sources in order, and the first that has a
weight wins:

1. the names that the configuration allows for the module, as the base's names spell them (`Names.find`);
2. these names with the change that all unmatched modules have in common (unknown_names.py);
3. for a head or embeddings that the base does not store, a new tensor or the other end (tied_embeddings.py).

A weight has the size of the adapter's own copy of it, if there is one (stored_base.py), and of a split module only the
rows of the part (split_layers.py).

`grown` returns a weight at a larger size: the base in its first rows and columns, zeros elsewhere. The size is in the
file (`reshape_weight`; ComfyUI comfy/weight_adapter/base.py), or the file is a control LoRA for Flux.1, by Black Forest
Labs (ComfyUI comfy/lora_convert.py) or diffusers (examples/flux-control), whose first layer has twice the channels.
Any other adapter that does not fit is refused, because a wider one is mostly for another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from math import prod
from typing import Final

from ..adapters.modules import WRAPPED_LINEAR, AdapterFile, Module
from ..adapters.peft.target_parameters import paths
from ..adapters.suffixes import split_parameter, split_row_part
from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS, COUNT
from ..algorithms.base import LAYER_SLOT
from ..dtypes import Shape, StoredTensor, flat
from ..errors import AmbiguousName, FitError, InputError, MergeError, ShapeMismatch
from ..grouping import by_key
from ..job import ORDERS, ROW_ORDER
from ..models.names import WAN_EXPERTS
from ..models.part_factors import Strengths
from ..models.tied_weights import EMBEDDINGS
from ..models.weights import WeightView, whole
from ..row_ranges import RowNumbers
from ..text import NUMBER
from .formula import AdapterContext
from .orientation import ModuleMatch, is_square
from .split_layers import ALL_PARTS, NO_PARTS, PARTLY, NoMatch, heights, rows_of_part
from .stored_base import StoredBase
from .tied_embeddings import EMBEDDING_NAMES, AdapterPair
from .unknown_names import CommonChange, common_change

NAMED_ORDER: Final = ".default"
"""The end of a module's name under which its rows may have another order than without it (adapters/suffixes.py)."""

CONTROL: Final = ("img_in.lora_A.weight", "single_blocks.0.norm.key_norm.scale")
"""Tensors that only control LoRAs of Black Forest Labs have together."""

WEIGHT_AXES: Final = 8  # of a weight

FLUX_FIRST_LAYER: Final = re.compile(r"(?:.*[._])?(?:img_in|x_embedder)")
"""Flux.1's first layer, by the names of both layouts."""


class WeightFinder:
    """Finds the weights of one adapter's modules. `lone`: prefix of the one expert of two in the base."""

    def __init__(
        self, strengths: Strengths, context: AdapterContext, stored: StoredBase, pair: AdapterPair, lone: str
    ) -> None:
        self.names, self._strengths, self.stored, self.pair = strengths.names, strengths, stored, pair
        self.base = {**stored.base, **pair.new_tensors}  # with the tensors that a separate head gets
        self._rules, self._path, self._lone = context.rules, context.adapter.path, lone
        self._modules = context.adapter.modules
        self._wrapped = {module.name for module in self._modules if module.wrapped}
        self._twins: dict[RowNumbers, StoredTensor | None] = {}  # trained tokens → see `twin`
        self._relatives: dict[tuple[str, ...], dict[str, WeightView]] = {}  # modules → their weights
        self._parts = heights(context.adapter.modules)
        self._weights: dict[str, WeightView] = {}  # modules → their weights, once `of` has looked for all
        self._order = context.user_settings.get(ROW_ORDER)
        self.settings: set[str] = set()  # the user's settings that a match depends on

    def look(self, name: str, parameter: str = "weight") -> WeightView | None:
        """Return a parameter by its name; None if the base has no such name."""
        # Of two experts, only the one in the base.
        if self._lone and name.startswith(tuple(WAN_EXPERTS)) and not name.startswith(self._lone):
            return None
        names = paths(self._rules.of(name).fields, name.removeprefix(self._lone))
        # The names of the module itself, then those with the common change.
        view = next((v for n in names if (v := self._strengths.find(n, parameter)) is not None), None)
        if view is None and (change := self.change) is not None:
            view = next((v for n in names if (v := self._strengths.find(change(n), parameter)) is not None), None)
        return self.stored.view(view)

    @cached_property
    def change(self) -> CommonChange | None:
        """The common change of names with which the modules match that are unmatched under their own names."""
        alike = by_key((NUMBER.sub("#", m.name), m) for m in self._modules if m.parameter == "weight")
        others = (some for some in alike.values() if not self.pair.is_end(some[0].name))
        lost = [some for some in others if not self._is_known(some[0])]
        return common_change(self.names, lost, self._called) if lost and not self._lone else None

    def _called(self, module: Module) -> str:
        """Return the name under which a module's weight is looked for."""
        return split_parameter(self._rules.of(module.name).targets(split_row_part(module.name)[0])[0])[0]

    def _is_known(self, module: Module) -> bool:
        """Return whether the base has a weight, or several, for a module under its own name."""
        targets = self._rules.of(module.name).targets(split_row_part(module.name)[0])
        try:
            return any(self.names.find(*split_parameter(target)) is not None for target in targets)
        except MergeError:
            return True

    def named(self, name: str, parameter: str) -> WeightView | None:
        """Return the parameter of a module by any name that the configuration allows."""
        targets = self._rules.of(name).targets(name) if parameter == "weight" else (f"{name}.{parameter}",)
        if name in self._wrapped:  # the base is the model before its layers were wrapped
            targets = (*targets, f"{name.removesuffix(WRAPPED_LINEAR)}.{parameter}")
        views = (self._in_order(*split_parameter(target)) for target in targets)
        return next((view for view in views if view is not None), None) or self._weight_of_end(name, parameter)

    def _in_order(self, name: str, parameter: str) -> WeightView | None:
        """Return what `look` does, with the rows in the order that the user states if the name has two orders;
        ShapeMismatch if nothing states it."""
        by_heads = self.look(name, parameter)
        plain = name.removesuffix(NAMED_ORDER)
        if plain == name:
            return by_heads
        stacked = self.look(plain, parameter)
        if by_heads is None or stacked is None or by_heads == stacked:
            return by_heads or stacked
        if self._order is None:
            raise ShapeMismatch(
                "the rows of a fused projection have two orders, and its names do not show which",
                f"{self._path}: {plain} of {stacked.row_slices[0].key}",
                f"state it: `--setting {ROW_ORDER}=stacked` for an adapter of a base with all of q, then k, then v, as "
                f"single files have them; `--setting {ROW_ORDER}=heads` for q, k and v head by head, as in the "
                "original shards",
            )
        self.settings.add(ROW_ORDER)
        return by_heads if self._order == ORDERS[0] else stacked

    def find(self, module: Module) -> WeightView | None:
        """Return the weight that the module changes, for a part of a module its rows; ShapeMismatch if it has none."""
        if module.parameter == "weight" and (known := self._weights.get(module.name)) is not None:
            return known
        name, number = split_row_part(module.name)
        view = self.named(name, module.parameter)
        if view is None and "diff" in module.slots:  # `.set_weight` and `.diff` may follow a parameter
            view = self.look(*split_parameter(name))
        if view is not None and "diff" in module.slots and len(view.shape) == 3:
            view = self.names.value(view)
        if view is None or number is None:
            return view
        # The rows of the part.
        try:
            return rows_of_part(view, number, self._parts.get(name, NO_PARTS), self.names.fused(view))
        except NoMatch as e:
            where = f"{self._path}: {module.where} of {view.row_slices[0].key}: {e}"
            raise ShapeMismatch(PARTLY, where, ALL_PARTS) from e

    def of(self, modules: Iterable[Module]) -> Iterator[ModuleMatch]:
        """Yield the matches of the modules that change a weight of the base."""
        for module in (m for m in modules if m.parameter == "weight"):
            with suppress(MergeError):  # `find` raises this again when the module is matched
                view = self.find(module)
                if view is not None:
                    self._weights[module.name] = view
                    yield ModuleMatch(module, view, None if is_square(view) else self.look(module.name, "bias"))

    def near(self, module: Module, relatives: Sequence[str]) -> dict[str, WeightView]:
        """Return the module's other parameters that its formulas read, and the weights of its relatives."""
        read = {parameter for name in module.complete for parameter in ALGORITHMS[name].base_slots.values()}
        if not read and not relatives:
            return {}
        others = {parameter: self.named(split_row_part(module.name)[0], parameter) for parameter in sorted(read)}
        related = tuple(relatives)
        if related not in self._relatives:
            views = ((f"{LAYER_SLOT}{n}", self.named(name, "weight")) for n, name in enumerate(related))
            self._relatives[related] = {slot: view for slot, view in views if view is not None}
        return {parameter: view for parameter, view in others.items() if view is not None} | self._relatives[related]

    def widest(self, modules: Iterable[Module]) -> tuple[int, int]:
        """Return (rows, columns), each the largest over the weights whose formula has the setting `widest`."""
        rows = {a for a, row in ALGORITHMS.items() if "widest" in row.settings}
        asking = [m for m in modules if not rows.isdisjoint(m.complete)]
        sizes = [flat(view.shape) for m in asking if (view := self.named(m.name, m.parameter)) is not None]
        return max((s[0] for s in sizes), default=0), max((s[1] for s in sizes), default=0)

    def dtype(self, module: Module) -> str:
        """Return the dtype of a module's weight in the base; "" if it has none."""
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

    def twin(self, name: str, rows: RowNumbers) -> StoredTensor | None:
        """Return what the adapter stores for these tokens of the embeddings, if the module is a head or a table that
        the base does not store: PEFT saves what it ties under all names."""
        if not (self.pair.is_head(name) or name.rpartition(".")[2] in EMBEDDING_NAMES) or self.look(name) is not None:
            return None
        if rows not in self._twins:
            shared, trained = self.embeddings(), self.pair.trained.get(rows, ())
            twins = (info for other, info in trained if shared is not None and self.look(other) == shared)
            self._twins[rows] = next(twins, None)
        return self._twins[rows]

    def lacks_end(self, name: str) -> bool:
        """Return whether this is the name of a head, or of embeddings that change with it, which the base does not
        store."""
        return self.pair.is_end(name) and self.look(name) is None

    def _weight_of_end(self, name: str, parameter: str) -> WeightView | None:
        """Return the weight of an end that the base does not store: a new one if possible, else the embeddings."""
        if parameter != "weight" or not self.pair.is_end(name):
            return None
        return self.pair.new_weight if self.pair.separates(name) else self.embeddings()


def grown(module: Module, view: WeightView, adapter: AdapterFile, values: FileValues, model: str) -> WeightView:
    """Return the weight at the adapter's size; `view` itself if the size stays.

    `model` is the base's architecture. FitError if the weight would shrink, or is only a part of a tensor of the base.
    """
    shape = _adapters_size(module, view, adapter, values, model)
    if shape == view.shape:
        return view
    piece = view.row_slices[0]
    where = f"{adapter.path}: {module.where} to {list(shape)}, the base has {list(view.shape)}"
    if len(shape) != len(view.shape):
        raise FitError(
            "the adapter gives a weight another number of axes", where, "merge into the model it was trained on"
        )
    if any(a < b for a, b in zip(shape, view.shape, strict=True)):
        raise FitError("the adapter makes a weight smaller", where, "merge into the model it was trained on")
    if len(view.row_slices) > 1 or piece.transposed or piece.size != prod(view.shape):
        raise FitError("the adapter makes a part of a fused tensor larger", where, "merge into an unfused checkpoint")
    return whole(piece.key, shape)


def _adapters_size(module: Module, view: WeightView, adapter: AdapterFile, values: FileValues, model: str) -> Shape:
    if "reshape" in module.shared:
        info = module.shared["reshape"]
        sizes = [COUNT.number(n) for n in values.elements(info)] if prod(info.shape) <= WEIGHT_AXES else [None]
        if None in sizes:
            raise InputError("reshape_weight is not a list of sizes", f"{info.file}: {info.name}", "export it again")
        return tuple(size for size in sizes if size is not None)
    first = module.parameter == "weight" and FLUX_FIRST_LAYER.fullmatch(module.name)
    if not first or not {"up", "down"} <= set(module.slots):
        return view.shape
    wide = module.slots["up"].shape[0], module.slots["down"].shape[-1]
    doubled = model == "Flux.1" and len(view.shape) == 2 and wide == (view.shape[0], 2 * view.shape[1])
    return wide if doubled or all(key in adapter.index.tensors for key in CONTROL) else view.shape
