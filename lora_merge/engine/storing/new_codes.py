"""Quantises weights on the way out.

Some formats have one scale for the whole weight, and the first byte of its codes depends on it. Such a weight is looked
at twice: for its largest number, then for its codes. A changed weight is folded twice, and its numbers are never all in
memory; the second time the system still has the base's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from math import prod
from typing import Final

from torch import Tensor

from ...files.codecs.arithmetic import largest
from ...planning.plan import OutputTensor, Plan
from ..blocks import BLOCK_ELEMENTS, Block, blocks
from ..buffers import Outcome
from ..fold_blocks import BlockMerger, settled
from ..tensors import Fetch, apart, decoded, packed, stored_numbers
from ..windows import Change, Convert
from .recoding import Codes, new_parts, recode, refitted

AT_ONCE: Final = 16  # blocks that are measured side by side: 64 MB of numbers


class NewCodes:
    """The quantised weights of outputs that the base holds as plain numbers, or in another format."""

    def __init__(self, plans: Sequence[Plan], merger: BlockMerger, pool: ThreadPoolExecutor, read: Fetch) -> None:
        """`read` returns a stored tensor without caching it."""
        self.merger, self.pool, self.read = merger, pool, read
        self._known: list[dict[str, OutputTensor]] = [{} for _ in plans]
        self._own = [
            {t.name: t for f in plan.files for t in f.targets if t.packing.encoding.measured} for plan in plans
        ]

    def measure(self, plan: int, change: Change, base: memoryview) -> Iterator[Future[Outcome]]:
        """Find the scales of the whole weights of a window, where they are not known yet; yield their bytes.

        `base`: the window's input. An unchanged weight that it holds as a whole is not read again.
        """
        own, known = self._own[plan], self._known[plan]
        names = (t.name for t in chain((f.block.target for f in change.folds), (c.target for c in change.converts)))
        for name in dict.fromkeys(names) if own else ():
            if name in own and name not in known:
                known[name] = refitted(own[name], self._largest(own[name], change, base), self.read)
                done: Future[Outcome] = Future()
                done.set_result(Outcome(parts=tuple(new_parts(known[name]))))
                yield done

    def block(self, plan: int, block: Block) -> Block:
        """Return a block of a weight with the scale of the whole weight."""
        target = self._known[plan].get(block.target.name)
        return block if target is None else replace(block, target=target)

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

    def _largest(self, target: OutputTensor, change: Change, base: memoryview) -> float:
        """Return the largest magnitude of a weight with its changes."""
        found, started = 0.0, self._measurements(target, change, base)
        while some := list(islice(started, AT_ONCE)):
            found = max([found, *settled(some).largest.values()])
        return found

    def _measurements(self, target: OutputTensor, change: Change, base: memoryview) -> Iterator[Future[Outcome]]:
        """Start to measure a weight, part by part; yield the futures."""
        if target.uses:
            for block in blocks(target):
                yield from self.merger.begin([replace(apart(block, self.read), measured=True)])
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
