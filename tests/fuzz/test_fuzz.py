"""Hostile files of every kind we read: a MergeError or a right answer, soon, in little memory, nothing else.

A short, repeatable part runs with the other tests; `pytest -m fuzz tests/fuzz` runs new cases for a minute in
all (FUZZ_SECONDS to change that). A failure prints the case and the seed.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.targets import TARGETS, run, run_long
from tests.kit.pairs import WHOLE

GROWTH = 300  # MB that all cases together may add to the process


def memory() -> float:
    """The most memory this process ever had, in MB; 0 where that cannot be asked."""
    try:
        import resource
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


OWN = [*TARGETS]  # without those that test_commands.py adds, and runs itself


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Any:
    for name in TARGETS:
        run(name, 1, 0, slowest=60.0)  # so that what is imported late is not counted
    before = memory()
    yield
    assert memory() - before < GROWTH


@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_few_cases(name: str) -> None:
    run(name, 160 if WHOLE else 4, 1)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", OWN)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
def test_fuzz_of_many_cases(name: str) -> None:
    run_long(name)
