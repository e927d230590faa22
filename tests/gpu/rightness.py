"""Steps that ask whether merges on a GPU are right: tests, detectors of races and of bad accesses, whole files."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.gpu import results
from tests.gpu.programs import Failed, Figures, differences, merged, printed, program, python
from tests.gpu.speed import Part, files

FIRST: Final = "tests/engine/test_gpu.py"
OTHERS: Final = ("tests/engine/test_cuda.py", "tests/engine/test_device_codecs.py", "tests/engine/test_placement.py",
                 "tests/cli/test_doctor.py")  # fmt: skip
"""Every file with tests marked gpu. Other files may need libraries that a machine with a GPU does not have."""

FILLING: Final = "memory or never_fits or busy_stream"
"""Tests that fill the device's memory."""


def machine(data: Path) -> Iterator[Part]:
    """What is there: facts, no figures."""

    def facts(seconds: float) -> Figures:
        code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), hasattr(torch._C, '_host_emptyCache'))"
        found: Figures = {"cores": os.cpu_count(), "data": f"{data}, {shutil.disk_usage(data).free >> 30} GiB free"}
        if shutil.which("nvidia-smi"):
            asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
            found["gpu"] = program("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", seconds=10).output
        found["sanitizer"] = shutil.which("compute-sanitizer") or "not installed"
        found["torch"] = python("-c", code, seconds=seconds).output.strip()
        return {"machine": found}

    yield facts


def right(data: Path) -> Iterator[Part]:
    """The tests that are marked gpu, those that fill the device's memory one by one; every formula by `doctor`."""
    cores, notes = os.cpu_count() or 1, Path(tempfile.mkdtemp()) / "results"
    notes.touch()

    def told() -> tuple[Figures, list[str]]:
        """The figures of all tests so far, and what could not be read."""
        found = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
        failed = {name: text for name, outcome, text in found if outcome == "failed"}
        passed, figures = sum(outcome == "passed" for _, outcome, _ in found), Figures()
        if passed or failed:
            figures = {
                "gpu_tests_failed": len(failed),
                "failed_tests": dict([*failed.items()][:40]),
                "gpu_tests_passed": passed,
                "warnings": sorted({text for _, outcome, text in found if outcome == "warned"})[:20],
            }
        return figures, [f"{name}: {text[-200:]}" for name, outcome, text in found if outcome == "not collected"]

    def tests(*words: object, workers: int, seconds: float) -> Figures:
        """Only the plugins that are named, as others of the machine may fail. Warnings are told, and are no errors: other
        versions of libraries warn of other things."""
        beside = ("-p", "xdist.plugin", "-n", workers) if workers and find_spec("xdist") else ()
        command = ("-m", "pytest", "-c", "pyproject.toml", "-m", "gpu", "-q", "-W", "default", "-p", "tests.gpu.results", "-p", "no:cacheprovider", *beside,
                   "--continue-on-collection-errors", *words)  # fmt: skip
        own = {results.FILE: str(notes), results.WORKER: "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": str(max(1, cores // max(workers, 1)))}  # fmt: skip
        done = python(*command, seconds=seconds, **own)
        figures, unread = told()
        if done.code not in {0, 1} or unread or not figures:
            raise Failed("\n".join([*unread, done.text]), figures)
        return figures

    yield lambda seconds: tests(FIRST, workers=0, seconds=seconds)
    yield lambda seconds: tests(*OTHERS, "-k", f"not ({FILLING})", workers=min(8, max(1, cores // 2)), seconds=seconds)
    yield lambda seconds: tests(*OTHERS, "-k", FILLING, workers=0, seconds=seconds)

    def doctor(seconds: float) -> Figures:
        done = python("-m", "lora_merge", "doctor", data, "--json", seconds=seconds)
        if done.code is None:
            raise TimeoutError(done.text)
        return {"doctor_failed": int(done.code != 0), "doctor": done.output[-4000:]}

    yield doctor


def races(_data: Path) -> Iterator[Part]:
    """torch's detector of races between streams."""
    yield lambda seconds: printed("tests.gpu.races", seconds=seconds)


def sanitizer(_data: Path) -> Iterator[Part]:
    """NVIDIA's checks of memory, where they are installed."""
    if not shutil.which("compute-sanitizer"):
        yield lambda _: {"sanitizer_skipped": "compute-sanitizer is not installed"}
        return

    def checked(seconds: float, tool: str) -> Figures:
        words = ["--tool", tool, "--error-exitcode", 9, sys.executable, "-m", "tests.gpu.races", "plain"]
        done = program("compute-sanitizer", *words, seconds=seconds)
        if done.code not in {0, 9}:
            raise RuntimeError(done.text)
        return {f"{tool}_errors": int(done.code == 9), f"{tool}_tail": done.text}

    yield from (partial(checked, tool=tool) for tool in ("memcheck", "initcheck"))


def whole(data: Path) -> Iterator[Part]:
    """SDXL merged on the GPU and on the CPU: how far they differ, and the proof of every number of each output."""
    base, lora = files(data, "sdxl")
    want, got = data / "want.safetensors", data / "got.safetensors"
    worst, proofs = [0.0, 0.0], [0]

    def compared(seconds: float, *options: str) -> Figures:
        both = (base, f"{lora}:0.7", "--no-verify", *options)
        if options[:1] in {(), ("--dtype",)}:
            merged(*both, "-o", want, "--device", "cpu", seconds=seconds)
        merged(*both, "-o", got, "--device", "cuda", seconds=seconds)
        worst[:] = map(max, worst, differences(got, want))
        return {"different_share": worst[0], "worst_ulp": worst[1]}

    def proven(seconds: float) -> Figures:
        done = python("-m", "lora_merge", "verify", "--full", got, seconds=seconds)
        if done.code is None:
            raise TimeoutError(done.text)
        proofs[0] += bool(done.code)
        return {"full_proof_failed": proofs[0], **({"full_proof": done.text} if done.code else {})}

    for options in ((), ("--max-memory", "16MiB"), ("--max-vram", "512MiB"), ("--dtype", "bf16")):
        yield partial(lambda seconds, o: compared(seconds, *o), o=options)
        yield proven
