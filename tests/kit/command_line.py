"""The program: `run` in this process, where nothing is imported anew, and `run_anew` in a new one, as a user runs it."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest


class Answer(NamedTuple):
    """The exit code of a command, and what it wrote."""

    code: int
    out: str
    err: str


Command: TypeAlias = Callable[..., Answer]


def run(*arguments: object, seconds: float = 60) -> Answer:
    """Run a command in this process, without a terminal. TimeoutError where it takes more time of the processor."""
    from lora_merge.cli.main import main

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    out, err, code = io.StringIO(), io.StringIO(), 0
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGVTALRM, late)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["lora-merge", *map(str, arguments)])
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return Answer(code, out.getvalue(), err.getvalue())


def run_anew(*arguments: object, cwd: Path | None = None) -> Answer:
    """Run a command in a process of its own, where everything is imported anew."""
    command = [sys.executable, "-m", "lora_merge", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)
