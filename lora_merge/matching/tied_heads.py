"""Heads that share the weight of the input embeddings, and what becomes of an adapter that trained one of the two.

PEFT wraps a layer, or a copy of it, at one end, and the forward pass of the other end keeps the old weight: the two
are tied no more. The output then holds the head as a tensor of its own, and its config.json says
`tie_word_embeddings: false`. Not so with `ensure_weight_tying` and for trained tokens: both ends are trained as one,
and what is saved for the head is a copy. merge_and_unload adds the change of one end to both, and the copy a second
time; the forward pass is right. PEFT 0.21, utils/other.py, tuners/{tuners_utils,lora/model,trainable_tokens/model}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from ..adapters.file import Module
from ..adapters.peft.kinds import MLX
from ..disk.files import StoredTensor
from ..errors import FitError, MergeError
from ..job import Adapter
from ..models.strengths import Strengths
from ..models.tied_weights import EMBEDDINGS, LM_HEAD, SHARED_LAYERS, Tied
from ..models.weights import WeightView, whole
from ..text import listed
from .choose import Patcher
from .patch import Matched, PatchPart

EMBEDDING_NAMES: Final = frozenset(name.rpartition(".")[2] for name in EMBEDDINGS)

DIFFERS: Final = (
    "where the adapter changes one end alone when it runs, as PEFT's do without ensure_weight_tying, the result differs"
)


class Heads:
    """What one adapter does to the head of a base that ties it."""

    def __init__(
        self,
        base: Tied | None,
        patcher: Patcher,
        ref: Strengths,
        result: Matched,
        look: Callable[[str], WeightView | None],
    ) -> None:
        self._base, self._patcher, self._ref, self._result, self._look = base, patcher, ref, result, look
        self._stored = ""
        if base is not None and base.stored:  # two tensors: what changes one end does not reach the other
            self._base, self._stored = None, base.stored
        self._head, self._shared = (base.head, base.info.name) if base else (LM_HEAD, "")
        self._sources = base.sources if base else {}
        self._weight = next(iter(self._sources), "")  # of a head of its own
        self.own = {key: replace(info, name=key) for key, info in self._sources.items()}
        named = {part for key in patcher.adapter.index.tensors for part in key.split(".")}
        self._has_both = self._head == LM_HEAD and LM_HEAD in named and not named.isdisjoint(EMBEDDING_NAMES)
        self._both: dict[str, str] = {}  # what changes both ends, though the adapter may mean one → their tensor

    def find(self, name: str, parameter: str) -> WeightView | None:
        """The weight of a head that the base does not have: its own if it can be given one, else the embeddings."""
        if parameter != "weight" or not self._is_head(name):
            return None
        if self._base is not None and self._parts(name):
            return whole(self._weight, self._base.info.shape)
        return self._table()

    def _is_head(self, name: str) -> bool:
        return f".{name}".endswith(f".{self._head}")

    def _table(self) -> WeightView | None:
        if self._base is not None:
            return whole(self._base.info.name, self._base.info.shape)
        return next((view for view in map(self._look, EMBEDDINGS) if view is not None), None)

    def place(self, info: StoredTensor, name: str, parameter: str, *, rows: bool) -> WeightView | None:
        """Where a value of the head, or of rows of it, goes that the base does not have; None if it can go nowhere."""
        key = self._weight if parameter == "weight" else f"{self._head}.{parameter}"
        if self._base is None or not self._is_head(name) or (parameter != "weight" and key not in self.own):
            return None
        shared = self._sources.get(key, self._base.info)
        if self._as_one(info.name):
            return whole(shared.name, shared.shape)
        strange = self._patcher.adapter.strange
        others = [t for t in strange if t is not info and t.shape == info.shape]
        if not self.own or (info.shape != shared.shape and not others and not rows):
            return None
        if parameter != "weight" and not any(t.name == f"{info.name.removesuffix(parameter)}weight" for t in strange):
            return whole(shared.name, shared.shape)  # saved by both names of one parameter
        self._part(key)
        return whole(key, shared.shape)

    def repeats(self, module: Module) -> bool:
        """Whether factors of the head are those of the embeddings, which PEFT saves a second time; noted."""
        modules = self._patcher.adapter.modules
        return self._as_one(module.name) and self._again(module.name, (m.name for m in modules))

    def repeats_rows(self, name: str, rows: tuple[int, ...]) -> bool:
        """Whether trained tokens of the head are those of the embeddings, saved a second time; noted."""
        plain = (self._patcher.rules.of(t.name).plain(t.name) for t in self._patcher.adapter.strange)
        return self._again(name, (p.target.rpartition(".")[0] for p in plain if p and p.rows == rows))

    def _again(self, name: str, others: Iterable[str]) -> bool:
        if not self._is_head(name) or self._look(name) is not None:
            return False
        shared = self._table()
        if shared is None or all(self._look(other) != shared for other in others):
            return False
        self._result.notes.append(f"{name}: saved a second time with the embeddings that it is tied to; merged once")
        return True

    def untie(self, name: str, view: WeightView) -> None:
        """Store the head apart if an adapter's module changes one of the two ends alone."""
        key, shared = view.pieces[0].key, self._base.info.name if self._base else ""
        headless = self._is_head(name) and self._look(name) is None
        if self._as_one(name) or not (headless or key == shared) or key.endswith(".bias"):
            return
        if self._parts(name):
            self._part(key)
        elif self._ref.factor(key, "model"):
            self._both[name] = key

    def refusal(self) -> MergeError | None:
        """The error for a head that cannot be stored apart, where PEFT trained one end alone; `skip` changes both."""
        names = [name for name in self._both if self._patcher.rules.of(name).kind]
        if self._base is None:  # nothing tells that it is tied but that it is not stored
            names = names if self._patcher.by_config else []
        if self._result.parted or not names:
            return None
        where = f"{self._patcher.adapter.path}: {listed(names)} on {self._shared or self._both[names[0]]}"
        return FitError("the adapter trained one end of embeddings that the base ties, and models of its kind cannot "
                        "be stored with the two apart", where,
                        "train it with ensure_weight_tying, or without these modules; --unmatched skip changes both "
                        "ends, which computes something else")  # fmt: skip

    def origin(self, view: WeightView) -> WeightView:
        """Where the values are that a place starts from: for a head those of the embeddings."""
        source = self._sources.get(self.key(view))
        return whole(source.name, source.shape) if source else view

    def key(self, view: WeightView) -> str:
        """The name of a head's tensor that the base does not have; "" for all other places."""
        return view.pieces[0].key if view.pieces[0].key in self.own else ""

    def follow(self) -> None:
        """Trained tokens are those of both ends, also where these differ; unless the head has tokens of its own.

        A bias is the head's too, unless that has its own.
        """
        parted, replaced, uses = self._result.parted, self._result.replaced, self._result.uses
        head = next((key for key in parted if key.endswith(".weight")), self._stored)
        tokens = [use for use in uses.get(self._shared, ()) if _trains_tokens(use)]
        if head and tokens and not any(map(_trains_tokens, uses.get(head, ()))):
            if self._stored:
                self._result.notes.append(f"{head} is tied to {self._shared}: the trained tokens are those of both")
                strength = self._ref.factor(head, "model")
                tokens = [_moved(use, head, strength) for use in tokens if strength]
            uses.setdefault(head, []).extend(tokens)
        for key in parted.keys() - {head} - uses.keys() - replaced.keys():
            source = parted[key].name
            uses |= {key: [*uses[source]]} if source in uses else {}
            replaced |= {key: replaced[source]} if source in replaced else {}
        if self._stored and self._differ():
            self._result.untied = head
            self._result.notes.append(f"{head} and {self._shared} now differ: tie_word_embeddings is now false")

    def _differ(self) -> bool:
        """Whether the two tensors that a base stores for tied ends change, and not as one."""
        result, ends = self._result, (self._stored, self._shared)
        tokens = [{u.piece.start for u in result.uses.get(end, ()) if _trains_tokens(u)} for end in ends]
        names = [u.patch.module.name for end in ends for u in result.uses.get(end, ()) if not _trains_tokens(u)]
        names += [result.replaced[end].name for end in ends if end in result.replaced]
        return tokens[0] != tokens[1] or not all(map(self._as_one, names))

    def notes(self) -> list[str]:
        """On tensors that change with another, and on those that the base did not have."""
        found, result = [], self._result
        key = self._base.info.name if self._base else ""
        if self._both and not result.parted:
            shared = ", ".join(sorted({*self._both.values()}))
            found.append(f"{listed([*self._both], 2)}: the head is tied to {shared}, so both ends change; {DIFFERS}")
        elif not result.parted and (key in result.replaced or key in result.uses):
            found.append(f"the head is tied to {key} and changes with it")
        if new := [name for name in result.created if name in result.uses and name not in result.parted]:
            found.append(f"{listed(new, 2)}: the base has no such bias; a model whose layers have none ignores it")
        return found

    def _as_one(self, name: str) -> bool:
        """Whether both ends have the same change: as PEFT was told, and did if both are saved (GPT-2: not always).

        PEFT looks for ends named `embed_tokens` or `lm_head`, which encoders do not have.
        """
        rules = self._patcher.rules.of(name)
        if rules.kind == MLX:  # its model has but one
            return True
        flag = rules.fields.flag("ensure_weight_tying", default=False)
        return flag and self._has_both and name not in self._unlike

    @cached_property
    def _unlike(self) -> frozenset[str]:
        """Modules of both ends whose changes differ: with DoRA, in scale, where PEFT tied other tensors alone."""
        modules = [m for m in self._patcher.adapter.modules if {"up", "down"} <= set(m.slots)]
        heads = [m for m in modules if self._is_head(m.name)]
        tables = [m for m in modules if m.name.rpartition(".")[2] in EMBEDDING_NAMES]
        same = {m.name for h in heads for t in tables if self._scale(h) == self._scale(t) and self._transposed(h, t)
                for m in (h, t)}  # fmt: skip
        return frozenset(m.name for m in (*heads, *tables)) - same

    def _scale(self, module: Module) -> float:
        """What PEFT multiplies the factors with: each end has its own, whether they share these or not."""
        return self._patcher.rules.of(module.name).numbers("lora", module.name, module.shapes).get("scale", 1.0)

    def _transposed(self, head: Module, table: Module) -> bool:
        """Whether the head's A is the transpose of the embeddings' B, the smaller two factors."""
        a, b = head.slots["down"], table.slots["up"]
        if a.shape != b.shape[::-1] or "magnitude" in {**head.shared, **table.shared}:
            return False
        (ours, theirs), columns = map(self._patcher.values.numbers, (a, b)), b.shape[1]
        return ours == tuple(v for k in range(columns) for v in theirs[k::columns])

    def _parts(self, name: str) -> bool:
        """Whether what has this name in the adapter changes one end alone, and the other can keep its weight."""
        return bool(self.own and self._patcher.rules.of(name).kind) and not self._as_one(name)

    def _part(self, end: str) -> None:
        """Give the head tensors of its own, which start as those that it shares, because one end changes."""
        head = self._weight
        if not self._sources or head in self._result.parted or not self._ref.factor(end, "model"):
            return
        for key, source in self._sources.items():
            self._result.parted[key] = source
            self._result.created[key] = source.shape, source.name
        self._result.notes.append(
            f"{head} was tied to {self._sources[head].name} and is now stored apart (tie_word_embeddings: false): the "
            "adapter was trained with the two apart"
        )


def _trains_tokens(use: PatchPart) -> bool:
    return "trainable_tokens" in f"{use.patch.module.name}.{use.patch.module.parameter}"


def _moved(use: PatchPart, key: str, strength: float) -> PatchPart:
    """The same rows of another tensor of this shape."""
    pieces = tuple(piece._replace(key=key) for piece in use.patch.view.pieces)
    patch = replace(use.patch, view=use.patch.view._replace(pieces=pieces))
    return PatchPart(patch, use.piece._replace(key=key), use.start, strength)


def shared_layers(patcher: Patcher) -> MergeError | None:
    """The error for an adapter of layers that two parts of the model share: it changes the one or both, not as one."""
    shared = SHARED_LAYERS.get(patcher.model)
    names = [
        m.name for m in patcher.adapter.modules if shared and shared.match(m.name) and patcher.rules.of(m.name).kind
    ]
    what = "the encoder and the decoder of the base share their layers, and the adapter trained them apart"
    fix = "keep it as a separate adapter; --unmatched skip merges what it has for the decoder, which changes both"
    return FitError(what, f"{patcher.adapter.path}: {listed(names)}", fix) if names else None


def check_alone(refs: Sequence[Adapter], matched: Sequence[Matched]) -> None:
    """FitError if one adapter parts the head from the embeddings and another changes both as one."""
    for number, one in enumerate(matched):
        for head, info in one.parted.items():
            for other, ref in zip(matched, refs, strict=True):
                if head not in other.parted and info.name in {*other.uses, *other.replaced}:
                    raise FitError("one adapter trained the head apart from the embeddings, another the two as one",
                                   f"{info.name}: by {refs[number].path} and {ref.path}",
                                   f"merge {ref.path} first, and the other into the result")  # fmt: skip
