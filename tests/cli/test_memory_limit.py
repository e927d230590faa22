"""A limit on the process's memory (ulimit -v) that torch has no room under: one error, and neither a hang nor an abort."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import lora_merge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system holds to this limit")

BASE = {"a.weight": torch.zeros(4, 4)}
ADAPTER = {"a.lora_A.weight": torch.ones(2, 4), "a.lora_B.weight": torch.ones(4, 2)}
COMMANDS = {
    "merge": ["base", "adapter", "-o", "out.safetensors", "--device", "cpu"],
    "replay": ["replay", "made.safetensors", "-o", "out.safetensors"],
    "inspect a torch file": ["inspect", "base.pt"],
    "batch": ["batch", "jobs.yaml"],
    "batch of workers": ["batch", "jobs.yaml", "--workers", "2"],
}


def run(folder: Path, arguments: list[str], mebibytes: int) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own that may have so much memory."""
    import resource

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))

    return subprocess.run([sys.executable, "-m", "lora_merge", *arguments], cwd=folder, preexec_fn=limited,
                          capture_output=True, text=True, timeout=100, check=False)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("limited")
    save_file(BASE, root / "base")
    save_file(ADAPTER, root / "adapter")
    torch.save(BASE, root / "base.pt")
    jobs = ", ".join(f"{{base: base, adapters: [adapter], output: job{n}}}" for n in range(2))
    (root / "jobs.yaml").write_text(f"version: 1\njobs: [{jobs}]\n")
    lora_merge.merge(root / "base", root / "adapter", root / "made.safetensors", device="cpu")
    return root


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("command", "mebibytes"), [*((command, 300) for command in COMMANDS), ("merge", 900), ("batch of workers", 900)]
)
def test_limit_too_low_is_refused_before_torch_is_loaded(folder: Path, command: str, mebibytes: int) -> None:
    before = sorted(folder.iterdir())
    done = run(folder, COMMANDS[command], mebibytes)
    assert done.returncode == 5, (done.returncode, done.stderr[-2000:])
    assert re.search("error: (not enough memory to load torch|the system allows no more threads)", done.stderr)
    assert "fix:   raise the limit (ulimit" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_commands_without_torch_need_no_room_for_it(folder: Path) -> None:
    for arguments in (["inspect", "base"], ["verify", "made.safetensors"], ["--help"], ["--version"]):
        done = run(folder, arguments, 300)
        assert done.returncode == 0, done.stderr
