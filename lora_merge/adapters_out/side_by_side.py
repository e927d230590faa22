"""Works at several layers at a time, each on one core: their results do not depend on the number of cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import local
from typing import Generic, TypeVar

from ..engine.devices import one_core, threads
from ..engine.placement import HOST, Placement

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""The most results of each thread that may wait for an earlier one."""


class PerThread(Generic[T]):
    """One object for each thread that asks, made when it asks first."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._here = make, local()

    def get(self) -> T:
        """Return the object of this thread."""
        if not hasattr(self._here, "made"):
            self._here.made = self._make()
        found: T = self._here.made
        return found


def side_by_side(
    tasks: Sequence[T], work: Callable[[T], R], nbytes: Callable[[T], int], bound: int, at: Placement = HOST
) -> Iterator[R]:  # fmt: skip
    """Yield the result of each task, in the order of the tasks; the first error ends the work.

    Parameters:
        tasks: What is worked at.
        work: Makes the result of one; it is called in several threads.
        nbytes: How many bytes a task takes while it is under way.
        bound: How many bytes all tasks under way may take; one alone may take more.
        at: Where most of the work is done: each device has as many threads as it can use.
    """
    count = threads([at])
    waiting: deque[tuple[Future[R], int]] = deque()
    left = deque(tasks)
    pool = ThreadPoolExecutor(count, thread_name_prefix="layers", initializer=one_core)
    try:
        while left or waiting:
            taken = sum(size for future, size in waiting if not future.done())
            while left and len(waiting) < count * AHEAD and (not taken or taken + nbytes(left[0]) <= bound):
                task = left.popleft()
                waiting.append((pool.submit(work, task), nbytes(task)))
                taken += waiting[-1][1]
            yield waiting.popleft()[0].result()
    finally:
        pool.shutdown(cancel_futures=True)
