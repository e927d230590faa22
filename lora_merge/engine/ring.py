"""Drives work items through stages side by side: one thread a stage, a fixed ring of slots between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Work = TypeVar("Work")


class Pool(Generic[Item]):
    """A fixed number of slots; whoever takes one waits until one is free."""

    def __init__(self, slots: Iterable[Item]) -> None:
        self._free: SimpleQueue[Item] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)

    def take(self) -> Item:
        """A free slot."""
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
