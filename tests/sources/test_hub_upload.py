"""Outputs that are uploaded to the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_merge.sources import inputs
from tests.sources.server import TOKEN, Machines
from tests.sources.test_hub import Command, llama_folder, peft_folder, published, run

__all__ = ["published", "run"]

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub and its own client


@pytest.fixture
def hub(published: Machines, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """The hub, logged in, without Xet."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return published


def test_merge_to_a_repository_is_one_private_commit_with_a_card(hub: Machines, run: Command, tmp_path: Path) -> None:
    words = ("local.safetensors", "style.safetensors:0.5")
    assert run(*words, "-o", "a.safetensors")[0] == 0
    code, out, err = run(*words, "-o", "hf://me/merged/a", "--json")
    assert code == 0, err
    report = json.loads(out)
    print(report["notes"], err)
    assert report["output"] == "hf://me/merged/a.safetensors" and hub.created == {"me/merged": "private"}
    files = hub.repositories["me/merged"]
    assert files["a.safetensors"] == Path("a.safetensors").read_bytes() and b"lora-merge" in files["README.md"]
    assert [r.path for r in hub.requests if "/commit/" in r.path] == ["/api/models/me/merged/commit/main"]
    assert TOKEN not in out + err and not list(tmp_path.rglob("lora-merge-uploads"))
