"""One layer of an output: its tensors, and what the report tells of it. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ..disk.draft import Draft, Heap
from ..text import Note
from .groups import Place
from .output_file import Entry
from .rounding import Effect

if TYPE_CHECKING:
    from torch import Tensor

Norms: TypeAlias = Mapping[int, float]
"""Adapter → the norm of its change of a layer at its strength, of those that change it."""

NOT_LOW_RANK: Final = "the result is not low-rank, so it has no exact factors"
STACKED: Final = "the weights of stacked experts have no factors in these formats"


@dataclass(frozen=True)
class Layer:
    """The stored tensors of one layer, by slot, and what was lost."""

    tensors: Mapping[str, Tensor]
    algorithm: str
    rank: int
    before: int
    alpha: float | None
    squares: float  # ‖Δ‖²
    lost: float  # ‖Δ − Δ̂‖² of the stored tensors
    notes: tuple[Note, ...] = field(default_factory=tuple)
    noise: float | None = None  # the share of ‖Δ‖ that rounding errors of two checkpoints have, where it is known
    effect: Effect | None = None  # the numbers of Δ, where they were looked at
    norms: Norms = field(default_factory=dict)
    weight: float | None = None  # ‖W‖² of the base's weight, where it was read


def without_bytes(layer: Layer) -> Layer:
    """Return the facts of a layer alone."""
    return replace(layer, tensors={})


def numbers_of(layer: Layer, adapters: int) -> dict[str, Any]:
    """Return a layer's facts for the report; `adapters`: the number of inputs."""
    share = layer.lost / layer.squares if layer.squares else 0.0
    found: dict[str, Any]
    found = {"algorithm": layer.algorithm, "rank": layer.rank, "rank_before": layer.before, "alpha": layer.alpha,
             "norm": math.sqrt(layer.squares), "energy": 1 - share, "residual": math.sqrt(share)}  # fmt: skip
    found |= {} if layer.noise is None else {"noise": layer.noise}
    if layer.weight is not None:
        size = math.sqrt(layer.weight)
        found |= {"weight": size, "ratio": found["norm"] / size if size else None}
    if layer.norms:
        found["adapters"] = [{"change": layer.norms[n]} if n in layer.norms else None for n in range(adapters)]
    return found if layer.effect is None else {**found, **layer.effect.told}


class Stored(NamedTuple):
    """One layer of an output, and its tensors by their slots as they are written."""

    layer: Layer
    entries: Mapping[str, Entry]


def held(one: Entry, put: Heap | Draft) -> Entry:
    """Return a tensor that is in memory as it waits, or as it is in the draft."""
    assert isinstance(one.data, memoryview), "it was just made"
    return replace(one, data=put.put(one.data))


def waiting(entries: Mapping[str, Entry], put: Heap | Draft) -> dict[str, Entry]:
    """Return the tensors of a layer in the order of their slots or endings; their bytes wait, or are in the draft."""
    return {slot: held(entries[slot], put) for slot in sorted(entries)}


@dataclass(frozen=True)
class Kept:
    """The stored tensors of one module by their ending, and the facts of its layer, which holds no tensors."""

    place: Place
    tensors: Mapping[str, Entry]
    layer: Layer
    copied: bool = False  # whether the tensors are those of the input
