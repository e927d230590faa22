"""What the recomputation of merged rows showed, added up."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Findings:
    """What the recomputation of some rows showed."""

    tensors: int = 0
    rows: int = 0
    elements: int = 0
    cut: int = 0  # elements too large for the output's dtype, written as its largest number
    broken: int = 0  # elements that are NaN or infinite, rightly so
    worst: float = 0.0  # units in the last place of the output dtype
    worst_tensor: str = ""
    wrong: dict[str, str] = field(default_factory=dict)  # tensor → where and how
    applied: dict[int, float] = field(default_factory=dict)  # adapter → Σ ⟨applied, intended⟩
    intended: dict[int, float] = field(default_factory=dict)  # adapter → Σ ‖intended‖²

    def add(self, part: Findings) -> None:
        """What was found in other rows too."""
        self.tensors += part.tensors
        self.rows += part.rows
        self.elements += part.elements
        self.cut += part.cut
        self.broken += part.broken
        if not part.worst <= self.worst:
            self.worst, self.worst_tensor = part.worst, part.worst_tensor
        for tensor, where in part.wrong.items():
            self.wrong.setdefault(tensor, where)
        for mine, theirs in ((self.applied, part.applied), (self.intended, part.intended)):
            for adapter, value in theirs.items():
                mine[adapter] = mine.get(adapter, 0.0) + value

    def retained(self, adapter: int) -> float | None:
        """Return the share of an adapter's change that is in the file; None where nothing of it was looked at."""
        return self.applied[adapter] / self.intended[adapter] if self.intended.get(adapter) else None
