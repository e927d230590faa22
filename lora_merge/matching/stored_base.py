"""Tensors of the base that PEFT stores beside an adapter: what it was trained on, which may not be what the base holds.

PEFT saves the embeddings and the head from under its own layer (`base_layer`) whenever one of them is trained or the
vocabulary was resized, and loads them over the base's, also where the two differ: new tokens are given their first
values before training. So does a merge; what stands on them is added to the copy. PEFT 0.21, utils/save_and_load.py.

Methods that take their start out of the weight (PiSSA) store what is left. At strength 1 that is the place to stand on
too; at another it would lack the start whole, so there the base's own stays, and the formula takes its part out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..adapters.file import Values
from ..adapters.peft.methods import STARTED
from ..adapters.peft.rules import BASE_LAYER
from ..adapters.suffixes import split_parameter
from ..disk.files import StoredTensor
from ..errors import FitError, MergeError, ShapeMismatch
from ..models.names import Names
from ..models.strengths import Strengths
from ..models.tied_weights import EMBEDDINGS, TiedPair
from ..models.weights import RowSlice, WeightView, whole
from .context import AdapterContext
from .patch import Patch


@dataclass(frozen=True)
class StoredBase:
    """A base as one adapter sees it."""

    path: Path  # of the adapter
    base: Mapping[str, StoredTensor]  # in the shapes that the tensors have for the adapter
    tied: TiedPair | None
    copies: Mapping[str, StoredTensor]  # base key → what the adapter stores of it
    other: Mapping[str, StoredTensor]  # those that are no copies, and take the base's place
    idle: Collection[str]  # those that stay as they are in the output, for the strength is 0
    residual: Collection[str]  # those that were compared: what a start was taken out of, in the place of the base's
    notes: Mapping[str, str]  # name in the adapter → what became of it

    @property
    def bases(self) -> dict[str, StoredTensor]:
        """What takes the base's place in the output."""
        return {key: info for key, info in self.other.items() if key not in self.idle}

    def view(self, view: WeightView | None) -> WeightView | None:
        """Return a place in the base, in the shape that it has for the adapter."""
        key = view.pieces[0].key if view else ""
        return whole(key, self.other[key].shape) if key in self.other else view

    def halves(self, names: Names, replaced: Mapping[str, StoredTensor]) -> dict[tuple[RowSlice, ...], MergeError]:
        """Of embeddings and head, what keeps its rows while the adapter holds more of the other."""
        views = [view for end in (*EMBEDDINGS, "lm_head") if (view := names.find(end)) is not None]
        old = {view.pieces[0].key: view.shape[0] for view in views}
        new = {key: replaced.get(key, self.base[key]).shape[0] for key in old}
        grown = {old[key] for key in old if key in self.other and new[key] != old[key]}
        left = {v.pieces: v.pieces[0].key for v in views if new[v.pieces[0].key] == v.shape[0] in grown}
        return {
            pieces: self.resized(f"the adapter does not hold the new rows of {key}") for pieces, key in left.items()
        }

    def lacking(self, patch: Patch) -> MergeError | None:
        """Return the error for a start that was taken out of tied ends, where what is left of these is not at hand."""
        key = patch.view.pieces[0].key
        ends = {self.tied.info.name, self.tied.stored} if self.tied else set()
        if patch.algorithm not in STARTED or key not in ends - {*self.residual}:
            return None
        return FitError("the start of the adapter was taken out of tied embeddings, which it does not tell",
                        f"{self.path}: {patch.module.where} ({patch.algorithm}), which shares {key}",
                        "save it with save_embedding_layers=True, and merge it at strength 1")  # fmt: skip

    def resized(self, where: str) -> MergeError:
        """Return the error for what the adapter does not tell of a base with another vocabulary."""
        return ShapeMismatch("the base was resized before training", f"{self.path}: {where}",
                             "resize the base's embeddings to the vocabulary of the training first")  # fmt: skip


def stored_base(
    context: AdapterContext, ref: Strengths, names: Names, base: Mapping[str, StoredTensor], tied: TiedPair | None
) -> StoredBase:
    """Return the base with what the adapter stores of it; every copy is compared with the base's own."""
    stored = [*_stored(context, names, base, tied)]
    started = {own.name for info, own in stored if _takes_start(context, info)}
    copies: dict[str, StoredTensor] = {}
    other: dict[str, StoredTensor] = {}
    notes: dict[str, str] = {}
    residual, idle = set(), set()
    for info, own in stored:
        if own.name not in copies:  # tied ends are one tensor
            copies[own.name] = info
            strength = ref.factor(own.name, names.component(own.name))
            if info.shape != own.shape or (strength and (strength == 1 or own.name not in started)):
                residual.add(own.name)
                if how := _difference(info, own, context.values):
                    other[own.name] = info
                    notes[info.name] = f"{how}; what the adapter was trained on takes their place, as PEFT has it"
            if not strength:
                idle.add(own.name)
    if tied is not None and tied.stored and len(ends := {tied.info.name, tied.stored} - copies.keys()) == 1:
        (left,), (copied,) = ends, {tied.info.name, tied.stored} - ends
        if copied in other and not context.values.differing(base[tied.stored], tied.info):
            other[left] = other[copied]  # one tensor in transformers, whatever is loaded later
    shaped = {**base, **{key: replace(base[key], shape=info.shape) for key, info in other.items()}}
    pair = replace(tied, info=shaped[tied.info.name]) if tied is not None and tied.info.name in other else tied
    return StoredBase(context.adapter.path, shaped, pair, copies, other, idle, residual, notes)


def _takes_start(context: AdapterContext, info: StoredTensor) -> bool:
    """Return whether this is a copy from under a layer out of whose weight a start was taken."""
    name = info.name.partition(".base_layer.")[0]
    complete = next((m.complete for m in context.adapter.modules if m.name == name), ())
    return bool(complete) and context.rules.of(name).algorithm(name, complete) in STARTED


def _stored(
    context: AdapterContext, names: Names, base: Mapping[str, StoredTensor], tied: TiedPair | None
) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Copies of whole tensors of the base, of as many rows or not, and what they are copies of."""
    for info in context.adapter.strange:
        meant = context.rules.of(info.name).stored_value(info.name)
        if meant is None or meant.kind != "copy":
            continue
        view = names.find(*split_parameter(meant.target))
        if view is None and tied is not None and f".{meant.target}".endswith(f".{tied.head}.weight"):
            view = whole(tied.info.name, tied.info.shape)
        own = base[view.pieces[0].key] if view else None
        if own is None or view != whole(own.name, own.shape):
            continue
        loaded = meant.why == BASE_LAYER or info.shape != own.shape  # others PEFT does not load over the base's
        if loaded and len(info.shape) == len(own.shape) and info.shape[1:] == own.shape[1:]:
            yield info, own


def _difference(info: StoredTensor, own: StoredTensor, values: Values) -> str:
    """In what a copy differs from the base's own; "" if it is one."""
    if info.shape != own.shape:
        return f"{own.name}: {own.shape[0]} rows become {info.shape[0]}"
    rows = values.differing(info, own)
    return f"{rows} of {own.shape[0]} rows are not those of {own.name}" if rows else ""
