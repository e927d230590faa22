"""A GPU that is not there, for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.pretended_cuda import Pretended, pretended_cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """One device."""
    with pretended_cuda(monkeypatch, 1) as found:
        yield found
