"""What became of an adapter: where each of its patches meets the base, and what has no place. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, Final, NamedTuple

from ..adapters.file import AdapterFile, Module
from ..algorithms import ALGORITHMS, Shape, dora
from ..disk.files import StoredTensor
from ..models.weights import RowSlice, WeightView

OFF: Final = "its strength is 0"
COPY: Final = "the adapter holds it a second time; it is applied once"
ZEROS: Final = "zeros for a bias that the layer does not have"
REPLACED: Final = "an adapter after it replaces the same parameter"
"""Why a tensor that has its place changes nothing. The proof looks whether that is so."""


@dataclass(frozen=True)
class Patch:
    """One formula with its tensors, and the weight it was trained on as pieces of the base."""

    adapter: int
    module: Module
    algorithm: str
    shapes: Mapping[str, Shape]  # per slot, as the formula wants it
    numbers: Mapping[str, float]
    settings: tuple[tuple[str, Any], ...]
    view: WeightView
    magnitude: tuple[dora.Axis, Shape] | None = None  # DoRA: axis, shape
    beside: Mapping[str, WeightView] = field(default_factory=dict)  # slot → where its values lie in the base

    @cached_property
    def row_group(self) -> int:
        """How many consecutive rows of ΔW are formed together: 1, those of one expert or one block, or all.

        Factors are cut to a multiple of it, along the axes that the algorithm's `row_axes` names.
        """
        row, rows = ALGORITHMS[self.algorithm], self.view.matrix[0]
        limits = {name for name, value in self.numbers.items() if isfinite(value)}
        chosen = self.shapes.keys() | {name for name, value in self.settings if value} | limits
        if row.row_axes is None or row.not_sliceable_with & chosen or (self.magnitude or ("out",))[0] != "out":
            return rows
        entries = [self.shapes[slot][axis] for slot, axis in row.row_axes.items() if slot in self.shapes] or [rows]
        count = min(entries)
        if not count or any(n % count for n in (rows, *entries)):
            return rows
        if self.reads_base and count < rows and len(self.view.pieces) > 1:  # they may lie in several tensors
            return rows
        return rows // count

    @property
    def reads_base(self) -> bool:
        """Whether ΔW depends on the base's values."""
        return self.magnitude is not None or ALGORITHMS[self.algorithm].reads_base


class PatchPart(NamedTuple):
    """A patch where it meets one stored tensor: piece `piece` of its view starts at view row `start`."""

    patch: Patch
    piece: RowSlice
    start: int
    strength: float


@dataclass(frozen=True)
class Match:
    """What one adapter does to the base."""

    adapter: AdapterFile
    uses: Mapping[str, Sequence[PatchPart]]  # base key → what changes it
    replaced: Mapping[str, StoredTensor]  # output key → the tensor that takes its place
    copies: Mapping[str, StoredTensor]  # base key → the tensor as the adapter stores it
    bases: Mapping[str, StoredTensor]  # those of them that differ, and stand for the base's
    created: Mapping[str, tuple[Shape, str]]  # tensors the base lacks → shape, sibling
    grown: Mapping[str, Shape]  # base key → its larger shape
    placed: Sequence[str]  # modules that found their place
    unmatched: Mapping[str, str]  # module → reason
    components: Mapping[str, int]  # component → modules
    unused: Mapping[str, str]  # tensor of the adapter that changes nothing → why
    notes: tuple[str, ...]
    settings: frozenset[str]  # those that the user states and a formula asked for
    applied: Mapping[tuple[str, float], int]  # (component, strength) → modules that are applied with it
    parted: Mapping[str, StoredTensor] = field(default_factory=dict)  # head the base lacks → its embeddings
    untied: str = ""  # head of its own that was a copy of the embeddings, and is none any more

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms in use, the most frequent first."""
        seen = Counter(u.patch.algorithm for uses in self.uses.values() for u in uses)
        return (*(name for name, _ in seen.most_common()), *(["replacement"] if self.replaced else []))

    @property
    def strengths(self) -> Mapping[str, Mapping[float, int]]:
        """Component → strength → modules that are applied with it; 0 for those that are left out."""
        found: dict[str, dict[float, int]] = {}
        for (component, strength), count in sorted(self.applied.items(), key=lambda item: -item[0][1]):
            found.setdefault(component, {})[strength] = count
        return found

    @property
    def modules(self) -> int:
        """How many modules found their place."""
        return len(self.placed)

    @property
    def total(self) -> int:
        """Modules in the adapter."""
        return self.modules + len(self.unmatched)
