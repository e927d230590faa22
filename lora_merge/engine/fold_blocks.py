"""Folds the changed blocks of one window: blocks of equal kind are stacked into one batched call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count
from threading import local
from typing import Any, Final

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, DoesNotFit
from ..disk.files import Memory
from ..dtypes import COMPUTE_DTYPES
from ..errors import FULL, ResourceError, ShapeMismatch, device_full
from ..files.codecs.base import Packing
from ..job import Job
from ..planning.plan import OutputTensor
from .blocks import Block, blocks
from .buffers import Outcome
from .devices import DeviceMemory, fallback_device, passed_over, precise, release, stack_size
from .fold import RULES
from .patch_tensors import PatchTensors
from .placement import (
    DeviceStream,
    Placement,
    beyond,
    finite,
    host,
    land,
    odd,
    settle,
    stage,
    sum_too_large,
)
from .tensors import decoded, encoded, stored_numbers
from .torch_state import exact_products

HOST: Final = Placement(torch.device("cpu"), torch.float64)


@dataclass(frozen=True)
class Item:
    """A block with its stored base values and the place for its result, both on the host."""

    block: Block
    base: Tensor  # [rows, cols], or as many numbers as are stored of a padded weight's rows
    into: Tensor  # [rows, cols], output dtype


@dataclass(frozen=True)
class BlockMerger:
    """Folds blocks at one placement, or at several."""

    at: tuple[Placement, ...]
    tensors: PatchTensors  # whoever gave them empties their cache
    pool: ThreadPoolExecutor | None = None  # for blocks side by side; tensors are then fetched from its threads
    max_vram: int | None = None
    notes: list[str] = field(default_factory=list)  # what the user should know
    saturate: bool = False  # whether numbers that the output's dtype has no room for are cut
    fallback_device: Placement | None = None  # for what does not fit, even alone
    room: DeviceMemory = field(default_factory=DeviceMemory)
    _own: local = field(default_factory=local)  # each thread's lane
    _lanes: Iterator[int] = field(default_factory=count)

    @staticmethod
    def of(
        job: Job, at: tuple[Placement, ...], tensors: PatchTensors, pool: ThreadPoolExecutor | None = None
    ) -> BlockMerger:
        """As a job wants it."""
        return BlockMerger(
            at, tensors, pool, job.max_vram, passed_over(job.device, COMPUTE_DTYPES[job.compute_dtype]),
            job.on_overflow == "saturate", fallback_device(job.device, at),
        )  # fmt: skip

    def fold(self, items: Sequence[Item]) -> Outcome:
        """Fold every item in place, equal kinds together. No autograd; nothing but `into` is written.

        TooLarge for numbers that have no room and may not be cut.
        """
        return settled(list(self.begin(items)))

    def begin(self, items: Sequence[Item]) -> Iterator[Future[Outcome]]:
        """As `fold`, side by side where there is a pool: what is yielded goes to `settled`."""
        for group in list(_groups(items, self._most)):
            if self.pool is None:
                done: Future[Outcome] = Future()
                done.set_result(self._fold(group))
                yield done
            else:
                yield self.pool.submit(self._fold, group)

    def _most(self, block: Block) -> int:
        """Return how many of these may go into one call."""
        return stack_size(_precise(self.at[0], block), self.max_vram, block.last - block.first, block.cols)

    def _fold(self, group: Sequence[Item]) -> Outcome:
        """Fold blocks of one kind in one call, or in as many as the device's memory needs."""
        name, numbers = group[0].block.target.name, sum(i.into.numel() for i in group)
        if len(group) == 1 or numbers <= self.room.most:
            with self.room.shared():
                found = self._attempt(group)
            if isinstance(found, str) and len(group) == 1:
                with self.room.alone():
                    self._relieve()  # of what other lanes have left
                    found = self._attempt(group)
                note = "a block did not fit beside others' work"
                if isinstance(found, str) and self.fallback_device is not None:
                    found = self._attempt(group, DeviceStream(self.fallback_device))
                    note = "a block was folded on the CPU"
                if isinstance(found, str):
                    raise ResourceError("the device is out of memory", f"{name}: {found}", FULL)
                self._note(note)
            if not isinstance(found, str):
                return found
            self.room.most = min(self.room.most, numbers // 2)
            self._note("smaller batches were used")
        half = len(group) // 2
        return self._fold(group[:half]) + self._fold(group[half:])

    def _attempt(self, group: Sequence[Item], lane: DeviceStream | None = None) -> Outcome | str:
        """Fold them in one call; returns what the device says where it is short of memory."""
        try:
            lane = lane or self._lane()
            with torch.no_grad(), exact_products(), lane.turn():
                merged = self._fold_at(group, _precise(lane.at, group[0].block), lane)
        except DoesNotFit as e:  # what only values tell: indices that point outside, …
            raise ShapeMismatch("adapter tensors do not fit the base", f"{group[0].block.target.name}: {e}",
                                "merge into the checkpoint that the adapter was trained on") from e  # fmt: skip
        except RuntimeError as e:
            short = device_full(e)
            if not short:
                raise
        else:
            return Outcome() if merged is None else self._cut(group, merged)
        self._relieve()  # outside `except`: while an exception is handled, its frames hold the memory that is missing
        return short

    def _relieve(self) -> None:
        """Give back what is not in use at the moment."""
        self.tensors.kept.clear()
        release(self.at)

    def _fold_at(self, group: Sequence[Item], at: Placement, lane: DeviceStream) -> Tensor | None:
        """Fold them and write the results; gives these back, as computed, if some of them need a closer look."""
        blocks = [i.block for i in group]
        stacks = self.tensors.stacks(blocks, at, lane)
        base = self._base(group, at, lane)
        merged = RULES[blocks[0].target.method.name](base, stacks)
        if merged is base and _in_place(group, at):
            return merged if odd(merged) else None
        return None if land(self._encoded(group, merged), [i.into for i in group], lane) else merged

    def _encoded(self, group: Sequence[Item], merged: Tensor) -> Tensor:
        """Merged blocks as they are stored, but for the rounding."""
        blocks = [i.block for i in group]
        if blocks[0].target.packed is None:
            return merged
        rows = zip(merged.unbind(), blocks, strict=True)
        return torch.stack([encoded(v, b.target.packing, b.first, self.tensors.fetch) for v, b in rows])

    def _cut(self, group: Sequence[Item], merged: Tensor) -> Outcome:
        """Look at all numbers; TooLarge for those of a finite base that became none, or that may not be cut."""
        found: Counter[str] = Counter()
        largest: dict[str, float] = {}
        for item, values in zip(group, merged.unbind(), strict=True):
            name, packing = item.block.target.name, item.block.target.packing
            if self._overflown(item, values):
                raise sum_too_large(name, values.dtype)
            numbers = host(encoded(values, packing, item.block.first, self.tensors.fetch))
            if packing.encoding.codec.refit is not None and beyond(numbers, item.into.dtype).any():
                own = host(values)
                largest[name] = max(largest.get(name, 0.0), float(own[finite(own)].abs().max()))
            else:
                found[name] += settle(name, numbers, item.into, saturate=self.saturate)
        return Outcome(+found, largest)

    def _overflown(self, item: Item, values: Tensor) -> bool:
        """Return whether a sum is NaN or infinite where the base is a number. A formula that reads other numbers of
        the base may make that of one NaN among them: the proof tells whether it did so rightly."""
        sound = finite(values)
        if sound.all() or not all(finite(self.tensors.whole(key)).all() for key in item.block.reads):
            return False
        overwritten = item.base is item.into
        base = stored_numbers(item.block, self.tensors.fetch) if overwritten else item.base
        known = finite(self._base([replace(item, base=base)], HOST, DeviceStream(HOST))[0])
        return bool((known & ~sound).any())

    def _values(self, item: Item) -> Tensor:
        """Return the base values of an item."""
        return decoded(item.base, item.block.target.weight, item.block.first, self.tensors.fetch)

    def _lane(self) -> DeviceStream:
        """Return the calling thread's lane; threads share the placements out among them."""
        if not hasattr(self._own, "lane"):
            number, which = divmod(next(self._lanes), len(self.at))
            self._own.lane = DeviceStream(self.at[which], number)
        lane: DeviceStream = self._own.lane
        return lane

    def leave(self) -> None:
        """Give up the calling thread's lane, with its memory."""
        self._own.__dict__.clear()

    def _note(self, text: str) -> None:
        text = f"{','.join(str(p.device) for p in self.at)} was short of memory: {text}"
        if text not in self.notes:
            self.notes.append(text)

    def _base(self, group: Sequence[Item], at: Placement, lane: DeviceStream) -> Tensor:
        """Return [n, rows, cols] in the compute dtype, to be overwritten; padded bases stand in the low corner of
        zeros.
        """
        block = group[0].block
        if not block.target.weight.padded:
            return group[0].base.unsqueeze(0) if _in_place(group, at) else stage([*map(self._values, group)], at, lane)
        out = torch.zeros((len(group), block.last - block.first, block.cols), dtype=at.dtype, device=at.device)
        for rows, item in zip(out, group, strict=True):
            if item.base.numel():
                weight = item.block.target.weight
                corner = stage([item.base.reshape(-1, *weight.stored.shape[1:])], at)[0]
                rows.view(-1, *weight.shape[1:])[tuple(slice(0, d) for d in corner.shape)] = corner
        return out


def settled(under_way: Sequence[Future[Outcome]]) -> Outcome:
    """Return what all of them have found. Waits for all, also if one fails: the memory must be at rest before anyone
    uses it again."""
    wait(under_way)
    return sum((done.result() for done in under_way), Outcome())


def _precise(at: Placement, block: Block) -> Placement:
    """Return the placement, in fp64 where a formula factorises or inverts."""
    rows = [ALGORITHMS[s.use.patch.algorithm] for s in block.slices]
    return precise(at) if any(r.decomposes for r in rows) else at


def _in_place(group: Sequence[Item], at: Placement) -> bool:
    """Return whether the base values lie where the result goes, in the compute dtype: no copy is needed in or out."""
    one = group[0]
    return len(group) == 1 and one.base is one.into and (at.device.type, at.dtype) == ("cpu", one.into.dtype)


def _groups(items: Sequence[Item], most: Callable[[Block], int]) -> Iterator[list[Item]]:
    kinds: dict[Any, list[Item]] = {}
    for item in items:
        kinds.setdefault(item.block.kind, []).append(item)
    for same in kinds.values():
        n = most(same[0].block)
        for first in range(0, len(same), n):
            yield same[first : first + n]


def refitted(target: OutputTensor, largest: float) -> OutputTensor:
    """Return the target with the small tensors that cover a weight of this largest magnitude, held in memory."""
    encoding, sides, beside = target.packing
    assert encoding.codec.refit is not None, "only such weights outgrow what they have"
    made = {
        role: replace(sides[role], source=Memory.of(sides[role].file, memoryview(bytearray(raw))), offset=0)
        for role, raw in encoding.codec.refit(encoding, largest).items()
    }
    return target._replace(packed=Packing(encoding, {**sides, **made}, beside))


def made_again(target: OutputTensor, merger: BlockMerger) -> Iterator[tuple[Block, Tensor]]:
    """Yield every block of a refitted target with its stored numbers."""
    shape = target.packing.encoding.stored_shape
    for block in blocks(target):
        base = stored_numbers(block, merger.tensors.fetch)
        into = torch.empty(shape((block.last - block.first, block.cols)), dtype=base.dtype)
        outcome = merger.fold([Item(block, base, into)])
        assert not outcome.largest, "it covers the weight"
        yield block, into
