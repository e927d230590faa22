"""Results of the recomputation of merged rows, added up, and words that several proofs report with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Final

import numpy as np

from ..planning.plan import Plan
from .reference.floats import Array

NAMED: Final = 5  # modules or tensors that a report names, of those that it counts
REPORT: Final = "report it with the headers of both files; until it is mended, merge with another tool"

MOST_LISTED: Final = 10_000  # tensors whose numbers a report lists one by one
RETAINED: Final = 0.9  # below this share of a change, the user is told


EIGHT_BITS: Final = frozenset({"F8_E4M3", "F8_E5M2"})


def remedy(plan: Plan) -> tuple[str, str, str]:
    """Return how the changed weights are stored, a wider dtype, and what to do where their changes do not survive."""
    changed = {t.packing.encoding for x in plan.files for t in x.targets if t.uses}
    small = all(not e.plain or e.title in EIGHT_BITS for e in changed)
    wider = "bf16 or fp32" if small else "fp32"
    ways = [f"write --dtype {wider}"]
    if plan.job.rounding == "nearest" and all(e.plain or e.stochastic for e in changed):
        ways.append("round with --rounding stochastic, which keeps the change on average")
    return ", ".join(sorted({e.title for e in changed})), wider, ", or ".join(ways)


@dataclass
class Exact:
    """Exact rows, in float64, before they are rounded."""

    base: Array  # the same rows without adapters
    value: Array
    terms: Array  # |W|, every |s ΔW| and every sum on the way, whichever is largest
    loss: float = 1.0  # Reference.loss of the worst formula
    changes: dict[int, Array] = field(default_factory=dict)  # adapter → s ΔW
    slack: Array | float = 0.0  # by how much an entry may differ, as its choice hangs on rounding

    def turned(self, turn: Callable[[Array], Array]) -> Exact:
        """Return the rows in the basis in which the weight is stored."""
        changes = {number: turn(change) for number, change in self.changes.items()}
        slack = np.sum(np.broadcast_to(self.slack, self.value.shape), axis=1, keepdims=True)
        return Exact(turn(self.base), turn(self.value), self.terms, self.loss, changes, slack)

    @property
    def largest(self) -> Array:
        """Per row, the largest finite term: [rows, 1]."""
        finite = np.where(np.isfinite(self.terms), self.terms, 0.0)
        return np.asarray(np.max(finite, axis=1, initial=0.0, keepdims=True))


@dataclass
class Share:
    """The change of one adapter, and the part of it that is in the output: sums over numbers."""

    intended: float = 0.0  # Σ (s ΔW)²
    applied: float = 0.0  # Σ applied · s ΔW

    def add(self, other: Share) -> None:
        """Add the sums over other numbers."""
        self.intended, self.applied = self.intended + other.intended, self.applied + other.applied

    @property
    def retained(self) -> float | None:
        """⟨applied, intended⟩ / ‖intended‖²; None where nothing is intended."""
        return self.applied / self.intended if self.intended else None


@dataclass
class Measure:
    """Sums over recomputed numbers of merged weights; with a sample of rows, estimates of the sums over all rows."""

    elements: int = 0  # numbers that were recomputed
    changed: int = 0  # of them, those that differ from what the output would hold without adapters
    cut: int = 0  # of them, those too large for the output's dtype
    weight: float = 0.0  # Σ W²
    noise: float = 0.0  # Σ (applied − ΔW)²
    largest: float = 0.0  # the largest |ΔW| of the recomputed numbers
    all: Share = field(default_factory=Share)
    adapters: dict[int, Share] = field(default_factory=dict)

    def add(self, other: Measure) -> None:
        """Add the sums over other numbers."""
        self.elements, self.changed, self.cut = (
            self.elements + other.elements, self.changed + other.changed, self.cut + other.cut
        )  # fmt: skip
        self.weight, self.noise = self.weight + other.weight, self.noise + other.noise
        self.largest = max(self.largest, other.largest)
        self.all.add(other.all)
        for number, share in other.adapters.items():
            self.adapters.setdefault(number, Share()).add(share)

    @property
    def loses(self) -> bool:
        """Whether less than `RETAINED` of the change is in the output, by more than three standard errors."""
        retained, wanted = self.all.retained, self.all.intended
        if retained is None or not self.elements:
            return False
        return retained + 3 * sqrt(self.noise / wanted / self.elements) < RETAINED

    def to_dict(self, count: int) -> dict[str, Any]:
        """Return the numbers as the report has them; `count` is the number of adapters."""
        change, shares = sqrt(self.all.intended), (self.adapters.get(number) for number in range(count))
        return {
            "elements": self.elements, "changed": _short(self.changed / max(self.elements, 1)),
            "saturated": self.cut, "weight": _short(sqrt(self.weight)), "change": _short(change),
            "ratio": _short(sqrt(self.all.intended / self.weight) if self.weight else None),
            "largest": _short(self.largest), "retained": _short(self.all.retained),
            "noise": _short(sqrt(self.noise) / change if change else None),
            "adapters": [
                s and {"change": _short(sqrt(s.intended)), "retained": _short(s.retained)} for s in shares
            ],
        }  # fmt: skip


def _short(number: float | None) -> float | None:
    """Return a number with six digits."""
    return None if number is None else float(f"{number:.6g}")


def measure(found: Array, exact: Exact, rounded: Callable[[Array], Array], weight: float) -> Measure:
    """Return the measure of some rows of the output, each of which stands for `weight` rows of its tensor.

    `rounded` gives the nearest numbers that the output can hold. Applied is the difference to what the output would
    hold without the adapter, or without all of them. Numbers that are NaN or infinite are left out.
    """
    base, intended, changes = exact.base, exact.value, exact.changes
    before, change = rounded(base), intended - base
    made = Measure(elements=found.size, changed=int(np.count_nonzero((found != before) & ~np.isnan(found))))
    applied = found - before
    sound = np.isfinite(applied) & np.isfinite(change)
    applied, change, weights = applied[sound], change[sound], base[sound]
    made.weight, made.largest = weight * float(weights @ weights), float(np.max(np.abs(change), initial=0.0))
    made.noise = weight * float(np.sum((applied - change) ** 2))
    made.all = Share(weight * float(change @ change), weight * float(applied @ change))
    for number, own in changes.items():
        if len(changes) > 1:
            applied = found - rounded(intended - own)
            sound = np.isfinite(applied) & np.isfinite(own)
            applied, change = applied[sound], own[sound]
        made.adapters[number] = Share(weight * float(change @ change), weight * float(applied @ change))
    return made


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
    measures: dict[str, Measure] = field(default_factory=dict)  # tensor → its numbers

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
        for tensor, measure in part.measures.items():
            self.measures.setdefault(tensor, Measure()).add(measure)

    def retained(self, adapter: int) -> float | None:
        """Return the share of an adapter's change that is in the file; None where none of its rows was recomputed."""
        total = Share()
        for measure in self.measures.values():
            total.add(measure.adapters.get(adapter, Share()))
        return total.retained

    def numbers(self, adapters: int, groups: Callable[[str], Iterable[tuple[str, str]]]) -> dict[str, Any]:
        """Return the numbers of the merge: in all, by group and by tensor.

        `groups`: tensor → (kind of a group, its name), such as ("blocks", "unet IN04"); `adapters`: their number.
        """
        total, kinds = Measure(), {"components": dict[str, Measure](), "blocks": dict[str, Measure]()}
        for name, one in self.measures.items():
            total.add(one)
            for kind, group in groups(name):
                kinds[kind].setdefault(group, Measure()).add(one)
        listed = self.measures if len(self.measures) <= MOST_LISTED else {}
        below = {name: one for name, one in self.measures.items() if one.loses}
        tables = {**kinds, "tensors": listed}
        return {
            "all": total.to_dict(adapters), "below": len(below),
            "worst": min(below, key=lambda name: below[name].all.retained or 0.0, default=None),
            "unlisted": len(self.measures) - len(listed),
            **{kind: {name: one.to_dict(adapters) for name, one in rows.items()} for kind, rows in tables.items()},
        }  # fmt: skip
