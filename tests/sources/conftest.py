"""Servers for the tests of this folder, and an environment in which nothing else is reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_merge.sources import inputs, web
from tests.sources.server import Machines, serving


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machines]:
    """The servers, with the hub and Civitai at their addresses, and empty caches."""
    for name in ("LORA_MERGE_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "CIVITAI_API_TOKEN", "CIVITAI_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LORA_MERGE_CACHE", str(tmp_path / "store"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(web, "wait", lambda _: None)
    monkeypatch.setattr(inputs, "_located", {})
    with serving(Machines()) as servers:
        monkeypatch.setenv("HF_ENDPOINT", servers.url)
        monkeypatch.setenv("CIVITAI_ENDPOINT", servers.url)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", servers.url)
        yield servers
