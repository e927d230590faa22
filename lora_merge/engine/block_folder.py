"""Folds the changed blocks of one window: on a device, blocks of equal kind are stacked into one batched call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from operator import attrgetter
from threading import local
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..algorithms import DoesNotFit
from ..dtypes import COMPUTE_DTYPES
from ..errors import FULL, ResourceError, device_failure, device_full, misfit
from ..files.codecs.arithmetic import largest
from ..files.codecs.draws import Draw, draws, rounded
from ..job import Job
from ..planning.plan import OutputTensor
from ..text import Note
from .cancelling import Cancelled, LargestSums, stop_where
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
from .device_memory import DRAWN, DeviceMemory, block_bytes, lane_share, lanes
from .devices import device_bytes, device_failed, fallback_device, passed_over, precise_at, release
from .fold import new_weights
from .patch_tensors import PatchTensors
from .recoding import Codes, NewParts, recode
from .row_blocks import Block, groups, portions
from .stages import MemoryBudget, Outcome, settled
from .tensor_moves import HOST, DeviceStream, Placement, host, land, numbers, odd, settle, sum_too_large
from .tensors import Held, Item, base_values, codecs_on, computing, in_place, in_units
from .torch_state import exact_products

STAGED: Final = 2**23
"""The most bytes of one call that go through a lane's pinned memory, up and down, unless one block has more."""

Result = TypeVar("Result")
_block: Final[Callable[[Item], Block]] = attrgetter("block")

LEAST_WORK: Final = 2**16
"""The least numbers that a thread of the pool gets at once: getting a tiny group would take longer than folding it."""


class Folded(NamedTuple):
    """Folded blocks: the merged values, if there is more to do with them, and the sample of their numbers."""

    values: Tensor | None  # codes are to be made of them, or some may be too large for their dtype
    sample: RowSample | RunSample | None
    read: PendingRowSums = tuple


@dataclass(frozen=True)
class BlockMerger:
    """Folds blocks at one placement, or at several."""

    at: tuple[Placement, ...]
    tensors: PatchTensors  # the caller empties their cache
    pool: ThreadPoolExecutor | None = None  # for blocks side by side; its threads then fetch tensors
    max_vram: int | None = None
    notes: list[Note] = field(default_factory=list)  # remarks for the user
    saturate: bool = False  # whether numbers that are too large for the output's dtype are cut
    draw: Draw | None = None  # for stochastic rounding
    staged: int = STAGED  # bytes of pinned memory for a transfer
    sampling: Sampling = field(default_factory=Sampling)  # how many numbers are measured
    fallback_device: Placement | None = None  # for a block that does not fit the device even alone
    room: DeviceMemory = field(default_factory=DeviceMemory)
    host: MemoryBudget = field(default_factory=lambda: MemoryBudget(2**30))  # for changes of whole weights
    _own: local = field(default_factory=local)  # each thread's lane
    _lanes: Iterator[int] = field(default_factory=count)

    @staticmethod
    def of(
        job: Job, at: tuple[Placement, ...], tensors: PatchTensors, pool: ThreadPoolExecutor | None = None
    ) -> BlockMerger:
        """Return the merger with the options of a job."""
        return BlockMerger(
            at, tensors, pool, job.max_vram, passed_over(job.device, COMPUTE_DTYPES[job.compute_dtype]),
            saturate=job.on_overflow == "saturate", draw=draws(job.seed) if job.rounding == "stochastic" else None,
            sampling=Sampling(runs=job.rounding != "stochastic"),
            fallback_device=fallback_device(job.device, at), host=MemoryBudget(job.max_memory),
        )  # fmt: skip

    def fold(self, items: Sequence[Item]) -> Outcome:
        """Fold all items, equal kinds together, without autograd; only `into` is written.

        Raises TooLarge for numbers that are too large for their dtype and may not be cut.
        """
        return settled(list(self.begin(items)))

    def begin(self, items: Sequence[Item]) -> Iterator[Future[Outcome]]:
        """Start to fold all items, side by side if there is a pool; yield futures for `settled`."""
        held, rest = [i for i in items if i.held is not None], [i for i in items if i.held is None]
        shares = list(portions(groups(rest, _block, self._most), _numbers, LEAST_WORK))
        shared = SharedSums(len(held) + len(shares))
        work = [partial(self._store, item, shared) for item in held]
        work += [partial(self._fold_all, some, shared) for some in shares]
        for one in work:
            if self.pool is None:
                done: Future[Outcome] = Future()
                done.set_result(one())
                yield done
            else:
                yield self.pool.submit(one)

    def fold_here(self, items: Sequence[Item]) -> Outcome:
        """Fold all items in the calling thread, which may be one of the pool."""
        return self._fold_all(groups(items, _block, self._most), SharedSums(1))

    def _fold_all(self, some: Iterable[Sequence[Item]], shared: SharedSums) -> Outcome:
        return _measured(sum(map(self._fold, some), Outcome()), shared)

    def _most(self, block: Block) -> int:
        """Return how many blocks like this one may go into one call: on a device as many as fit a lane's share of its
        memory and its pinned memory. On a CPU one, as the libraries round batched products otherwise than single ones,
        and how many blocks a window has depends on the memory limit."""
        size = self.size(block)
        if not size:
            return 1
        moved = max(1, *(t.packing.encoding.nbytes(block.elements) for t in (block.target, block.target.weight)))
        return max(1, min(self.share // size, self.staged // moved))

    @cached_property
    def share(self) -> int:
        """The bytes of its device's memory that a lane may use for blocks."""
        held = self.tensors.held.size(self.at[0]) if self.tensors.held is not None else 0
        return lane_share(self.at[0], device_bytes(self.max_vram), held)

    def _fold(self, group: Sequence[Item]) -> Outcome:
        """Fold blocks of one kind in one call, or in as many as are needed; those whose terms cancel in fp64."""
        try:
            return self._fold_in_memory(group)
        except Cancelled as e:
            again = [self.tensors.untouched(group[n]) for n in sorted(e.numbers)]
            exact = [replace(item, block=replace(item.block, exact=True)) for item in again]
            rest = [item for n, item in enumerate(group) if n not in e.numbers]
            return sum((self._fold(some) for some in (exact, rest) if some), Outcome())

    def _fold_in_memory(self, group: Sequence[Item]) -> Outcome:
        """Fold blocks of one kind in one call, or in as many as the device's memory needs."""
        name, numbers = group[0].block.target.name, _numbers(group)
        if len(group) == 1 or numbers <= self.room.most:
            host, size = self._elsewhere(group[0].block), self.size(group[0].block) * len(group)
            large = host is None and size > self.share
            with self.room.alone() if large else self.room.shared(), self.host.hold(sum(i.block.room for i in group)):
                found = self._attempt(group, host)
            if isinstance(found, str) and len(group) == 1:
                with self.room.alone():
                    self._relieve()  # other lanes have left unused memory
                    found = self._attempt(group)
                note = "a block did not fit beside others' work"
                if isinstance(found, str) and self.fallback_device is not None:
                    found = self._attempt(group, DeviceStream(self.fallback_device))
                    note = "a block was folded on the CPU"
                    self.room.spill()
                if isinstance(found, str):
                    raise ResourceError("the device is out of memory", f"{name}: {found}", FULL)
                self.note(note)
            if not isinstance(found, str):
                return found
            self.room.halve(numbers)
            self.note("smaller batches were used")
        half = len(group) // 2
        return self._fold(group[:half]) + self._fold(group[half:])

    def size(self, block: Block) -> int:
        """Return the bytes of the device's memory that folding a block takes; 0 on a CPU."""
        at = precise_at(self.at[0], block)
        drawn = DRAWN * block.elements if self.draw is not None else 0
        return 0 if at.device.type == "cpu" else block_bytes(block, at) + drawn

    def exceeds(self, size: int) -> bool:
        """Return whether so many bytes are more than `--max-vram` leaves for all lanes together; False without it."""
        return self.max_vram is not None and size > self.share * lanes(self.at[0], self.max_vram)

    def _elsewhere(self, block: Block) -> DeviceStream | None:
        """Return a lane of the CPU for a block that needs more than `--max-vram`, or while the device has no room."""
        cpu = self.fallback_device if self.room.full else None
        if self.exceeds(self.size(block)):
            self.note("a block that needs more than --max-vram was folded on the CPU")
            cpu = Placement(HOST.device, self.at[0].dtype)
        return DeviceStream(cpu) if cpu else None

    def _attempt(self, group: Sequence[Item], lane: DeviceStream | None = None) -> Outcome | str:
        """Fold blocks in one call; return the device's message if it is out of memory."""
        if self.at[0].device.type == "cpu":
            group = in_units(group, self.tensors.fetch)
        try:
            merged = self.turn(lambda lane: self._fold_at(group, precise_at(lane.at, group[0].block), lane), lane)
        except DoesNotFit as e:
            if len(group) > 1:  # one by one, the error has the right name
                for item in group:
                    self._attempt([item], lane)
            raise misfit(group[0].block.target.name, e) from e
        if isinstance(merged, str):
            return merged
        values, sample, read = merged
        if values is not None and group[0].block.target.packed is not None:
            return self._recoded(group, values, sample if isinstance(sample, RowSample) else None, lane)
        outcome = Outcome(measured=read(), samples=() if sample is None or sample.on_device else (sample,))
        return outcome if values is None else outcome + self._cut(group, values)

    def turn(self, work: Callable[[DeviceStream], Result], lane: DeviceStream | None = None) -> Result | str:
        """Return the result of work in one turn of a lane, by default the calling thread's; the device's message if it
        is out of memory. DeviceFailed if the device has failed."""
        try:
            lane = lane or self._lane()
            with torch.no_grad(), exact_products(), lane.turn():
                return work(lane)
        except RuntimeError as e:
            short = device_full(e)
            if not short and (text := device_failure(e)):
                raise device_failed(self.at[0].device if lane is None else lane.at.device, text) from e
            if not short:
                raise
        self._relieve()  # outside `except`: frames of an exception in hand keep their tensors
        return short

    def norms(self, targets: Sequence[OutputTensor]) -> Outcome:
        """Return the norms of changes from their factors; none if the device is out of memory."""
        found = self.turn(lambda lane: factor_norms(targets, self.tensors, lane))
        return Outcome() if isinstance(found, str) else Outcome(norms=found)

    def _relieve(self) -> None:
        """Give unused memory back."""
        self.tensors.kept.clear()
        release(self.at)

    def _fold_at(self, group: Sequence[Item], at: Placement, lane: DeviceStream) -> Folded:
        """Fold blocks and write the results, but for codes."""
        blocks = [i.block for i in group]
        stacks, one = self.tensors.stacks(blocks, at, lane), group[0]
        base = base_values(group, at, None if one.keep else lane, self.tensors.fetch)
        if units := [i.unit for i in group if not i.block.target.packing.scaled]:
            stacks = [s.in_units(numbers(units, at)) for s in stacks]
        sample = None if one.measured and not one.keep else sample_of(blocks, base, self.sampling)
        sums = LargestSums.of(blocks, base)
        merged = new_weights(blocks, base, stacks, *(o for o in (sums, sample) if o is not None))
        if sums is not None:
            stop_where(sums.cancelled)
        if blocks[0].target.packed is not None:
            return Folded(merged, replace(sample, units=units) if isinstance(sample, RowSample) else None)
        if self.draw is not None and one.into.dtype.itemsize < 4:
            drawn = [self.drawn(block, v) for block, v in zip(blocks, merged.unbind(), strict=True)]
            merged = drawn[0].unsqueeze(0) if len(drawn) == 1 else torch.stack(drawn)  # which copies also one
            if isinstance(sample, RowSample):
                sample.note_stored(merged)
        read = bring_sums([sample] if isinstance(sample, RowSample) and sample.on_device else [], lane)
        if merged is base and in_place(group, at):
            return Folded(merged if odd(merged) else None, sample, read)
        return Folded(None if land(merged, [i.into for i in group], lane) else merged, sample, read)

    def _uniform(self, block: Block, device: torch.device) -> Tensor | None:
        """Return the draws of a block's numbers, made on a device; None for rounding to the nearest."""
        if self.draw is None:
            return None
        with computing(device):
            return self.draw(block.target.stored, block.first * block.cols, block.elements)

    def drawn(self, block: Block, values: Tensor) -> Tensor:
        """Return merged values as numbers of the output's dtype, rounded stochastically where that is asked for."""
        own = values if codecs_on(values.device) else host(values)
        target, at = block.target, block.first * block.cols
        with computing(own.device):
            return own if self.draw is None else rounded(own, target.dtype, partial(self.draw, target.stored), at)

    def _recoded(
        self, group: Sequence[Item], merged: Tensor, sample: RowSample | None, lane: DeviceStream | None
    ) -> Outcome | str:
        """Store merged blocks that are not plain numbers; nothing is written if the device is out of memory."""
        look = 0 if group[0].keep else sample_width(sample)
        pairs = [*zip(group, merged.unbind(), strict=True)]
        made = self.turn(lambda _: [self._stored(item, values, look) for item, values in pairs], lane)
        if isinstance(made, str):
            return made
        outcome, there = Outcome(), [n for n, found in enumerate(made) if isinstance(found, NewParts)]
        if group[0].keep:
            outcome = Outcome(held=tuple(Held(i.block, v, sample) for i, v in pairs))
        elif sample is not None and there:
            new = [found for found in made if isinstance(found, NewParts)]
            bases = [group[n].base for n in there]
            measured, samples = measure_codes(sample.on_host().only(there), bases, new, self.tensors.fetch)
            outcome = Outcome(measured=tuple(measured), samples=tuple(samples))
        for item, found in zip(group, made, strict=True):
            if isinstance(found, Outcome):
                outcome += found
            else:
                item.into.copy_(found.codes)
                outcome += Outcome(parts=found.others)
        return outcome

    def _store(self, item: Item, shared: SharedSums) -> Outcome:
        """Store a block that is merged already."""
        held = item.held
        assert held is not None
        sample = None if held.sample is None else replace(held.sample, blocks=[item.block])
        found = self._recoded([item], held.values.unsqueeze(0), sample, None)
        if isinstance(found, str):
            raise ResourceError("the device is out of memory", f"{item.block.target.name}: {found}", FULL)
        return _measured(found, shared)

    def _stored(self, item: Item, values: Tensor, look: int) -> NewParts | Outcome:
        """Return how a merged block is stored, or its largest number where no scale covers it. `look`: how many numbers
        of the output are wanted."""
        target, own = item.block.target, values if codecs_on(values.device) else host(values)
        looked = item.held is not None or (item.whole is not None and self.draw is None)
        if not looked and odd(own) and self.tensors.overflown(item, values):
            raise sum_too_large(target.name, values.dtype)
        if item.measured:
            return Outcome(largest={target.name: largest(own)})
        codes = Codes(item.base, self._uniform(item.block, own.device), look)
        found = recode(target, item.block.stored[0], own, codes, self.tensors.fetch)
        if found is None and item.whole is not None:  # or a sum is not finite, which no scale covers
            again = self._attempt([replace(item.whole, measured=True, keep=True)])
            assert isinstance(again, Outcome), "a CPU has room"
            return Outcome(largest=again.largest)
        return Outcome(largest={target.name: largest(own)}) if found is None else found

    def _cut(self, group: Sequence[Item], merged: Tensor) -> Outcome:
        """Write the numbers again, those too large for their dtype cut; TooLarge if they may not be cut, or if a sum of
        finite numbers is not finite."""
        found: Counter[str] = Counter()
        for item, values in zip(group, merged.unbind(), strict=True):
            name = item.block.target.name
            if self.tensors.overflown(item, values):
                raise sum_too_large(name, values.dtype)
            found[name] += settle(name, host(values), item.into, saturate=self.saturate)
        return Outcome(+found)

    def _lane(self) -> DeviceStream:
        """Return the calling thread's lane; lanes are distributed over the placements in turn."""
        if not hasattr(self._own, "lane"):
            number, which = divmod(next(self._lanes), len(self.at))
            self._own.lane = DeviceStream(self.at[which], number)
        lane: DeviceStream = self._own.lane
        return lane

    def leave(self) -> None:
        """Give up the calling thread's lane, with its memory."""
        self._own.__dict__.clear()

    def note(self, text: str) -> None:
        """Add a note, once, on what was done because a device was short of memory."""
        note = Note(f"{','.join(str(p.device) for p in self.at)} was short of memory: {text}")
        self.notes.extend({note} - {*self.notes})


def _measured(outcome: Outcome, shared: SharedSums) -> Outcome:
    """Return the outcome of a thread, with measures in place of its samples."""
    return replace(outcome, samples=(), measured=outcome.measured + shared.measured(outcome.samples))


def _numbers(group: Sequence[Item]) -> int:
    return sum(item.into.numel() for item in group)
