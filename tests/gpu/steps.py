"""The steps of the checklist: each runs programs, and returns figures by the names of predictions.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from .programs import ROOT, Figures, differences, merged, printed, program, python

NO_OTHERS: Final = "memory or never_fits or busy_stream"
"""Tests that fill the device's memory."""

FLUX: Final = 80e9
"""Bytes that Flux, an adapter and an output of it need, twice."""

LEAST: Final = 5.0
"""Seconds; with less a part is not begun."""

Part = Callable[[float], Figures]
"""Function of the seconds that are left that returns figures."""


class Step(NamedTuple):
    """A chapter of the checklist, and the minutes that it may take."""

    name: str
    minutes: float
    parts: Callable[[Path], Iterator[Part]]
    """Folder for data → parts; one that fails leaves the figures of the others."""


def machine(data: Path) -> Iterator[Part]:
    """What is there: facts, no figures; and every formula against the reference."""

    def facts(seconds: float) -> Figures:
        code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), hasattr(torch._C, '_host_emptyCache'))"
        found = {"torch": python("-c", code, seconds=seconds).stdout.strip(), "cores": os.cpu_count()}
        if shutil.which("nvidia-smi"):
            asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
            query = program("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", seconds=30)
            found["gpu"] = query.stdout.strip()
        found["sanitizer"] = shutil.which("compute-sanitizer") or "not installed"
        return {"machine": found}

    def doctor(seconds: float) -> Figures:
        done = python("-m", "lora_merge", "doctor", data, "--json", seconds=seconds)
        return {"doctor_failed": int(done.returncode != 0), "doctor": done.stdout[-4000:]}

    yield from (facts, doctor)


def probe(_data: Path) -> Iterator[Part]:
    """What the device and the link can do."""
    yield lambda seconds: printed("tests.gpu.probe", seconds=seconds)


def right(_data: Path) -> Iterator[Part]:
    """The tests that are marked gpu: those that fill the device's memory one by one, after all others."""
    failed: list[str] = []

    def tests(*words: object, seconds: float) -> Figures:
        done = python(
            "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/engine", *words, seconds=seconds
        )
        lines = done.stdout.splitlines()
        failed.extend(line.split(" - ")[0].removeprefix("FAILED ") for line in lines if line.startswith("FAILED"))
        if done.returncode not in {0, 1} or " passed" not in done.stdout:
            raise RuntimeError(done.stdout[-2000:])
        return {"gpu_tests_failed": len(failed), "failed_tests": failed[:40]}

    yield lambda seconds: tests("-n", 6, "-k", f"not ({NO_OTHERS})", seconds=seconds)
    yield lambda seconds: tests("-n", 0, "-k", NO_OTHERS, seconds=seconds)


def races(_data: Path) -> Iterator[Part]:
    """torch's detector of races, and NVIDIA's checks of memory where they are installed."""
    yield lambda seconds: printed("tests.gpu.races", seconds=seconds)
    scene = ["-m", "pytest", "-m", "gpu", "-q", "-n", 0, "-p", "no:cacheprovider", "tests/engine/test_cuda.py", "-k",
             "windows_that and keep and 8MiB"]  # fmt: skip

    def checked(seconds: float, tool: str) -> Figures:
        words = ["--tool", tool, "--error-exitcode", 9, sys.executable, *scene]
        done = program("compute-sanitizer", *words, seconds=seconds)
        if done.returncode not in {0, 9}:
            raise RuntimeError(done.stdout[-2000:])
        return {f"{tool}_errors": int(done.returncode == 9), f"{tool}_tail": done.stdout[-2000:]}

    if shutil.which("compute-sanitizer"):
        yield from (partial(checked, tool=tool) for tool in ("memcheck", "initcheck"))


def files(data: Path, size: str, rank: int = 32) -> tuple[Path, Path]:
    """A checkpoint of full size and an adapter for it, made once."""
    from ..bench import inputs

    dtype = "BF16" if size == "flux" else "F16"
    lora = inputs.adapter(data / f"{size}-lora{'' if rank == 32 else rank}.safetensors", size, rank=rank)
    return inputs.base(data / f"{size}.safetensors", size, dtype), lora


def whole(data: Path) -> Iterator[Part]:
    """SDXL merged on the GPU and on the CPU: how far they differ, and the proof of every number of each output."""
    base, lora = files(data, "sdxl")
    want, got = data / "want.safetensors", data / "got.safetensors"
    figures: Figures = {"full_proof_failed": 0, "different_share": 0.0, "worst_ulp": 0.0}

    def compared(seconds: float, *options: str) -> Figures:
        if options[:1] in {(), ("--dtype",)}:
            merged(base, f"{lora}:0.7", "-o", want, "--device", "cpu", "--no-verify", *options, seconds=seconds)
        merged(base, f"{lora}:0.7", "-o", got, "--device", "cuda", "--no-verify", *options, seconds=seconds)
        share, ulp = differences(got, want)
        figures["different_share"] = max(figures["different_share"], share)
        figures["worst_ulp"] = max(figures["worst_ulp"], ulp)
        proof = python("-m", "lora_merge", "verify", "--full", got, seconds=seconds)
        figures["full_proof_failed"] += bool(proof.returncode)
        return figures

    every = ((), ("--max-memory", "16MiB"), ("--max-vram", "512MiB"), ("--dtype", "bf16"))
    yield from (partial(lambda seconds, o: compared(seconds, *o), o=options) for options in every)


def speed(data: Path, size: str, rounds: int, seconds: float) -> Figures:
    """What the folds reach of the link, and whole merges against the CPU and the floor of the folder."""
    report = data / f"{size}-bench.json"
    command = ["-m", "tests.bench", "gpu", "--size", size, "--rounds", rounds, "--rivals", "", "--keep", "--data", data]
    done = python(*command, "--json", report, seconds=seconds)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:])
    rows = json.loads(report.read_text())["results"]
    folds = next(r for r in rows if r["name"] == f"{size}, folds")
    times = {r["name"]: r["seconds"] for r in rows if r["suite"] == f"gpu, {size}"}
    found: Figures = {f"{size}_link_share": folds["link_share"], f"{size}_folds_gb_s": folds["gb_per_s"]}
    if folds.get("kernels"):
        found[f"{size}_kernels_per_gb"] = folds["kernels"] / (folds["base"] / 1e9)
    fastest = min(times["cpu"], times["cuda"])
    found |= {f"{size}_seconds": times, f"{size}_over_floor": times["cuda"] / times["disk floor"]}
    return found | ({"auto_loss": times["auto"] / fastest} if size == "sdxl" else {})


def sdxl(data: Path) -> Iterator[Part]:
    """SDXL in memory, what a device costs the host, and SDXL on the disk of the repository."""
    base, lora = files(data, "sdxl")

    def host(seconds: float) -> Figures:
        found = printed("tests.bench.host", base, lora, seconds=seconds)
        return {"host_ms_per_gb": found["ms_per_gb"], "host_operations": found["operations"]}

    yield host
    yield partial(speed, data, "sdxl", 3)
    yield partial(on_disk, base, lora)


def on_disk(base: Path, lora: Path, seconds: float) -> Figures:
    """A merge with its output on a disk, against a copy of the base to it."""
    with tempfile.TemporaryDirectory(dir=ROOT, prefix="bench-data-") as folder:
        if shutil.disk_usage(folder).free < 2 * base.stat().st_size:
            return {"disk_skipped": "no room on the disk of the repository"}
        out, took = Path(folder) / "out.safetensors", dict[str, float]()
        for name in ("floor", "cuda"):
            began = time.monotonic()
            if name == "floor":
                python("-m", "tests.bench.floor", base, out, seconds=seconds)
                out.unlink()
            else:
                merged(base, lora, "-o", out, "--device", "cuda", "--no-verify", seconds=seconds)
            took[name] = time.monotonic() - began
    return {"disk_seconds": took, "disk_over_floor": took["cuda"] / took["floor"]}


def flux(data: Path) -> Iterator[Part]:
    """Flux, where there is room for three files of its size; and its folds with an adapter of rank 128."""
    if shutil.disk_usage(data).free < FLUX:
        yield lambda _: {"flux_skipped": "80 GB are needed in the folder for data"}
        return
    yield partial(speed, data, "flux", 1)

    def wide(seconds: float) -> Figures:
        took = []
        for rank in (32, 128):
            words = ("tests.bench.device", "cuda", *files(data, "flux", rank), 1)
            took.append(printed(*words, seconds=seconds)["folds"]["seconds"])
        return {"rank_128_ratio": took[1] / took[0]}

    yield wide


def rest(data: Path) -> Iterator[Part]:
    """Tensors in memory, two merges at once, a bound, torch's other allocators, a device that is nearly full, a hostile
    adapter in a batch, and an interrupted merge."""
    base, lora = files(data, "sdxl")
    want, got = data / "want.safetensors", data / "got.safetensors"
    yield lambda seconds: printed("tests.gpu.memory", base, lora, data, seconds=seconds)

    def first(seconds: float) -> Figures:
        merged(base, lora, "-o", want, "--device", "cuda", "--no-verify", seconds=seconds)
        return {"allocators_different": 0}

    yield first
    different: list[bool] = []

    def other(seconds: float, setting: str) -> Figures:
        words = (base, lora, "-o", got, "--device", "cuda", "--no-verify")
        merged(*words, seconds=seconds, PYTORCH_CUDA_ALLOC_CONF=setting)
        different.append(differences(got, want) != (0.0, 0.0))
        return {"allocators_different": sum(different)}

    yield from (partial(other, setting=s) for s in ("expandable_segments:True", "backend:cudaMallocAsync"))
    yield partial(crowded, base, lora, got, want)
    yield lambda seconds: printed("tests.gpu.hostile", seconds=seconds)
    yield partial(interrupted, base, lora, data)


def crowded(base: Path, lora: Path, got: Path, want: Path, seconds: float) -> Figures:
    """Merge while another process holds all but 1 GiB of the device's memory."""
    hold = "import torch; n = torch.cuda.mem_get_info()[0] - 2**30; t = torch.empty(max(n, 1), dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None, "it was asked for"
            other.stdout.readline()
            began = time.monotonic()
            done = merged(base, lora, "-o", got, "--device", "cuda", "--no-verify", seconds=seconds)
            took = time.monotonic() - began
        finally:
            other.kill()
    return {"crowded_s": took, "crowded_ulp": differences(got, want)[1], "crowded_says": done.stdout[-1000:]}


def interrupted(base: Path, lora: Path, data: Path, seconds: float) -> Figures:
    """Send SIGINT in the middle of a merge."""
    folder = data / "interrupted"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    words = [sys.executable, "-m", "lora_merge", base, lora, "-o", folder / "o.safetensors", "--device", "cuda"]
    with subprocess.Popen(
        [str(w) for w in words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            end = time.monotonic() + seconds / 2
            while process.poll() is None and time.monotonic() < end and not any(folder.iterdir()):
                time.sleep(0.01)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            code = process.wait(seconds / 2)
        finally:
            process.kill()
    if code == 0:
        return {"interrupted_code": 0}  # it was too fast
    return {"interrupted_left": len([*folder.iterdir()]), "interrupted_code": code}


STEPS: Final[Sequence[Step]] = (
    Step("machine", 1, machine), Step("probe", 3, probe), Step("right", 5, right), Step("races", 4, races),
    Step("whole", 4, whole), Step("sdxl", 4.5, sdxl), Step("flux", 5, flux), Step("rest", 3.5, rest),
)  # fmt: skip


def carry_out(
    steps: Sequence[Step], data: Path, say: Callable[[str], object] = print,
    keep: Callable[[Figures], object] = lambda _: None,
) -> Figures:  # fmt: skip
    """Run the steps; a part that fails is told, and the others go on. `keep` is given the figures so far after each."""
    figures: Figures = {}
    for step in steps:
        began, errors = time.monotonic(), list[str]()
        figures[f"{step.name}_errors"] = errors
        parts = step.parts(data)
        while True:
            try:
                if (part := next(parts, None)) is None:
                    break
                left = step.minutes * 60 - (time.monotonic() - began)
                if left < LEAST:
                    raise TimeoutError(f"{step.minutes} minutes were not enough for all parts")
                figures |= part(left)
            except Exception as e:  # noqa: BLE001  # whatever it is, the rest of the half hour is worth more
                figures |= getattr(e, "figures", {})
                errors.append(f"{type(e).__name__}: {e}"[:2000])
            keep(figures)
        say(f"{step.name}: {time.monotonic() - began:.0f} s" + "".join(f"\n  {e}" for e in errors))
    return figures
