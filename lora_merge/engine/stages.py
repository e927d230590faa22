"""A fixed number of reusable, page-aligned buffers for windows, and stages that work on them side by side."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition
from typing import Generic, TypeVar

from ..disk.pages import PAGE, aligned_buffer
from .tasks import FoldResult
from .windows import Window, WindowChange

Slot = TypeVar("Slot")
Work = TypeVar("Work")


class Buffer:
    """Page-aligned memory that is reused; it grows by a quarter more than needed, as the system zeroes new memory."""

    def __init__(self) -> None:
        self.memory = aligned_buffer(0)

    def view(self, start: int, size: int) -> memoryview:
        """Return `size` bytes whose address equals `start` modulo the size of a page."""
        lead = start % PAGE
        size_before, needed = len(self.memory), lead + size
        if size_before < needed:
            self.memory = aligned_buffer(needed + needed // 4 if size_before else needed)
        return self.memory[lead : lead + size]


@dataclass(frozen=True)
class WindowBuffers:
    """The two buffers of a window: its output bytes, and base bytes whose dtype or shape differs from the output's."""

    out: Buffer = field(default_factory=Buffer)
    base: Buffer = field(default_factory=Buffer)

    def views(self, window: Window) -> tuple[memoryview, memoryview]:
        """Return both buffers in the window's sizes; output bytes have the same offset in a page as in the file."""
        return self.out.view(window.start, window.size), self.base.view(0, window.input_size)


@dataclass(frozen=True)
class WindowTask:
    """One window of one plan, and the buffers that it occupies."""

    window: Window
    plan: int
    base_bytes: WindowBuffers  # the bytes read, shared by all tasks of the window
    output: WindowBuffers  # for the output bytes; the last task makes them in `base_bytes`
    first: bool
    last: bool
    shared: bool = False  # whether the output file shares these blocks with the base
    under_way: list[Future[FoldResult]] = field(default_factory=list, compare=False)  # blocks that are being merged
    reported: list[int] = field(default_factory=list, compare=False)  # bytes reported before it was written
    saturated: Counter[str] = field(default_factory=Counter, compare=False)  # tensor → values that a conversion cut

    @property
    def ready(self) -> bool:
        """Whether the bytes are written as they were read, or are not read at all."""
        return self.shared or (self.last and self.window.untouched)

    @property
    def change(self) -> WindowChange:
        """The conversions and folds of the plan in this window."""
        return self.window.changes[self.plan]


class MemoryBudget:
    """A number of bytes of memory, of which threads hold parts."""

    def __init__(self, nbytes: int) -> None:
        self._free, self._whole, self._changed = nbytes, nbytes, Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Hold so many bytes; waits until they are free. A request above the budget waits until all of it is free."""
        taken = min(nbytes, self._whole)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= taken)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


class Pool(Generic[Slot]):
    """A fixed number of slots; `take` waits until one is free."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def take(self) -> Slot:
        """Return a free slot."""
        return self._free.get()

    def give(self, slot: Slot) -> None:
        """Put a slot back."""
        self._free.put(slot)


def drive(work: Iterable[Work], stages: Sequence[Callable[[Work], None]], done: Callable[[Work], None]) -> None:
    """Run every item through all stages, in order, then call `done`, also if a stage has failed.

    `work` limits how many items are under way: it takes slots from a pool, and `done` gives them back. The first
    failure of any stage, or KeyboardInterrupt, is raised here once the running stages have ended; later items are not
    started.
    """
    pools = [ThreadPoolExecutor(1, thread_name_prefix=s.__name__) for s in stages]
    under_way: deque[Future[None]] = deque()
    try:
        for item in work:
            while under_way and under_way[0].done():
                under_way.popleft().result()
            last: Future[None] | None = None
            for pool, stage in zip(pools, stages, strict=True):
                last = pool.submit(_after, last, stage, item)
            if last is not None:
                last.add_done_callback(lambda _, item=item: done(item))  # type: ignore[misc]
                under_way.append(last)
        for last in under_way:
            last.result()
    finally:
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _after(earlier: Future[None] | None, stage: Callable[[Work], None], item: Work) -> None:
    if earlier is not None:
        earlier.result()  # raises the error of an earlier stage
    stage(item)
