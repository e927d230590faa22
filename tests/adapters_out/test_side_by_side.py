"""Layers side by side: in order, within their bound, and the first error ends the work."""

from __future__ import annotations

from threading import Barrier, Lock

import pytest
import torch

from lora_merge.adapters_out import parallel as module
from lora_merge.adapters_out.parallel import side_by_side
from tests.kit.cost import steps


@pytest.fixture(autouse=True)
def _three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "threads", lambda _: 3)


def test_results_come_in_the_order_of_the_tasks_however_long_each_takes() -> None:
    together = Barrier(3)

    def work(task: int) -> int:
        if task < 3:
            together.wait(10)  # all three are under way at once
        return task * 10

    assert [*side_by_side(range(20), work, lambda _: 1, 3)] == [task * 10 for task in range(20)]


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

    assert [*side_by_side([4, 4, 9, 1, 4, 4, 12, 2], work, lambda size: size, 8)] == [4, 4, 9, 1, 4, 4, 12, 2]
    assert most[0] <= 12


def test_first_error_ends_the_work() -> None:
    begun: list[int] = []

    def work(task: int) -> int:
        begun.append(task)
        if task == 2:
            raise ValueError("two")
        return task

    with pytest.raises(ValueError, match="two"):
        [*side_by_side(range(1000), work, lambda _: 1, 10)]
    assert len(begun) < 20


def test_tiny_tasks_go_to_a_thread_many_at_once() -> None:
    """A file of a megabyte has ten thousand layers of one number, and a thread takes longer to get one than to do it."""

    def negated() -> None:
        assert [*side_by_side(range(10_000), lambda task: -task, lambda _: 10, 2**30)] == [-n for n in range(10_000)]

    assert steps(negated) < 10 * 10_000, "one by one it takes 50 calls for each"
