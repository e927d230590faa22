"""Runs one program and measures it: wall and processor seconds, peak memory; page cache as the case wants it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Cache = Literal["warm", "cold"]
CHUNK: Final = 2**26
DISKS: Final = Path("/proc/diskstats")


@dataclass(frozen=True)
class Run:
    """One process."""

    seconds: float
    cpu: float  # seconds of processor time, user and system
    peak: int  # bytes of its largest resident size
    output: str


class Failed(RuntimeError):
    """A program did not end well; the text is the end of what it said."""


def run(command: Sequence[str], *, threads: int | None = None, known: Path | None = None) -> Run:
    """Run a command to its end; Failed unless it succeeds. `known`: the folder of what earlier runs have hashed."""
    found = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]  # peers may lie elsewhere
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed programs are compiled, this folder's at the first run
    if known is not None:
        environment["XDG_CACHE_HOME"] = str(known)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None, "a pipe was asked for"
        output = process.stdout.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise Failed(f"{' '.join(command)}: exit {process.returncode}\n{output[-2000:]}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit, output)


def prepare(files: Sequence[Path], cache: Cache) -> None:
    """Bring the inputs into the page cache, or out of it; nothing else is left waiting for the disk."""
    os.sync()
    for file in files:
        with file.open("rb", buffering=0) as f:
            if cache == "cold":
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                continue
            buffer = bytearray(CHUNK)
            while f.readinto(buffer):
                pass
    _settle()


def _settle() -> None:
    """Wait for half a second, a minute at most, in which no disk has anything under way: where a file of 24 GB was
    deleted, its blocks are discarded after the sync, at the cost of what runs then."""
    quiet = 0
    for _ in range(600 if DISKS.exists() else 0):
        under_way = any(int(line.split()[11]) for line in DISKS.read_text().splitlines())
        quiet = 0 if under_way else quiet + 1
        if quiet == 5:
            return
        time.sleep(0.1)
