"""Lanes, on which blocks are folded, and the memory that a call on one may use.

Each thread has a lane of its own: a stream on one of the placements (`Lanes`). `MemoryPolicy` decides how many blocks
are folded in one call, and on which lane, so that devices and the host have the memory for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from threading import local
from typing import Final, TypeAlias, TypeVar

import torch

from ..errors import DEVICE_FULL, ResourceError, device_failure, device_full
from ..text import Note
from .device_memory import STOCHASTIC_BYTES, DeviceMemory, block_bytes, lane_count, lane_share
from .devices import device_bytes, device_failed, precise_at, release
from .row_blocks import Block
from .stages import MemoryBudget
from .tasks import BlockTask, OutOfMemory
from .tensor_moves import HOST, DeviceStream, Placement
from .tensors import DeviceCache
from .torch_state import exact_products

STAGED: Final = 2**23
"""The most bytes of one call that go through a lane's pinned memory, up and down, unless one block has more."""

Task = TypeVar("Task", bound=BlockTask)
Result = TypeVar("Result")

Call: TypeAlias = Callable[[Sequence[Task], DeviceStream | None], Result | OutOfMemory]
"""Function that folds blocks on a lane, by default the calling thread's."""


class Lanes:
    """The lanes of all threads to some placements. `cache`: device tensors that are dropped if memory is short."""

    def __init__(self, at: tuple[Placement, ...], cache: DeviceCache) -> None:
        self.at, self._cache = at, cache
        self._of_thread, self._lane_numbers = local(), count()

    def lane(self) -> DeviceStream:
        """Return the calling thread's lane; lanes are distributed over the placements in turn."""
        if not hasattr(self._of_thread, "lane"):
            number, which = divmod(next(self._lane_numbers), len(self.at))
            self._of_thread.lane = DeviceStream(self.at[which], number)
        lane: DeviceStream = self._of_thread.lane
        return lane

    def leave(self) -> None:
        """Give up the calling thread's lane, with its memory."""
        self._of_thread.__dict__.clear()

    def turn(self, work: Callable[[DeviceStream], Result], lane: DeviceStream | None = None) -> Result | OutOfMemory:
        """Return the result of work in one turn of a lane, by default the calling thread's. DeviceFailed if the device
        has failed."""
        try:
            lane = lane or self.lane()
            with torch.no_grad(), exact_products(), lane.turn():
                return work(lane)
        except RuntimeError as e:
            short = device_full(e)
            if not short and (text := device_failure(e)):
                raise device_failed(self.at[0].device if lane is None else lane.at.device, text) from e
            if not short:
                raise
        self.relieve()  # outside `except`: frames of an exception in hand keep their tensors
        return OutOfMemory(short)

    def relieve(self) -> None:
        """Give unused memory back."""
        self._cache.clear()
        release(self.at)


@dataclass(frozen=True)
class MemoryLimits:
    """The memory that one merge may use."""

    max_vram: int | None = None  # bytes of a device; None for most of it
    host: int = 2**30  # bytes of the host for changes of whole weights
    fallback: Placement | None = None  # a CPU for a block that does not fit the device even alone; None: an error
    staged: int = STAGED  # bytes of pinned memory for one transfer


class MemoryPolicy:
    """Applies the limits of one merge to calls that fold blocks on its lanes."""

    def __init__(
        self, lanes: Lanes, limits: MemoryLimits, adapter_bytes: Callable[[Placement], int], *, draws: bool
    ) -> None:
        """`adapter_bytes` returns the bytes of a placement that adapters take. `draws`: whether merged weights are
        rounded stochastically."""
        self.lanes, self.limits, self.device, self.host = lanes, limits, DeviceMemory(), MemoryBudget(limits.host)
        self.notes: list[Note] = []
        """Remarks for the user."""
        self._adapter_bytes, self._draws = adapter_bytes, draws

    @cached_property
    def share(self) -> int:
        """The bytes of its device's memory that a lane may use for blocks."""
        at = self.lanes.at[0]
        return lane_share(at, device_bytes(self.limits.max_vram), self._adapter_bytes(at))

    def size(self, block: Block) -> int:
        """Return the bytes of the device's memory that folding a block takes; 0 on a CPU."""
        at = precise_at(self.lanes.at[0], block)
        drawn = STOCHASTIC_BYTES * block.elements if self._draws else 0
        return 0 if at.device.type == "cpu" else block_bytes(block, at) + drawn

    def exceeds(self, size: int) -> bool:
        """Return whether so many bytes are more than `--max-vram` leaves for all lanes together; False without it."""
        limit = self.limits.max_vram
        return limit is not None and size > self.share * lane_count(self.lanes.at[0], limit)

    def most(self, block: Block) -> int:
        """Return how many blocks like this one may go into one call: on a device as many as fit a lane's share of its
        memory and its pinned memory. On a CPU one, as the libraries round batched products otherwise than single ones,
        and how many blocks a window has depends on the memory limit."""
        size = self.size(block)
        if not size:
            return 1
        moved = max(1, *(t.packing.encoding.nbytes(block.elements) for t in (block.target, block.target.weight)))
        return max(1, min(self.share // size, self.limits.staged // moved))

    def call(self, work: Call[Task, Result], tasks: Sequence[Task], elements: int) -> Result | OutOfMemory:
        """Return the result of work on tasks of one kind, which have so many values, on a lane that has the memory.

        OutOfMemory only for several tasks, which then need more calls; ResourceError if one task alone does not fit.
        """
        if len(tasks) > 1 and elements > self.device.most:
            return OutOfMemory("as many numbers did not fit before")
        # Side by side with other lanes, or alone on the device if the call takes more than a lane's share of it.
        block = tasks[0].block
        lane, size = self._other_lane(block), self.size(block) * len(tasks)
        large = lane is None and size > self.share
        with self.device.alone() if large else self.device.shared(), self.host.hold(sum(t.block.room for t in tasks)):
            result = work(tasks, lane)
        if isinstance(result, OutOfMemory) and len(tasks) == 1:
            return self._last_resort(work, tasks)
        if isinstance(result, OutOfMemory):
            self.device.halve(elements)
            self.note("smaller batches were used")
        return result

    def _last_resort(self, work: Call[Task, Result], tasks: Sequence[Task]) -> Result:
        """Return the result of work on one task that did not fit next to others' work."""
        with self.device.alone():
            self.lanes.relieve()  # other lanes have left unused memory
            result = work(tasks, None)
        note = "a block did not fit next to the work of others"
        if isinstance(result, OutOfMemory) and self.limits.fallback is not None:
            result = work(tasks, DeviceStream(self.limits.fallback))
            note = "a block was folded on the CPU"
            self.device.spill()
        if isinstance(result, OutOfMemory):
            where = f"{tasks[0].block.target.name}: {result.message}"
            raise ResourceError("the device is out of memory", where, DEVICE_FULL)
        self.note(note)
        return result

    def _other_lane(self, block: Block) -> DeviceStream | None:
        """Return a lane of the CPU for a block that needs more than `--max-vram`, or while the device has no room."""
        cpu = self.limits.fallback if self.device.full else None
        if self.exceeds(self.size(block)):
            self.note("a block that needs more than --max-vram was folded on the CPU")
            cpu = Placement(HOST.device, self.lanes.at[0].dtype)
        return DeviceStream(cpu) if cpu else None

    def note(self, text: str) -> None:
        """Add a note, once, on what was done because a device was short of memory."""
        note = Note(f"{','.join(str(p.device) for p in self.lanes.at)} was short of memory: {text}")
        self.notes.extend({note} - {*self.notes})
