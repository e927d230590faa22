"""What an adapter does to a base, by the second reading: module → rows of the base, formula, scale, strength.

`claims` needs the headers of both files, the adapter's configuration and its α alone. What it cannot tell it leaves
out; what it says must be what the plan says (second_reading.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple

from ...disk.files import StoredTensor
from ...dtypes import FLOATS
from .kinds import fits, kind_of
from .methods import METHODS, Known
from .numbers import Number, Numbers, strength
from .places import PEFT, Place, Places, rows_of
from .reading import NUMBERS, Group, groups, shapes

Shape = tuple[int, ...]
Stored = Mapping[str, Shape]

CONV1D: Final = ("c_attn", "c_proj", "c_fc", "q_attn", "conv1d")
"""What transformers calls its layers whose weights are [in, out]."""

STARTED: Final = ("pissa", "olora")
"""Rows whose start PEFT takes out of the weight."""

COPIED: Final = ".base_layer."
"""What the name of a copy has that PEFT stores of a layer's own weight."""

IN_OUT: Final = ("gpt2",)
"""Types of models that have no other layers of these names."""

TABLES: Final = ("embed_tokens", "lm_head", "wte", "shared", "word_embeddings", "embed_in", "embed_out", "decoder",
                 "embeddings", "proj_out", "tok_embeddings")  # fmt: skip
"""Layers that may share one weight."""


class Span(NamedTuple):
    """Rows [start, stop) of a base tensor `cols` wide, and the row of ΔW that goes onto the first of them.

    Where the base has the weight the other way round, `transposed`, they are rows of the stored tensor all the same.
    """

    key: str
    start: int
    stop: int
    cols: int
    transposed: bool
    first: int


@dataclass(frozen=True)
class Claim:
    """One module on the base."""

    name: str  # the module as the adapter calls it
    kind: str  # the row of ALGORITHMS
    tensors: Mapping[str, str]  # role → name of the tensor, those of the formula alone
    spans: Mapping[Span, float]  # where → strength, which is not 0
    scale: float
    axis: str = ""  # of DoRA's norm: out or in; "" without
    shared: Mapping[str, str] = field(default_factory=dict)  # role → name of a tensor that several modules have
    told: Mapping[str, Any] = field(default_factory=dict)  # further numbers and settings


@dataclass(frozen=True)
class Base:
    """What the second reading looks at of a base."""

    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    places: Places

    @property
    def ties(self) -> bool:
        """Whether some of its layers may share a weight that is stored once."""
        return bool(self.config.get("architectures")) and self.config.get("tie_word_embeddings") is not False

    @cached_property
    def across(self) -> frozenset[str]:
        """Last names of layers of which one is [in, out] beyond doubt: its bias is as long as its second axis."""
        found = set()
        for key, info in self.tensors.items():
            bias = self.tensors.get(key.removesuffix("weight") + "bias") if key.endswith(".weight") else None
            if bias is not None and len(info.shape) == 2 and bias.shape == info.shape[1:] != info.shape[:1]:
                found.add(key.split(".")[-2])
        return frozenset(found)


@dataclass(frozen=True)
class Strengths:
    """How strongly one adapter is wanted."""

    all: float
    parts: tuple[tuple[str, float], ...] = ()


def claims(tensors: Mapping[str, StoredTensor], numbers: Numbers, base: Base, wanted: Strengths) -> Iterator[Claim]:
    """Yield what is known of an adapter's modules; those that claim one place with others are left out."""
    unsure = _unsure(tensors, base)
    read = [g for g in groups(tensors.values()) if not (unsure and g.stem.startswith(unsure))]
    found: list[tuple[Group, Place]] = []
    for group in read:
        place = _place(group, read_parts(read, group), base)
        if place is not None:
            found.append((group, place))
    if any(_lies_across(group, place) for group, place in found):  # then a square weight may, too
        found = [(g, p) for g, p in found if _is_told(base) or not (fits(g, p.shape) and fits(g, p.shape[::-1]))]
    taken: dict[object, int] = {}
    for group, place in found:
        mark = (_family(group.kind), place.rows)
        taken[mark] = taken.get(mark, 0) + 1
    for group, place in found:
        if taken[_family(group.kind), place.rows] == 1:
            claim = _claim(group, place, numbers, base, wanted)
            if claim is not None and claim.kind in STARTED and any(COPIED in name for name in tensors):
                continue  # a copy of what is left without the start may stand in the base's place: the plan compares
            if claim is not None and group.kind in METHODS:
                claim = _of_method(claim, group, place, numbers, tensors)
            if claim is not None:
                yield claim


def _of_method(
    claim: Claim, group: Group, place: Place, numbers: Numbers, tensors: Mapping[str, StoredTensor]
) -> Claim | None:
    """Return the claim with what its method's row tells; None where other numbers may hold."""
    method, config = METHODS[group.kind], (numbers.configuration(group.stem) or ({}, ""))[0]
    alpha = numbers.limit(group)
    if alpha is None or (alpha and method.type):
        return None
    known = Known(shapes(group), place.shape, config, alpha)
    shared = {
        s: key
        for s, key in method.shared_keys(group.stem.removeprefix(PEFT)).items()
        if s not in claim.tensors and key in tensors
    }
    scale = claim.scale if group.kind == "lora_bias" else method.scale(known)
    return replace(
        claim, scale=scale, told=method.told(known) if not claim.kind.startswith("onetrainer") else {}, shared=shared
    )


def _lies_across(group: Group, place: Place) -> bool:
    """Return whether the base has a weight the other way round, as its shape shows."""
    return len(place.shape) == 2 and not fits(group, place.shape) and fits(group, place.shape[::-1])


def _is_told(base: Base) -> bool:
    """Return whether the type of the model tells which of its weights are [in, out]."""
    return str(base.config.get("model_type")) in IN_OUT


def _unsure(tensors: Mapping[str, StoredTensor], base: Base) -> str:
    """Return what the names begin with of one of two experts, where the base has one alone and nothing here tells
    which.
    """
    both = any(name.startswith("transformer_2.") for name in tensors)
    return "transformer." if both and not base.places.has("transformer_2") else ""


def _family(kind: str) -> str:
    return "low rank" if kind.startswith("lora") else kind


def read_parts(read: list[Group], group: Group) -> list[Group]:
    """Return all groups of the module that a part belongs to; none for what is no part."""
    if group.part is None:
        return []
    return [g for g in read if g.stem == group.stem and g.part is not None and g.parameter == group.parameter]


def _place(group: Group, parts: list[Group], base: Base) -> Place | None:
    place = base.places.find(group.stem, group.parameter)
    if place is None or any(base.tensors[r.key].dtype not in FLOATS for r in place.rows):
        return None
    leaf = group.stem.rpartition(".")[2]
    if base.ties and (leaf in TABLES or place.rows[0].key.split(".")[-2:-1] in [[t] for t in TABLES]):
        return None
    return place if group.part is None else _part(group, parts, place, base.places.parts(place))


def _part(group: Group, parts: list[Group], place: Place, known: tuple[int, ...]) -> Place | None:
    """Return the rows of part k: those below the parts before it, all of which must be there and fill the weight
    together.

    Where some are not, only a weight that is known to be made of such parts tells.
    """
    sizes = {g.part: g.roles["up"].shape[0] for g in parts if "up" in g.roles and g.roles["up"].shape}
    number = group.part or 0
    if len(place.rows) != 1 or number not in sizes:
        return None
    if known and all(n is not None and n < len(known) and known[n] == size for n, size in sizes.items()):
        return rows_of(place, sum(known[:number]), sum(known[: number + 1]))
    if sorted(n for n in sizes if n is not None) == list(range(len(sizes))) and sum(sizes.values()) == place.shape[0]:
        start = sum(sizes[n] for n in range(number))
        return rows_of(place, start, start + sizes[number])
    return None


def _claim(group: Group, place: Place, numbers: Numbers, base: Base, wanted: Strengths) -> Claim | None:
    turned = _turned(group, place, numbers, base)
    scale = numbers.scale(group)
    if turned is None or scale is None or _contradicts(group, numbers):
        return None
    kind, axis = kind_of(group, place.shape, numbers), _axis(group, place, turned=turned)
    if kind is None or axis is None:
        return None
    rows = list(_spans(place, turned=turned))
    if kind == "peft_ia3_out" or (group.kind in METHODS and METHODS[group.kind].bias):
        rows += _bias(place, base)
    spans: dict[Span, float] = {}
    for span in rows:
        factor = strength(wanted.all, wanted.parts, span.key, place.network)
        if factor is None:
            return None
        if factor:
            spans[span] = factor
    tensors = {
        role.rpartition("/")[2].removeprefix("kron_"): info.name
        for role, info in group.roles.items()
        if role not in NUMBERS
    }
    return Claim(group.stem, kind, tensors, spans, scale, axis)


def _contradicts(group: Group, numbers: Numbers) -> bool:
    """Return whether a module has two tensors of one role, or a magnitude that its configuration says is none."""
    found = numbers.configuration(group.stem)
    unused = found is not None and found[0].get("use_dora") is False and "magnitude" in group.roles
    return bool(group.twice) or unused


def _spans(place: Place, *, turned: bool) -> Iterator[Span]:
    first = 0
    merged: list[tuple[str, int, int, int]] = []
    for r in place.rows:  # neighbouring rows of one tensor are one span
        if merged and merged[-1][0] == r.key and merged[-1][2] == r.start:
            merged[-1] = (r.key, merged[-1][1], r.stop, r.cols)
        else:
            merged.append((r.key, r.start, r.stop, r.cols))
    for key, start, stop, cols in merged:
        yield Span(key, start, stop, cols, turned, first)
        first += stop - start


def _bias(place: Place, base: Base) -> Iterator[Span]:
    """Yield the bias of a layer whose outputs are scaled."""
    key = place.rows[0].key.removesuffix("weight") + "bias"
    info = base.tensors.get(key)
    if info is not None and info.shape == place.shape[:1]:
        yield Span(key, 0, info.shape[0], 1, False, 0)  # noqa: FBT003


def _turned(group: Group, place: Place, numbers: Numbers, base: Base) -> bool | None:
    """Return whether the base has the weight the other way round than the factors; None if they do not fit, or nothing
    tells.

    The shapes tell, but for square ones: there the type of the model does.
    """
    upright, across = fits(group, place.shape), fits(group, place.shape[::-1])
    if len(place.shape) != 2 or len(place.rows) > 1 or not across:
        return False if upright else None
    name = place.rows[0].key.split(".")[-2:-1]
    conv1d = bool(name) and name[0] in CONV1D
    found = numbers.configuration(group.stem)
    said = found is not None and bool(found[0].get("fan_in_fan_out"))
    if upright and not (conv1d or said or numbers.turns or (name and name[0] in base.across)):
        return False
    return True if conv1d and _is_told(base) and group.kind == "lora" else None


def _axis(group: Group, place: Place, *, turned: bool) -> str | None:
    """Return the axis of DoRA's magnitude, "" without one; None where nothing tells it."""
    info = group.roles.get("magnitude")
    if info is None:
        return ""
    if turned or group.kind == "lora_embedding" or len(place.shape) < 2:
        return None
    shape, (out, inputs) = info.shape, place.shape[:2]
    if info.name.endswith(".dora_scale") and len(shape) > 1 and shape[0] != out:
        return "in" if shape[1] == inputs and prod(shape) == inputs else None
    return "out" if prod(shape) == out else None


__all__ = ["Base", "Claim", "Number", "Numbers", "Places", "Span", "Strengths", "claims"]
