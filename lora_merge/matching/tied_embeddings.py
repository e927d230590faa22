"""Heads tied to the input embeddings, and adapters that trained one of these two ends.

PEFT wraps one end, and the forward pass of the other end keeps the old weight: the two are no longer tied. The output
then holds the head as a tensor of its own, and its config.json says `tie_word_embeddings: false`. With
`ensure_weight_tying` and for trained tokens both ends are trained as one, and the tensors saved for the head are a
copy. PEFT's merge_and_unload adds the change of one end to both, and adds the copy a second time; its forward pass is
right, and a merge follows it. PEFT 0.21, utils/other.py, tuners/{tuners_utils,lora/model,trainable_tokens/model}.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from ..adapters.modules import Module
from ..dtypes import Shape, StoredTensor
from ..errors import FitError, MergeError
from ..grouping import by_key
from ..job import Adapter
from ..models.part_factors import Strengths
from ..models.tied_weights import EMBEDDINGS, LM_HEAD, SHARED_LAYERS, TiedPair
from ..models.weights import WeightView, whole
from ..options import Unmatched
from ..row_ranges import RowNumbers
from ..text import Note, listed
from .formula import AdapterContext
from .patch import Match, PatchPart

EMBEDDING_NAMES: Final = frozenset(name.rpartition(".")[2] for name in EMBEDDINGS)

DIFFERS: Final = (
    "the result differs if the adapter changes one end alone when it runs, as PEFT's do without ensure_weight_tying"
)
SAVED_TWICE: Final = "{name}: saved a second time with the embeddings that it is tied to; merged once"
STORED_APART: Final = (
    "{head} was tied to {table} and is now stored apart (tie_word_embeddings: false): the adapter was trained with the "
    "two apart"
)

TOKENS_WITHOUT_BIAS: Final = (
    "{name}: PEFT's forward pass of trained tokens leaves out the bias of the head that is tied to them, its merge "
    "does not; nor does this one"
)


class AdapterPair:
    """The tied pair of a base, as one adapter uses it. It only answers questions; `separate` makes the changes."""

    def __init__(self, tied: TiedPair | None, context: AdapterContext) -> None:
        self.context = context
        self.stored = tied.stored if tied else ""  # the head's own tensor, if the base stores one
        self.tied = None if self.stored else tied
        self._head, self.shared = (tied.head, tied.info.name) if tied else (LM_HEAD, "")
        self.sources = tied.sources if tied else {}
        self.bias = tied.own_bias if tied else ""
        self.weight = next(iter(self.sources), "")  # name of the weight that a separate head gets
        self.new_tensors = {key: replace(info, name=key) for key, info in self.sources.items()}

    def is_head(self, name: str) -> bool:
        """Return whether a module's name is that of the head."""
        return f".{name}".endswith(f".{self._head}")

    def is_end(self, name: str) -> bool:
        """Return whether a module's name is that of the head, or of embeddings that change with it.

        Encoder and decoder may each have a name for the one table; PEFT then trains and saves it under all names.
        """
        return self.is_head(name) or (name.rpartition(".")[2] in EMBEDDING_NAMES and self.changes_both(name))

    @property
    def new_weight(self) -> WeightView | None:
        """The new tensor of the head; None if it can have none."""
        return whole(self.weight, self.new_tensors[self.weight].shape) if self.new_tensors else None

    def view_of(self, info: StoredTensor, name: str, parameter: str, *, rows: bool) -> WeightView | None:
        """Return the view of a value, or of rows, for a head that the base does not store; None if it has none."""
        key = self.weight if parameter == "weight" else f"{self._head}.{parameter}"
        # Only for an end that the base does not store.
        if self.tied is None or not self.is_end(name) or (parameter != "weight" and key not in self.new_tensors):
            return None
        # The embeddings, if both ends change; else the new head, if it can have one.
        shared = self.sources.get(key, self.tied.info)
        if self.changes_both(info.name):
            return whole(shared.name, shared.shape)
        strange = self.context.adapter.strange
        others = [t for t in strange if t is not info and t.shape == info.shape]
        if not self.new_tensors or (info.shape != shared.shape and not others and not rows):
            return None
        if parameter != "weight" and not any(t.name == f"{info.name.removesuffix(parameter)}weight" for t in strange):
            return whole(shared.name, shared.shape)  # saved by both names of one parameter
        return whole(key, shared.shape)

    @cached_property
    def trained(self) -> Mapping[RowNumbers, Sequence[tuple[str, StoredTensor]]]:
        """Trained tokens → the modules for which the adapter trained them, and what it stores for each."""
        strange = self.context.adapter.strange
        values = ((info, self.context.rules.of(info.name).stored_value(info.name)) for info in strange)
        return by_key((v.rows, (v.target.rpartition(".")[0], info)) for info, v in values if v and v.rows is not None)

    def start_of(self, view: WeightView) -> WeightView:
        """Return the view with the values that a view starts from: for a new head the embeddings."""
        source = self.sources.get(self.key(view))
        return whole(source.name, source.shape) if source else view

    def key(self, view: WeightView) -> str:
        """Return the name of a new tensor of the head; "" for all others."""
        return view.row_slices[0].key if view.row_slices[0].key in self.new_tensors else ""

    def changes_both(self, name: str) -> bool:
        """Return whether the module changes both ends: the configuration ties them, and the saved changes are equal.

        PEFT looks for ends named `embed_tokens` or `lm_head`, which encoders do not have.
        """
        rules = self.context.rules.of(name)
        if rules.method.one_table:
            return True
        flag = rules.fields.flag("ensure_weight_tying", default=False)
        return flag and self._has_both and name not in self._unlike

    def separates(self, name: str) -> bool:
        """Return whether a module of the adapter changes one end alone, and the two ends can be stored separately."""
        return bool(self.new_tensors and self.context.rules.of(name).kind) and not self.changes_both(name)

    @cached_property
    def _has_both(self) -> bool:
        """Whether the adapter has tensors of both ends by the names that PEFT looks for."""
        named = {part for key in self.context.adapter.index.tensors for part in key.split(".")}
        return self._head == LM_HEAD and LM_HEAD in named and not named.isdisjoint(EMBEDDING_NAMES)

    @cached_property
    def _unlike(self) -> frozenset[str]:
        """Modules of both ends whose changes differ: by DoRA, by scale, or if PEFT tied only other tensors."""
        modules = [m for m in self.context.adapter.modules if {"up", "down"} <= set(m.slots)]
        heads = [m for m in modules if self.is_head(m.name)]
        tables = [m for m in modules if m.name.rpartition(".")[2] in EMBEDDING_NAMES]
        alike: dict[tuple[float, Shape], tuple[list[Module], list[Module]]] = {}
        for end, some in enumerate((heads, tables) if heads and tables else ()):
            for m in (m for m in some if "magnitude" not in m.shared):
                shape = m.slots["up"].shape[::-1] if end else m.slots["down"].shape
                alike.setdefault((self._scale(m), shape), ([], []))[end].append(m)
        same = {name for ends in alike.values() if all(ends) for name in self._transposed(*ends)}
        return frozenset(m.name for m in (*heads, *tables)) - same

    def _scale(self, module: Module) -> float:
        """Return the scale in PEFT, which each end has for itself, also if both share the factors."""
        rules = self.context.rules.of(module.name)
        formula = next((name for name in module.complete if name in rules.method.algorithms), "")
        return rules.scalars(formula, module.name, module.shapes).get("scale", 1.0)

    def _transposed(self, heads: Sequence[Module], tables: Sequence[Module]) -> Iterator[str]:
        """Yield the heads whose A is the transpose of the B of embeddings, the smaller two of the four factors, and
        these embeddings."""
        elements = self.context.values.elements
        of_heads = [(m.name, elements(m.slots["down"])) for m in heads]
        columns = [(m, elements(m.slots["up"]), m.slots["up"].shape[-1]) for m in tables]
        of_tables = [(m.name, tuple(v for k in range(n) for v in values[k::n])) for m, values, n in columns]
        common = {values for _, values in of_heads} & {values for _, values in of_tables}
        yield from (name for name, values in (*of_heads, *of_tables) if values in common)


def separate(
    pair: AdapterPair, ends: Mapping[str, str], match: Match, strengths: Strengths, unmatched: Unmatched
) -> Match:
    """Return the match with a separate head, where the adapter changes only one of embeddings and head.

    `ends`: module that changes one end → the tensor that it changes. FitError if PEFT trained one end and the two
    cannot be stored separately, unless `unmatched` is "skip": then both change.
    """
    # The modules that change one end, and those of them that can only change both.
    changed = {name: key for name, key in ends.items() if strengths.factor(key, "model")}
    both = {name: key for name, key in changed.items() if key not in pair.new_tensors and not pair.separates(name)}
    separated = pair.sources if len(both) < len(changed) else {}
    if unmatched == "error" and (refusal := _refusal(pair, {} if separated else both)):
        raise refusal
    # The new head, with the changes that it takes from the embeddings.
    created = {**match.created, **{key: (source.shape, source.name) for key, source in separated.items()}}
    notes = [Note(STORED_APART.format(head=pair.weight, table=separated[pair.weight].name))] if separated else []
    merged, end_notes = _with_tokens_of_head(pair, replace(match, separated=separated, created=created), strengths)
    if both and not separated:
        shared = ", ".join(sorted({*both.values()}))
        end_notes.append(Note(f"{listed([*both], 2)}: the head is tied to {shared}, so both ends change; {DIFFERS}"))
    elif not separated and pair.tied and (pair.shared in merged.replaced or pair.shared in merged.uses):
        end_notes.append(Note(f"the head is tied to {pair.shared} and changes with it"))
    return replace(merged, notes=(*merged.notes, *notes, *end_notes))


def _refusal(pair: AdapterPair, both: Mapping[str, str]) -> MergeError | None:
    """Return the error if PEFT trained one end alone and the head cannot be stored separately."""
    names = [name for name in both if pair.context.rules.of(name).kind]
    if not names or (
        pair.tied is None and not pair.context.by_config
    ):  # only the missing head suggests that it is tied
        return None
    where = f"{pair.context.adapter.path}: {listed(names)} on {pair.shared or both[names[0]]}"
    return FitError("the adapter trained one end of embeddings that the base ties, and models of its kind cannot "
                    "be stored with the two apart", where,
                    "train it with ensure_weight_tying, or without these modules; `--unmatched skip` changes both "
                    "ends, which computes something else")  # fmt: skip


def _with_tokens_of_head(pair: AdapterPair, match: Match, strengths: Strengths) -> tuple[Match, list[Note]]:
    """Return (the match with the changes that the head takes from the embeddings, notes).

    Trained tokens change both ends, unless the head has trained tokens of its own. The same holds for a bias.
    """
    uses, replaced, notes = dict(match.uses), dict(match.replaced), list[Note]()
    # Trained tokens of the embeddings.
    head = next((key for key in match.separated if key.endswith(".weight")), pair.stored)
    tokens = [use for use in uses.get(pair.shared, ()) if _trains_tokens(use)]
    if pair.bias and tokens:
        notes.append(Note(TOKENS_WITHOUT_BIAS.format(name=pair.bias)))
    if head and tokens and not any(map(_trains_tokens, uses.get(head, ()))):
        if pair.stored:
            notes.append(Note(f"{head} is tied to {pair.shared}: the trained tokens are those of both"))
            strength = strengths.factor(head, "model")
            tokens = [_moved(use, head, strength) for use in tokens if strength]
        uses[head] = [*uses.get(head, ()), *tokens]
    # Other new tensors of the head, such as a bias.
    for key in match.separated.keys() - {head} - uses.keys() - replaced.keys():
        source = match.separated[key].name
        uses |= {key: uses[source]} if source in uses else {}
        replaced |= {key: replaced[source]} if source in replaced else {}
    changed = replace(match, uses=uses, replaced=replaced)
    if not pair.stored or not _differ(pair, changed):
        return changed, notes
    notes.append(Note(f"{head} and {pair.shared} now differ: tie_word_embeddings is now false"))
    return replace(changed, untied=head), notes


def _differ(pair: AdapterPair, match: Match) -> bool:
    """Return whether the two tensors that a base stores for tied ends change differently."""
    ends = pair.stored, pair.shared
    tokens = [{u.piece.start for u in match.uses.get(end, ()) if _trains_tokens(u)} for end in ends]
    names = [u.patch.module.name for end in ends for u in match.uses.get(end, ()) if not _trains_tokens(u)]
    names += [match.replaced[end].name for end in ends if end in match.replaced]
    return tokens[0] != tokens[1] or not all(map(pair.changes_both, names))


def _trains_tokens(use: PatchPart) -> bool:
    return "trainable_tokens" in f"{use.patch.module.name}.{use.patch.module.parameter}"


def _moved(use: PatchPart, key: str, strength: float) -> PatchPart:
    """Return the patch part on the same rows of another tensor of this shape."""
    pieces = tuple(piece._replace(key=key) for piece in use.patch.view.row_slices)
    patch = replace(use.patch, view=use.patch.view._replace(row_slices=pieces))
    return PatchPart(patch, use.piece._replace(key=key), use.start, strength)


def shared_layers(context: AdapterContext) -> MergeError | None:
    """Return the error for an adapter of layers that encoder and decoder share but PEFT trained separately."""
    shared = SHARED_LAYERS.get(context.model)
    names = [
        m.name for m in context.adapter.modules if shared and shared.match(m.name) and context.rules.of(m.name).kind
    ]
    what = "the encoder and the decoder of the base share their layers, and the adapter trained them apart"
    fix = "keep it as a separate adapter; `--unmatched skip` merges what it has for the decoder, which changes both"
    return FitError(what, f"{context.adapter.path}: {listed(names)}", fix) if names else None


def check_separations(adapters: Sequence[Adapter], matches: Sequence[Match]) -> None:
    """Raise FitError if one adapter separates the head from the embeddings and another changes both as one."""
    for number, match in enumerate(matches):
        for head, info in match.separated.items():
            for other, adapter in zip(matches, adapters, strict=True):
                if head not in other.separated and info.name in {*other.uses, *other.replaced}:
                    raise FitError("one adapter trained the head apart from the embeddings, another the two as one",
                                   f"{info.name}: by {adapters[number].path} and {adapter.path}",
                                   f"merge {adapter.path} first, and the other into the result")  # fmt: skip
