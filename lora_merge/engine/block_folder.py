"""Folds the changed blocks of one window: on a device, blocks of equal kind are stacked into one batched call.

`BlockFolder` groups blocks, folds each group (`fold.py`) on a lane (`lanes.py`) that has the memory for it
(`lanes.py`), and writes the merged values, or their codes (`requantisation.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..algorithms import DoesNotFit
from ..errors import DEVICE_FULL, ResourceError, misfit
from ..files.encodings.arithmetic import largest
from ..files.encodings.stochastic_rounding import Draw, draws, rounded
from ..job import Job
from ..planning.plan import OutputTensor
from .block_values import base_values, in_place, in_units
from .cancellation import Cancelled, LargestSums, stop_where
from .change_norms import factor_norms
from .change_sample import (
    PendingRowSums,
    RowSample,
    RunSample,
    Sampling,
    SharedSums,
    bring_sums,
    measure_codes,
    sample_of,
    sample_width,
)
from .devices import fallback_device, precise_at
from .fold import StackedPatch, new_weights
from .lanes import STAGED, Call, Lanes, MemoryLimits, MemoryPolicy
from .patch_tensors import PatchTensors
from .requantisation import Codes, NewParts, Uncovered, recode
from .row_blocks import Block, groups, portions
from .tasks import (
    BlockTask,
    EncodeTask,
    FoldResult,
    FoldTask,
    InUnitsTask,
    LargestNumber,
    LargestTask,
    MergedBlock,
    OutOfMemory,
    settled,
)
from .tensor_moves import DeviceStream, Placement, as_scalars, host, land, odd, settle, sum_too_large
from .tensors import codecs_on, computing

LEAST_WORK: Final = 2**16
"""The least values that a thread of the pool gets at once: getting a tiny group would take longer than folding it."""

Task = TypeVar("Task", bound=BlockTask)
Result = TypeVar("Result")

_block: Final[Callable[[BlockTask], Block]] = attrgetter("block")


class FoldedBlocks(NamedTuple):
    """Folded blocks of one kind."""

    values: Tensor  # [n, rows, cols], merged; the lane's next turn may overwrite them
    sample: RowSample | RunSample | None
    in_place: bool = False  # whether the values are in the memory of the base values


class WrittenBlocks(NamedTuple):
    """Folded blocks of plain values whose results are written."""

    too_large: Tensor | None  # the merged values, if some may be too large for their dtype
    sample: RowSample | RunSample | None
    sums: PendingRowSums  # of a sample on a device


@dataclass(frozen=True)
class FoldOptions:
    """How a merge folds its blocks."""

    saturate: bool = False  # whether values that are too large for the output's dtype are cut
    draw: Draw | None = None  # for stochastic rounding
    sampling: Sampling = field(default_factory=Sampling)  # how many values are measured
    limits: MemoryLimits = field(default_factory=MemoryLimits)

    @staticmethod
    def of(
        job: Job, at: Sequence[Placement], staged: int = STAGED, checked: frozenset[str] = frozenset()
    ) -> FoldOptions:
        """Return the options of a job at some placements. `staged`: the bytes of pinned memory for one transfer;
        `checked`: weights of which the proof computes the sampled rows again."""
        draw = draws(job.seed) if job.rounding == "stochastic" else None
        limits = MemoryLimits(job.max_vram, job.max_memory, fallback_device(job.device, at), staged)
        return FoldOptions(job.on_overflow == "saturate", draw, Sampling(runs=draw is None, checked=checked), limits)


class BlockFolder:
    """Folds blocks on the lanes of one merge.

    Parameters:
        at: The placement, or several.
        tensors: Makes the tensors that formulas take; the caller empties its cache.
        pool: For blocks side by side; its threads then fetch tensors.
        options: How they are folded.
    """

    def __init__(
        self,
        at: tuple[Placement, ...],
        tensors: PatchTensors,
        pool: ThreadPoolExecutor | None = None,
        options: FoldOptions | None = None,
    ) -> None:
        self.tensors, self.pool, self.options = tensors, pool, options or FoldOptions()
        self.lanes = Lanes(at, tensors.cache)
        adapter_bytes = tensors.adapters_on_device.size if tensors.adapters_on_device is not None else (lambda _: 0)
        draws = self.options.draw is not None
        self.memory = MemoryPolicy(self.lanes, self.options.limits, adapter_bytes, draws=draws)

    def fold(self, tasks: Sequence[FoldTask]) -> FoldResult:
        """Do all tasks, equal kinds together, without autograd; only `into` is written.

        Raises TooLarge for values that are too large for their dtype and may not be cut.
        """
        return settled(list(self.begin(tasks)))

    def begin(self, tasks: Sequence[FoldTask]) -> Iterator[Future[FoldResult]]:
        """Start to do all tasks, side by side if there is a pool; yield futures for `settled`."""
        encode = [task for task in tasks if isinstance(task, EncodeTask)]
        rest = [task for task in tasks if not isinstance(task, EncodeTask)]
        shares = list(portions(groups(rest, _block, self.memory.most), _elements, LEAST_WORK))
        sums = SharedSums(len(encode) + len(shares))
        for task in encode:
            yield self._submit(partial(self._encode, task, sums))
        for share in shares:
            yield self._submit(partial(self._fold_all, share, sums))

    def begin_largest(self, task: LargestTask) -> Future[LargestNumber]:
        """Start to find the largest number of a block."""
        return self._submit(lambda: self._calls(self._largest, [task])[0])

    def fold_here(self, tasks: Sequence[FoldTask]) -> FoldResult:
        """Do all tasks in the calling thread, which may be one of the pool."""
        return self._fold_all(groups(tasks, _block, self.memory.most), SharedSums(1))

    def norms(self, targets: Sequence[OutputTensor]) -> FoldResult:
        """Return the norms of changes from their factors; none if the device is out of memory."""
        norms = self.lanes.turn(lambda lane: factor_norms(targets, self.tensors, lane))
        return FoldResult() if isinstance(norms, OutOfMemory) else FoldResult(norms=norms)

    def _submit(self, work: Callable[[], Result]) -> Future[Result]:
        if self.pool is not None:
            return self.pool.submit(work)
        done: Future[Result] = Future()
        done.set_result(work())
        return done

    def _fold_all(self, groups_of_tasks: Iterable[Sequence[FoldTask]], sums: SharedSums) -> FoldResult:
        calls = (merged for group in groups_of_tasks for merged in self._calls(self._merge, group))
        return _summed(sum(calls, FoldResult()), sums)

    def _calls(self, work: Call[Task, Result], tasks: Sequence[Task]) -> list[Result]:
        """Return the results of work on tasks of one kind: of one call, or of as many as memory and precision need."""
        parts: tuple[Sequence[Task], ...]
        try:
            result = self.memory.call(work, tasks, sum(map(_size, tasks)))
        except Cancelled as e:
            # Blocks whose terms cancel are folded again in fp64, the others as before.
            again = [self.tensors.untouched(tasks[n]) for n in sorted(e.numbers)]
            exact = [replace(task, block=replace(task.block, exact=True)) for task in again]
            parts = exact, [task for n, task in enumerate(tasks) if n not in e.numbers]
        else:
            if not isinstance(result, OutOfMemory):
                return [result]
            half = len(tasks) // 2
            parts = tasks[:half], tasks[half:]
        return [result for part in parts if part for result in self._calls(work, part)]

    def _merge(self, tasks: Sequence[FoldTask], lane: DeviceStream | None) -> FoldResult | OutOfMemory:
        """Fold blocks of one kind in one call, and write the results."""
        if self.lanes.at[0].device.type == "cpu":
            tasks = in_units(tasks, self.tensors.fetch)
        # Codes: fold in one turn, encode in another.
        if tasks[0].block.target.packed is not None:
            folded = self._in_turn(tasks, self._fold, lane)
            if isinstance(folded, OutOfMemory):
                return folded
            rows = folded.sample if isinstance(folded.sample, RowSample) else None
            return self._recoded(tasks, folded.values, rows, lane)
        # Plain values: fold and write in one turn, then cut what is too large.
        written = self._in_turn(tasks, self._write, lane)
        if isinstance(written, OutOfMemory):
            return written
        sample = written.sample
        merged = FoldResult(measures=written.sums(), samples=() if sample is None or sample.on_device else (sample,))
        return merged if written.too_large is None else merged + self._cut(tasks, written.too_large)

    def _largest(self, tasks: Sequence[LargestTask], lane: DeviceStream | None) -> LargestNumber | OutOfMemory:
        """Fold one block in one call, and return its largest number."""
        (task,) = tasks
        folded = self._in_turn(tasks, self._fold, lane)
        if isinstance(folded, OutOfMemory):
            return folded
        (values,) = folded.values.unbind()
        magnitude = self.lanes.turn(lambda _: largest(self._finite(task, values)), lane)
        if isinstance(magnitude, OutOfMemory):
            return magnitude
        sample = folded.sample if isinstance(folded.sample, RowSample) else None
        merged = MergedBlock(values, sample) if task.keep else None
        return LargestNumber(task.block.target.name, magnitude, task.block.first, merged)

    def _in_turn(
        self, tasks: Sequence[Task], work: Callable[[Sequence[Task], Placement, DeviceStream], Result],
        lane: DeviceStream | None,
    ) -> Result | OutOfMemory:  # fmt: skip
        """Return the result of work in one turn of a lane; an error with the weight's name for an adapter whose values
        do not fit it."""
        block = tasks[0].block
        try:
            return self.lanes.turn(lambda lane: work(tasks, precise_at(lane.at, block), lane), lane)
        except DoesNotFit as e:
            if len(tasks) > 1:  # one by one, the error has the right name
                for task in tasks:
                    self._in_turn([task], work, lane)
            raise misfit(block.target.name, e) from e

    def _fold(self, tasks: Sequence[BlockTask], at: Placement, lane: DeviceStream) -> FoldedBlocks:
        """Return the merged values of blocks of one kind."""
        blocks, first = [task.block for task in tasks], tasks[0]
        keep = first.keep if isinstance(first, LargestTask) else None  # None: the results are written
        # The inputs, stacked at the placement: tensors of the adapters, and base values.
        stacks = self.tensors.stacks(blocks, at, lane)
        base = base_values(tasks, at, None if keep else lane, self.tensors.fetch)
        units = [task.unit for task in tasks if isinstance(task, InUnitsTask)]
        if units:
            stacks = [s.in_units(as_scalars(units, at)) for s in stacks]
        merged, sample, cancelled = observed_weights(
            blocks, base, stacks, None if keep is False else self.options.sampling
        )
        if cancelled is not None:
            stop_where(cancelled)
        if units and isinstance(sample, RowSample):
            sample = replace(sample, units=units)
        return FoldedBlocks(merged, sample, merged is base)

    def _write(self, tasks: Sequence[FoldTask], at: Placement, lane: DeviceStream) -> WrittenBlocks:
        """Fold blocks of one kind and write the results, plain values."""
        merged, sample, same_memory = self._fold(tasks, at, lane)
        if self.options.draw is not None and tasks[0].into.dtype.itemsize < 4:
            drawn = [self.drawn(task.block, v) for task, v in zip(tasks, merged.unbind(), strict=True)]
            merged = drawn[0].unsqueeze(0) if len(drawn) == 1 else torch.stack(drawn)  # which copies also one
            same_memory = False
            if isinstance(sample, RowSample):
                sample.note_stored(merged)
        sums = bring_sums([sample] if isinstance(sample, RowSample) and sample.on_device else [], lane)
        written = same_memory and in_place(tasks, at)
        sound = not odd(merged) if written else land(merged, [task.into for task in tasks], lane)
        return WrittenBlocks(None if sound else merged, sample, sums)

    def _uniform(self, block: Block, device: torch.device) -> Tensor | None:
        """Return the draws of a block's values, made on a device; None for rounding to the nearest."""
        if self.options.draw is None:
            return None
        with computing(device):
            return self.options.draw(block.target.stored, block.first * block.cols, block.elements)

    def drawn(self, block: Block, values: Tensor) -> Tensor:
        """Return merged values in the output's dtype, rounded stochastically where that is asked for."""
        values = self._on_codec_device(values)
        target, first = block.target, block.first * block.cols
        if self.options.draw is None:
            return values
        with computing(values.device):
            return rounded(values, target.dtype, partial(self.options.draw, target.stored), first)

    def _recoded(
        self, tasks: Sequence[FoldTask], merged: Tensor, sample: RowSample | None, lane: DeviceStream | None
    ) -> FoldResult | OutOfMemory:
        """Store merged blocks as codes."""
        # The codes of all blocks, and as a reader decodes them, the values that are sampled.
        width, pairs = sample_width(sample), [*zip(tasks, merged.unbind(), strict=True)]
        encoded = self.lanes.turn(lambda _: [self._encoded(task, values, width) for task, values in pairs], lane)
        if isinstance(encoded, OutOfMemory):
            return encoded
        # Measures of the blocks that have codes, before these overwrite the base's.
        covered, result = {n: e for n, e in enumerate(encoded) if isinstance(e, NewParts)}, FoldResult()
        if sample is not None and covered:
            bases, sample = [tasks[n].base for n in covered], sample.on_host().only([*covered])
            measures, samples = measure_codes(sample, bases, [*covered.values()], self.tensors.fetch)
            result = FoldResult(measures=tuple(measures), samples=tuple(samples))
        for task, codes in zip(tasks, encoded, strict=True):
            if isinstance(codes, Uncovered):
                result += FoldResult(uncovered={task.block.target.name: codes.largest})
            else:
                task.into.copy_(codes.codes)
                result += FoldResult(parts=codes.others)
        return result

    def _encode(self, task: EncodeTask, sums: SharedSums) -> FoldResult:
        """Store a block that is merged already, with the scale that its weight has got since."""
        values, sample = task.merged
        sample = None if sample is None else replace(sample, blocks=[task.block])
        merged = self._recoded([task], values.unsqueeze(0), sample, None)
        if isinstance(merged, OutOfMemory):
            where = f"{task.block.target.name}: {merged.message}"
            raise ResourceError("the device is out of memory", where, DEVICE_FULL)
        return _summed(merged, sums)

    def _encoded(self, task: FoldTask, values: Tensor, width: int) -> NewParts | Uncovered:
        """Return the codes of a merged block. `width`: how many of its first values are decoded again."""
        # A merged block to encode was checked before; in units, values that are not finite show as uncovered.
        checked = isinstance(task, EncodeTask) or (isinstance(task, InUnitsTask) and self.options.draw is None)
        values = self._on_codec_device(values) if checked else self._finite(task, values)
        codes = Codes(task.base, self._uniform(task.block, values.device), width)
        encoded = recode(task.block.target, task.block.stored[0], values, codes, self.tensors.fetch)
        if isinstance(task, InUnitsTask) and isinstance(encoded, Uncovered):
            # The largest number in units of 1; or a sum is not finite, which no scale covers.
            again = self._largest([LargestTask(task.original.block, task.original.base, keep=True)], None)
            assert isinstance(again, LargestNumber), "a CPU has room"
            return Uncovered(again.magnitude)
        return encoded

    def _on_codec_device(self, values: Tensor) -> Tensor:
        return values if codecs_on(values.device) else host(values)

    def _finite(self, task: BlockTask, values: Tensor) -> Tensor:
        """Return a merged block where codecs compute; TooLarge if a sum of finite values is not finite."""
        moved = self._on_codec_device(values)
        if odd(moved) and self.tensors.overflown(task, values):
            raise sum_too_large(task.block.target.name, values.dtype)
        return moved

    def _cut(self, tasks: Sequence[FoldTask], merged: Tensor) -> FoldResult:
        """Write the values again, those too large for their dtype cut; TooLarge if they may not be cut, or if a sum of
        finite values is not finite."""
        counts: Counter[str] = Counter()
        for task, values in zip(tasks, merged.unbind(), strict=True):
            name = task.block.target.name
            if self.tensors.overflown(task, values):
                raise sum_too_large(name, values.dtype)
            counts[name] += settle(name, host(values), task.into, saturate=self.options.saturate)
        return FoldResult(+counts)


def observed_weights(
    blocks: Sequence[Block], base: Tensor, stacks: Sequence[StackedPatch], sampling: Sampling | None
) -> tuple[Tensor, RowSample | RunSample | None, Tensor | None]:
    """Return W' of blocks of one kind, as `new_weights` does, their sample for the report if there is `sampling`, and
    whether the terms of each block cancel, if that is checked."""
    sample = None if sampling is None else sample_of(blocks, base, sampling)
    sums = LargestSums.of(blocks, base)
    merged = new_weights(blocks, base, stacks, *(o for o in (sums, sample) if o is not None))
    return merged, sample, None if sums is None else sums.cancelled


def _summed(merged: FoldResult, sums: SharedSums) -> FoldResult:
    """Return what a thread has merged, with measures in place of its samples."""
    return replace(merged, samples=(), measures=merged.measures + sums.measured(merged.samples))


def _elements(tasks: Sequence[FoldTask]) -> int:
    return sum(task.into.numel() for task in tasks)


def _size(task: BlockTask) -> int:
    return task.into.numel() if isinstance(task, FoldTask) else task.block.elements
