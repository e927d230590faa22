"""Drives work items through stages side by side: one thread a stage, a fixed ring of slots between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

Slot = TypeVar("Slot")
Work = TypeVar("Work")


def drive(work: Iterable[Work], slots: Sequence[Slot], stages: Sequence[Callable[[Slot, Work], None]]) -> None:
    """Every item through every stage, in order; at most one item per slot is under way.

    The first failure of any stage is raised here, after what runs at that moment has ended; later items
    are not started. The same on KeyboardInterrupt.
    """
    free: SimpleQueue[Slot] = SimpleQueue()
    for slot in slots:
        free.put(slot)
    pools = [ThreadPoolExecutor(1, thread_name_prefix=s.__name__) for s in stages]
    under_way: deque[Future[None]] = deque()
    try:
        for item in work:
            slot = free.get()
            while under_way and under_way[0].done():
                under_way.popleft().result()
            done: Future[None] | None = None
            for pool, stage in zip(pools, stages, strict=True):
                done = pool.submit(_after, done, stage, slot, item)
            if done is not None:
                done.add_done_callback(lambda _, slot=slot: free.put(slot))  # type: ignore[misc]
                under_way.append(done)
        for last in under_way:
            last.result()
    finally:
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _after(earlier: Future[None] | None, stage: Callable[[Slot, Work], None], slot: Slot, item: Work) -> None:
    if earlier is not None:
        earlier.result()  # raises what an earlier stage raised
    stage(slot, item)
