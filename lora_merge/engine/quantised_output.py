"""Quantises weights on the way out.

Some formats have one scale for the whole weight, and the first byte of its codes depends on it. Such a weight is folded
twice: for its largest number, then for its codes. Merged blocks are kept from the first time to the second, as many
as a quarter of the memory limit holds; the others are folded again, from bytes that the system still has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from math import prod
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ..files.encodings.arithmetic import largest
from ..planning.plan import OutputTensor, Plan, partners
from .block_folder import BlockFolder
from .block_values import base_view, stored_base
from .requantisation import Codes, Uncovered, new_parts, recode, refitted
from .row_blocks import BLOCK_ELEMENTS, Block, blocks
from .tasks import EncodeTask, FoldResult, FoldTask, LargestNumber, LargestTask, MergedBlock, results
from .tensors import Fetch, decoded, packed, stored_values
from .windows import Convert, WindowChange

BLOCKS_AT_ONCE: Final = 16  # blocks that are measured side by side: 64 MB of values
BLOCK_SHARE: Final = 4  # the part of the memory limit for merged blocks is one of so many

Key: TypeAlias = tuple[int, str, int]
"""Plan, weight and first row of a block."""


class NewCodes:
    """The quantised weights of outputs that the base holds as plain values, or in another format."""

    def __init__(self, plans: Sequence[Plan], folder: BlockFolder, pool: ThreadPoolExecutor, read: Fetch) -> None:
        """`read` returns a stored tensor without caching it."""
        self.folder, self.pool, self.read = folder, pool, read
        self._weights = [{t.name: t for t in plan.targets if t.packing.encoding.needs_largest} for plan in plans]
        """For each plan the weights that have one scale, by name."""
        self._partners = [partners(weights.values()) for weights in self._weights]
        self._refitted: list[dict[str, OutputTensor]] = [{} for _ in plans]
        """For each plan those whose scale is known, with it."""
        self._merged: dict[Key, MergedBlock] = {}
        on_host = folder.lanes.at[0].device.type == "cpu"
        self._free = min(plan.job.max_memory for plan in plans) // BLOCK_SHARE if on_host else 0
        """Bytes that further merged blocks may take."""

    def scales(self, plan: int, change: WindowChange, base: memoryview) -> Iterator[Future[FoldResult]]:
        """Find the scales of the whole weights of a window, where they are not known yet; yield their bytes.

        `base`: the window's input, which is not read again.
        """
        # The largest number of each weight, block by block.
        names = (t.name for t in chain((f.block.target for f in change.folds), (c.target for c in change.converts)))
        unknown = self._unknown(plan, names) if self._weights[plan] else []
        magnitudes: dict[str, float] = {}
        work = chain.from_iterable(self._begin_largest(target, change, base) for target in unknown)
        while under_way := list(islice(work, BLOCKS_AT_ONCE)):
            for name, magnitude, first, merged in results(under_way):
                magnitudes[name] = max(magnitude, magnitudes.get(name, 0.0))
                if merged is not None:
                    self._merged[plan, name, first] = merged
        # The scale that covers it, and the values of the weights that share it.
        for target in unknown:
            joined = self._partners[plan].get(target.name, (target,))
            magnitude = max(magnitudes.get(t.name, 0.0) for t in joined)
            self._refitted[plan][target.name] = new = refitted(target, magnitude, self.read)
            done: Future[FoldResult] = Future()
            done.set_result(FoldResult(parts=tuple(new_parts(new))))
            yield done

    def _unknown(self, plan: int, names: Iterable[str]) -> list[OutputTensor]:
        """Return the weights among these whose scales are not known yet, with the weights that need the same scale."""
        weights, joined = self._weights[plan], self._partners[plan]
        new = (weights[name] for name in names if name in weights and name not in self._refitted[plan])
        return [*{t.name: t for target in new for t in joined.get(target.name, (target,))}.values()]

    def task(self, plan: int, task: FoldTask) -> FoldTask:
        """Return a task with the scale of the whole weight, if that is known; of a block that is merged already, the
        task to encode it."""
        block = task.block
        target = self._refitted[plan].get(block.target.name)
        if target is None:
            return task
        block = replace(block, target=target)
        merged = self._merged.pop((plan, target.name, block.first), None)
        if merged is None:
            return replace(task, block=block)
        self._free += self._size(block)
        return EncodeTask(block, task.base, task.into, merged)

    def _size(self, block: Block) -> int:
        """Return the bytes of the merged values of a block."""
        return block.elements * self.folder.lanes.at[0].dtype.itemsize

    def begin(
        self, plan: int, c: Convert, base: memoryview, out: memoryview, fetch: Fetch
    ) -> Iterator[Future[FoldResult]]:
        """Start to store values that no adapter changes."""
        target = self._refitted[plan].get(c.target.name, c.target)
        weight, before, after = c.target.weight, c.target.weight.packing.encoding, c.target.packing.encoding
        for low, count in _parts(c.count, c.target.group):
            source, at = c.source + before.nbytes(low), c.at + after.nbytes(low)
            stored = packed(base[source : source + before.nbytes(count)], weight.packing, weight.stored.dtype, (count,))
            into = packed(out[at : at + after.nbytes(count)], target.packing, target.dtype, (count,))
            yield self.pool.submit(_store, target, (c.first + low, count), stored, into, fetch)

    def _begin_largest(
        self, target: OutputTensor, change: WindowChange, base: memoryview
    ) -> Iterator[Future[LargestNumber]]:
        """Start to find the largest number of a weight, part by part. Its parts in the window, whose input is `base`,
        are not read again."""
        if target.uses:
            folds = {f.block.first: f for f in change.folds if f.block.target.name == target.name}
            for block in blocks(target):
                fold = folds.get(block.first)
                stored = stored_base(block, self.read) if fold is None else base_view(fold, base)
                keep = self._size(block) <= self._free
                self._free -= self._size(block) if keep else 0
                yield self.folder.begin_largest(LargestTask(block, stored, keep))
            return
        total, weight = prod(target.shape), target.weight
        nbytes = weight.packing.encoding.nbytes
        convert = next((c for c in change.converts if c.target.name == target.name and c.count == total), None)
        for first, count in _parts(total, target.group):
            part = None
            if convert is not None:
                low = convert.source + nbytes(first)
                part = packed(base[low : low + nbytes(count)], weight.packing, weight.stored.dtype, (count,))
            yield self.pool.submit(self._largest, target, first, count, part)

    def _largest(self, target: OutputTensor, first: int, count: int, part: Tensor | None) -> LargestNumber:
        """Return the largest value of a part of a weight that no adapter changes; `part`: its stored values, if the
        window has them."""
        stored = stored_values(target.weight, first, count, self.read) if part is None else part
        return LargestNumber(target.name, largest(decoded(stored, target.weight, first, count, self.read)))


def _parts(total: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of parts of so many values, in whole groups."""
    step = max(1, BLOCK_ELEMENTS // group) * group
    for first in range(0, total, step):
        yield first, min(step, total - first)


def _store(target: OutputTensor, span: tuple[int, int], stored: Tensor, into: Tensor, fetch: Fetch) -> FoldResult:
    """Store (first, count) values, which are stored in another way so far."""
    encoded = recode(target, span[0], decoded(stored, target.weight, *span, fetch), Codes(into, None), fetch)
    if isinstance(encoded, Uncovered):
        return FoldResult(uncovered={target.name: encoded.largest})
    into.copy_(encoded.codes)
    return FoldResult(parts=encoded.others)


def refolded(target: OutputTensor, folder: BlockFolder) -> Iterator[tuple[Block, Tensor, FoldResult]]:
    """Yield every block of a refitted target, folded once more, with its codes, as bytes, and its other parts."""
    for block in blocks(target):
        codes = torch.empty(target.packing.encoding.nbytes(block.elements), dtype=torch.uint8)
        merged = folder.fold([FoldTask(block, stored_base(block, folder.tensors.fetch), codes)])
        assert not merged.uncovered, "the new scale covers the weight"
        yield block, codes, merged
