"""Products of numpy run on the thread that asks; the program's own setting comes back."""

from __future__ import annotations

from lora_merge.proof.reference.one_core import _openblas, one_core


def test_the_number_of_threads_is_one_inside_and_as_before_after_the_last() -> None:
    functions = _openblas()
    if functions is None:  # numpy with another library: nothing is set
        with one_core():
            return
    read, _ = functions
    before = read()
    first, second = one_core(), one_core()
    first.__enter__()
    second.__enter__()
    assert read() == 1
    first.__exit__(None, None, None)
    assert read() == 1, "another one is still inside"
    second.__exit__(None, None, None)
    assert read() == before
