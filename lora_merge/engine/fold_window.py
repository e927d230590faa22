"""Makes a window's output bytes from its base bytes, in memory: folded blocks, converted numbers, unchanged bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..disk.files import Memory
from ..disk.reader import Reader
from ..disk.writer import amend
from ..dtypes import COMPUTE_DTYPES
from ..planning.plan import Plan
from .buffers import Outcome, WindowTask
from .devices import one_core, places, release, threads
from .fold_blocks import BlockMerger, Item, made_again, refitted, settled
from .patch_tensors import PatchTensors
from .placement import convert, settle
from .tensors import TensorCache, decoded, encoded, packed
from .windows import Change, Fold, Window


class WindowMerger:
    """Merges the windows of plans of one layout and one placement; ResourceError if the device is missing."""

    def __init__(self, plans: Sequence[Plan], reader: Reader) -> None:
        self.plans, job = plans, plans[0].job
        at = places(job.device, COMPUTE_DTYPES[job.compute_dtype])
        self.device = ",".join(str(p.device) for p in at)
        self.cache = TensorCache(reader, frozenset(f for p in plans for m in p.adapters for f in m.adapter.index.files))
        self.pool = ThreadPoolExecutor(threads(at), thread_name_prefix="fold", initializer=one_core)
        self.blocks = BlockMerger.of(job, at, PatchTensors(self.cache.fetch, plans[0].weights), self.pool)
        self.outcomes = [Outcome() for _ in plans]
        """For each plan, the results that are too large for their dtype."""

    def begin(self, task: WindowTask) -> None:
        """Start to fold changed blocks, convert other dtypes and copy the rest; the task is complete after `settle`."""
        base_bytes, base = task.base_bytes.views(task.window)
        out = task.own.out.view(task.window.start, task.window.size)
        if not task.last:
            for low, high in _kept(task.window, task.change):
                out[low:high] = base_bytes[low:high]
        for c in task.change.converts:
            name, cols = c.target.name, max(c.target.matrix[1], 1)
            shape = (c.count // cols, cols) if c.target.by_rows else (c.count,)
            numbers = packed(base[c.source : c.source + c.source_bytes], c.target.weight.packing, shape)
            values = decoded(numbers, c.target.weight, c.first // cols, self.cache.fetch)
            values = encoded(values, c.target.packing, c.first // cols, self.cache.fetch)
            into = packed(out[c.at : c.at + c.nbytes], c.target.packing, shape)
            if not convert(values, into):
                task.saturated[name] += settle(name, values, into, saturate=self.blocks.saturate)
        kept = None if task.last else base_bytes  # the last task overwrites the base values
        for future in self.blocks.begin([_item(f, out, base if f.apart else kept) for f in task.change.folds]):
            task.under_way.append(future)

    def settle(self, task: WindowTask) -> None:
        """Wait for the blocks of a task."""
        self.outcomes[task.plan] += Outcome(task.saturated) + settled(task.under_way)

    def rescale(self, number: int, part: Path) -> None:
        """Write weights of a plan's finished output again that are too large for their scales."""
        _rescale(self.plans[number], part, self.blocks, self.outcomes[number].largest)
        self.forget()

    def forget(self) -> None:
        """Drop the adapters' tensors of this window, so that memory does not grow with the model."""
        self.cache.forget()
        self.blocks.tensors.kept.clear()

    def close(self) -> None:
        """End the threads, and give back the memory of their streams, which no other stream can use."""
        self.pool.shutdown()
        self.forget()
        release(self.blocks.at)


def _kept(window: Window, change: Change) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the window that are read into the output buffer and not folded."""
    folds = iter(sorted((f.at, f.at + f.nbytes) for f in change.folds if not f.apart))
    low, high = next(folds, (window.size, window.size))
    for r in window.direct:
        at, end = r.at, r.at + r.nbytes
        while low < end:
            if at < low:
                yield at, low
            at = high
            low, high = next(folds, (window.size, window.size))
        if at < end:
            yield at, end


def _item(f: Fold, out: memoryview, base: memoryview | None) -> Item:
    """Return a block with its base values and its result as tensors that share the buffers.

    Without `base`, the base values lie in `out`, where the result overwrites them.
    """
    block, shape = f.block, (f.block.last - f.block.first, f.block.cols)
    into = packed(out[f.at : f.at + f.nbytes], block.target.packing, shape)
    if base is None:
        return Item(block, into, into)
    weight, raw = block.target.weight, base[f.source : f.source + f.source_bytes]
    return Item(block, packed(raw, weight.packing, (block.stored[1],) if weight.padded else shape), into)


def _rescale(plan: Plan, part: Path, merger: BlockMerger, largest: Mapping[str, float]) -> None:
    """Write weights of a finished output again that are too large for their scale: name → largest magnitude.

    A scale of a whole weight applies to all of its rows, and lies elsewhere in the file. Windows keep the base's scale,
    as few weights outgrow it. The largest magnitude is known when all rows are merged: then such a weight gets a new
    scale, and its bytes are written a second time.
    """
    homes = {t.name: (part / f.name if f.name else part, t) for f in plan.files for t in f.targets}
    for name, magnitude in largest.items():
        path, old = homes[name]
        target = refitted(old, magnitude)
        for block, numbers in made_again(target, merger):
            raw: Any = numbers.view(torch.uint8).numpy()
            amend(path, raw.tobytes(), old.offset + target.packing.encoding.nbytes(block.first * block.cols))
        for side in target.packing.sides.values():
            if isinstance(side.source, Memory):
                path, small = homes[side.name]
                amend(path, bytes(side.source.content()), small.offset)
