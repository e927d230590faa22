"""Measures the change of weights on a sample of their values, for the report of a merge.

A sample observes a fold: it copies some values before and after, and what each of several adapters changes. Later
their sums are made, many blocks at once: W², ΔW², what is stored of ΔW. There are two kinds. A `RunSample` has short
runs of values, evenly spread; it takes two copies for a block, or on a device for a whole window. A `RowSample` has
whole rows, where runs are not enough: of codes that are encoded together and read back, of several adapters, and of the
weights that the proof computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import isfinite, prod
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..change_statistics import Checked, Measure, Measurement, Share
from ..planning.plan import OutputTensor
from .requantisation import Codes, NewParts, read_back
from .row_blocks import Block
from .tensor_moves import HOST, TORCH_DTYPES, DeviceStream, as_stored, brought, host, strided, take, workspace
from .tensors import Fetch

if TYPE_CHECKING:
    from .fold import SampleOf

WHOLE_BELOW: Final = 2**16
"""All values of a weight of so many are looked at; of a larger one at least so many if it is replaced."""

RUN: Final = 128
"""The values of a run, which are consecutive."""

PERIOD: Final = 256 * RUN
"""Of so many values the first ones are a run."""

LEAST_BLOCK: Final = 2 * PERIOD
"""A block of so many values contains a whole run, wherever it begins."""

RUN_VALUES: Final = 2**22
"""How many sampled values one lane keeps before it adds them up, if its memory has `SUM_BYTES` bytes for each."""

SUM_BYTES: Final = 256
"""Bytes; adding a number up takes less than 40."""

PendingRunSums: TypeAlias = Callable[[], list[tuple[Measurement, ...]]]
"""Function that returns the measures of samples, once the lane is settled."""

COARSE_FACTOR: Final = 4
"""The factor by which more values than usual are sampled if whole tiles of rows are encoded together."""

ROW_PERIOD: Final = 4
"""Of so many blocks that the same patches change, one is sampled: each costs a dozen calls, however few rows it has."""

SUMS: Final = 6
"""Of every block: W², ΔW², error · ΔW, error², the values that differ, and the largest |ΔW|."""

PART_SUMS: Final = 3
"""Of the change of each adapter: ΔW², error · ΔW, and error² where it changes values."""

WAITING_VALUES: Final = 2**19
"""The numbers of rows that wait for their sums, until these are made."""

PendingRowSums: TypeAlias = Callable[[], tuple[Measurement, ...]]
"""Function that returns the measures of some blocks, once their lane is settled."""


def same(target: OutputTensor) -> bool:
    """Return whether the output can hold the values of the base as they are."""
    return target.weight.packing.encoding is target.packing.encoding


def suits(block: Block) -> bool:
    """Return whether runs are enough for a block: it holds some, of plain values, and one adapter changes it."""
    return block.elements >= LEAST_BLOCK and block.target.packed is None and not block.several


def runs(work: Tensor, period: int) -> Tensor:
    """Return a copy of the runs [n, RUN] of flat values, one in so many."""
    whole = len(work) // period * period
    return work.narrow(0, 0, whole).view(-1, period).narrow(1, 0, RUN).clone()


@dataclass
class RunSample:
    """Runs of consecutive blocks, before and after the blocks are folded. `note_merged` records the
    runs after it."""

    blocks: Sequence[Block]
    represents: Sequence[int]  # values of its weight that those of each block represent; 0: no sample
    period: int  # of so many values the first ones are a run
    before: Tensor  # [n, RUN]
    after: Tensor

    @staticmethod
    def of(blocks: Sequence[Block], represents: Sequence[int], base: Tensor, period: int) -> RunSample:
        """Return the sample of consecutive blocks with these base values."""
        before = runs(base.view(-1), period)
        return RunSample(blocks, represents, period, before, before)

    def note_sum(self, adapter: int, merged: Tensor) -> None:
        """Record nothing: one adapter changes these blocks."""

    def note_change(self, adapter: int, change: SampleOf, strengths: Sequence[float]) -> None:
        """Record nothing: one adapter changes these blocks."""

    def note_merged(self, merged: Tensor) -> None:
        """Record the merged blocks."""
        self.after = runs(merged.reshape(-1), self.period)

    @property
    def elements(self) -> int:
        """How many values are kept."""
        return 2 * self.before.numel()

    @property
    def on_device(self) -> bool:
        """Whether they are on a device."""
        return self.before.device.type != "cpu"


@dataclass
class RunSums:
    """Runs that the lanes of devices have sampled and not added up yet, and the measures of the others."""

    most: int  # values that wait on a lane for their sums, if no part has more
    _measures: list[tuple[int, tuple[Measurement, ...]]] = field(default_factory=list)  # with the number of a plan
    _waiting: dict[DeviceStream, list[tuple[int, RunSample]]] = field(default_factory=dict)

    def add(self, plan: int, samples: Sequence[RunSample], lane: DeviceStream) -> Callable[[], None]:
        """Keep the samples of a lane; add them up once they are many. Call the result when the lane is settled."""
        waiting = self._waiting.setdefault(lane, [])
        waiting += [(plan, sample) for sample in samples]
        if sum(sample.elements for _, sample in waiting) < self.most:
            return lambda: None
        self._waiting[lane] = []
        return self._added(waiting, lane)

    def rest(self) -> Iterator[tuple[DeviceStream, Callable[[DeviceStream], Callable[[], None]]]]:
        """Yield each lane with samples left, and a function that adds them up as `add` does; nothing is under way."""
        waiting, self._waiting = self._waiting, {}
        return ((lane, partial(self._added, some)) for lane, some in waiting.items() if some)

    def of(self, plan: int) -> Iterator[Measurement]:
        """Yield the measures of a plan's tensors."""
        return (measure for number, some in self._measures if number == plan for measure in some)

    def _added(self, waiting: Sequence[tuple[int, RunSample]], lane: DeviceStream) -> Callable[[], None]:
        read = added([sample for _, sample in waiting], lane)
        return lambda: self._measures.extend(zip((plan for plan, _ in waiting), read(), strict=True))


def added(every: Sequence[RunSample], lane: DeviceStream) -> PendingRunSums:
    """Start to add up the values of each run; return a function for the measures of the blocks of each."""
    kinds: dict[tuple[torch.dtype, str, bool], list[int]] = {}
    for number, sample in enumerate(every):
        alike = all(same(b.target) for b in sample.blocks)
        kinds.setdefault((sample.before.dtype, sample.blocks[0].target.dtype, alike), []).append(number)
    sums = [
        _sums([every[number] for number in some], TORCH_DTYPES[dtype], alike=alike)
        for (_, dtype, alike), some in kinds.items()
    ]
    sums_on_host = brought(torch.cat(sums, 1), lane, "runs")
    ordered = [number for some in kinds.values() for number in some]

    def read() -> list[tuple[Measurement, ...]]:
        parts = sums_on_host.split_with_sizes([len(every[number].before) for number in ordered], 1)
        sums_of_sample, finite = dict(zip(ordered, parts, strict=True)), bool(sums_on_host.isfinite().all())
        return [tuple(_measured(sample, sums_of_sample[number], finite=finite)) for number, sample in enumerate(every)]

    return read


def _sums(some: Sequence[RunSample], dtype: torch.dtype, *, alike: bool) -> Tensor:
    """Return of each run [6, n], see `SUMS`: sums over its values.

    `alike`: whether an output of this dtype holds the base's values as they are.
    """
    before, after = (torch.cat([getattr(sample, name) for sample in some]) for name in ("before", "after"))
    change, stored = after - before, as_stored(after, dtype)
    differ = torch.ne(stored, before if alike else as_stored(before, dtype), out=torch.empty_like(stored))
    error = _error(stored, after, change)
    pairs = (before, before), (change, change), (error, change), (error, error)
    return torch.stack([*((x * y).sum(1) for x, y in pairs), differ.sum(1), change.abs().amax(1)])


def _error(stored: Tensor, merged: Tensor, change: Tensor) -> Tensor:
    """Return by how much stored values are off; 0 if a change leaves them as they are."""
    return (stored - merged).masked_fill_(change == 0, 0.0)


def _measured(sample: RunSample, sums: Tensor, *, finite: bool) -> Iterator[Measurement]:
    """Yield the measures of blocks from the sums of their runs; runs with values that are not finite are left out."""
    end = 0
    for block, represents in zip(sample.blocks, sample.represents, strict=True):
        low, end = end, end + block.elements
        if not represents:
            continue
        of_block = sums[:, -(-low // sample.period) : (end - RUN) // sample.period + 1]
        if not finite:
            of_block = of_block[:, of_block.isfinite().all(0)]
        if elements := RUN * of_block.shape[1]:
            weight, change, more, error, changed, _ = of_block.sum(1, dtype=torch.float64).tolist()
            scale = represents / elements
            whole = Share(change, change, change + more, error).scaled(scale)
            yield Measurement(block.target.name, Measure(
                represents, elements, scale * changed, 0, scale * weight, float(of_block[5].max()), whole,
                {block.slices[0].use.patch.adapter: whole},
            ))  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """The density of a sample: about one number of a block in `every`, and at least `least`."""

    every: int = 256
    least: int = 2**11
    runs: bool = True  # whether runs of values may be sampled in place of rows
    checked: frozenset[str] = frozenset()  # weights of which rows are sampled: the proof computes these rows again

    def rows(self, blocks: Sequence[Block]) -> range:
        """Return the sampled rows of each of some blocks of one kind, spread evenly; rows of codes are consecutive,
        because rows that share a scale are encoded together."""
        block = blocks[0]
        rows, cols, group = block.last - block.first, max(block.cols, 1), block.target.row_group
        count = min(rows, max(-(-self.least // cols), self._others(blocks) * self._enough(block) // cols))
        if block.target.packed is None:
            return range(0, rows // count * count, rows // count)
        return range(min(rows, -(-count // group) * group))

    def step(self, blocks: Sequence[Block], represents: int) -> int:
        """Return n: one in n of `rows` is enough, if all of them represent so many rows of the weight."""
        block = blocks[0]
        if block.target.packed is None:
            return 1
        enough = max(represents // self.every, COARSE_FACTOR * self.least // max(block.cols, 1), 1)
        rows = len(self.rows(blocks))
        return max((step for step in (1, 2, 4, 8, 16) if rows % step == 0 and rows // step >= enough), default=1)

    def by_runs(self, blocks: Sequence[Block]) -> bool:
        """Return whether these blocks are sampled by runs."""
        return self.runs and suits(blocks[0]) and self.checked.isdisjoint(b.target.name for b in blocks)

    def period(self, blocks: Sequence[Block]) -> int:
        """Return n: one run is sampled in every n values of each of some blocks."""
        return max(RUN, PERIOD // 256 * self.every // self._others(blocks))

    def represents(self, blocks: Sequence[Block]) -> list[int]:
        """Return how many rows of its weight the sampled rows of each block represent; 0 for a block without a sample.

        Rows that are encoded together may be most of a block: then only some of such blocks are sampled, unless
        several are folded in one call.
        """
        block = blocks[0]
        group = block.target.row_group
        if len(blocks) > 1 or block.target.packed is None or group * block.cols <= COARSE_FACTOR * self._enough(block):
            return [self._until(b) for b in blocks]
        period = group * max(self.every // COARSE_FACTOR, 1)
        at = -(-block.first // period) * period
        return [min(period, block.target.matrix[0] - at) if at < block.last else 0]

    @property
    def _period(self) -> int:
        return min(ROW_PERIOD, self.every)

    def _others(self, blocks: Sequence[Block]) -> int:
        """Return how many blocks of its run one of some sampled blocks represents, at most."""
        return min(self._period, max(-(-(b.run.high - b.run.low) // b.run.step) for b in blocks))

    def _until(self, block: Block) -> int:
        """Return the rows from a sampled block to the next sampled block of its run; 0 for a block without a sample."""
        period = self._period * block.run.step
        return 0 if (block.first - block.run.low) % period else min(period, block.run.high - block.first)

    def _enough(self, block: Block) -> int:
        """Return how many values of a block are sampled, if all blocks are; all of a small weight."""
        whole = prod(block.target.matrix) <= WHOLE_BELOW
        return block.elements if whole else max(block.elements // self.every, self.least)


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
    represents: Sequence[int]  # how many rows of its weight those of each block represent
    work: Tensor  # [3, n, width]: base, merged (then ΔW), the error of what is stored; beyond the rows zeros
    parts: list[AdapterChange] = field(default_factory=list)
    stored: Tensor | None = None  # [n, width]: what is stored, where it is not the nearest of the merged values
    before: Tensor | None = None  # [n, width]: the base as the output would hold it, where that is known
    differ: Tensor | None = None  # [n, width]: 1 for values that the output would not hold without adapters
    step: int = 1  # one row in so many is added up; the others are here because they are encoded together
    units: Sequence[float] = ()  # of the values of each block, where they are not 1

    @staticmethod
    def of(blocks: Sequence[Block], base: Tensor, sampling: Sampling) -> RowSample | None:
        """Return the sample of base values [n, rows, cols], before the fold; None if these blocks are not sampled."""
        if not any(represents := sampling.represents(blocks)):
            return None
        # Memory for base, merged and stored values; the base values are taken now.
        rows, (n, _, cols) = sampling.rows(blocks), base.shape
        width = len(rows) * cols
        if blocks[0].target.packed is None:  # of few widths, so that the sums of many blocks are made at once
            width = 1 << (width - 1).bit_length()
        work, step = workspace(base, (3, n, width)), sampling.step(blocks, max(represents))
        sample = RowSample(blocks, [rows] * n, represents, work, step=step)
        take(strided(base, rows), sample.work.select(0, 0))
        return sample

    @property
    def on_device(self) -> bool:
        """Whether the rows are on a device, where they are added up at once."""
        return self.work.device.type != "cpu"

    @property
    def several(self) -> bool:
        """Whether several adapters change the blocks, so that the change of each is kept."""
        return self.blocks[0].several

    @property
    def elements(self) -> int:
        """How many values are kept."""
        return self.work.numel()

    def note_sum(self, adapter: int, merged: Tensor) -> None:
        """Record blocks [n, rows, cols] to which all changes up to those of an adapter are added."""
        before = self.work.select(0, 1).clone() if self.parts else self.work.select(0, 0)
        self.note_merged(merged)
        self.parts.append(AdapterChange(adapter, self.work.select(0, 1) - before, combined=False))

    def note_change(self, adapter: int, change: SampleOf, strengths: Sequence[float]) -> None:
        """Record a change that becomes one change with others."""
        of_adapter = torch.zeros_like(self.work.select(0, 0))
        take(change(self.rows[0]), of_adapter)
        for part, strength in zip(of_adapter.unbind(), strengths, strict=True):
            part.mul_(strength)
        self.parts.append(AdapterChange(adapter, of_adapter, combined=True))

    def note_merged(self, merged: Tensor) -> None:
        """Record the merged blocks [n, rows, cols]."""
        take(strided(merged, self.rows[0]), self.work.select(0, 1))

    def note_stored(self, stored: Tensor) -> None:
        """Record what is stored [n, rows, cols], where values are rounded stochastically."""
        self.stored = torch.zeros_like(self.work.select(0, 0))
        take(strided(stored, self.rows[0]), self.stored)

    def on_host(self) -> RowSample:
        """Return the sample with its rows on the host."""
        parts = [part._replace(change=host(part.change)) for part in self.parts]
        differ = None if self.differ is None else host(self.differ)
        return replace(self, work=host(self.work), parts=parts, differ=differ)

    def only(self, numbers: Sequence[int]) -> RowSample:
        """Return the sample of some of the blocks, by their numbers."""
        if len(numbers) == len(self.blocks):
            return self
        return RowSample(
            [self.blocks[n] for n in numbers], [self.rows[n] for n in numbers], [self.represents[n] for n in numbers],
            self.work[:, numbers], [part._replace(change=part.change[numbers]) for part in self.parts], step=self.step,
            units=[self.units[n] for n in numbers] if self.units else (),
        )  # fmt: skip

    def thinned(self) -> RowSample:
        """Return the sample without the rows that are not added up, once nothing is to be encoded any more."""
        if self.step == 1:
            return self

        def some(values: Tensor) -> Tensor:
            lead = values.shape[:-1]
            return values.view(*lead, -1, self.blocks[0].cols)[..., :: self.step, :].reshape(*lead, -1)

        stored, before = (None if values is None else some(values) for values in (self.stored, self.before))
        parts = [part._replace(change=some(part.change)) for part in self.parts]
        return replace(self, rows=[r[:: self.step] for r in self.rows], work=some(self.work), parts=parts,
                       stored=stored, before=before, step=1)  # fmt: skip

    def sums(self) -> Tensor:
        """Return flat what `measured` reads: `SUMS` of every block, and `PART_SUMS` of each part.

        The merged values are overwritten.
        """
        # What is stored of the values, with and without the changes.
        base, merged, error = self.work.unbind()
        target = self.blocks[0].target
        stored, before = self.stored, base if same(target) else self.before
        if stored is None:
            stored = _nearest(merged, target)
        if before is None:
            before = _nearest(base, target)
        self.differ = torch.ne(stored, before, out=torch.empty_like(stored))
        # The change, and by how much the stored values are off where it changes them.
        torch.sub(stored, merged, out=error)
        change = merged.sub_(base)
        if not same(target):
            error.masked_fill_(change == 0, 0.0)
        return self._added([sums for part in self.parts for sums in _part_sums(part.change, error)])

    def sound(self) -> list[float]:
        """Return the sums without the values that are NaN, infinite, or too large for what is stored."""
        copy = self.on_host()
        assert copy.differ is not None, "the sums were made"
        broken = ~torch.isfinite(copy.work).all(0)
        copy.work.masked_fill_(broken, 0.0)
        copy.differ.masked_fill_(broken, 0.0)
        squares = [p.change.masked_fill(~torch.isfinite(p.change), 0.0).square().sum(1) for p in copy.parts]
        more = [of_adapter for size in squares for of_adapter in (size, *[torch.full_like(size, torch.nan)] * 2)]
        sums: list[float] = copy._added(more).tolist()
        return sums

    def _added(self, more: Sequence[Tensor]) -> Tensor:
        base, change, error = self.work.unbind()
        assert self.differ is not None, "it is known before the sums are made"
        dot, changed = torch.linalg.vecdot, self.differ.sum(1)
        sums = [dot(base, base), dot(change, change), dot(error, change), dot(error, error), changed]
        return torch.cat([*sums, change.abs().amax(1), *more])

    def measured(self, sums: Tensor, *, known: bool) -> tuple[Measurement, ...]:
        """Return the measure of each block. `known`: whether what is stored was measured."""
        values = sums.tolist()
        values, count = values if all(map(isfinite, values)) else self.sound(), len(self.blocks)
        return tuple(self._measure(n, values[n::count], known=known) for n in range(count))

    def _measure(self, n: int, values: Sequence[float], *, known: bool) -> Measurement:
        # Sums of values in units become those of the weight's own.
        if self.units:
            unit, changed, largest = self.units[n], values[4], values[5]
            values = [unit * unit * x for x in values]
            values[4:SUMS] = changed, unit * largest
        weight, change, more, error, changed, largest = values[:SUMS]
        # The sample represents more rows of the weight.
        block, rows, represents = self.blocks[n], self.rows[n], self.represents[n]
        elements = len(rows) * block.cols if represents else 0
        scale = represents / len(rows)
        whole = Share(change, change, change + more if known else None, error).scaled(scale)
        shares = {} if self.several else {block.slices[0].use.patch.adapter: whole}
        for number, part in enumerate(self.parts):
            size, of_error, off = values[SUMS + PART_SUMS * number :][:PART_SUMS]
            separate = known and not part.combined and isfinite(of_error)
            share = Share(size, size, size + of_error, off) if separate else Share(size, applied=None)
            shares[part.adapter] = share.scaled(scale)
        sums = Measure(
            represents * block.cols, elements, scale * changed if known else 0.0, 0, scale * weight, largest, whole,
            shares,
        )  # fmt: skip
        sampled = range(block.first + rows.start, block.first + rows.stop, rows.step)
        return Measurement(block.target.name, sums, Checked(sampled, weight, change, round(changed) if known else None))


def _nearest(values: Tensor, target: OutputTensor) -> Tensor:
    """Return what the output can hold for some values; the values themselves if codes hold them."""
    return as_stored(values, TORCH_DTYPES[target.dtype]) if target.packed is None else values


def _part_sums(change: Tensor, error: Tensor) -> Iterator[Tensor]:
    """Yield the `PART_SUMS` of the change of one adapter in each block."""
    yield from (torch.linalg.vecdot(values, change) for values in (change, error))
    yield error.masked_fill(change == 0, 0.0).square_().sum(1)


def bring_sums(samples: Sequence[RowSample], lane: DeviceStream) -> PendingRowSums:
    """Bring all sums to the host with one transfer."""
    if not samples:
        return tuple
    summed = [(sample, sample.sums()) for sample in _joined(samples)]
    sizes = [len(sums) for _, sums in summed]
    every = brought(torch.cat([sums for _, sums in summed]), lane, "sums")

    def read() -> tuple[Measurement, ...]:
        parts = zip(summed, every.split_with_sizes(sizes), strict=True)
        return tuple(measure for (sample, _), sums in parts for measure in sample.measured(sums, known=True))

    return read


def _joined(every: Iterable[RowSample]) -> Iterator[RowSample]:
    """Yield the samples, those of one width that are summed in one way joined into one."""
    kinds: dict[tuple[Any, ...], list[RowSample]] = {}
    for w in every:
        target = w.blocks[0].target
        apart = id(w) if w.parts else None
        known = w.stored is None, w.before is None, bool(w.units)
        kind = w.work.dtype, w.work.shape[2], target.dtype, same(target), *known, apart
        kinds.setdefault(kind, []).append(w)
    for alike in kinds.values():
        first = alike[0]
        yield first if len(alike) == 1 else RowSample(
            [b for w in alike for b in w.blocks], [r for w in alike for r in w.rows],
            [s for w in alike for s in w.represents], torch.cat([w.work for w in alike], 1),
            stored=None if first.stored is None else torch.cat([w.stored for w in alike if w.stored is not None]),
            before=None if first.before is None else torch.cat([w.before for w in alike if w.before is not None]),
            units=[unit for w in alike for unit in w.units],
        )  # fmt: skip


class SharedSums:
    """Samples of several threads on the host, whose sums are made in one call for many blocks."""

    def __init__(self, threads: int) -> None:
        self._left, self._samples, self._elements, self._lock = threads, list[RowSample | RunSample](), 0, Lock()

    def measured(self, samples: Sequence[RowSample | RunSample]) -> tuple[Measurement, ...]:
        """Keep the samples of a thread at its end; return the measures of all that are kept, once they are many or this
        is the last thread."""
        with self._lock:
            self._left -= 1
            self._samples += samples
            self._elements += sum(sample.elements for sample in samples)
            if self._left and self._elements < WAITING_VALUES:
                return ()
            every, self._samples, self._elements = self._samples, [], 0
        with torch.no_grad():
            lane, by_runs = DeviceStream(HOST), [sample for sample in every if isinstance(sample, RunSample)]
            measures = bring_sums([sample for sample in every if isinstance(sample, RowSample)], lane)()
            return measures + tuple(chain.from_iterable(added(by_runs, lane)())) if by_runs else measures


def sample_of(blocks: Sequence[Block], base: Tensor, sampling: Sampling) -> RowSample | RunSample | None:
    """Return the sample of blocks of one kind, with their base values [n, rows, cols], as an observer of their fold;
    None for blocks of which no values are sampled."""
    if not (base.numel() and blocks[0].slices):
        return None
    if base.device.type != "cpu" or not sampling.by_runs(blocks):  # a device has runs of whole windows
        return RowSample.of(blocks, base, sampling)
    elements = [rows * b.cols for rows, b in zip(sampling.represents(blocks), blocks, strict=True)]
    return RunSample.of(blocks, elements, base, sampling.period(blocks)) if any(elements) else None


def sample_width(sample: RowSample | None) -> int:
    """Return how many of the first values of each block are in its sample."""
    return sample.work.shape[2] if sample is not None else 0


def measure_codes(
    sample: RowSample, bases: Sequence[Tensor], encoded: Sequence[NewParts], fetch: Fetch
) -> tuple[Sequence[Measurement], Sequence[RowSample]]:
    """Return (measures of blocks, samples that are still to be added up); one of the two is empty.

    `sample`: the sample of the blocks, on the host; `bases`: their stored values, which new codes may overwrite
    afterwards; `encoded`: their new codes.
    """
    # Of padded weights, what is stored is not known.
    target = sample.blocks[0].target
    if target.weight.padded:
        return sample.measured(sample.sums(), known=False), ()
    base, merged, _ = sample.work.unbind()

    def nearest(n: int, some: Tensor) -> Tensor | None:
        """Return what the output would hold for some values of a block."""
        block, codes = sample.blocks[n], Codes(bases[n][:0], None)
        return read_back(block.target, block.first * block.cols, some, codes, fetch)

    # What is stored: the new codes, decoded.
    stored, before = _each(merged, lambda n, _: encoded[n].decoded), None if same(target) else _each(base, nearest)
    return (), (replace(sample, stored=stored, before=before).thinned(),)


def _each(values: Tensor, of: Callable[[int, Tensor], Tensor | None]) -> Tensor:
    """Return the values [n, width] that a function gives for each row; those of the row if it gives none."""
    result = torch.empty_like(values)
    for n, (old, new) in enumerate(zip(values.unbind(), result.unbind(), strict=True)):
        new_values = of(n, old)
        new.copy_(old if new_values is None else new_values.view(new.shape))
    return result
