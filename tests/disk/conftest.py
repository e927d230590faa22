"""Here the disk is waited for."""

from __future__ import annotations

import os

import pytest

from tests.conftest import to_disk


@pytest.fixture(autouse=True)
def _waited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsync", "fdatasync"):
        if hasattr(os, name):
            monkeypatch.setattr(os, name, to_disk)
