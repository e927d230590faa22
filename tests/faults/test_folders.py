"""The same for outputs that are folders: shards, an index and side files appear together or not at all."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import Nursery
from tests.faults.conftest import PART
from tests.kit.files import sha


@dataclass
class Model:
    """A base of two shards, an adapter, and what the output folder holds after merges of two strengths."""

    folder: Path
    nursery: Nursery
    old: dict[str, str]
    new: dict[str, str]

    def start(self, strength: float = 1.0, *more: str, **how: Any) -> int:
        argv = ["base", f"a.safetensors:{strength}", "-o", str(self.folder / "out"), "-q", *more]
        return self.nursery.start(argv, self.folder, **how)

    def run(self, *args: Any, **how: Any) -> int:
        return self.nursery.wait(self.start(*args, **how))

    def out(self) -> dict[str, str]:
        """Every file of the output by its digest."""
        out = self.folder / "out"
        return {p.relative_to(out).as_posix(): sha(p) for p in out.rglob("*") if p.is_file()}

    def strays(self) -> list[str]:
        return [p.name for p in self.folder.iterdir() if PART in p.name]

    def reset(self) -> None:
        shutil.rmtree(self.folder / "out", ignore_errors=True)

    def log(self) -> str:
        return (self.folder.parent / "log.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if not nursery.shim:
        pytest.skip("no gcc for the fault shim")
    folder = tmp_path_factory.mktemp("model") / "work"
    (folder / "base").mkdir(parents=True)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    weights = {f"layers.{i}.weight": torch.randn(256, 256).half() for i in range(6)}
    table = {key: names[i % 2] for i, key in enumerate(weights)}
    for name in names:
        save_file({k: w for k, w in weights.items() if table[k] == name}, folder / "base" / name)
    (folder / "base" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "base" / "config.json").write_text("{}")
    adapter = {f"layers.{i}.lora_{d}.weight": torch.randn(*s) for i in (0, 3) for d, s in
               (("up", (256, 4)), ("down", (4, 256)))}  # fmt: skip
    save_file(adapter, folder / "a.safetensors")
    made = Model(folder, nursery, {}, {})
    for strength, kept in ((0.5, made.old), (1.0, made.new)):
        made.reset()
        assert made.run(strength) == 0, made.log()
        kept.update(made.out())
    assert len(made.old) == 5
    assert made.old.keys() == made.new.keys()
    return made


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["lost", "lie", "lost plain", "lie plain"])
@pytest.mark.parametrize("at", [0, 1])
def test_exit_code_agrees_with_the_folder_where_a_reply_is_lost(model: Model, kind: str, at: int) -> None:
    model.reset()
    assert model.run(0.5) == 0, model.log()
    code = model.run(1.0, "--overwrite", fault=("name", at, kind, "out"))
    assert model.out() == (model.new if code == 0 else model.old), model.log()
    assert code == 0 or kind.startswith("lie"), model.log()
    assert model.strays() == []


@pytest.mark.few(2)
@pytest.mark.parametrize(("call", "at"), [("pwrite", 0), ("pwrite", 2), ("fsync", 0), ("fsync", 3), ("name", 0)])
@pytest.mark.parametrize("kind", ["kill", "EIO"])
def test_folder_is_the_old_one_or_the_new_one(model: Model, call: str, at: int, kind: str) -> None:
    for old in (model.old, {}):
        model.reset()
        if old:
            assert model.run(0.5) == 0
        code = model.run(1.0, "--overwrite", fault=(call, at, kind, PART))
        assert code == (1 if kind == "EIO" else -signal.SIGKILL), model.log()
        assert model.out() == old, model.log()
        assert len(model.strays()) == (kind == "kill")
        assert model.run(1.0, "--overwrite") == 0, model.log()
        assert model.out() == model.new
        assert model.strays() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("at", [("fsync", 0), ("pwrite", 1), ("fsync", 3)])
@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_two_merges_into_one_folder(model: Model, more: tuple[str, ...], at: tuple[str, int]) -> None:
    """The first waits at a gate while the second runs, so the first is the last to give the output its name."""
    model.reset()
    first = model.start(0.5, *more, fault=(*at, "gate", PART))
    with model.nursery.gate(first, model.folder, model.log):
        assert model.run(1.0, *more) == 0, model.log()
        assert len(model.strays()) == 1, "the live run's folder was taken for a stale one"
        assert model.out() == model.new
    assert model.nursery.wait(first) == (0 if more else 2), model.log()
    assert model.out() == (model.old if more else model.new)
    assert model.strays() == []
