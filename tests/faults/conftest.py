"""The folder that faults are tried on, and what must hold after each of them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_merge.disk.volumes import RESERVES, file_system
from tests.conftest import Nursery
from tests.kit.files import sha

PART = "lora-merge.part"


@dataclass
class Scene:
    """A base, an adapter, an old output, and the output that a merge gives."""

    folder: Path
    nursery: Nursery
    inputs: dict[str, str] = field(default_factory=dict)
    old: bytes = b"an older file"
    new: str = ""
    seconds: float = 0.0

    @property
    def out(self) -> Path:
        return self.folder / "out.safetensors"

    def argv(self, *more: str, base: str = "base.safetensors", adapter: str = "a.safetensors") -> list[str]:
        return [base, adapter, "-o", str(self.out), "-q", "--overwrite", "--max-memory", "8MiB", *more]

    def run(self, *more: str, argv: list[str] | None = None, **how: Any) -> int:
        """The exit code of one merge with this fault."""
        return self.nursery.wait(self.start(*more, argv=argv, **how))

    def start(self, *more: str, argv: list[str] | None = None, **how: Any) -> int:
        return self.nursery.start(argv or self.argv(*more), self.folder, **how)

    def armed(self, call: str, at: int, kind: str, path: str = PART) -> dict[str, Any]:
        """The request for a fault of the shim."""
        if not self.nursery.shim:
            pytest.skip("no gcc for the fault shim")
        if call == "fallocate" and file_system(self.folder) not in RESERVES:
            pytest.skip("space is not reserved on this file system")
        return {"fault": (call, at, kind, path)}

    def stopped(self, pid: int) -> None:
        self.nursery.stopped(pid, self.log)

    def log(self) -> str:
        return (self.folder.parent / "log.txt").read_text(encoding="utf-8")

    def strays(self) -> list[str]:
        return [p.name for p in self.folder.iterdir() if PART in p.name]

    def check(self, *, finished: bool | None = None, quiet: bool = True) -> None:
        """Inputs as they were; at the output the old file or the complete new one (`finished`: which)."""
        for name, value in self.inputs.items():
            assert sha(self.folder / name) == value, name
        kept = self.out.exists() and self.out.read_bytes() == self.old
        made = self.out.exists() and sha(self.out) == self.new
        assert kept or made, f"neither the old nor the new file: {self.out.stat() if self.out.exists() else 'nothing'}"
        if finished is not None:
            assert made is finished, self.log()
        assert "Traceback" not in self.log() or not quiet
        assert {p.name for p in self.folder.iterdir()} - set(self.strays()) == {
            "base.safetensors",
            "a.safetensors",
            self.out.name,
        }

    def reset(self) -> None:
        self.out.write_bytes(self.old)


@pytest.fixture(scope="module")
def scene(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Six layers of 512 KiB: a merge in windows of 1 MiB."""
    folder = tmp_path_factory.mktemp("scene") / "work"
    folder.mkdir()
    return furnish(folder, nursery)


def furnish(folder: Path, nursery: Nursery) -> Scene:
    generator = torch.Generator().manual_seed(1)
    base = {f"blocks.{i}.weight": torch.randn(512, 512, generator=generator).half() for i in range(6)}
    adapter = {}
    for i in range(0, 6, 2):
        adapter[f"blocks.{i}.lora_up.weight"] = torch.randn(512, 8, generator=generator) * 0.1
        adapter[f"blocks.{i}.lora_down.weight"] = torch.randn(8, 512, generator=generator) * 0.1
    save_file(base, folder / "base.safetensors")
    save_file(adapter, folder / "a.safetensors")
    scene = Scene(folder, nursery)
    scene.inputs = {name: sha(folder / name) for name in ("base.safetensors", "a.safetensors")}
    assert scene.run() == 0, scene.log()
    started = time.perf_counter()
    assert scene.run() == 0, scene.log()
    scene.seconds = time.perf_counter() - started
    scene.new = sha(scene.out)
    scene.reset()
    return scene


def send(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
