"""Results of the recomputation of merged rows, added up, and words that several proofs report with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

NAMED: Final = 5  # modules or tensors that a report names, of those that it counts
REPORT: Final = "report it with the headers of both files; until it is mended, merge with another tool"


@dataclass
class Findings:
    """Results of the recomputation of some rows."""

    tensors: int = 0
    rows: int = 0
    elements: int = 0
    cut: int = 0  # elements too large for the output's dtype, written as its largest number
    broken: int = 0  # elements that are NaN or infinite, as they must be
    worst: float = 0.0  # units in the last place of the output dtype
    worst_tensor: str = ""
    wrong: dict[str, str] = field(default_factory=dict)  # tensor → where and how
    applied: dict[int, float] = field(default_factory=dict)  # adapter → Σ ⟨applied, intended⟩
    intended: dict[int, float] = field(default_factory=dict)  # adapter → Σ ‖intended‖²

    def add(self, part: Findings) -> None:
        """Add the results of other rows."""
        self.tensors += part.tensors
        self.rows += part.rows
        self.elements += part.elements
        self.cut += part.cut
        self.broken += part.broken
        if not part.worst <= self.worst:
            self.worst, self.worst_tensor = part.worst, part.worst_tensor
        for tensor, where in part.wrong.items():
            self.wrong.setdefault(tensor, where)
        for total, more in ((self.applied, part.applied), (self.intended, part.intended)):
            for adapter, value in more.items():
                total[adapter] = total.get(adapter, 0.0) + value

    def retained(self, adapter: int) -> float | None:
        """Return the share of an adapter's change that is in the file; None where none of its rows was recomputed."""
        return self.applied[adapter] / self.intended[adapter] if self.intended.get(adapter) else None
