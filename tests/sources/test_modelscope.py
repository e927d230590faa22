"""Repositories of ModelScope."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lora_merge.planning.recipe import KEY
from tests.kit.adapters import kohya
from tests.kit.command_line import Command
from tests.kit.files import load_all, metadata, save
from tests.kit.folders import llama_folder, peft_folder
from tests.kit.models import sd1_sample
from tests.sources.server import COMMIT, Machines


def test_file_is_pinned_by_its_commit_and_replayed(machines: Machines, run: Command, tmp_path: Path) -> None:
    save(sd1_sample(), tmp_path / "base.safetensors")
    lora = save(kohya(sd1_sample()), tmp_path / "style.safetensors")
    machines.repositories["me/style"] = {"README.md": b"# style", "sub/style.safetensors": lora.read_bytes()}
    lora.unlink()
    code, out, err = run("inspect", "ms://me/style/sub/style.safetensors", "--json")
    assert code == 0 and json.loads(out)["path"] == f"ms://me/style@{COMMIT}/sub/style.safetensors", err
    code, _, err = run("base.safetensors", "ms://me/style@master/sub/style.safetensors:0.5", "-o", "a.safetensors")
    assert code == 0, err
    used = json.loads(metadata(Path("a.safetensors"))[KEY])["adapters"][0]
    assert used["source"] == f"ms://me/style@{COMMIT}/sub/style.safetensors"
    for clear in (False, True):
        if clear:
            shutil.rmtree(tmp_path / "store")
        code, _, err = run("replay", "a.safetensors", "-o", f"{clear}.safetensors")
        assert code == 0 and Path(f"{clear}.safetensors").read_bytes() == Path("a.safetensors").read_bytes(), err


def test_folder_is_merged_as_a_local_folder(machines: Machines, run: Command, tmp_path: Path) -> None:
    machines.repositories["me/tiny"] = llama_folder(tmp_path / "tiny")
    machines.repositories["me/peft"] = peft_folder(tmp_path / "peft")
    assert run("ms://me/tiny", "ms://me/peft:0.5", "-o", "a")[0] == 0
    assert run("tiny", "peft:0.5", "-o", "b")[0] == 0
    assert {p.name for p in Path("a").iterdir()} == {p.name for p in Path("b").iterdir()}
    one, other = load_all(Path("a")), load_all(Path("b"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in other)


@pytest.mark.parametrize("revision", ["", "@master", "@v2"])
def test_cache_of_the_library_is_read_without_requests(
    machines: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, revision: str
) -> None:
    """It does not say which revision it has: the usual one is taken for it."""
    monkeypatch.setenv("LORA_MERGE_OFFLINE", "1")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    (folder := tmp_path / "ms" / "models" / "me" / "style-1___5").mkdir(parents=True)
    save(kohya(sd1_sample()), folder / "style.safetensors")
    code, _, err = run("inspect", f"ms://me/style-1.5{revision}")
    assert code == (2 if revision == "@v2" else 0) and not machines.requests, err


def test_repository_that_is_not_there_is_an_input_error(machines: Machines, run: Command) -> None:
    code, _, err = run("inspect", "ms://me/nothing")
    assert code == 3 and "MODELSCOPE_API_TOKEN" in err


@pytest.mark.parametrize("wrong", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_library_downloads_with_its_login_if_it_is_installed(
    machines: Machines, run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, wrong: bool
) -> None:
    """A file of other bytes than ModelScope states is exit 3 and leaves nothing."""
    save(sd1_sample(), tmp_path / "base.safetensors")
    machines.repositories["me/style"] = {"style.safetensors": save(kohya(sd1_sample()), tmp_path / "x").read_bytes()}
    calls = list[tuple[str, ...]]()

    def model_file_download(name: str, path: str, revision: str, *, local_dir: str, endpoint: str) -> str:
        calls.append((name, path, revision, endpoint))
        (file := Path(local_dir, path)).write_bytes(machines.repositories[name][path] + b"x" * wrong)
        return str(file)

    modules = {name: ModuleType(name) for name in ("modelscope", "modelscope.hub", "modelscope.hub.file_download",
                                                   "modelscope.hub.api")}  # fmt: skip
    modules["modelscope"].__spec__ = ModuleSpec("modelscope", None)
    vars(modules["modelscope.hub.file_download"])["model_file_download"] = model_file_download
    vars(modules["modelscope.hub.api"])["ModelScopeConfig"] = SimpleNamespace(get_token=lambda: "ms-login")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    code, out, err = run("base.safetensors", "ms://me/style", "-o", "a.safetensors")
    assert code == (3 if wrong else 0) and "ms-login" not in out + err, err
    assert calls == [("me/style", "style.safetensors", "master", machines.url)]
    assert all(r.token == "ms-login" for r in machines.requests if r.path.startswith("/api/v1/models/"))
    kept = [p.name for p in (tmp_path / "store").rglob("*") if p.is_file() and p.name != ".lock"]
    assert sorted(kept) == ([] if wrong else ["source.json", "style.safetensors"])
