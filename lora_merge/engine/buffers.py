"""Windows on their way from the disk to the disk: a fixed ring of buffers, and stages that work side by side."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

from ..disk.pages import PAGE, aligned_buffer
from .windows import Change, Window

Item = TypeVar("Item")
Work = TypeVar("Work")


class Buffer:
    """Page-aligned memory that is reused; it grows with room to spare, as the system zeroes all of it each time."""

    def __init__(self) -> None:
        self._memory = aligned_buffer(0)

    def view(self, start: int, size: int) -> memoryview:
        """`size` bytes whose address has the residue of `start` modulo the page."""
        lead = start % PAGE
        held, needed = len(self._memory), lead + size
        if held < needed:
            self._memory = aligned_buffer(needed + needed // 4 if held else needed)
        return self._memory[lead : lead + size]


@dataclass
class WindowBuffers:
    """A window's place in memory: its output bytes, and base bytes where dtype or shape differ."""

    out: Buffer = field(default_factory=Buffer)
    base: Buffer = field(default_factory=Buffer)

    def views(self, window: Window) -> tuple[memoryview, memoryview]:
        """Return the two buffers at the window's sizes; output bytes lie in pages as they will in the file."""
        return self.out.view(window.start, window.size), self.base.view(0, window.input_size)


@dataclass(frozen=True)
class Outcome:
    """What folding has found out about its results."""

    cut: Counter[str] = field(default_factory=Counter)  # tensor → how many numbers were cut
    largest: Mapping[str, float] = field(default_factory=dict)  # tensor → its largest magnitude, beyond what it covers

    def __add__(self, other: Outcome) -> Outcome:
        largest = dict(self.largest)
        for name, magnitude in other.largest.items():
            largest[name] = max(magnitude, largest.get(name, 0.0))
        return Outcome(self.cut + other.cut, largest)


@dataclass(frozen=True)
class WindowTask:
    """One window for one plan, and the memory it holds."""

    window: Window
    plan: int
    base_bytes: WindowBuffers  # what was read, shared by the tasks of the window
    own: WindowBuffers  # where the output bytes are made: for the last task, where the base bytes are
    first: bool
    last: bool
    shared: bool = False  # whether the output file shares these blocks with the base
    under_way: list[Future[Outcome]] = field(default_factory=list, compare=False)  # blocks that are being merged
    saturated: Counter[str] = field(default_factory=Counter, compare=False)  # tensor → numbers that a conversion cut

    @property
    def ready(self) -> bool:
        """Whether its bytes go out as they were read, or are not read at all."""
        return self.shared or (self.last and self.window.untouched)

    @property
    def change(self) -> Change:
        """What the plan does in this window."""
        return self.window.changes[self.plan]


class Pool(Generic[Item]):
    """A fixed number of slots; whoever takes one waits until one is free."""

    def __init__(self, slots: Iterable[Item]) -> None:
        self._free: SimpleQueue[Item] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def take(self) -> Item:
        """Return a free slot."""
        return self._free.get()

    def give(self, slot: Item) -> None:
        """The slot is free again."""
        self._free.put(slot)


def drive(work: Iterable[Work], stages: Sequence[Callable[[Work], None]], done: Callable[[Work], None]) -> None:
    """Every item through every stage, in order; then `done`, also where a stage failed.

    How many are under way is up to `work`: it takes slots from a pool, to which `done` gives them back.
    The first failure of any stage is raised here, after what runs at that moment has ended; later items
    are not started. The same on KeyboardInterrupt.
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
        earlier.result()  # raises what an earlier stage raised
    stage(item)
