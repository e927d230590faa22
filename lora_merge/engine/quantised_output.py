"""Quantises weights on the way out.

Some formats have one scale for the whole weight, and the first byte of its codes depends on it. Such a weight is looked
at twice: for its largest number, then for its codes. Merged blocks are kept from the first time to the second, as many
as a quarter of the memory limit holds; the others are folded again, from bytes that the system still has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from math import prod
from typing import Final, TypeAlias

from torch import Tensor

from ..files.encodings.arithmetic import largest
from ..planning.plan import OutputTensor, Plan, partners
from .block_folder import BlockMerger
from .recoding import Codes, new_parts, recode, refitted
from .row_blocks import BLOCK_ELEMENTS, Block, blocks
from .stages import Outcome, settled
from .tensors import Fetch, Held, Item, base_view, decoded, item_of, packed, stored_numbers
from .windows import Change, Convert, Fold

AT_ONCE: Final = 16  # blocks that are measured side by side: 64 MB of numbers
SHARE: Final = 4  # the part of the memory limit for merged blocks is one of so many

Key: TypeAlias = tuple[int, str, int]
"""Plan, weight and first row of a block."""


class NewCodes:
    """The quantised weights of outputs that the base holds as plain numbers, or in another format."""

    def __init__(self, plans: Sequence[Plan], merger: BlockMerger, pool: ThreadPoolExecutor, read: Fetch) -> None:
        """`read` returns a stored tensor without caching it."""
        self.merger, self.pool, self.read = merger, pool, read
        self._known: list[dict[str, OutputTensor]] = [{} for _ in plans]
        self._own = [
            {t.name: t for f in plan.files for t in f.targets if t.packing.encoding.needs_largest} for plan in plans
        ]
        self._partners = [partners(own.values()) for own in self._own]
        self._held: dict[Key, Held] = {}
        on_host = merger.at[0].device.type == "cpu"
        self._room = min(plan.job.max_memory for plan in plans) // SHARE if on_host else 0
        """Bytes that may still be held."""

    def measure(self, plan: int, change: Change, base: memoryview) -> Iterator[Future[Outcome]]:
        """Find the scales of the whole weights of a window, where they are not known yet; yield their bytes.

        `base`: the window's input. What it holds is not read again.
        """
        own, known, joined = self._own[plan], self._known[plan], self._partners[plan]
        names = (t.name for t in chain((f.block.target for f in change.folds), (c.target for c in change.converts)))
        new = self._unknown(plan, names) if own else []
        largest: dict[str, float] = {}
        work = chain.from_iterable(self._measurements(plan, target, change, base) for target in new)
        while some := list(islice(work, AT_ONCE)):
            found = settled(some)
            for name, magnitude in found.largest.items():
                largest[name] = max(magnitude, largest.get(name, 0.0))
            self._held |= {(plan, held.block.target.name, held.block.first): held for held in found.held}
        for target in new:
            together = joined.get(target.name, (target,))
            known[target.name] = refitted(target, max(largest.get(t.name, 0.0) for t in together), self.read)
            done: Future[Outcome] = Future()
            done.set_result(Outcome(parts=tuple(new_parts(known[target.name]))))
            yield done

    def _unknown(self, plan: int, names: Iterable[str]) -> list[OutputTensor]:
        """Return the weights among these whose scales are not known yet, with those that need the same scale."""
        own, known, joined = self._own[plan], self._known[plan], self._partners[plan]
        new = (own[name] for name in names if name in own and name not in known)
        return [*{t.name: t for target in new for t in joined.get(target.name, (target,))}.values()]

    def block(self, plan: int, block: Block) -> tuple[Block, Held | None]:
        """Return a block of a weight with the scale of the whole weight, and its merged numbers where they are held."""
        target = self._known[plan].get(block.target.name)
        held = self._held.pop((plan, block.target.name, block.first), None)
        if held is not None:
            self._room += self._size(block)
        return block if target is None else replace(block, target=target), held

    def _size(self, block: Block) -> int:
        """Return the bytes of the merged numbers of a block."""
        return block.elements * self.merger.at[0].dtype.itemsize

    def begin(
        self, plan: int, c: Convert, base: memoryview, out: memoryview, fetch: Fetch
    ) -> Iterator[Future[Outcome]]:
        """Start to store numbers that no adapter changes."""
        target = self._known[plan].get(c.target.name, c.target)
        weight, read, made = c.target.weight, c.target.weight.packing.encoding, c.target.packing.encoding
        step = max(1, BLOCK_ELEMENTS // c.target.group) * c.target.group
        for low in range(0, c.count, step):
            count = min(step, c.count - low)
            source, at = c.source + read.nbytes(low), c.at + made.nbytes(low)
            given = packed(base[source : source + read.nbytes(count)], weight.packing, weight.stored.dtype, (count,))
            into = packed(out[at : at + made.nbytes(count)], target.packing, target.dtype, (count,))
            yield self.pool.submit(_store, target, (c.first + low, count), given, into, fetch)

    def _measurements(
        self, plan: int, target: OutputTensor, change: Change, base: memoryview
    ) -> Iterator[Future[Outcome]]:
        """Start to measure a weight, part by part; yield the futures."""
        if target.uses:
            there = {f.block.first: f for f in change.folds if f.block.target.name == target.name}
            for block in blocks(target):
                yield from self.merger.begin([self._item(block, there.get(block.first), base)])
            return
        total, group, weight = prod(target.shape), target.group, target.weight
        step = max(1, BLOCK_ELEMENTS // group) * group
        read = weight.packing.encoding
        here = next((c for c in change.converts if c.target.name == target.name and c.count == total), None)
        for first in range(0, total, step):
            count, given = min(step, total - first), None
            if here is not None:
                low = here.source + read.nbytes(first)
                given = packed(base[low : low + read.nbytes(count)], weight.packing, weight.stored.dtype, (count,))
            yield self.pool.submit(self._plain, target, first, count, given)

    def _item(self, block: Block, fold: Fold | None, base: memoryview) -> Item:
        """Return a block to measure. `fold`: the block in the window whose input is `base`, if it is there."""
        item = item_of(block, self.read, None if fold is None else base_view(fold, base))
        keep = self._size(block) <= self._room
        self._room -= self._size(block) if keep else 0
        return replace(item, measured=True, keep=keep)

    def _plain(self, target: OutputTensor, first: int, count: int, given: Tensor | None) -> Outcome:
        """Return the largest number of a part of a weight that no adapter changes, read from the base if not given."""
        numbers = stored_numbers(target.weight, first, count, self.read) if given is None else given
        return Outcome(largest={target.name: largest(decoded(numbers, target.weight, first, count, self.read))})


def _store(target: OutputTensor, span: tuple[int, int], numbers: Tensor, into: Tensor, fetch: Fetch) -> Outcome:
    """Store (first, count) numbers in another way."""
    values = decoded(numbers, target.weight, *span, fetch)
    made = recode(target, span[0], values, Codes(into, None), fetch)
    if made is None:
        return Outcome(largest={target.name: largest(values)})
    into.copy_(made.codes)
    return Outcome(parts=made.others)


def made_again(target: OutputTensor, merger: BlockMerger) -> Iterator[tuple[Block, Tensor, Outcome]]:
    """Yield every block of a refitted target with its codes, as bytes, and its other parts."""
    for block in blocks(target):
        item = item_of(block, merger.tensors.fetch)
        codes, outcome = item.into, merger.fold([item])
        assert not outcome.largest, "the new scale covers the weight"
        yield block, codes, outcome
