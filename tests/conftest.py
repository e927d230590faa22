"""What every test starts from."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from lora_merge.stopping import NUMBERS

settings.register_profile(
    "the same everywhere", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("the same everywhere")


@pytest.fixture(scope="session")
def _caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("caches")
    return (folder / str(n) for n in itertools.count())


@pytest.fixture(autouse=True)
def _nothing_remembered(_caches: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds or leaves anything in the user's cache, or finds what another has left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(next(_caches)))


@pytest.fixture(scope="session")
def children() -> Any:
    """Processes that start at once, from one that has imported everything."""
    if sys.platform == "win32":
        pytest.skip("no fork server")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lora_merge.writing", "lora_merge.batch", "tests.test_batch", "tests.test_formats"])
    return context


@pytest.fixture(autouse=True)
def _signals_restored() -> Iterator[None]:
    """After the command line ran in this process, Ctrl-C ends the tests again."""
    kept = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """What the imported libraries consist of is not garbage; looking for it takes a tenth of the time of all tests."""
    gc.collect()
    gc.freeze()
