"""Models of the hub: the cache on disk, headers by ranges, whole files by huggingface_hub."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_merge.planning.recipe import KEY
from tests.kit import command_line
from tests.kit.adapters import kohya
from tests.kit.files import load, metadata, save
from tests.kit.models import sd1
from tests.sources.server import COMMIT, Machines

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        answer = command_line.run(*words)
        return answer.code, answer.out, answer.err

    return call


@pytest.fixture
def published(machines: Machines, tmp_path: Path) -> Machines:
    """A repository with a base, and one with an adapter."""
    base, lora = save(sd1(), tmp_path / "local.safetensors"), save(kohya(sd1()), tmp_path / "style.safetensors")
    machines.repositories["me/sd"] = {
        "README.md": b"# sd", "other.safetensors": b"x" * 4000, "sd.safetensors": base.read_bytes(),
    }  # fmt: skip
    machines.repositories["me/style"] = {"README.md": b"# style", "style.safetensors": lora.read_bytes()}
    return machines


def test_merge_of_two_repositories_has_the_bytes_of_the_merge_of_files(
    published: Machines, run: Command, tmp_path: Path
) -> None:
    code, out, err = run("hf://me/sd/sd.safetensors", "hf://me/style:0.8", "-o", "a.safetensors")
    assert code == 0, err
    code, out, err = run("local.safetensors", "style.safetensors:0.8", "-o", "b.safetensors")
    assert code == 0, err
    one, other = load(Path("a.safetensors")), load(Path("b.safetensors"))
    assert all((one[name] == other[name]).all() for name in other)
    recipe = json.loads(metadata(Path("a.safetensors"))[KEY])
    assert recipe["base"]["source"] == f"hf://me/sd@{COMMIT}/sd.safetensors"
    assert recipe["adapters"][0]["source"] == f"hf://me/style@{COMMIT}"
