"""How long `make test` takes, by step, file and test.

`python -m tests.durations [options of pytest]` runs the suite and what comes before it, and keeps the table;
`python -m tests.durations --show` prints the slowest of the table that is kept.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

TABLE: Final = Path(__file__).with_name("durations.tsv")
SHOWN: Final = 20  # rows of each list
LEAST: Final = 0.2  # seconds of a test that has a row in the table
STEPS: Final = {
    "import torch": ("-c", "import torch"),
    "collect": ("-m", "pytest", "-q", "--collect-only"),
    "ruff check": ("-m", "ruff", "check", "."),
    "ruff format": ("-m", "ruff", "format", "--check", "."),
    **{f"mypy, {system}": ("-m", "mypy", "--platform", system, "--cache-dir", f".mypy_cache/{system}")
       for system in ("linux", "win32", "darwin")},
}  # fmt: skip
"""Step → arguments of Python. What is collected and checked for the first time takes longer: run it twice."""


class Recorder:
    """A plugin of pytest for the process that all reports reach."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.first = 0.0
        self.tests: Counter[str] = Counter()
        self.fixtures: Counter[str] = Counter()  # what a test waits for before it begins, and after

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.first = self.first or time.monotonic() - self.start
        (self.tests if report.when == "call" else self.fixtures)[report.nodeid] += report.duration


def steps() -> dict[str, float]:
    """Run what a worker pays before its first test, and the checks; return step → seconds."""
    seconds: dict[str, float] = {}
    for name, arguments in STEPS.items():
        start = time.monotonic()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        seconds[name] = time.monotonic() - start
    return seconds


def table(before: dict[str, float], recorder: Recorder, wall: float) -> str:
    """Return the rows `kind, seconds, number of tests, name`, the slowest of each kind first."""
    files: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seconds in (recorder.tests, recorder.fixtures):
        for node, spent in seconds.items():
            files[node.partition("::")[0]] += spent
    for node in recorder.tests:
        counts[node.partition("::")[0]] += 1
    machine = (
        f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, Python {platform.python_version()}"
    )
    rows = [f"# {machine}: {wall:.0f} s, {recorder.first:.0f} s of them before the first test ended"]
    rows += [f"step\t{spent:.1f}\t1\t{name}" for name, spent in before.items()]
    rows += [f"file\t{spent:.1f}\t{counts[name]}\t{name}" for name, spent in files.most_common()]
    rows += [f"test\t{spent:.2f}\t1\t{name}" for name, spent in recorder.tests.most_common() if spent >= LEAST]
    rows += [f"fixture\t{spent:.2f}\t1\t{name}" for name, spent in recorder.fixtures.most_common() if spent >= LEAST]
    return "\n".join(rows) + "\n"


def show(rows: str) -> str:
    """Return the slowest rows of each kind, and what is before the first of them."""
    first, *lines = rows.splitlines()
    kinds = {
        kind: [line for line in lines if line.startswith(f"{kind}\t")] for kind in ("step", "file", "test", "fixture")
    }
    return "\n".join([first, *(line for kind in kinds.values() for line in kind[:SHOWN])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the slowest of the table that is kept")
    parser.add_argument("--output", type=Path, default=TABLE, help="where the table is kept")
    options, rest = parser.parse_known_args()
    code = 0
    if not options.show:
        before, recorder = steps(), Recorder()
        code = pytest.main(rest or ["-q", "-n", "2", "--dist", "worksteal"], plugins=[recorder])
        options.output.write_text(table(before, recorder, time.monotonic() - recorder.start))
    print(show(options.output.read_text()))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
