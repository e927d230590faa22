"""Samples rows of blocks while they are folded: base, change and stored numbers, of which sums are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...measure import Checked, Measure, Measured, Share
from ..blocks import Block
from ..cancelling import Cancelling
from ..device.placement import brought
from ..fold import new_weights
from ..placement import HOST, TORCH_DTYPES, DeviceStream, host
from .placement import as_stored, strided, take, workspace
from .run_sample import RunSample, added, runs, same, several
from .sampling import Sampling

if TYPE_CHECKING:
    from ..fold import SampleOf, StackedPatch

SUMS: Final = 6
"""Of every block: W², ΔW², applied · ΔW, applied², the numbers that differ, and the largest |ΔW|."""

HELD: Final = 2**21
"""The numbers of rows that wait for their sums, until these are made."""


Nearest: TypeAlias = Callable[[Tensor], Tensor]
"""Function that returns the numbers [n, k · cols] that the output can hold for some."""


@dataclass(frozen=True)
class Stored:
    """The numbers that the output holds in the sampled rows."""

    nearest: Nearest
    same: bool = False  # whether it can hold the numbers of the base as they are


class AdapterChange(NamedTuple):
    """The change of one adapter in the sampled rows."""

    adapter: int
    change: Tensor  # [n, k · cols]
    combined: bool  # whether it becomes one change with others, in which its part is unknown


@dataclass
class RowSample:
    """Rows of blocks of one kind, before and after the blocks are folded."""

    blocks: Sequence[Block]
    rows: Sequence[range]  # of each block
    stands_for: Sequence[int]  # how many rows of its weight those of each block stand for
    work: Tensor  # [3, n, width]: base, merged (then ΔW), stored (then what is applied of it); beyond the rows zeros
    parts: list[AdapterChange] = field(default_factory=list)
    found: Tensor | None = None  # [n, width]: what is stored, where it is not the nearest of the merged numbers
    before: Tensor | None = None  # [n, width]: the base as the output would hold it, where that is known
    step: int = 1  # one row in so many is added up; the others are here because they are encoded together
    units: Sequence[float] = ()  # of the numbers of each block, where they are not 1

    @staticmethod
    def of(blocks: Sequence[Block], base: Tensor, sampling: Sampling) -> RowSample | None:
        """Return the sample of base values [n, rows, cols], which are not folded yet; None if none is wanted."""
        if not any(stands_for := sampling.stands_for(blocks)):
            return None
        rows, (n, _, cols) = sampling.rows(blocks), base.shape
        width = len(rows) * cols
        if blocks[0].target.packed is None:  # of few widths, so that the sums of many blocks are made at once
            width = 1 << (width - 1).bit_length()
        sample = RowSample(
            blocks,
            [rows] * n,
            stands_for,
            workspace(base, (3, n, width)),
            step=sampling.step(blocks, max(stands_for)),
        )
        take(strided(base, rows), sample.work.select(0, 0))
        return sample

    @property
    def on_device(self) -> bool:
        """Whether the rows are on a device, where they are added up at once."""
        return self.work.device.type != "cpu"

    @property
    def several(self) -> bool:
        """Whether several adapters change the blocks, so that the change of each is kept."""
        return several(self.blocks[0])

    @property
    def numbers(self) -> int:
        """How many numbers are kept."""
        return self.work.numel()

    def note_sum(self, adapter: int, merged: Tensor) -> None:
        """Record blocks [n, rows, cols] to which all changes up to those of an adapter are added."""
        before = self.work.select(0, 1).clone() if self.parts else self.work.select(0, 0)
        take(strided(merged, self.rows[0]), self.work.select(0, 1))
        self.parts.append(AdapterChange(adapter, self.work.select(0, 1) - before, combined=False))

    def note_change(self, adapter: int, change: SampleOf, strengths: Sequence[float]) -> None:
        """Record a change that becomes one change with others."""
        own = torch.zeros_like(self.work.select(0, 0))
        take(change(self.rows[0]), own)
        for part, strength in zip(own.unbind(), strengths, strict=True):
            part.mul_(strength)
        self.parts.append(AdapterChange(adapter, own, combined=True))

    def note_merged(self, merged: Tensor) -> None:
        """Record the merged blocks [n, rows, cols]."""
        take(strided(merged, self.rows[0]), self.work.select(0, 1))

    def note_stored(self, stored: Tensor) -> None:
        """Record what is stored [n, rows, cols], where numbers are rounded stochastically."""
        self.found = torch.zeros_like(self.work.select(0, 0))
        take(strided(stored, self.rows[0]), self.found)

    def on_host(self) -> RowSample:
        """Return the sample with its rows on the host."""
        parts = [part._replace(change=host(part.change)) for part in self.parts]
        return replace(self, work=host(self.work), parts=parts)

    def only(self, numbers: Sequence[int]) -> RowSample:
        """Return the sample of some of the blocks, by their numbers."""
        if len(numbers) == len(self.blocks):
            return self
        return RowSample(
            [self.blocks[n] for n in numbers], [self.rows[n] for n in numbers], [self.stands_for[n] for n in numbers],
            self.work[:, numbers], [part._replace(change=part.change[numbers]) for part in self.parts], step=self.step,
            units=[self.units[n] for n in numbers] if self.units else (),
        )  # fmt: skip

    def thinned(self) -> RowSample:
        """Return the sample without the rows that are not added up, once nothing is to be encoded any more."""
        if self.step == 1:
            return self

        def some(numbers: Tensor | None) -> Tensor | None:
            if numbers is None:
                return None
            lead = numbers.shape[:-1]
            return numbers.view(*lead, -1, self.blocks[0].cols)[..., :: self.step, :].reshape(*lead, -1)

        work, found, before = map(some, (self.work, self.found, self.before))
        assert work is not None, "it was given"
        return replace(self, rows=[r[:: self.step] for r in self.rows], work=work, found=found, before=before, step=1)

    def sums(self, stored: Stored | None) -> Tensor:
        """Return flat what `read` reads: `SUMS` of every block, and ΔW² and applied · ΔW of each part.

        `stored`: None where what is stored is not measured. The merged numbers are overwritten.
        """
        base, change, applied = self.work.unbind()
        found = self.found
        if found is None:
            found = change if stored is None else stored.nearest(change)
        more = []
        for part in self.parts:
            own = left = part.change
            if stored is not None and not part.combined:
                left = found - stored.nearest(change - own)
            more += [(own * own).sum(1), (left * own).sum(1)]
        before = self.before
        if before is None:
            before = base if stored is None or stored.same else stored.nearest(base)
        torch.sub(found, before, out=applied)
        change -= base
        return self._added(more)

    def sound(self) -> list[float]:
        """Return the sums without the numbers that are NaN, infinite, or too large for what is stored."""
        found = self.on_host()
        found.work.masked_fill_(~torch.isfinite(found.work).all(0), 0.0)
        more = [p.change.masked_fill(~torch.isfinite(p.change), 0.0).square().sum(1) for p in found.parts]
        sums: list[float] = found._added([x for own in more for x in (own, torch.full_like(own, torch.nan))]).tolist()
        return sums

    def _added(self, more: Sequence[Tensor]) -> Tensor:
        base, change, applied = self.work.unbind()
        dot, differ = torch.linalg.vecdot, torch.ne(applied, 0, out=torch.empty_like(applied))
        sums = [dot(base, base), dot(change, change), dot(applied, change), dot(applied, applied), differ.sum(1)]
        return torch.cat([*sums, change.abs().amax(1), *more])

    def measured(self, sums: Tensor, *, known: bool) -> tuple[Measured, ...]:
        """Return the measure of each block. `known`: whether what is stored was measured."""
        found = sums.tolist()
        found, count = found if all(map(isfinite, found)) else self.sound(), len(self.blocks)
        return tuple(self._measure(n, found[n::count], known=known) for n in range(count))

    def _measure(self, n: int, own: Sequence[float], *, known: bool) -> Measured:
        if self.units:
            unit, changed, largest = self.units[n], own[4], own[5]
            own = [unit * unit * x for x in own]
            own[4:SUMS] = changed, unit * largest
        weight, change, left, square, changed, largest = own[:SUMS]
        block, rows, stands_for = self.blocks[n], self.rows[n], self.stands_for[n]
        elements = len(rows) * block.cols if stands_for else 0
        scale = stands_for / len(rows)
        whole = Share(scale * change, scale * change, scale * left if known else None)
        shares = {} if self.several else {block.slices[0].use.patch.adapter: whole}
        for number, part in enumerate(self.parts):
            size, kept = (scale * x for x in own[SUMS + 2 * number : SUMS + 2 * number + 2])
            separate = known and not part.combined and isfinite(kept)
            shares[part.adapter] = Share(size, size if separate else 0.0, kept if separate else None)
        sums = Measure(
            stands_for * block.cols, elements, scale * changed if known else 0.0, 0,
            scale * weight,
            scale * max(square - 2 * left + change, 0.0) if known else 0.0, largest, whole, shares,
        )  # fmt: skip
        numbers = range(block.first + rows.start, block.first + rows.stop, rows.step)
        return Measured(block.target.name, sums, Checked(numbers, weight, change, round(changed) if known else None))


Read: TypeAlias = Callable[[], tuple[Measured, ...]]
"""Function that returns the measures of some blocks, once their lane is settled."""


def sums_of(sample: RowSample) -> tuple[RowSample, Tensor]:
    """Return the sample and its sums, for blocks whose output is plain numbers, or codes that are decoded already."""
    target = sample.blocks[0].target
    if target.packed is not None:
        return sample, sample.sums(None)
    return sample, sample.sums(Stored(partial(as_stored, dtype=TORCH_DTYPES[target.dtype]), same(target)))


def bring_sums(samples: Sequence[RowSample], lane: DeviceStream) -> Read:
    """Bring all sums to the host with one transfer."""
    if not samples:
        return tuple
    found = [sums_of(one) for one in _joined(samples)]
    sizes = [len(sums) for _, sums in found]
    every = brought(torch.cat([sums for _, sums in found]), lane, "sums")

    def read() -> tuple[Measured, ...]:
        parts = zip(found, every.split_with_sizes(sizes), strict=True)
        return tuple(one for (sample, _), sums in parts for one in sample.measured(sums, known=True))

    return read


def _joined(every: Iterable[RowSample]) -> Iterator[RowSample]:
    """Yield the samples, those of one width that are summed in one way joined into one."""
    kinds: dict[tuple[Any, ...], list[RowSample]] = {}
    for w in every:
        target = w.blocks[0].target
        apart = id(w) if w.parts else None
        known = w.found is None, w.before is None, bool(w.units)
        kind = w.work.dtype, w.work.shape[2], target.dtype, same(target), *known, apart
        kinds.setdefault(kind, []).append(w)
    for alike in kinds.values():
        first = alike[0]
        yield (
            first
            if len(alike) == 1
            else RowSample(
                [b for w in alike for b in w.blocks],
                [r for w in alike for r in w.rows],
                [s for w in alike for s in w.stands_for],
                torch.cat([w.work for w in alike], 1),
                found=None if first.found is None else torch.cat([w.found for w in alike if w.found is not None]),
                before=None if first.before is None else torch.cat([w.before for w in alike if w.before is not None]),
                units=[unit for w in alike for unit in w.units],
            )
        )


class SharedSums:
    """Samples of several threads on the host, whose sums are made in one call for many blocks."""

    def __init__(self, threads: int) -> None:
        self._left, self._samples, self._numbers, self._lock = threads, list[RowSample | RunSample](), 0, Lock()

    def measured(self, samples: Sequence[RowSample | RunSample]) -> tuple[Measured, ...]:
        """Keep the samples of a thread at its end; return the measures of all that are kept, once they are many or this
        is the last thread."""
        with self._lock:
            self._left -= 1
            self._samples += samples
            self._numbers += sum(one.numbers for one in samples)
            if self._left and self._numbers < HELD:
                return ()
            every, self._samples, self._numbers = self._samples, [], 0
        with torch.no_grad():
            lane, by_runs = DeviceStream(HOST), [one for one in every if isinstance(one, RunSample)]
            found = bring_sums([one for one in every if isinstance(one, RowSample)], lane)()
            return found + tuple(chain.from_iterable(added(by_runs, lane)())) if by_runs else found


class FoldedWeights(NamedTuple):
    """Merged weights [n, rows, cols], a sample of them, if any, and whether the terms of each cancel, where that is
    looked at."""

    merged: Tensor
    sample: RowSample | RunSample | None
    cancelled: Tensor | None


def fold_and_sample(
    blocks: Sequence[Block], base: Tensor, stacks: Sequence[StackedPatch], sampling: Sampling | None
) -> FoldedWeights:
    """Return merged weights as `new_weights` does, a sample of them, and whether their terms cancel."""
    if not (base.numel() and stacks):
        return FoldedWeights(new_weights(blocks, base, stacks), None, None)
    before, sample, numbers, period = None, None, list[int](), 0
    if sampling is not None and base.device.type == "cpu" and sampling.by_runs(blocks):
        numbers = [rows * b.cols for rows, b in zip(sampling.stands_for(blocks), blocks, strict=True)]
        period = sampling.period(blocks)
        before = runs(base.view(-1), period) if any(numbers) else None
    elif sampling is not None:
        sample = RowSample.of(blocks, base, sampling)
    alone = not several(blocks[0])
    single = base.dtype == torch.float32 and blocks[0].target.combining is None
    # On a device, a change that cancels with the base alone is not looked for: it would take two more calls each.
    sums = Cancelling(base, sample) if single and not (alone and base.device.type != "cpu") else None
    merged = new_weights(blocks, base, stacks, None if alone else sample if sums is None else sums)
    if sums is not None:
        sums.note(merged)
    if sample is not None:
        sample.note_merged(merged)
    cancelled = None if sums is None else sums.found
    if before is None:
        return FoldedWeights(merged, sample, cancelled)
    after = runs(merged.reshape(-1), period)
    return FoldedWeights(merged, RunSample(blocks, numbers, before, after, period), cancelled)
