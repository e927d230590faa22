"""Products of numpy run on the thread that asks; the program's own setting comes back."""

from __future__ import annotations

from threading import Thread
from typing import Any

import numpy  # noqa: F401  its library has to be loaded
import pytest
from threadpoolctl import threadpool_limits

from lora_merge.proof.reference import numpy_threads as module
from lora_merge.proof.reference.numpy_threads import one_core


def count() -> int:
    """The number of threads of the libraries that were loaded when they were first asked for, numpy's among them; 1 where
    it has none that can be set. Other tests load more: scipy has one of its own."""
    return max((one["num_threads"] for one in module._libraries().info() if one["user_api"] == "blas"), default=1)


def test_number_of_threads_is_one_inside_and_as_before_after_the_last() -> None:
    with threadpool_limits(limits=2, user_api="blas"):
        before = count()
        first, second = one_core(), one_core()
        first.__enter__()
        second.__enter__()
        assert count() == 1
        first.__exit__(None, None, None)
        assert count() == 1, "another one is still inside"
        second.__exit__(None, None, None)
        assert count() == before


def test_setting_comes_back_after_an_error() -> None:
    with threadpool_limits(limits=2, user_api="blas"):
        before = count()
        with pytest.raises(ZeroDivisionError), one_core():
            raise ZeroDivisionError
        assert count() == before


def test_user_that_was_left_open_may_end_while_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector ends it, in the thread that holds the lock."""
    left, found = one_core(), module._libraries
    left.__enter__()

    def libraries() -> Any:
        left.__exit__(None, None, None)
        return found()

    monkeypatch.setattr(module, "_libraries", libraries)
    monkeypatch.setattr(module, "_users", 0)
    done = []

    def use() -> None:
        with one_core():
            done.append(True)

    thread = Thread(target=use, daemon=True)
    thread.start()
    thread.join(10)
    assert done
