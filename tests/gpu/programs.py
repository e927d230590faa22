"""Programs of the repository, run with a limit on their time, and what their outputs tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
Figures = dict[str, Any]


def program(*words: object, seconds: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the repository with other variables of the environment; its output is kept."""
    return subprocess.run([str(w) for w in words], cwd=ROOT, env={**os.environ, **more}, text=True, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)  # fmt: skip


def python(*words: object, seconds: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words."""
    return program(sys.executable, *words, seconds=seconds, **more)


def merged(*words: object, seconds: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a merge that must succeed."""
    done = python("-m", "lora_merge", *words, "--overwrite", seconds=seconds, **more)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    return done


class Failed(RuntimeError):
    """A program that failed, and the figures that it has printed before."""

    def __init__(self, text: str, figures: Figures) -> None:
        super().__init__(text)
        self.figures = figures


def printed(module: str, *words: object, seconds: float) -> Figures:
    """Run a module that prints JSON, and return what its last line holds."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        command, failed = [sys.executable, "-m", module, *map(str, words)], ""
        try:
            if subprocess.run(command, cwd=ROOT, check=False, stdout=out, stderr=errors, timeout=seconds).returncode:
                errors.seek(0)
                failed = f"{module}: {errors.read()[-2000:]}"
        except subprocess.TimeoutExpired as e:
            failed = str(e)
        out.seek(0)
        lines = [line for line in out if line.startswith("{")]
    figures: Figures = json.loads(lines[-1]) if lines else {}
    if failed or not figures:
        raise Failed(failed or f"{module} printed no figures", figures)
    return figures


def differences(one: Path, other: Path) -> tuple[float, float]:
    """Return the largest share of a tensor's elements that differ between two files, and the largest distance in units
    of the last place."""
    import torch
    from safetensors import safe_open

    share = worst = 0.0
    with safe_open(one, "pt") as a, safe_open(other, "pt") as b:
        for name in sorted(a.keys()):
            x, y = (f.get_tensor(name).reshape(-1) for f in (a, b))
            if x.dtype in {torch.float16, torch.bfloat16} and not torch.equal(x, y):
                ordered = [t.view(torch.int16).int() for t in (x, y)]
                ordered = [torch.where(t < 0, -32768 - t, t) for t in ordered]  # neighbours are one apart
                apart = (ordered[0] - ordered[1]).abs()
                share, worst = max(share, float((apart > 0).double().mean())), max(worst, float(apart.max()))
    return share, worst
