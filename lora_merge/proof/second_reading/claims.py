"""The changes of an adapter to a base, by the second reading: module → rows of the base, formula, scale, strength.

Read are the headers of both files, the adapter's configuration and its α, nothing else. Modules whose answer is not
certain are left out. Every claim must be what the plan says (comparison.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple

from ...dtypes import FLOATS, StoredTensor
from .formulas import fits, kind_of, square_experts, variant
from .methods import METHOD_ROWS, VECTOR, ModuleFacts
from .modules import NUMBER_ROLES, Group, groups
from .rows import PEFT_PREFIX, Networks, WeightPlace, reordered, rows_of
from .scales import ModuleScales

CONV1D: Final = ("c_attn", "c_proj", "c_fc", "q_attn", "conv1d")
"""Names that transformers gives to layers whose weights are [in, out]."""

STARTED: Final = ("pissa", "olora")
"""Rows of ALGORITHMS for LoRA whose start PEFT takes out of the weight."""

BASE_COPY: Final = ".base_layer."
"""Part of the names under which PEFT stores copies of the base's own weights."""

IN_OUT_MODELS: Final = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Types of models in which every layer with a name of CONV1D is [in, out]."""

OUT_IN: Final = ("gpt_bigcode",)
"""Types of models in which none of them is."""

SHARED_NUMBERS: Final = f"base_model.{VECTOR[:-1]}"

REGISTERED: Final = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""Parameters of stacked experts, in the order in which transformers' classes register them."""

TOKENS_DELTA: Final = ".trainable_tokens_delta"
WRAPPED_LAYER: Final = ".base_layer"
LORA_ROLES: Final = {"up", "down"}
MOST_PARAMETERS: Final = 100

TIED_LAYERS: Final = ("embed_tokens", "lm_head", "wte", "shared", "word_embeddings", "embed_in", "embed_out", "decoder",
                      "embeddings", "proj_out", "tok_embeddings")  # fmt: skip
"""Layers that may share one weight."""


Strength = Callable[[str, str], float | None]
"""(key of the base, Place.network) → an adapter's strength there; None if it is unknown."""


class TargetRows(NamedTuple):
    """Rows [start, stop) of a stored base tensor `cols` wide, and the row of ΔW that is added to the first of them.

    `transposed`: the base stores the transpose of the weight that ΔW is for.
    """

    key: str
    start: int
    stop: int
    cols: int
    transposed: bool
    first: int


@dataclass(frozen=True)
class ModuleClaim:
    """The change of one module of an adapter to the base."""

    name: str  # the module as the adapter calls it
    kind: str  # the row of ALGORITHMS
    tensors: Mapping[str, str]  # slot of the formula → name of the tensor
    spans: Mapping[TargetRows, float]  # where → strength, which is not 0
    scale: float
    axis: str = ""  # of DoRA's norm: out or in; "" without DoRA
    shared: Mapping[str, str] = field(default_factory=dict)  # slot → name of a tensor that several modules share
    settings: Mapping[str, Any] = field(default_factory=dict)  # further numbers and settings


@dataclass(frozen=True)
class BaseHeader:
    """The tensors, the configuration and the networks of a base."""

    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    places: Networks

    @property
    def ties(self) -> bool:
        """Whether some of its layers may share a weight that is stored once."""
        return bool(self.config.get("architectures")) and self.config.get("tie_word_embeddings") is not False

    @property
    def is_in_out(self) -> bool:
        """Whether every layer of this type of model with a name of CONV1D is [in, out]."""
        return str(self.config.get("model_type")) in IN_OUT_MODELS

    @cached_property
    def in_out_names(self) -> frozenset[str]:
        """Last names of layers of which one is certainly [in, out]: its bias is as long as its second axis."""
        names = set()
        for key, info in self.tensors.items():
            bias = self.tensors.get(key.removesuffix("weight") + "bias") if key.endswith(".weight") else None
            if bias is not None and len(info.shape) == 2 and bias.shape == info.shape[1:] != info.shape[:1]:
                names.add(key.split(".")[-2])
        return frozenset(names)


@dataclass(frozen=True)
class AdapterClaims:
    """The changes of one adapter to a base. `copies`: names of tensors that the plan takes for copies of others."""

    tensors: Mapping[str, StoredTensor]
    scales: ModuleScales
    base: BaseHeader
    strength: Strength
    copies: Collection[str] = ()

    def certain(self) -> Iterator[ModuleClaim]:
        """Yield what is certain of the adapter's modules; modules that claim the same place are left out, but for those
        that are copies."""
        uncertain = self._uncertain_prefix()
        groups_of = [g for g in groups(self.tensors.values()) if not (uncertain and g.stem.startswith(uncertain))]
        read = [replace(group, kind=variant(group, self.scales)) for group in groups_of]
        yield from self._experts(read)
        yield from self._tokens()
        placed = ((group, self._place(group, read)) for group in read)
        pairs = [(g, p) for g, place in placed if place is not None and (p := self._ordered(g, place)) is not None]
        if any(_is_stored_in_out(group, place) for group, place in pairs):  # then a square weight may, too
            pairs = [
                (g, p) for g, p in pairs if self.base.is_in_out or not (fits(g, p.shape) and fits(g, p.shape[::-1]))
            ]
        taken = Counter((_family(group.kind), place.rows) for group, place in pairs if not self._is_copy(group))
        has_copies = any(BASE_COPY in name for name in self.tensors)
        vectors = [name for name in self.tensors if name.startswith(SHARED_NUMBERS)]
        for group, place in pairs:
            claim = self._claim(group, place) if taken[_family(group.kind), place.rows] <= 1 else None
            if claim is not None and claim.kind in STARTED and has_copies:
                continue  # a stored copy may lack the start already, and be taken for the base: the plan compares them
            if group.kind == "tinylora" and vectors != [f"base_model.{VECTOR}"]:
                continue
            if claim is not None and group.kind in METHOD_ROWS:
                claim = self._of_method(claim, group, place)
            if claim is not None:
                yield claim

    def _uncertain_prefix(self) -> str:
        """Return the prefix of one of two expert models, where the base is one of them and nothing here says which."""
        both = any(name.startswith("transformer_2.") for name in self.tensors)
        return "transformer." if both and not self.base.places.has("transformer_2") else ""

    def _is_copy(self, group: Group) -> bool:
        return all(info.name in self.copies for role, info in group.roles.items() if role not in NUMBER_ROLES)

    def _tokens(self) -> Iterator[ModuleClaim]:
        """Yield the trained tokens of a table, unless a second tensor may follow it because the two are tied."""
        added = [info for info in self.tensors.values() if info.name.endswith(TOKENS_DELTA)]
        if not added or (self.base.ties and self._may_be_tied()):
            return
        for info in added:
            stem = info.name.removesuffix(TOKENS_DELTA).removesuffix(".token_adapter")
            place = self.base.places.find(stem, "weight")
            if place is not None and len(place.rows) == 1 and self.base.tensors[place.rows[0].key].dtype in FLOATS:
                (row,), factor = place.rows, self.strength(place.rows[0].key, place.network)
                known = factor is not None and row.start == 0
                runs = self.scales.tokens(stem, info.shape[0], row.stop) if known else []
                spans = {
                    TargetRows(row.key, a, b, row.cols, transposed=False, first=at): factor
                    for a, b, at in runs
                    if factor
                }
                if runs:
                    yield ModuleClaim(stem, "set", {"diff": info.name}, spans, 1.0)

    def _may_be_tied(self) -> bool:
        """Return whether the adapter has more tensors of tables, or the base has several tables."""
        others = (name.split(".") for name in self.tensors if not name.endswith(TOKENS_DELTA))
        layers = (name.split(".")[-2:-1] for name, info in self.base.tensors.items() if len(info.shape) == 2)
        tables = sum(bool(layer) and layer[0] in TIED_LAYERS for layer in layers)
        return tables > 1 or any(not {*TIED_LAYERS}.isdisjoint(levels) for levels in others)

    def _experts(self, read: list[Group]) -> Iterator[ModuleClaim]:
        """Yield the LoRA of stacked experts, whose sides show how the base stores them."""
        stacks = [(group, *stack) for group in read if (stack := self._stacked(group)) is not None]
        taken = Counter(place.rows for group, place, _ in stacks if not self._is_copy(group))
        for group, place, path in stacks:
            scale = self.scales.of_experts(group, path, place.shape[0])
            factor = self.strength(place.rows[0].key, place.network)
            sides, config = (group.roles["up"].shape[0], *group.roles["down"].shape[1:]), self.scales.config(group.stem)
            square = len({*sides}) == 1
            row = square_experts(config, str(self.base.config.get("model_type") or "")) if square else "lora_experts"
            if None in (scale, factor, row) or taken[place.rows] > 1 or group.roles.keys() != LORA_ROLES:
                continue
            if sorted(sides) == sorted(place.shape[1:]):
                spans = dict.fromkeys(_spans(place, turned=False), factor) if factor else {}
                tensors = {role: info.name for role, info in group.roles.items()}
                yield ModuleClaim(group.stem, row, tensors, spans, scale, "")  # type: ignore[arg-type]

    def _stacked(self, group: Group) -> tuple[WeightPlace, str] | None:
        """Return where the experts of a module are that PEFT's `target_parameters` names, and the parameter's path.

        PEFT wraps the module that holds them once for each parameter; the parameter that the model registers last is
        outermost (tuners/lora/layer.py, ParamWrapper).
        """
        names = self.scales.config(group.stem).get("target_parameters")
        if group.kind != "lora" or not isinstance(names, list) or len(names) > MOST_PARAMETERS:
            return None
        owner, depth = group.stem.replace(WRAPPED_LAYER, ""), group.stem.count(WRAPPED_LAYER)
        path = owner.removeprefix(PEFT_PREFIX)
        parts = [str(name).rpartition(".") for name in names]
        leaves = {leaf for of, _, leaf in parts if f".{path}".endswith(f".{of}") or not of}
        known = len(leaves) == 1 or leaves <= {*REGISTERED}
        if not known or not all(of for of, _, _ in parts) or depth >= len(leaves):
            return None
        leaf = (sorted(leaves, key=REGISTERED.index) if len(leaves) > 1 else [*leaves])[-1 - depth]
        place = self.base.places.find(owner, leaf)
        alone = place is not None and len(place.rows) == 1 and len(place.shape) == 3
        return (place, f"{path}.{leaf}") if place is not None and alone else None

    def _place(self, group: Group, read: list[Group]) -> WeightPlace | None:
        place = self.base.places.find(group.stem, group.parameter)
        if place is None or any(self.base.tensors[r.key].dtype not in FLOATS for r in place.rows):
            return None
        leaf, of_base = group.stem.rpartition(".")[2], place.rows[0].key.split(".")[-2:-1]
        if self.base.ties and (leaf in TIED_LAYERS or (of_base and of_base[0] in TIED_LAYERS)):
            return None
        return place if group.part is None else _part(group, group.part, read, place, self.base.places.parts(place))

    def _ordered(self, group: Group, place: WeightPlace) -> WeightPlace | None:
        """Return the place with its rows in the order of the adapter's; None if nothing states that order.

        A name with PEFT's name of the adapter is DiffSynth-Studio's, which trains on files of both orders; published
        ones without it are stacked.
        """
        network = self.base.places.of_heads(place)
        if network is None:
            return place
        named = any(".default" in info.name for info in group.roles.values())
        order = self.scales.order if named else "stacked"
        files = {self.base.tensors[network.prefix + name].file for name in network.shapes}
        stored = "heads" if len(files) > 1 else "stacked"
        if order == stored:
            return place
        return reordered(place, by_heads=stored == "heads") if order and len(place.rows) == 1 else None

    def _claim(self, group: Group, place: WeightPlace) -> ModuleClaim | None:
        turned, scale = self._turned(group, place), self.scales.scale(group)
        if turned is None or scale is None or self._contradicts(group):
            return None
        kind, axis = kind_of(group, place.shape, self.scales), _axis(group, place, turned=turned)
        if kind is None or axis is None:
            return None
        rows = list(_spans(place, turned=turned))
        if kind == "peft_ia3_out" or (group.kind in METHOD_ROWS and METHOD_ROWS[group.kind].bias):
            rows += self._bias(place, place.shape[1 if turned else 0])
        spans: dict[TargetRows, float] = {}
        for span in rows:
            factor = self.strength(span.key, place.network)
            if factor is None:
                return None
            if factor:
                spans[span] = factor
        tensors = {role.rpartition("/")[2]: info.name for role, info in group.roles.items() if role not in NUMBER_ROLES}
        settings = self.scales.stated({"parts": ()}) if kind == "lora_fused" else {}
        return ModuleClaim(group.stem, kind, tensors, spans, scale, axis, settings=settings)

    def _contradicts(self, group: Group) -> bool:
        """Return whether a module has two tensors of one role, or a magnitude that its configuration denies."""
        denied = self.scales.config(group.stem).get("use_dora") is False
        return bool(group.twice) or (denied and "magnitude" in group.roles)

    def _bias(self, place: WeightPlace, outputs: int) -> Iterator[TargetRows]:
        """Yield the bias of a layer whose outputs are scaled."""
        key = place.rows[0].key.removesuffix("weight") + "bias"
        info = self.base.tensors.get(key)
        if info is not None and info.shape == (outputs,):
            yield TargetRows(key, 0, info.shape[0], 1, transposed=False, first=0)

    def _turned(self, group: Group, place: WeightPlace) -> bool | None:
        """Return whether the base stores the transpose of the factors' product; None if they do not fit, or it is
        unknown.

        The shapes decide; for square weights the type of the model does.
        """
        upright, turned = fits(group, place.shape), fits(group, place.shape[::-1])
        if len(place.shape) != 2 or len(place.rows) > 1 or not turned:
            return False if upright else None
        name = place.rows[0].key.split(".")[-2:-1]
        conv1d = bool(name) and name[0] in CONV1D and str(self.base.config.get("model_type")) not in OUT_IN
        if upright and not (
            conv1d
            or self.scales.config(group.stem).get("fan_in_fan_out")
            or self.scales.turns
            or (name and name[0] in self.base.in_out_names)
        ):
            return False
        return True if not upright or (conv1d and self.base.is_in_out) else None

    def _of_method(self, claim: ModuleClaim, group: Group, place: WeightPlace) -> ModuleClaim | None:
        """Return the claim with the numbers of its method's row; None if others may apply."""
        scales, method, alpha = self.scales, METHOD_ROWS[group.kind], self.scales.limit(group)
        if alpha is None or (alpha and method.type):
            return None
        known = ModuleFacts(group.shapes, place.shape, scales.config(group.stem), alpha, group.stem, scales.of_lycoris)
        keys = method.shared_keys(group.stem.removeprefix(PEFT_PREFIX))
        shared = {slot: key for slot, key in keys.items() if slot not in claim.tensors and key in self.tensors}
        scale = claim.scale if group.kind == "lora_bias" else method.scale(known)
        settings = {} if claim.kind.startswith("onetrainer") else method.settings(known)
        return replace(claim, scale=scale, settings=scales.stated(settings), shared=shared)


def _is_stored_in_out(group: Group, place: WeightPlace) -> bool:
    """Return whether the shape shows that the base stores the transpose of the weight."""
    return len(place.shape) == 2 and not fits(group, place.shape) and fits(group, place.shape[::-1])


def _family(kind: str) -> str:
    return "low rank" if kind.startswith("lora") else kind


def _part(
    group: Group, number: int, read: list[Group], place: WeightPlace, known: tuple[int, ...]
) -> WeightPlace | None:
    """Return the rows of row part `number`, which follow the rows of the parts before it.

    If all parts are in the file and fill the weight, their sizes give the rows; else only the known parts of the
    base's weight do.
    """
    sizes = {
        g.part: g.roles["up"].shape[0]
        for g in read
        if (g.stem, g.parameter) == (group.stem, group.parameter) and g.part is not None
        if "up" in g.roles and g.roles["up"].shape
    }
    if len(place.rows) != 1 or number not in sizes:
        return None
    if known and all(n < len(known) and known[n] == size for n, size in sizes.items()):
        return rows_of(place, sum(known[:number]), sum(known[: number + 1]))
    if sorted(sizes) == list(range(len(sizes))) and sum(sizes.values()) == place.shape[0]:
        start = sum(sizes[n] for n in range(number))
        return rows_of(place, start, start + sizes[number])
    return None


def _spans(place: WeightPlace, *, turned: bool) -> Iterator[TargetRows]:
    first = 0
    merged: list[tuple[str, int, int, int]] = []
    for r in place.rows:  # neighbouring rows of one tensor are one span
        if merged and merged[-1][0] == r.key and merged[-1][2] == r.start:
            merged[-1] = (r.key, merged[-1][1], r.stop, r.cols)
        else:
            merged.append((r.key, r.start, r.stop, r.cols))
    for key, start, stop, cols in merged:
        yield TargetRows(key, start, stop, cols, turned, first)
        first += stop - start


def _axis(group: Group, place: WeightPlace, *, turned: bool) -> str | None:
    """Return the axis of DoRA's magnitude, "" without one; None if it is unknown."""
    info = group.roles.get("magnitude")
    if info is None:
        return ""
    if group.kind == "lora_embedding" or len(place.shape) < 2:
        return None
    shape, (out, inputs) = info.shape, place.shape[::-1] if turned else place.shape[:2]
    if info.name.endswith(".dora_scale") and len(shape) > 1 and shape[0] != out:
        return "in" if shape[1] == inputs and prod(shape) == inputs else None
    return "out" if prod(shape) == out else None
