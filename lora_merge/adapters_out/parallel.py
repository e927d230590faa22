"""Works at several layers at a time, each on one core: their results do not depend on the number of cores. No torch."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from threading import local
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from ..process import cores
from ..proof.reference.numpy_threads import one_core

if TYPE_CHECKING:
    from ..engine.tensor_moves import Placement

T = TypeVar("T")
R = TypeVar("R")

RESULTS_AHEAD = 2
"""The most results of each thread that may wait for an earlier one."""

BATCH_BYTES: Final = 2**16
"""Small tasks are handed over in batches of this size, as one hand-over takes as long as a tiny task."""


class PerThread(Generic[T]):
    """A value of each thread, created when the thread first uses it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._here = make, local()

    def get(self) -> T:
        """Return the object of this thread."""
        if not hasattr(self._here, "value"):
            self._here.value = self._make()
        value: T = self._here.value
        return value


def side_by_side(
    tasks: Sequence[T], work: Callable[[T], R], nbytes: Callable[[T], int], bound: int, at: Placement | None = None
) -> closing[Generator[R, None, None]]:  # fmt: skip
    """Give a `with` block an iterator of the results, in the order of the tasks; the first error ends the work.

    The end of the block ends the work. An iterator that is left to the garbage collector would wait for its threads
    in any thread and at any time, also in one that they wait for.

    Parameters:
        tasks: What is worked at.
        work: Makes the result of one; it is called in several threads.
        nbytes: How many bytes a task takes while it is under way.
        bound: How many bytes all tasks under way may take; one alone may take more.
        at: Where most of the work is done, if not on the processor: each device has as many threads as it can use.
    """
    return closing(_results(tasks, work, nbytes, bound, threads(at)))


def _results(
    tasks: Sequence[T], work: Callable[[T], R], nbytes: Callable[[T], int], bound: int, count: int
) -> Generator[R, None, None]:  # fmt: skip
    """Yield the result of each task, which `count` threads work at."""
    waiting: deque[tuple[Future[list[R]], int]] = deque()
    left = deque(_batches(tasks, nbytes, min(BATCH_BYTES, bound // (2 * count * RESULTS_AHEAD))))

    def all_of(batch: Sequence[T]) -> list[R]:
        return [work(task) for task in batch]

    pool = ThreadPoolExecutor(count, thread_name_prefix="layers", initializer=on_one_core)
    with one_core():
        try:
            while left or waiting:
                taken = sum(size for future, size in waiting if not future.done())
                while left and len(waiting) < count * RESULTS_AHEAD and (not taken or taken + left[0][1] <= bound):
                    batch, size = left.popleft()
                    waiting.append((pool.submit(all_of, batch), size))
                    taken += size
                yield from waiting.popleft()[0].result()
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(tasks: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[tuple[list[T], int]]:
    """Yield the tasks in order, some of them together while they take no more bytes than `most`, and their bytes."""
    some: list[T] = []
    total = 0
    for task in tasks:
        size = nbytes(task)
        if some and total + size > most:
            yield some, total
            some, total = [], 0
        some.append(task)
        total += size
    if some:
        yield some, total


def threads(at: Placement | None) -> int:
    """Return how many tasks are worked at side by side."""
    if at is None and "torch" not in sys.modules:
        return cores()
    from ..engine import devices
    from ..engine.tensor_moves import HOST

    return devices.threads([at or HOST])


def on_one_core() -> None:
    """Limit torch to one core in this thread, as numpy is already. Call it again after torch was imported."""
    if "torch" in sys.modules:
        from ..engine.devices import one_core as torch_on_one_core

        torch_on_one_core()


def settings_of_torch() -> AbstractContextManager[object]:
    """Return a context in which torch's settings do not depend on the caller's program; torch that is not imported yet
    has no others."""
    if "torch" not in sys.modules:
        return nullcontext()
    from ..engine.torch_state import undisturbed

    return undisturbed()
