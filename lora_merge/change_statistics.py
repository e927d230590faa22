"""Measures the effect of changes on weights: sums over values, from which norms and shares follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from math import isfinite, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from zlib import crc32

from .grouping import by_key
from .paths import input_name
from .survival import ENOUGH, lost_in_rounding, survived
from .text import Note

if TYPE_CHECKING:
    from .job import Job

MOST_LISTED: Final = 10_000  # tensors whose numbers a report lists one by one
RETAINED: Final = 0.9  # weights that keep a smaller share of their change are counted

ALL_ADAPTERS: Final = -1  # all adapters, next to the numbers of each
CHECKED: Final = 16  # tensors of which the proof checks the sample

Norms: TypeAlias = dict[str, Mapping[int, float]]
"""Tensor → adapter, or `ALL_ADAPTERS` → ‖s ΔW‖² in the whole tensor, where its factors are known."""

NO_NORMS: Final[Mapping[int, Any]] = MappingProxyType({})


class Groups(NamedTuple):
    """The groups of the tensors of a model."""

    of: Callable[[str], Iterable[tuple[str, str]]]
    """Tensor → (kind of a group, its name), such as ("blocks", "unet IN04")."""
    place: Callable[[str], tuple[int, int]] = lambda _: (0, 0)
    """Name of a group → its place in the model's order."""

    def block(self, tensor: str) -> str:
        """Return the block of a tensor, or its part of the model if it is in no block."""
        return [name for _, name in self.of(tensor)][-1]


class Share(NamedTuple):
    """The change of one adapter, or of all, and the part of it that is in the output: sums over values.

    What is applied of it is s ΔW plus the error of the output, which is what is stored minus the exact sum.
    """

    change: float = 0.0  # Σ (s ΔW)²; exact where it follows from the factors of ΔW
    intended: float = 0.0  # the same sum over the values that were looked at
    applied: float | None = 0.0  # Σ applied · s ΔW over them; None where what is stored was not looked at
    error: float = 0.0  # Σ error² over those of them that change

    def plus(self, other: Share) -> Share:
        """Return the sums over both."""
        known = None if self.applied is None or other.applied is None else self.applied + other.applied
        return Share(self.change + other.change, self.intended + other.intended, known, self.error + other.error)

    def scaled(self, scale: float) -> Share:
        """Return sums over so many times as many values."""
        known = self.applied and scale * self.applied
        return Share(scale * self.change, scale * self.intended, known, scale * self.error)

    @property
    def retained(self) -> float | None:
        """⟨applied, intended⟩ / ‖intended‖²; None where nothing is intended, or it is not known."""
        return self.applied / self.intended if self.intended and self.applied is not None else None

    @property
    def noise(self) -> float | None:
        """‖applied − intended‖ / ‖intended‖; None where that is not known."""
        return None if self.retained is None else sqrt(max(self.error / self.intended, 0.0))

    @property
    def survives(self) -> float | None:
        """The share that survives; None where it is not known."""
        retained, noise = self.retained, self.noise
        return None if retained is None or noise is None else survived(retained, noise * noise)

    @property
    def fails(self) -> bool:
        """Whether what survives is not enough."""
        return self.survives is not None and self.survives < ENOUGH

    def lost(self, adapter: str, dtypes: str, fix: str) -> Note:
        """Return the warning about what is lost of the change of an adapter."""
        return lost_in_rounding(self.survives or 0.0, self.noise or 0.0, adapter, dtypes, fix)


NO_SHARE: Final = Share()


@dataclass(frozen=True)
class Measure:
    """Sums over the values of merged weights. Where only some of them were looked at, the sums are scaled up."""

    of: float = 0.0  # values that the sums represent
    elements: int = 0  # of them, the values that were read
    changed: float = 0.0  # values that differ from what the output would hold without adapters
    cut: int = 0  # those too large for the output's dtype
    weight: float = 0.0  # Σ W²
    largest: float = 0.0  # the largest |ΔW| of the values that were read
    all: Share = NO_SHARE
    adapters: Mapping[int, Share] = field(default_factory=lambda: NO_NORMS)

    def __add__(self, other: Measure) -> Measure:
        adapters = dict(self.adapters)
        for number, share in other.adapters.items():
            adapters[number] = adapters[number].plus(share) if number in adapters else share
        return Measure(
            self.of + other.of, self.elements + other.elements, self.changed + other.changed, self.cut + other.cut,
            self.weight + other.weight, max(self.largest, other.largest), self.all.plus(other.all), adapters,
        )  # fmt: skip

    def with_exact(self, norms: Mapping[int, float], cut: int) -> Measure:
        """Return the same with the exact norms that are known, and the count of values that were cut."""
        if not norms and not cut:
            return self
        adapters = {a: s._replace(change=norms.get(a, s.change)) for a, s in self.adapters.items()}
        whole = self.all._replace(change=norms.get(ALL_ADAPTERS, self.all.change))
        return replace(self, cut=self.cut + cut, all=whole, adapters=adapters)

    def scaled(self, count: int) -> Measure:
        """Return sums that represent so many values."""
        scale = count / max(self.of, 1.0)
        if scale == 1:
            return self
        shares = {number: share.scaled(scale) for number, share in self.adapters.items()}
        return replace(self, of=count, changed=scale * self.changed, weight=scale * self.weight,
                       all=self.all.scaled(scale), adapters=shares)  # fmt: skip

    def loses(self, least: float = RETAINED) -> bool:
        """Return whether less than a share of the change survives, by more than three standard errors."""
        share, noise = self.all.survives, self.all.noise
        if share is None or noise is None or not self.elements:
            return False
        return share + 3 * share * (1 - share) * (1 + noise) / sqrt(self.elements) < least

    def to_dict(self, count: int) -> dict[str, Any]:
        """Return the numbers as reports have them; `count` is the number of adapters."""
        shares = (self.adapters.get(number) for number in range(count))
        return {
            "of": round(self.of), "elements": self.elements, "changed": _short(self.changed / max(self.of, 1.0)),
            "saturated": self.cut, "weight": _root(self.weight), "change": _root(self.all.change),
            "ratio": _root(self.all.change / self.weight) if self.weight else None,
            "largest": _short(self.largest), **_survival(self.all),
            "adapters": [s and {"change": _root(s.change), **_survival(s)} for s in shares],
        }  # fmt: skip


def _survival(share: Share) -> dict[str, Any]:
    """Return what of a change is in the output, as reports have it."""
    return {"share": _short(share.survives), "retained": _short(share.retained), "noise": _short(share.noise)}


def _short(number: float | None) -> float | None:
    """Return a number with six digits; None for one that JSON has no word for."""
    return float(f"{number:.6g}") if number is not None and isfinite(number) else None


def _root(number: float) -> float | None:
    return _short(sqrt(max(number, 0.0)))


def checked(tensors: Iterable[str]) -> frozenset[str]:
    """Return the tensors of which the proof checks the sample: those with the smallest checksums."""
    return frozenset(nsmallest(CHECKED, tensors, key=lambda name: crc32(name.encode())))


class Checked(NamedTuple):
    """Sums over some rows of a merged tensor, so that another computation can check it."""

    rows: Sequence[int]
    weight: float  # Σ W²
    change: float  # Σ ΔW²
    changed: int | None  # values that differ from what the output would hold without adapters; None: not known


class Measurement(NamedTuple):
    """The measure of a part of a tensor."""

    tensor: str
    sums: Measure
    checked: Checked | None = None


class Measures:
    """The measures of merged tensors, added up as their parts become known."""

    def __init__(self) -> None:
        self.tensors: dict[str, Measure] = {}
        self.norms: Norms = {}
        self.samples: dict[str, Checked] = {}
        """Sums over some rows of a part of some tensors, those whose names have the smallest checksums."""

    def take(self, measurements: Iterable[Measurement]) -> None:
        """Add the measures of parts of tensors."""
        for tensor, sums, checked in measurements:
            self._put(tensor, sums)
            if checked is not None:
                self.samples.setdefault(tensor, checked)
            if len(self.samples) > CHECKED:
                del self.samples[max(self.samples, key=lambda name: crc32(name.encode()))]

    def know(self, norms: Norms) -> None:
        """Keep the norms that follow from factors."""
        self.norms.update(norms)

    def add(self, other: Measures) -> None:
        """Add the measures of other parts."""
        for tensor, sums in other.tensors.items():
            self._put(tensor, sums)

    def _put(self, tensor: str, sums: Measure) -> None:
        known = self.tensors.get(tensor)
        self.tensors[tensor] = sums if known is None else known + sums

    def forget(self, tensor: str) -> None:
        """Forget what is known of a tensor, as it is made again."""
        self.tensors.pop(tensor, None)
        self.samples.pop(tensor, None)

    def in_order(self, tensors: Iterable[str]) -> Measures:
        """Return the same with the tensors in an order that does not depend on when each became known."""
        self.tensors = {name: self.tensors[name] for name in tensors if name in self.tensors}
        return self

    def of_adapters(self, count: int) -> list[Measure]:
        """Return the measure of the change of each adapter. `count`: their number."""
        every = total(self.tensors.values())
        shares = (every.adapters.get(number, NO_SHARE) for number in range(count))
        return [Measure(elements=every.elements, cut=every.cut, all=share) for share in shares]

    def lost(self, job: Job, proven: Collection[int] = ()) -> Iterator[Note]:
        """Yield a warning for each adapter of whose change too little survives, if no proof reports it.

        `proven`: the numbers of the adapters that a proof reports.
        """
        for number, (ref, measure) in enumerate(zip(job.adapters, self.of_adapters(len(job.adapters)), strict=True)):
            if number not in proven and measure.loses(ENOUGH) and not measure.cut:
                yield measure.all.lost(input_name(ref.path), "the output's dtype", "write --dtype fp32")

    @property
    def below(self) -> dict[str, Measure]:
        """The tensors that surely lose more of their change than `RETAINED` allows."""
        return {name: measure for name, measure in self.tensors.items() if measure.loses()}

    def to_dict(self, adapters: int, groups: Groups, cut: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
        """Return the numbers of the merge: in all, by group and by tensor; {} where nothing was measured.

        `adapters`: their number. `cut`: tensor → values that were cut to the largest of their dtype.
        """
        tensors = {
            n: measure.with_exact(self.norms.get(n, NO_NORMS), cut.get(n, 0)) for n, measure in self.tensors.items()
        }
        if not tensors:
            return {}
        kinds: dict[str, dict[str, list[Measure]]] = {"components": {}, "blocks": {}}
        for name, measure in tensors.items():
            for kind, group in groups.of(name):
                kinds[kind].setdefault(group, []).append(measure)
        listed = tensors if len(tensors) <= MOST_LISTED else {}
        below = self.below
        return {
            "all": total(tensors.values()).to_dict(adapters), "below": len(below),
            "worst": min(below, key=lambda name: below[name].all.survives or 0.0, default=None),
            "unlisted": len(tensors) - len(listed),
            **{kind: {name: total(rows[name]).to_dict(adapters) for name in sorted(rows, key=groups.place)}
               for kind, rows in kinds.items()},
            "tensors": {
                name: {"block": groups.block(name), **measure.to_dict(adapters)} for name, measure in listed.items()
            },
        }  # fmt: skip


def total(measures: Iterable[Measure]) -> Measure:
    """Return the sum of several measures."""
    every = list(measures)
    if len(every) < 2:
        return every[0] if every else Measure()
    shares = by_key(pair for measure in every for pair in measure.adapters.items())
    return Measure(
        sum(m.of for m in every), sum(m.elements for m in every), sum(m.changed for m in every),
        sum(m.cut for m in every), sum(m.weight for m in every), max((m.largest for m in every), default=0.0),
        _sum([m.all for m in every]),
        {number: _sum(adapter_shares) for number, adapter_shares in shares.items()},
    )  # fmt: skip


def _sum(shares: Sequence[Share]) -> Share:
    applied = [s.applied for s in shares if s.applied is not None]
    known = sum(applied) if len(applied) == len(shares) else None
    return Share(sum(s.change for s in shares), sum(s.intended for s in shares), known, sum(s.error for s in shares))
