"""Layers side by side: in order, within their bound, and the first error ends the work."""

from __future__ import annotations

from threading import Barrier, Lock
from threading import enumerate as running
from typing import Any

import pytest
import torch

from lora_merge.adapters_out import parallel as module
from lora_merge.adapters_out.parallel import side_by_side
from tests.kit.cost import steps


def results(tasks: Any, *how: Any) -> list[Any]:
    """All results."""
    with side_by_side(tasks, *how) as every:
        return [*every]


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "threads", lambda _: 3)


def test_results_come_in_the_order_of_the_tasks_however_long_each_takes() -> None:
    together = Barrier(3)

    def work(task: int) -> int:
        if task < 3:
            together.wait(10)  # all three are under way at once
        return task * 10

    assert results(range(20), work, lambda _: 1, 3) == [task * 10 for task in range(20)]


def test_tasks_under_way_stay_within_the_bound_and_one_alone_may_exceed_it() -> None:
    lock, now, most = Lock(), [0], [0]

    def work(size: int) -> int:
        with lock:
            now[0] += size
            most[0] = max(most[0], now[0])
        torch.ones(1000).sum()
        with lock:
            now[0] -= size
        return size

    assert results([4, 4, 9, 1, 4, 4, 12, 2], work, lambda size: size, 8) == [4, 4, 9, 1, 4, 4, 12, 2]
    assert most[0] <= 12


def test_first_error_ends_the_work() -> None:
    begun: list[int] = []

    def work(task: int) -> int:
        begun.append(task)
        if task == 2:
            raise ValueError("two")
        return task

    with pytest.raises(ValueError, match="two"):
        results(range(1000), work, lambda _: 1, 10)
    assert len(begun) < 20


def test_work_ends_with_the_block_also_when_an_error_keeps_the_iterator() -> None:
    """The collector of garbage would end it in any thread, where waiting for threads may never end."""
    with (
        pytest.raises(ValueError, match="of the loop") as kept,
        side_by_side(range(100), abs, lambda _: 1, 10) as every,
    ):
        for _ in every:
            raise ValueError("of the loop")
    assert kept.traceback and next(every, None) is None
    assert not [thread for thread in running() if thread.name.startswith("layers")]


def test_tiny_tasks_go_to_a_thread_many_at_once() -> None:
    """A file of a megabyte has ten thousand layers of one number, and a thread takes longer to get one than to do it."""

    def negated() -> None:
        assert results(range(10_000), lambda task: -task, lambda _: 10, 2**30) == [-n for n in range(10_000)]

    assert steps(negated) < 10 * 10_000, "one by one it takes 50 calls for each"
