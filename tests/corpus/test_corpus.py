"""The corpus in small: what is recorded is replayed, and what changed is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.corpus import record_scene, replay_scene

SCENES = ("model-transformers-gpt2", "gguf-q8-0", "quantised-comfyui-nvfp4", "algorithm-lora", "algorithm-vera", "folders")
"""Small scenes that have files, folders, PEFT, codes, GGUF and tensors in memory."""


def edited(file: Path, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change an entry of what was recorded."""
    entries = json.loads(file.read_text())
    edit(next(entry for entry in entries if entry["call"]["name"] == name))
    file.write_text(json.dumps(entries))


def test_changed_byte_plan_and_report_are_named_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = [record_scene(tmp_path, name) for name in SCENES]
    done = sum(count.total() for count in counts)
    changed = tmp_path / "algorithm-lora/out/merge-bf16/out.safetensors"
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    edited(tmp_path / "gguf-q8-0/calls.json", "merge-keep", lambda entry: entry["plan"].update(tensors=3))
    edited(tmp_path / "algorithm-vera/calls.json", "combine-rank-2", lambda entry: entry["report"].update(residual=0.0))
    capsys.readouterr()
    again = [replay_scene(tmp_path, name) for name in SCENES]
    said = capsys.readouterr().out
    assert sum(count["different"] for count in again) == 3, said
    assert sum(count["same"] for count in again) == done - 3
    lines = said.splitlines()
    assert lines[0] == ""
