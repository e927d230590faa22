"""Heads that share the weight of the input embeddings, and what becomes of an adapter that trained one of the two.

PEFT wraps a module of `modules_to_save` around a copy, so that during training, and after merge_and_unload, the other
end keeps the old weight: the two are tied no more. The output then holds the head as a tensor of its own, and its
config.json says `tie_word_embeddings: false`. Not so with `ensure_weight_tying`, where both ends are trained as one.
PEFT 0.21, utils/other.py and tuners/tuners_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

from .doubles import EMBEDDINGS
from .errors import FitError
from .folders import listed
from .header import TensorInfo
from .job import Adapter
from .matched import Matched
from .names import Names
from .patching import Patcher
from .views import View, whole

HEADED: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of transformers' classes that have a head."""

HEAD: Final = "lm_head.weight"
APART: Final = ("model.embed_tokens.weight", "transformer.wte.weight")
"""Embeddings beside which the head is `lm_head.weight`, so that it can be stored apart."""


@dataclass(frozen=True)
class Tied:
    """The shared tensor of a base."""

    info: TensorInfo
    separable: bool  # whether the head can be given a tensor of its own


def tied(names: Names, base: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Tied | None:
    """The embeddings that a base's head uses; None if it has its own, none, or nothing tells."""
    classes = config.get("architectures")
    named = [c for c in classes if isinstance(c, str)] if isinstance(classes, list) else []
    stated = config.get("tie_word_embeddings")
    if stated is False or not any(c.endswith(HEADED) for c in named) or names.find("lm_head") is not None:
        return None
    view = next((v for v in map(names.find, EMBEDDINGS) if v is not None), None)
    if view is None or len(view.pieces) > 1:
        return None
    info = base[view.pieces[0].key]
    causal = not any(c.endswith(HEADED[2]) for c in named)
    return Tied(info, causal and info.name in APART and info.stored in ("", info.name) and prod(info.shape) > 0)


class Heads:
    """What one adapter does to the head of a base that ties it."""

    def __init__(self, base: Tied | None, patcher: Patcher, ref: Adapter, result: Matched) -> None:
        self._base, self._patcher, self._ref, self._result = base, patcher, ref, result
        self.own = {HEAD: replace(base.info, name=HEAD)} if base and base.separable else {}

    def place(self, info: TensorInfo, name: str, parameter: str) -> View | None:
        """Where a value of the head goes that the base does not have; None if it can go nowhere."""
        if self._base is None or f"{name.rpartition('.')[2]}.{parameter}" != HEAD:
            return None
        shared = self._base.info
        if self._as_one(info):
            return whole(shared.name, shared.shape)
        others = [t for t in self._patcher.adapter.strange if t is not info and t.shape == info.shape]
        if not self.own or (info.shape != shared.shape and not others):
            return None
        self._part()
        return whole(HEAD, shared.shape)

    def origin(self, view: View) -> View:
        """Where the values are that a place starts from: for a head those of the embeddings."""
        return whole(self._base.info.name, self._base.info.shape) if self._base and self.key(view) else view

    def key(self, view: View) -> str:
        """The name of a head that the base does not have; "" for all other places."""
        return HEAD if HEAD in self.own and view.pieces[0].key == HEAD else ""

    def leave(self, info: TensorInfo, view: View) -> None:
        """New embeddings leave the head that was tied to them as it was."""
        if self._base is None or self._as_one(info) or not self._patcher.rules.kind or not self.own:
            return
        if view == whole(self._base.info.name, self._base.info.shape) and info.shape == view.shape:
            self._part()

    def notes(self) -> list[str]:
        """On tensors that change with another, and on those that the base did not have."""
        found, result = [], self._result
        key = self._base.info.name if self._base else ""
        told = result.parted or any("head is tied to" in note for note in result.notes)
        if not told and (key in result.replaced or key in result.uses):
            found.append(f"the head is tied to {key} and changes with it")
        if new := [name for name in result.created if name in result.uses and name not in result.parted]:
            found.append(f"{listed(new, 2)}: the base has no such bias; a model whose layers have none ignores it")
        return found

    def _as_one(self, info: TensorInfo) -> bool:
        return self._patcher.rules.of(info.name).fields.flag("ensure_weight_tying", default=False)

    def _part(self) -> None:
        """Give the head a tensor of its own, which starts as the embeddings."""
        shared = self._base.info if self._base else None
        if shared is None or HEAD in self._result.parted or not self._ref.factor(shared.name, "model"):
            return
        self._result.parted[HEAD] = shared
        self._result.created[HEAD] = shared.shape, shared.name
        self._result.notes.append(
            f"{HEAD} was tied to {shared.name} and is now stored apart (tie_word_embeddings: false): the adapter was "
            "trained with the two apart"
        )


def check_alone(refs: Sequence[Adapter], matched: Sequence[Matched]) -> None:
    """FitError if one adapter parts the head from the embeddings and another changes either of them."""
    for number, one in enumerate(matched):
        for head, info in one.parted.items():
            for other in (m for m in matched if m is not one):
                if {head, info.name} & {*other.uses, *other.replaced, *other.parted}:
                    raise FitError("one adapter trained the head apart from the embeddings, another changes them",
                                   f"{info.name}: by {refs[number].path} and {other.adapter.path}",
                                   "merge the adapters one after the other")  # fmt: skip
        both = [u for info in one.parted.values() for u in one.uses.get(info.name, ())]
        if any(u.patch.module.name.endswith("lm_head") for u in both):
            raise FitError("the adapter changes a tied head and replaces the embeddings", str(refs[number].path),
                           "merge it into a base that stores its head apart (tie_word_embeddings: false)")  # fmt: skip
