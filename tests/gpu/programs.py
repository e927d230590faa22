"""Programs of the repository, run with a limit on their time, and what their outputs tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
Figures = dict[str, Any]


class Ended(NamedTuple):
    """A program that has ended."""

    code: int | None  # None: it had no time left, and was killed
    output: str
    errors: str

    @property
    def text(self) -> str:
        """The end of what it said."""
        cut = "" if self.code is not None else "\nno time was left"
        return f"{self.output}\n{self.errors}".strip()[-2000:] + cut


class Failed(RuntimeError):
    """A part that failed, and the figures that it has found before."""

    def __init__(self, text: str, figures: Figures) -> None:
        super().__init__(text)
        self.figures = figures


def program(*words: object, seconds: float, **more: str) -> Ended:
    """Run a program of the repository with other variables of the environment. With no time left, it is killed with all
    that it has started, as workers of pytest: they would take the GPU from what comes next."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:

        def read(file: IO[str]) -> str:
            file.seek(0)
            return file.read()

        # A group of its own, not a session, so that it ends with the terminal or the job that the checklist is part of.
        with subprocess.Popen(
            [str(w) for w in words], cwd=ROOT, env={**os.environ, **more}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=errors, preexec_fn=os.setpgrp,
        ) as process:  # fmt: skip
            try:
                code = process.wait(max(seconds, 0.0))
            except subprocess.TimeoutExpired:
                return Ended(None, read(output), read(errors))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return Ended(code, read(output), read(errors))


def python(*words: object, seconds: float, **more: str) -> Ended:
    """Run Python with these words."""
    return program(sys.executable, *words, seconds=seconds, **more)


def merged(*words: object, seconds: float, **more: str) -> Ended:
    """Run a merge that must succeed."""
    done = python("-m", "lora_merge", *words, "--overwrite", seconds=seconds, **more)
    if done.code != 0:
        raise RuntimeError(done.text)
    return done


def printed(module: str, *words: object, seconds: float) -> Figures:
    """Run a module that prints JSON, and return what its last line holds."""
    done = python("-m", module, *words, seconds=seconds)
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    figures: Figures = json.loads(lines[-1]) if lines else {}
    if done.code != 0 or not figures:
        why = "it had no time left" if done.code is None else done.errors[-2000:] or "it printed no figures"
        raise Failed(f"{module}: {why}", figures)
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
