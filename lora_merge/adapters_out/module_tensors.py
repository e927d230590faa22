"""One layer of an output: its tensors, and what is reported of it. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ..disk.draft import Draft, Heap
from ..text import Note
from .groups import Place
from .output_file import Entry
from .rounding import Effect

if TYPE_CHECKING:
    from torch import Tensor

Norms: TypeAlias = Mapping[int, float]
"""Adapter → the norm of its change of a layer at its strength, if it changes it."""


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

    @property
    def residual(self) -> float:
        """‖Δ − Δ̂‖ / ‖Δ‖; 0 for a Δ of zeros, and for one that was not measured."""
        return math.sqrt(self.lost / self.squares) if self.squares else 0.0


class ChangeOfMean(NamedTuple):
    """The facts of a layer whose tensors are averaged."""

    before: int  # the largest rank of the changes
    rank: int  # of the change by the averaged tensors
    squares: float  # ‖Δ‖² of the average of the changes
    lost: float  # ‖Δ − Δ̂‖², with the change by the averaged tensors
    effect: Effect
    norms: Norms


def without_bytes(layer: Layer) -> Layer:
    """Return the facts of a layer alone."""
    return replace(layer, tensors={})


def numbers_of(layer: Layer, adapters: int) -> dict[str, Any]:
    """Return a layer's facts for the report; `adapters`: the number of inputs."""
    share = layer.lost / layer.squares if layer.squares else 0.0
    facts: dict[str, Any]
    facts = {"algorithm": layer.algorithm, "rank": layer.rank, "rank_before": layer.before, "alpha": layer.alpha,
             "norm": math.sqrt(layer.squares), "energy": 1 - share, "residual": layer.residual}  # fmt: skip
    facts |= {} if layer.noise is None else {"noise": layer.noise}
    if layer.weight is not None:
        size = math.sqrt(layer.weight)
        facts |= {"weight": size, "ratio": facts["norm"] / size if size else None}
    if layer.norms:
        facts["adapters"] = [{"change": layer.norms[n]} if n in layer.norms else None for n in range(adapters)]
    return facts if layer.effect is None else {**facts, **layer.effect.facts}


class LayerTensors(NamedTuple):
    """One layer of an output, and its tensors by their slots as they are written."""

    layer: Layer
    entries: Mapping[str, Entry]


def waiting_entry(entry: Entry, put: Heap | Draft) -> Entry:
    """Return a tensor that is in memory as it waits, or as it is in the draft."""
    assert isinstance(entry.data, memoryview), "it was just made"
    return replace(entry, data=put.put(entry.data))


def waiting(entries: Mapping[str, Entry], put: Heap | Draft) -> dict[str, Entry]:
    """Return the tensors of a layer in the order of their slots or endings; their bytes wait, or are in the draft."""
    return {slot: waiting_entry(entries[slot], put) for slot in sorted(entries)}


@dataclass(frozen=True)
class StoredModule:
    """The stored tensors of one module by their ending, and the facts of its layer, which holds no tensors."""

    place: Place
    tensors: Mapping[str, Entry]
    layer: Layer
    copied: bool = False  # whether the tensors are those of the input
