"""What every test starts from."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from lora_merge.stopping import NUMBERS


@pytest.fixture(autouse=True)
def _nothing_remembered(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds or leaves anything in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def _signals_restored() -> Iterator[None]:
    """After the command line ran in this process, Ctrl-C ends the tests again."""
    kept = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
