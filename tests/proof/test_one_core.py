"""Products of numpy run on the thread that asks; the program's own setting comes back."""

from __future__ import annotations

import numpy  # noqa: F401  its library has to be loaded
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from lora_merge.proof.reference.one_core import one_core


def count() -> int:
    """The number of threads of numpy's library; 1 where it has none that can be set."""
    return max((library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"), default=1)


def test_the_number_of_threads_is_one_inside_and_as_before_after_the_last() -> None:
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


def test_the_setting_comes_back_after_an_error() -> None:
    with threadpool_limits(limits=2, user_api="blas"):
        before = count()
        with pytest.raises(ZeroDivisionError), one_core():
            raise ZeroDivisionError
        assert count() == before
