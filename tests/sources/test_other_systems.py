"""Files of other file systems, by fsspec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_merge.planning.recipe import KEY
from lora_merge.sources import other_systems
from tests.kit.adapters import kohya
from tests.kit.command_line import Command
from tests.kit.files import load_all, metadata, save
from tests.kit.folders import llama_folder, peft_folder
from tests.kit.models import sd1_sample

fsspec = pytest.importorskip("fsspec")

AT = "sftp://me:secretsecret@host/models"


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A file system in memory in the place of a server of sftp."""
    monkeypatch.delenv("LORA_MERGE_OFFLINE", raising=False)
    monkeypatch.setenv("LORA_MERGE_CACHE", "")
    from fsspec.implementations.memory import MemoryFileSystem

    memory = MemoryFileSystem()
    memory.store.clear()
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (memory, url.partition("host")[2]))
    yield memory
    memory.store.clear()


def test_file_is_read_without_a_copy_or_kept(
    system: Any, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(sd1_sample(), tmp_path / "base.safetensors")
    system.pipe("/models/s.safetensors", save(kohya(sd1_sample()), tmp_path / "style.safetensors").read_bytes())
    code, out, err = run("base.safetensors", f"{AT}/s.safetensors:0.5", "-o", "a.safetensors", "--report", "r.json")
    assert code == 0 and "nothing is kept" in err, err
    recipe = metadata(Path("a.safetensors"))[KEY]
    assert json.loads(recipe)["adapters"][0]["source"] == "sftp://me@host/models/s.safetensors"
    assert not [text for text in (out, err, recipe, Path("r.json").read_text()) if "secretsecret" in text]
    code, _, err = run("base.safetensors", f"{AT}/s.safetensors:0.5", "-o", "b.safetensors", "--cache", "here")
    assert code == 0 and Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes(), err
    assert [p.name for p in (tmp_path / "here").rglob("*.safetensors")] == ["s.safetensors"]
    monkeypatch.setenv("LORA_MERGE_OFFLINE", "1")
    code, _, err = run("inspect", f"{AT}/s.safetensors", "--cache", "here")
    assert code == 0, err


def test_folder_is_merged_as_a_local_folder(system: Any, run: Command, tmp_path: Path) -> None:
    files = llama_folder(tmp_path / "tiny") | {f"peft/{n}": c for n, c in peft_folder(tmp_path / "peft").items()}
    for name, content in files.items():
        system.pipe(f"/models/{name if '/' in name else f'tiny/{name}'}", content)
    code, _, err = run(f"{AT}/tiny", f"{AT}/peft:0.5", "-o", "a")
    assert code == 0, err
    assert run("tiny", "peft:0.5", "-o", "b")[0] == 0
    one, other = load_all(Path("a")), load_all(Path("b"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in other)


def test_failures_are_answered(system: Any, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("inspect", f"{AT}/nothing.safetensors")
    assert code == 3 and "no such file" in err and "secretsecret" not in err, err
    monkeypatch.setattr(system, "info", lambda _: (_ for _ in ()).throw(ConnectionResetError("secretsecret")))
    code, _, err = run("inspect", f"{AT}/x.safetensors", "--json")
    assert code == 5 and "secretsecret" not in err, err
    monkeypatch.setattr(other_systems, "find_spec", lambda _: None)
    code, _, err = run("inspect", f"{AT}/x.safetensors")
    assert code == 2 and "pip install fsspec" in err, err
