"""What became of an adapter: where each of its patches meets the base, and what has no place. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ..adapters.file import AdapterFile, Module
from ..algorithms import Shape
from ..disk.files import StoredTensor
from ..models.weights import RowSlice
from .choose import Patch

OFF: Final = "its strength is 0"
COPY: Final = "the adapter holds it a second time; it is applied once"
ZEROS: Final = "zeros for a bias that the layer does not have"
REPLACED: Final = "an adapter after it replaces the same parameter"
"""Why a tensor that has its place changes nothing. The proof looks whether that is so."""


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
    unused: dict[str, str] = field(default_factory=dict)  # tensor of the adapter that changes nothing → why
    notes: list[str] = field(default_factory=list)

    def leave(self, module: Module, why: str) -> None:
        """Remember why the tensors of a module that has its place change nothing."""
        self.unused |= dict.fromkeys((i.name for i in (*module.slots.values(), *module.shared.values())), why)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms in use, the most frequent first."""
        seen = Counter(u.patch.algorithm for uses in self.uses.values() for u in uses)
        return (*(name for name, _ in seen.most_common()), *(["replacement"] if self.replaced else []))

    @property
    def total(self) -> int:
        """Modules in the adapter."""
        return self.modules + len(self.unmatched)
