"""The result of matching: the patches of an adapter on the base, and the unmatched modules. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, Final, NamedTuple

from ..adapters.modules import AdapterFile, Module
from ..algorithms import ALGORITHMS, dora
from ..dtypes import Shape, StoredTensor
from ..models.weights import RowSlice, WeightView
from ..text import Note

OFF: Final = "its strength is 0"
COPY: Final = "the adapter contains it a second time; it is applied once"
ZEROS: Final = "zeros for a bias that the layer does not have"
NO_LAYER: Final = "it has no elements, and the base has no such layer"
REPLACED_AGAIN: Final = "an adapter after it replaces the same parameter"
"""Reasons why a matched tensor changes nothing. The proof checks them."""


@dataclass(frozen=True)
class Patch:
    """One formula with its tensors on one view of the base's weights."""

    adapter: int
    module: Module
    algorithm: str
    shapes: Mapping[str, Shape]  # slot → shape as the formula needs it
    scalars: Mapping[str, float]
    settings: tuple[tuple[str, Any], ...]
    view: WeightView
    magnitude: tuple[dora.Axis, Shape] | None = None  # DoRA: axis, shape
    base_slots: Mapping[str, WeightView] = field(default_factory=dict)  # slot → weight of the base that fills it

    @cached_property
    def row_group(self) -> int:
        """The number of consecutive rows of ΔW that are formed together: 1, those of one expert or one block, or all.

        Factors are cut to a multiple of it, along the axes that the algorithm's `row_axes` names.
        """
        row, rows = ALGORITHMS[self.algorithm], self.view.matrix[0]
        limits = {name for name, value in self.scalars.items() if isfinite(value)}
        chosen = self.shapes.keys() | {name for name, value in self.settings if value} | limits
        if row.row_axes is None or row.not_sliceable_with & chosen or (self.magnitude or ("out",))[0] != "out":
            return rows
        entries = [self.shapes[slot][axis] for slot, axis in row.row_axes.items() if slot in self.shapes] or [rows]
        count = min(entries)
        if not count or any(n % count for n in (rows, *entries)):
            return rows
        if self.reads_base and count < rows and len(self.view.row_slices) > 1:  # they may lie in several tensors
            return rows
        return rows // count

    @property
    def reads_base(self) -> bool:
        """Whether ΔW depends on the base's values."""
        return self.magnitude is not None or ALGORITHMS[self.algorithm].reads_base


class PatchPart(NamedTuple):
    """The part of a patch on one stored tensor: piece `piece` of its view, which starts at view row `start`."""

    patch: Patch
    piece: RowSlice
    start: int
    strength: float


@dataclass(frozen=True)
class Match:
    """The changes that one adapter makes to the base."""

    adapter: AdapterFile
    uses: Mapping[str, Sequence[PatchPart]]  # base key → patches on it
    replaced: Mapping[str, StoredTensor]  # output key → the tensor that takes its place
    copies: Mapping[str, StoredTensor]  # base key → copy of the tensor in the adapter
    bases: Mapping[str, StoredTensor]  # copies that differ from the base's tensor and replace it
    created: Mapping[str, tuple[Shape, str]]  # new tensor → its shape, and the tensor next to which it is stored
    grown: Mapping[str, Shape]  # base key → its larger shape
    matched: Sequence[str]  # modules that match the base
    unmatched: Mapping[str, str]  # module → reason
    components: Mapping[str, int]  # component → modules
    unused: Mapping[str, str]  # tensor of the adapter that changes nothing → why
    notes: tuple[Note, ...]
    settings: frozenset[str]  # the user's settings that a formula needed
    applied: Mapping[tuple[str, float], int]  # (component, strength) → number of modules
    separated: Mapping[str, StoredTensor] = field(default_factory=dict)  # new head → the embeddings that it starts from
    untied: str = ""  # stored head that was equal to the embeddings and now differs

    @property
    def parts(self) -> Iterator[PatchPart]:
        """The parts of all patches, tensor by tensor."""
        return (use for uses in self.uses.values() for use in uses)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms in use, the most frequent first."""
        counts = Counter(part.patch.algorithm for part in self.parts)
        return (*(name for name, _ in counts.most_common()), *(["replacement"] if self.replaced else []))

    @property
    def strengths(self) -> Mapping[str, Mapping[float, int]]:
        """Component → strength → number of modules; strength 0 for modules that are left out."""
        by_component: dict[str, dict[float, int]] = {}
        for (component, strength), count in sorted(self.applied.items(), key=lambda item: -item[0][1]):
            by_component.setdefault(component, {})[strength] = count
        return by_component

    @property
    def modules(self) -> int:
        """Number of modules that match."""
        return len(self.matched)

    @property
    def total(self) -> int:
        """Number of modules in the adapter."""
        return self.modules + len(self.unmatched)
