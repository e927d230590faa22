"""A fixed number of reusable, page-aligned buffers for windows, and stages that work on them side by side."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Condition
from typing import TYPE_CHECKING, Generic, TypeVar

from ..change_statistics import Measured, Norms
from ..disk.pages import PAGE, aligned_buffer
from ..disk.scale_spool import PartBytes
from .windows import Change, Window

if TYPE_CHECKING:
    from .change_sample import RowSample, RunSample
    from .tensors import Held

Item = TypeVar("Item")
Work = TypeVar("Work")


class Buffer:
    """Page-aligned memory that is reused; it grows by a quarter more than needed, as the system zeroes new memory."""

    def __init__(self) -> None:
        self.memory = aligned_buffer(0)

    def view(self, start: int, size: int) -> memoryview:
        """Return `size` bytes whose address equals `start` modulo the size of a page."""
        lead = start % PAGE
        held, needed = len(self.memory), lead + size
        if held < needed:
            self.memory = aligned_buffer(needed + needed // 4 if held else needed)
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
class Outcome:
    """Results of folding that the window does not carry: numbers that are too large, parts beside codes, measures."""

    cut: Counter[str] = field(default_factory=Counter)  # tensor → how many numbers were cut
    largest: Mapping[str, float] = field(default_factory=dict)  # tensor → largest magnitude, too large for its scale
    parts: tuple[PartBytes, ...] = ()
    measured: tuple[Measured, ...] = ()  # what was done to the blocks
    held: tuple[Held, ...] = ()  # merged blocks whose codes are to be made later
    samples: tuple[RowSample | RunSample, ...] = ()  # numbers of blocks whose sums are not added up yet
    norms: Norms = field(default_factory=dict)

    def __add__(self, other: Outcome) -> Outcome:
        largest = dict(self.largest)
        for name, magnitude in other.largest.items():
            largest[name] = max(magnitude, largest.get(name, 0.0))
        return Outcome(
            self.cut + other.cut, largest, self.parts + other.parts, self.measured + other.measured,
            self.held + other.held, self.samples + other.samples, {**self.norms, **other.norms},
        )  # fmt: skip


def settled(under_way: Sequence[Future[Outcome]]) -> Outcome:
    """Wait for all futures, also if one fails, as their buffers are reused then; return the sum of their outcomes."""
    wait(under_way)
    return sum((done.result() for done in under_way), Outcome())


@dataclass(frozen=True)
class WindowTask:
    """One window of one plan, and the buffers that it occupies."""

    window: Window
    plan: int
    base_bytes: WindowBuffers  # the bytes read, shared by all tasks of the window
    own: WindowBuffers  # for the output bytes; the last task makes them in `base_bytes`
    first: bool
    last: bool
    shared: bool = False  # whether the output file shares these blocks with the base
    under_way: list[Future[Outcome]] = field(default_factory=list, compare=False)  # blocks that are being merged
    reported: list[int] = field(default_factory=list, compare=False)  # bytes reported before it was written
    saturated: Counter[str] = field(default_factory=Counter, compare=False)  # tensor → numbers that a conversion cut

    @property
    def ready(self) -> bool:
        """Whether the bytes are written as they were read, or are not read at all."""
        return self.shared or (self.last and self.window.untouched)

    @property
    def change(self) -> Change:
        """The conversions and folds of the plan in this window."""
        return self.window.changes[self.plan]


class MemoryBudget:
    """A number of bytes of memory, of which threads hold parts."""

    def __init__(self, nbytes: int) -> None:
        self._free, self._whole, self._changed = nbytes, nbytes, Condition()

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Hold so many bytes; waits until they are free. Who needs more than all of them waits to be alone."""
        wanted = min(nbytes, self._whole)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= wanted)
            self._free -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()


class Pool(Generic[Item]):
    """A fixed number of slots; `take` waits until one is free."""

    def __init__(self, slots: Iterable[Item]) -> None:
        self._free: SimpleQueue[Item] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def take(self) -> Item:
        """Return a free slot."""
        return self._free.get()

    def give(self, slot: Item) -> None:
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
