"""Folds the changed blocks of a window on a device: one transfer up, a few operations, one transfer down.

The host's bytes are written last, when the results are known to be finite. Until then everything can be done again
block by block: if a number is too large for its dtype, and if the device is out of memory. The buffers of windows
are registered with CUDA, which then reads and writes them itself, without a copy on the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..algorithms import DoesNotFit
from ..change_statistics import Measurement
from ..disk.pages import address
from ..grouping import by_key
from . import change_sample
from .block_folder import BlockFolder, observed_weights
from .change_sample import PendingRowSums, RowSample, RunSample, RunSums, bring_sums, suits
from .device_memory import base_share
from .devices import device_bytes, precise_at
from .row_blocks import block, groups
from .stages import Buffer, WindowTask
from .tasks import FoldResult, FoldTask, OutOfMemory
from .tensor_moves import (
    TORCH_DTYPES,
    DeviceStream,
    Gather,
    Placement,
    brought,
    cast_all,
    castable,
    download,
    extremes,
    fit,
    holds,
    upload,
)
from .tensors import codecs_on
from .windows import Fold, Window

PORTABLE: Final = 1
"""cudaHostRegisterPortable: the memory is pinned for all devices."""

TENSOR_ALIGNMENT: Final = 8
"""Bytes of the widest values: a tensor of the device's bytes begins at a multiple of them in the buffer."""


class RegisteredBuffers:
    """Buffers that are registered; their memory is kept until it is unregistered, by `close` at the latest."""

    def __init__(self, *, enabled: bool) -> None:
        self._memory: dict[int, tuple[memoryview, torch.device]] = {}
        """Buffer → its memory, and the device that was current when it was registered."""
        self._enabled, self._lock = enabled, Lock()

    def has(self, buffer: Buffer, device: torch.device) -> bool:
        """Return whether the device can use a buffer itself; registers it, and again after it has grown.

        False if that fails, as it does under a limit on locked memory; no other buffer is tried then.
        """
        memory = buffer.memory
        with self._lock:
            registered = self._memory.get(id(buffer))
            if registered is not None and registered[0] is memory:
                return True
            if registered is not None:  # nothing is under way in it: the buffer was free since
                self._drop(id(buffer))
            if not self._enabled or not len(memory):
                return False
            error = _cudart().cudaHostRegister(address(memory), len(memory), PORTABLE)
            if int(error):  # an enumeration, which is true for every value
                self._enabled = False
                _clear_error(device)
                return False
            self._memory[id(buffer)] = memory, device
            return True

    def close(self) -> None:
        """Unregister all buffers; nothing may be under way in them."""
        with self._lock:
            for key in [*self._memory]:
                self._drop(key)

    def _drop(self, key: int) -> None:
        """Unregister a buffer. Any device can do that, but one that this process has not used would be started for it,
        as device 0 is where a thread has chosen none: half a GB of its memory."""
        memory, device = self._memory.pop(key)
        with suppress(RuntimeError), torch.cuda.device(device):  # of a failed device: the first error is reported
            _cudart().cudaHostUnregister(address(memory))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _clear_error(device: torch.device) -> None:
    """Let the next kernel be the one that reports the error of the failed call, as CUDA keeps it until then."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


class JoinedFold(NamedTuple):
    """Consecutive blocks of one tensor that are folded as one."""

    fold: Fold
    parts: tuple[Fold, ...]


class DeviceBatch(NamedTuple):
    """Blocks of a window that are folded at once, in the order of their results, with a way to fold them one by one."""

    task: WindowTask
    folds: tuple[Fold, ...]
    tasks: Callable[[], list[FoldTask]]
    results: Sequence[int]  # offsets of all results of the window
    nbytes: int  # of the device's memory that folding takes


class FoldedBatch(NamedTuple):
    """Folded blocks, in another order than in their window."""

    folds: list[Fold]
    work: Tensor  # their merged values, flat
    sizes: list[int]  # how many there are of each
    row_samples: list[RowSample]  # of the blocks that are sampled by rows
    by_runs: RunSample | None  # of the others
    cancelled: list[Tensor]  # for each kind that is checked, whether the terms of each block cancel


class NotAtOnce(NamedTuple):
    """The result for a batch that has to be folded block by block; nothing of it is written."""


class DeviceWindows:
    """Folds windows in the threads of a pool, each of which has a lane to a device."""

    def __init__(self, blocks: BlockFolder, pool: ThreadPoolExecutor, piece: int) -> None:
        """`piece`: the bytes of pinned memory for one transfer, where the device cannot use a buffer itself."""
        self.blocks, self.pool, self.piece = blocks, pool, piece
        self._shared: dict[tuple[int, bool, int, int, Placement], tuple[Window, Tensor]] = {}
        """Base bytes that several plans merge, by the number of their window, which is held for it, and their place."""
        self._sharing, self._room = Lock(), base_share(device_bytes(blocks.memory.limits.max_vram))
        self.run_sums = RunSums(min(change_sample.RUN_VALUES, blocks.memory.share // change_sample.SUM_BYTES))
        self.registered = RegisteredBuffers(enabled=blocks.lanes.at[0].device.type == "cuda")

    def begin(self, task: WindowTask, fold_task: Callable[[Fold], FoldTask]) -> Iterator[Future[FoldResult] | Fold]:
        """Start to fold the blocks of a task; yield a future for each part, and the blocks that are left: those whose
        bytes are not values that the device has. `fold_task` returns a block's task, with its tensors on the host."""
        change, ours = task.change, list[Fold]()
        results = sorted([f.at for f in change.folds] + [c.at for c in change.converts])
        for f in change.folds:
            if self._takes(f):
                ours.append(f)
            else:
                yield f
        for apart in (False, True):
            for some, nbytes in self._parts(sorted((f for f in ours if f.apart is apart), key=lambda f: f.at)):
                tasks = partial(lambda some: [fold_task(f) for j in some for f in _by_block(j)], some)
                yield self.pool.submit(
                    self._fold, DeviceBatch(task, tuple(j.fold for j in some), tasks, results, nbytes)
                )

    def _takes(self, f: Fold) -> bool:
        target, at = f.block.target, self.blocks.lanes.at[0]
        weight = target.weight
        if not (target.packing.encoding.plain and weight.packing.encoding.plain) or weight.padded:
            return False
        dtypes = (TORCH_DTYPES[target.dtype], TORCH_DTYPES[weight.stored.dtype])
        aligned = f.source % dtypes[1].itemsize == 0 == f.at % dtypes[0].itemsize
        alike = precise_at(at, f.block).device == at.device and all(holds(at.device, d) for d in dtypes)
        return aligned and alike and (self.blocks.options.draw is None or codecs_on(at.device))

    def _parts(self, folds: Sequence[Fold]) -> Iterator[tuple[list[JoinedFold], int]]:
        """Yield blocks, joined, that fit a lane's share of the device's memory together, and the bytes that folding
        them takes; a block that is larger stays alone."""
        part, run, used = list[JoinedFold](), list[Fold](), 0
        rate, target = 0.0, None
        for f in folds:
            if f.block.target is not target:  # its blocks are alike
                target = f.block.target
                rate = self.blocks.memory.size(f.block) / max(f.block.elements, 1)
            needed = int(rate * f.block.elements)
            full = bool(run) and used + needed > self.blocks.memory.share
            if run and (full or not _follows(run[-1], f)):
                part.append(_joined(run))
                run = []
            if full:
                yield part, used
                part, used = [], 0
            run.append(f)
            used += needed
        if run:
            yield [*part, _joined(run)], used

    def _fold(self, part: DeviceBatch) -> FoldResult:
        """Fold a part of a window, block by block if it is not possible at once; alone on its device if it takes more
        than a lane's share."""
        memory = self.blocks.memory
        if memory.device.full or memory.exceeds(part.nbytes):
            return self.blocks.fold_here(part.tasks())
        with memory.device.shared() if part.nbytes <= memory.share else memory.device.alone():
            sums = self.blocks.lanes.turn(partial(self._at_once, part))
        if isinstance(sums, OutOfMemory):
            memory.note("smaller batches were used")
        elif not isinstance(sums, NotAtOnce):
            return FoldResult(measures=sums())
        return self.blocks.fold_here(part.tasks())

    def _at_once(self, part: DeviceBatch, lane: DeviceStream) -> PendingRowSums | NotAtOnce:
        """Fold blocks and write the results, unless a number is too large for its dtype, an adapter's value is invalid,
        or terms cancel: folding block by block then finds which."""
        # Up: the base bytes, from the first block's to the last one's.
        task, apart = part.task, part.folds[0].apart
        host = task.base_bytes.views(task.window)[apart]
        low = min(f.source for f in part.folds) // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT
        base = _bytes(host, low, max(f.source + f.source_bytes for f in part.folds))
        uploaded = self._uploaded(part, base, low, lane)
        start = part.folds[0].at // TENSOR_ALIGNMENT * TENSOR_ALIGNMENT
        size = part.folds[-1].at + part.folds[-1].nbytes - start
        if apart:
            out = torch.empty(size, dtype=torch.uint8, device=lane.at.device)
        else:  # other plans need the base's bytes
            out = uploaded if task.last else uploaded.clone()
        # Fold, by placement and dtype; then look at the extremes of each kind, and at terms that cancel.
        kinds = by_key(((precise_at(lane.at, f.block) == lane.at, f.block.target.dtype), f) for f in part.folds)
        try:
            folded = [self._merged(some, uploaded, low, lane) for some in kinds.values()]
        except DoesNotFit:
            return NotAtOnce()
        ends = [extremes(batch.work, lane, number) for number, batch in enumerate(folded)]
        flags = [flag for batch in folded for flag in batch.cancelled]
        cancelled = brought(torch.cat(flags), lane, "cancelled") if flags else torch.zeros(0)
        lane.settle()
        dtypes = [TORCH_DTYPES[dtype] for _, dtype in kinds]
        if cancelled.any() or not all(map(fit, ends, dtypes)):
            return NotAtOnce()
        # Cast the merged values into the bytes of the output.
        for batch, dtype in zip(folded, dtypes, strict=True):
            new: Sequence[Tensor] = castable(batch.work, dtype).split_with_sizes(batch.sizes)
            drawn = self.blocks.options.draw is not None and dtype.itemsize < 4
            if drawn:
                old = batch.work.split_with_sizes(batch.sizes)
                new = [self.blocks.drawn(f.block, v) for f, v in zip(batch.folds, old, strict=True)]
            cast_all(new, [_typed(out, f.at - start, f.nbytes, dtype) for f in batch.folds])
            if drawn:
                _note_stored(batch, new)
        # Down: the results; meanwhile the sums of the samples.
        read = self._add_up(task.plan, folded, lane)
        view = task.output.out.view(task.window.start, task.window.size)
        for a, b in _runs(part, bridged=not apart):
            download(out[a - start : b - start], _bytes(view, a, b), lane, self._piece(task.output.out, lane))
        lane.settle()
        return read

    def _uploaded(self, part: DeviceBatch, base: Tensor, low: int, lane: DeviceStream) -> Tensor:
        """Return bytes of the base on the device, which the tasks of several plans share."""
        task, apart = part.task, part.folds[0].apart
        piece = self._piece(task.base_bytes.base if apart else task.base_bytes.out, lane)
        if task.first and task.last:
            return upload(base, lane, piece)
        key = (id(task.window), apart, low, len(base), lane.at)
        with self._sharing:
            if key not in self._shared:
                uploaded = upload(base, lane, piece)
                if len(base) + sum(len(shared) for _, shared in self._shared.values()) > self._room:
                    return uploaded
                lane.settle()
                self._shared[key] = task.window, uploaded
            return lane.hold(self._shared[key][1])

    def forget(self, window: Window) -> None:
        """Give up the bytes of a window that all plans have merged."""
        with self._sharing:
            self._shared = {key: entry for key, entry in self._shared.items() if entry[0] is not window}

    def _piece(self, buffer: Buffer, lane: DeviceStream) -> int:
        direct = lane.stream is None or self.registered.has(buffer, lane.at.device)
        return 0 if direct else self.piece

    def _add_up(self, plan: int, folded: Sequence[FoldedBatch], lane: DeviceStream) -> PendingRowSums:
        """Start to add up the samples of a part, and of earlier ones; return a function for the measures of blocks that
        are sampled by rows. Those of the others are kept."""
        read = bring_sums([w for batch in folded for w in batch.row_samples], lane)
        rest = self.run_sums.add(plan, [batch.by_runs for batch in folded if batch.by_runs is not None], lane)

        def both() -> tuple[Measurement, ...]:
            rest()
            return read()

        return both

    def measured(self, plan: int) -> Iterator[Measurement]:
        """Yield what is known of a plan's blocks next to the outcomes, when all windows are merged."""
        for lane, add in self.run_sums.rest():
            rest = self.blocks.lanes.turn(add, DeviceStream(lane.at))
            if not isinstance(rest, OutOfMemory):
                rest()
        return self.run_sums.of(plan)

    def _merged(self, folds: Sequence[Fold], input_bytes: Tensor, low: int, lane: DeviceStream) -> FoldedBatch:
        """Fold blocks of one placement and dtype."""
        # The base values of all blocks, and all factors, gathered with few operations.
        at = precise_at(lane.at, folds[0].block)
        stacks = [*groups(folds, lambda f: f.block, lambda _: len(folds))]
        ordered = [f for stack in stacks for f in stack]
        sizes = [f.block.elements for f in ordered]
        work, gather = torch.empty(sum(sizes), dtype=at.dtype, device=at.device), Gather()
        for f, part in zip(ordered, work.split_with_sizes(sizes), strict=True):
            dtype = TORCH_DTYPES[f.block.target.weight.stored.dtype]
            gather.add(_typed(input_bytes, f.source - low, f.source_bytes, dtype), part)
        patches = [self.blocks.tensors.stacks([f.block for f in stack], at, lane, gather.stacked) for stack in stacks]
        gather.run()
        # Fold kind by kind; runs of the whole batch are one sample.
        by_runs = self.blocks.options.draw is None and any(suits(f.block) for f in ordered)
        sampled: RunSample | None = None
        if by_runs:
            counts = [f.block.elements if suits(f.block) else 0 for f in ordered]
            sampled = RunSample.of([f.block for f in ordered], counts, work, change_sample.PERIOD)
        done, row_samples, flags = 0, list[RowSample](), list[Tensor]()
        for stack, stacked in zip(stacks, patches, strict=True):
            b = stack[0].block
            base = work[done : done + len(stack) * b.elements].view(len(stack), b.last - b.first, b.cols)
            alike = [f.block for f in stack]
            sampling = None if by_runs and suits(b) else self.blocks.options.sampling
            merged, sample, cancelled = observed_weights(alike, base, stacked, sampling)
            flags += [] if cancelled is None else [cancelled]
            row_samples += [sample] if isinstance(sample, RowSample) else []
            if merged is not base:
                base.copy_(merged)
            done += base.numel()
        if sampled is not None:
            sampled.note_merged(work)
        return FoldedBatch(ordered, work, sizes, row_samples, sampled, flags)

    def close(self) -> None:
        """Unregister the buffers; nothing may be under way."""
        self.registered.close()


def _note_stored(folded: FoldedBatch, stored: Sequence[Tensor]) -> None:
    """Record in the samples what is stored, where values are rounded stochastically."""
    stored_blocks = {id(f.block): values for f, values in zip(folded.folds, stored, strict=True)}
    for sample in folded.row_samples:
        sample.note_stored(torch.stack([stored_blocks[id(b)].view(-1, b.cols) for b in sample.blocks]))


def _follows(a: Fold, b: Fold) -> bool:
    return (
        a.block.target is b.block.target and a.block.last == b.block.first
        and (a.at + a.nbytes, a.source + a.source_bytes) == (b.at, b.source)
        and len(a.block.slices) == len(b.block.slices)
        and all(x.use is y.use for x, y in zip(a.block.slices, b.block.slices, strict=True))
    )  # fmt: skip


def _joined(run: Sequence[Fold]) -> JoinedFold:
    """Return consecutive blocks as one, which has a sample of its own and represents no other."""
    first, last = run[0], run[-1]
    whole = block(first.block.target, first.block.first, last.block.last)
    return JoinedFold(Fold(whole, first.source, first.at, first.apart), tuple(run))


def _by_block(joined: JoinedFold) -> Iterator[Fold]:
    """Yield the blocks that were joined; their samples represent these alone."""
    for f in joined.parts:
        run = f.block.run._replace(low=joined.fold.block.first, high=joined.fold.block.last)
        yield replace(f, block=replace(f.block, run=run))


def _runs(part: DeviceBatch, *, bridged: bool) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the window that are downloaded: the results; `bridged`: and the uploaded bytes between two of
    them, if they contain no other result."""

    def near(a: Fold, b: Fold) -> bool:
        end = a.at + a.nbytes
        return end == b.at or (bridged and part.results[bisect_left(part.results, end)] == b.at)

    low = part.folds[0]
    for a, b in zip(part.folds, (*part.folds[1:], None), strict=True):
        if b is None or not near(a, b):
            yield low.at, a.at + a.nbytes
            low = b or low


def _typed(data: Tensor, at: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """Return a part of some bytes as values, flat; they share the bytes."""
    return data[at : at + nbytes].view(dtype)


def _bytes(memory: memoryview, low: int, high: int) -> Tensor:
    """Return a part of the host's memory as a tensor that shares it."""
    return torch.frombuffer(memory[low:high], dtype=torch.uint8)
