"""Runs tests once for each set of kernels that MKL and torch can be told to take, each time in a new process.

    python -m tests.kernels [arguments of pytest]      default: the tests that look at bytes and at accuracy

A name that a processor or a library does not know is ignored by it, so that all of them run everywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
MKL = (None, "AVX2", "AVX512", "COMPATIBLE")
ATEN = (None, "avx2", "avx512")
SETTINGS: Sequence[Mapping[str, str]] = [
    {name: value for name, value in (("MKL_CBWR", mkl), ("ATEN_CPU_CAPABILITY", aten)) if value is not None}
    for mkl, aten in product(MKL, ATEN)
]
TESTS = (
    "tests/algorithms/test_same_bytes.py",
    "tests/engine/test_placement.py",
    "tests/adapters_out/test_bad_input.py",
)


def run(setting: Mapping[str, str], arguments: Sequence[str] = TESTS) -> subprocess.CompletedProcess[str]:
    """Run pytest under a setting, without those that this process has."""
    own = {name: value for name, value in os.environ.items() if name not in {"MKL_CBWR", "ATEN_CPU_CAPABILITY"}}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**own, **setting}, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    failed = 0
    for setting in SETTINGS:
        done = run(setting, sys.argv[1:] or TESTS)
        failed += bool(done.returncode)
        print(setting or "no setting", done.stdout if done.returncode else done.stdout.splitlines()[-1], flush=True)
    sys.exit(min(failed, 1))
