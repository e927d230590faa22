"""Results of the recomputation of merged rows, added up, and words that several proofs report with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ..change_statistics import Measure, Measures, Share, total
from ..dtypes import COMPUTE_DTYPES, ITEM_BYTES, spoken
from ..files.encodings.base import Encoding
from ..planning.plan import Plan
from .grids import CONTRACT, UNDERFLOW
from .reference.floats import Array

MOST_NAMED: Final = 5  # modules or tensors that a report names, of all that it counts
REPORT_HEADERS: Final = "report it with the headers of both files; until it is mended, merge with another tool"

MOST_LOSS: Final = 64  # of any one formula; more comes of a recipe that lists many
EIGHT_BITS: Final = frozenset({"F8_E4M3", "F8_E5M2"})


def coarse(encoding: Encoding) -> bool:
    """Return whether bf16 holds more digits than an encoding."""
    return not encoding.plain or encoding.title in EIGHT_BITS


def remedy(plan: Plan, *, bf16: bool = True) -> tuple[str, str]:
    """Return the dtypes that changes of weights are too small for, and the option that takes a wider one. `bf16`:
    whether bf16 holds enough of the changes, where that is wider."""
    changed = {t.packing.encoding for t in plan.targets if t.uses}
    computed = COMPUTE_DTYPES[plan.job.compute_dtype]
    dtypes = ", ".join(sorted({spoken(e.title) for e in changed}))
    if len(changed) == 1 and all(e.plain and ITEM_BYTES[e.title] == ITEM_BYTES["BF16"] for e in changed):
        dtypes += f" (as in any {dtypes} file)"  # which is no fault of this merge
    if all(e.plain and ITEM_BYTES[e.title] > ITEM_BYTES[computed] for e in changed):
        return spoken(computed), "compute with --compute-dtype fp64"
    if all(e.plain and ITEM_BYTES[e.title] >= ITEM_BYTES["F32"] for e in changed):  # no dtype is wider
        return dtypes, "give a larger strength"
    wider = "write --dtype bf16 or fp32" if bf16 and any(map(coarse, changed)) else "write --dtype fp32"
    return dtypes, wider + ", with --compute-dtype fp32" * (ITEM_BYTES[computed] < ITEM_BYTES["F32"])


@dataclass(frozen=True)
class Exact:
    """Exact rows, in float64, before they are rounded."""

    base: Array  # the same rows without adapters
    value: Array
    terms: Array  # |W|, every |s ΔW| and every sum on the way, whichever is largest
    loss: float = 1.0  # Reference.loss of the worst formula
    growth: float = 1.0  # by how much an underflow is enlarged
    changes: dict[int, Array] = field(default_factory=dict)  # adapter → s ΔW
    slack: Array | float = 0.0  # by how much an entry may differ, as its choice hangs on rounding

    def turned(self, turn: Callable[[Array], Array]) -> Exact:
        """Return the rows in the basis in which the weight is stored."""
        changes = {number: turn(change) for number, change in self.changes.items()}
        slack = np.sum(np.broadcast_to(self.slack, self.value.shape), axis=1, keepdims=True)
        return replace(self, base=turn(self.base), value=turn(self.value), changes=changes, slack=slack)

    @property
    def largest(self) -> Array:
        """Per row, the largest finite term: [rows, 1]."""
        finite = np.where(np.isfinite(self.terms), self.terms, 0.0)
        return np.asarray(np.max(finite, axis=1, initial=0.0, keepdims=True))


def measure(stored: Array, exact: Exact, rounded: Callable[[Array], Array], weight: float) -> Measure:
    """Return the measure of some rows of the output, each of which counts for `weight` rows of its tensor.

    `rounded` gives the nearest values that the output can hold. Values that are NaN or infinite are left out.
    """
    base, change = exact.base, exact.value - exact.base
    changed = np.count_nonzero((stored != rounded(base)) & ~np.isnan(stored))
    error = stored - exact.value
    sound = np.isfinite(error) & np.isfinite(change)
    weights, largest = base[sound], float(np.max(np.abs(change[sound]), initial=0.0))
    whole, alone = _share(change[sound], error[sound], weight), len(exact.changes) == 1
    shares = {
        number: whole if alone else _share(change_by[(some := sound & np.isfinite(change_by))], error[some], weight)
        for number, change_by in exact.changes.items()
    }
    return Measure(
        of=weight * stored.size, elements=stored.size, changed=weight * float(changed),
        weight=weight * float(weights @ weights), largest=largest, all=whole, adapters=shares,
    )  # fmt: skip


def _share(change: Array, error: Array, weight: float) -> Share:
    """Return the share of a change in values with these errors, each of which counts for `weight` of them."""
    size, off = float(change @ change), error[change != 0]
    return Share(size, size, size + float(error @ change), float(off @ off)).scaled(weight)


@dataclass(frozen=True)
class Bound:
    """The largest error beyond the contract of fp32 sums that is allowed, and the largest change, of some rows."""

    allowed: float = 0.0  # of the elements alone that need it
    change: float = 0.0

    @classmethod
    def of(cls, beyond: Array, lost: Array, exact: Exact, value: Array) -> Bound:
        """`beyond`: the errors beyond the rounding to the output. `lost`: the allowed errors. `value`: the exact
        rows, as far as the output can hold them."""
        before = replace(exact, terms=np.maximum(np.abs(exact.base), np.abs(value))).largest
        sure = min(exact.loss, MOST_LOSS) * (CONTRACT * before + UNDERFLOW["fp32"] * exact.growth)
        needed, change = np.where(beyond > sure, lost, 0.0), np.abs(value - exact.base)
        return cls(*(float(np.max(some, where=np.isfinite(some), initial=0.0)) for some in (needed, change)))

    def or_larger(self, other: Bound) -> Bound:
        """Return the bound of the rows of both."""
        return Bound(max(self.allowed, other.allowed), max(self.change, other.change))

    @property
    def proves(self) -> bool:
        """Whether the values within the bound are evidence of the change."""
        return self.allowed <= self.change


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
    cancelled: bool = True  # whether all wrong elements are the rounding of products that cancel
    measures: Measures = field(default_factory=Measures)
    bounds: dict[str, Bound] = field(default_factory=dict)  # tensor → what is allowed
    in_bf16: dict[int, Share] = field(default_factory=dict)
    """Adapter → the share of its change that would survive in bf16, if that is wider than a dtype of the output."""

    def count(self, tensors: int = 0, cut: int = 0) -> None:
        """Count tensors that are looked at, and elements that are cut."""
        self.tensors += tensors
        self.cut += cut

    def fail(self, tensor: str, where: str, *, cancelled: bool) -> None:
        """Record a tensor with wrong elements. `cancelled`: whether they are the rounding of products that cancel."""
        self.wrong[tensor] = where
        self.cancelled &= cancelled

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
        self.cancelled &= part.cancelled
        for tensor, bound in part.bounds.items():
            self.bounds[tensor] = self.bounds.get(tensor, Bound()).or_larger(bound)
        self.measures.add(part.measures)
        for adapter, share in part.in_bf16.items():
            self.in_bf16[adapter] = self.in_bf16[adapter].plus(share) if adapter in self.in_bf16 else share

    def measured(self, adapter: int) -> float | None:
        """Return the share of an adapter's change that is in the file; None if none of its rows was recomputed."""
        every = [
            measured.adapters[adapter] for measured in self.measures.tensors.values() if adapter in measured.adapters
        ]
        return total(Measure(all=share) for share in every).all.retained
