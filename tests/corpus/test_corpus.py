"""The corpus in small: a replay by the same version agrees, and what changed is named."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.calls import refusal
from tests.corpus.corpus import record_scene, replay_scene
from tests.corpus.differences import differences
from tests.kit.pairs import WHOLE

SCENES = {
    "algorithm-lora": 7,
    "gguf-q8_0": 4,
    "quantised-comfyui-fp8-rows": 3,
    "model-transformers-gpt2": 2,
    "trainer-parted": 7,
}
"""Scene → how many of its calls: of each command, of both functions for tensors in memory, codes, GGUF and PEFT."""


def test_replay_needs_no_part_of_the_program_but_its_public_names() -> None:
    """It runs with versions whose modules have other names: only `record` makes inputs."""
    folder = Path(__file__).parent
    for path in {*folder.glob("*.py")} - {folder / "scenes.py", Path(__file__)}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("lora_merge.") for name in names), path.name


def changed(file: Path, name: str, part: str, key: str, value: Any) -> None:
    """Change what was recorded of a call."""
    entries = json.loads(file.read_text())
    next(entry for entry in entries if entry["call"]["name"] == name)[part][key] = value
    file.write_text(json.dumps(entries))


def test_changed_byte_plan_and_report_are_named_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = SCENES if WHOLE else {name: SCENES[name] for name in ("algorithm-lora", "gguf-q8_0")}
    recorded = sum(sum(record_scene(tmp_path, name, None if WHOLE else n).values()) for name, n in scenes.items())
    output = tmp_path / "algorithm-lora/out/merge-bf16/out.safetensors"
    data = bytearray(output.read_bytes())
    data[-1] ^= 1
    output.write_bytes(data)
    changed(tmp_path / "gguf-q8_0/calls.json", "merge-keep", "plan", "tensors", 3)
    changed(tmp_path / "algorithm-lora/calls.json", "combine-rank-2", "report", "residual", 0.0)
    capsys.readouterr()
    counts = [replay_scene(tmp_path, name) for name in scenes]
    lines = capsys.readouterr().out.splitlines()
    assert sum(count["same"] for count in counts) == recorded - 3
    assert lines[0] == "algorithm-lora/merge-bf16"
    assert lines[1].startswith("  bytes: out.safetensors: m.layers.1.a.weight: 1 of 120 numbers, at most ")
    assert lines[2:4] == ["  bytes: no loss grew, 0 fell", "algorithm-lora/combine-rank-2"]
    assert lines[4].startswith("  report: residual: 0.0 → 0.")
    assert lines[5:] == ["gguf-q8_0/merge-keep", "  plan: tensors: 3 → 12"]


def test_loss_that_grew_is_named(tmp_path: Path) -> None:
    for n, folder in enumerate(("old", "new")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "side.json").write_text(f'{{"rank": {n}}}')
    then, now = ({"plan": None, "report": {"layers": [{"residual": loss}]}} for loss in (0.1, 0.2))
    assert [*differences(tmp_path, then, now, tmp_path / "old", tmp_path / "new")] == [
        "report: layers[0].residual: 0.1 → 0.2",
        "bytes: side.json: header: rank: 0 → 1",
        "bytes: losses that grew: 1, most layers[0].residual: 0.1 → 0.2",
    ]


def test_refusal_is_named_with_its_kind(tmp_path: Path) -> None:
    then, now = ({"plan": None, "report": report} for report in ({"output": "a"}, refusal("FitError", 4)))
    assert [*differences(tmp_path, then, now, tmp_path, tmp_path)] == [
        "report: done → refused: {'refused': 'FitError', 'exit_code': 4}"
    ]


def test_same_entries_in_another_layout_are_other_bytes(tmp_path: Path) -> None:
    for folder, indent in (("old", None), ("new", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "side.json").write_text(json.dumps({"rank": 4}, indent=indent))
    same = {"plan": None, "report": None}
    lines = [*differences(tmp_path, same, same, tmp_path / "old", tmp_path / "new")]
    assert lines[0] == "bytes: side.json: header: another layout of the same entries"
