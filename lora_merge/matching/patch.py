"""What became of an adapter: where each of its patches meets the base, and what has no place. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ..adapters.file import AdapterFile
from ..algorithms import Shape
from ..disk.files import StoredTensor
from ..models.weights import RowSlice
from .choose import Patch


class PatchPart(NamedTuple):
    """A patch where it meets one stored tensor: piece `piece` of its view starts at view row `start`."""

    patch: Patch
    piece: RowSlice
    start: int
    strength: float


@dataclass
class Matched:
    """What one adapter does to the base."""

    adapter: AdapterFile
    uses: dict[str, list[PatchPart]] = field(default_factory=dict)  # base key → uses
    replaced: dict[str, StoredTensor] = field(default_factory=dict)  # output key → the tensor that takes its place
    copies: dict[str, StoredTensor] = field(default_factory=dict)  # base key → the tensor as the adapter stores it
    bases: dict[str, StoredTensor] = field(default_factory=dict)  # those of them that differ, and stand for the base's
    created: dict[str, tuple[Shape, str]] = field(default_factory=dict)  # tensors the base lacks → shape, sibling
    parted: dict[str, StoredTensor] = field(default_factory=dict)  # head the base lacks → the embeddings it was tied to
    untied: str = ""  # head of its own that was a copy of the embeddings, and is none any more
    grown: dict[str, Shape] = field(default_factory=dict)  # base key → its larger shape
    modules: int = 0  # how many modules found their place
    unmatched: dict[str, str] = field(default_factory=dict)  # module → reason
    components: dict[str, int] = field(default_factory=dict)  # component → modules
    notes: list[str] = field(default_factory=list)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms in use, the most frequent first."""
        seen = Counter(u.patch.algorithm for uses in self.uses.values() for u in uses)
        return (*(name for name, _ in seen.most_common()), *(["replacement"] if self.replaced else []))

    @property
    def total(self) -> int:
        """Modules in the adapter."""
        return self.modules + len(self.unmatched)
