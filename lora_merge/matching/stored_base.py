"""Tensors of the base that PEFT stores with an adapter: the values of the training, which the base may not have.

PEFT saves the embeddings and the head below its own layer (`base_layer`) whenever one of them is trained or the
vocabulary was resized, and on loading replaces the base's, also if the two differ: new tokens get their first
values before training. A merge does the same and applies changes to the copy. PEFT 0.21, utils/save_and_load.py.

Methods that subtract their start from the weight (PiSSA) store the rest. At strength 1 the merge uses this rest too. At
other strengths the rest would lack all of the start, so the base's weight stays and the formula subtracts its share.
No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..adapters.peft.rules import BASE_LAYER
from ..adapters.suffixes import split_parameter
from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS
from ..dtypes import StoredTensor
from ..errors import FitError, MergeError, ShapeMismatch
from ..models.names import Names
from ..models.part_factors import Strengths
from ..models.tied_weights import EMBEDDINGS, TiedPair
from ..models.weights import RowSlice, WeightView, whole
from .formula import AdapterContext
from .patch import Patch


@dataclass(frozen=True)
class StoredBase:
    """The base with the tensors that PEFT saved with the adapter in place of its own."""

    path: Path  # of the adapter
    base: Mapping[str, StoredTensor]  # in the shapes that the tensors have for the adapter
    tied: TiedPair | None
    copies: Mapping[str, StoredTensor]  # base key → its copy in the adapter
    replacing: Mapping[str, StoredTensor]  # base key → copy that differs from the base's tensor and replaces it
    at_strength_0: Collection[str]  # base keys of tensors that stay in the output as they are
    without_start: Collection[str]  # base keys from which PEFT subtracted the initial product of the factors
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
        alone = {v.row_slices: v.row_slices[0].key for v in views if new[v.row_slices[0].key] == v.shape[:1] in grown}
        return {pieces: self.resized(f"the adapter lacks the new rows of {key}") for pieces, key in alone.items()}

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
    pairs = [*_copies(context, names, base, tied)]
    complete = {m.name: m.complete for m in reversed(context.adapter.modules)} if pairs else {}
    started = {weight.name for copy, weight in pairs if _takes_start(context, copy, complete)}
    copies: dict[str, StoredTensor] = {}
    replacing: dict[str, StoredTensor] = {}
    notes: dict[str, str] = {}
    without_start, at_strength_0 = set(), set()
    for copy, weight in pairs:
        key = weight.name
        if key in copies:  # tied ends are one tensor
            continue
        copies[key] = copy
        strength = strengths.factor(key, names.component(key))
        # The copy counts: it has another size, or the adapter is applied to it.
        if copy.shape != weight.shape or (strength and (strength == 1 or key not in started)):
            without_start.add(key)
            if how := _difference(copy, weight, context.values):
                replacing[key] = copy
                notes[copy.name] = f"{how}; the values that the adapter was trained on replace them, as in PEFT"
        if not strength:
            at_strength_0.add(key)
    # A copy of one of two equal ends replaces both.
    if tied is not None and tied.stored and len(uncopied := {tied.info.name, tied.stored} - copies.keys()) == 1:
        (other,), (copied,) = uncopied, {tied.info.name, tied.stored} - uncopied
        if copied in replacing and not context.values.differing(base[tied.stored], tied.info):
            replacing[other] = replacing[copied]  # one tensor in transformers, whatever is loaded later
    shaped = {**base, **{key: replace(base[key], shape=info.shape) for key, info in replacing.items()}}
    pair = replace(tied, info=shaped[tied.info.name]) if tied is not None and tied.info.name in replacing else tied
    return StoredBase(context.adapter.path, shaped, pair, copies, replacing, at_strength_0, without_start, notes)


def _takes_start(context: AdapterContext, copy: StoredTensor, complete: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a start was subtracted from the weight of this copy. `complete`: module → its rows."""
    name = copy.name.partition(".base_layer.")[0]
    if not complete.get(name):
        return False
    selected = context.rules.of(name).algorithm(name, complete[name])
    return selected is not None and ALGORITHMS[selected].starts_in_base


def _copies(
    context: AdapterContext, names: Names, base: Mapping[str, StoredTensor], tied: TiedPair | None
) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Yield (copy in the adapter, tensor of the base) for whole tensors; the numbers of rows may differ."""
    for info in context.adapter.strange:
        value = context.rules.of(info.name).stored_value(info.name)
        if value is None or value.kind != "copy":
            continue
        # The tensor of the base, for a tied head the embeddings.
        view = names.find(*split_parameter(value.target))
        if view is None and tied is not None and f".{value.target}".endswith(f".{tied.head}.weight"):
            view = whole(tied.info.name, tied.info.shape)
        weight = base[view.row_slices[0].key] if view else None
        if weight is None or view != whole(weight.name, weight.shape):
            continue
        loaded = value.why == BASE_LAYER or info.shape != weight.shape  # PEFT does not load other copies
        if loaded and len(info.shape) == len(weight.shape) and info.shape[1:] == weight.shape[1:]:
            yield info, weight


def _difference(copy: StoredTensor, weight: StoredTensor, values: FileValues) -> str:
    """Return the sentence on how a copy differs from the base's tensor; "" if it is equal."""
    if copy.shape != weight.shape:
        return f"{weight.name}: {weight.shape[0]} rows become {copy.shape[0]}"
    rows = values.differing(copy, weight)
    return f"{rows} of {weight.shape[0]} rows are not those of {weight.name}" if rows else ""
