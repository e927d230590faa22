"""The steps of the checklist: each runs programs, and returns figures by the names of predictions.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
Figures = dict[str, Any]


class Step(NamedTuple):
    """A part of the checklist, and the minutes that it may take."""

    name: str
    minutes: float
    act: Callable[[Path, float], Figures]
    """(folder for data, seconds) → figures"""


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


def last_json(text: str) -> Figures:
    """Return the last line that is a JSON object; nothing if there is none."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {}


def machine(_data: Path, seconds: float) -> Figures:
    """What is there: facts, no figures."""
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), hasattr(torch._C, '_host_emptyCache'))"
    found = {"torch": python("-c", code, seconds=seconds).stdout.strip(), "cores": os.cpu_count()}
    if shutil.which("nvidia-smi"):
        asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
        found["gpu"] = program("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", seconds=30).stdout.strip()
    return {"machine": found}


def probe(_data: Path, seconds: float) -> Figures:
    """What the device and the link can do."""
    return last_json(python("-m", "tests.gpu.probe", seconds=seconds).stdout)


def right(_data: Path, seconds: float) -> Figures:
    """The tests that are marked gpu."""
    done = python("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/engine", seconds=seconds)
    failed = [
        line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if line.startswith("FAILED")
    ]
    ran = done.returncode in {0, 1} and " passed" in done.stdout
    return {
        "gpu_tests_failed": len(failed) if ran else None,
        "failed_tests": failed[:40],
        "gpu_tests": done.stdout[-300:],
    }


def races(_data: Path, seconds: float) -> Figures:
    """torch's detector of races, and NVIDIA's checks of memory where they are installed."""
    began = time.monotonic()
    found = last_json(python("-m", "tests.gpu.races", seconds=seconds / 3).stdout)
    scene = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/engine/test_cuda.py", "-k",
             "windows_that and keep and 8MiB"]  # fmt: skip
    for tool in ("memcheck", "initcheck"):
        left = seconds - (time.monotonic() - began)
        if shutil.which("compute-sanitizer") and left > 20:
            done = program(
                "compute-sanitizer", "--tool", tool, "--error-exitcode", 9, sys.executable, *scene, seconds=left
            )
            found[f"{tool}_errors"] = int(done.returncode == 9)
            found[f"{tool}_tail"] = done.stdout[-300:]
    return found


def files(data: Path, size: str) -> tuple[Path, Path]:
    """A checkpoint of full size and an adapter for it, made once."""
    from ..bench import inputs

    dtype = "BF16" if size == "flux" else "F16"
    lora = inputs.adapter(data / f"{size}-lora.safetensors", size)
    return inputs.base(data / f"{size}.safetensors", size, dtype), lora


def whole(data: Path, _seconds: float) -> Figures:
    """SDXL merged on the GPU and on the CPU: how far they differ, and the proof of every number of each output."""
    base, lora = files(data, "sdxl")
    want, got = data / "want.safetensors", data / "got.safetensors"
    figures: Figures = {"full_proof_failed": 0, "different_share": 0.0, "worst_ulp": 0.0}
    for options in ((), ("--max-memory", "16MiB"), ("--max-vram", "512MiB"), ("--dtype", "bf16")):
        if options[:1] in {(), ("--dtype",)}:
            merged(base, f"{lora}:0.7", "-o", want, "--device", "cpu", "--no-verify", *options)
        merged(base, f"{lora}:0.7", "-o", got, "--device", "cuda", "--no-verify", *options)
        figures["full_proof_failed"] += bool(
            python("-m", "lora_merge", "verify", "--full", got, seconds=300).returncode
        )
        share, ulp = differences(got, want)
        figures["different_share"] = max(figures["different_share"], share)
        figures["worst_ulp"] = max(figures["worst_ulp"], ulp)
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


def speed(data: Path, seconds: float, size: str, rounds: int) -> Figures:
    """What the folds reach of the link, and whole merges against the CPU and the disk's floor."""
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


def sdxl(data: Path, seconds: float) -> Figures:
    """SDXL in memory, and what a device costs the host."""
    found = speed(data, seconds * 0.8, "sdxl", 3)
    base, lora = files(data, "sdxl")
    hosted = last_json(python("-m", "tests.bench.host", base, lora, seconds=seconds * 0.2).stdout)
    return found | {"host_ms_per_gb": hosted.get("ms_per_gb")}


def flux(data: Path, seconds: float) -> Figures:
    """Flux, where there is room for three files of its size."""
    if shutil.disk_usage(data).free < 80e9:
        return {"flux_skipped": "80 GB are needed in the folder for data"}
    return speed(data, seconds, "flux", 1)


def rest(data: Path, seconds: float) -> Figures:
    """Tensors in memory, two merges at once, torch's other allocators, a bound, and an interrupted merge."""
    base, lora = files(data, "sdxl")
    found = last_json(python("-m", "tests.gpu.memory", base, lora, data, seconds=seconds / 2).stdout)
    want, got = data / "want.safetensors", data / "got.safetensors"
    merged(base, lora, "-o", want, "--device", "cuda", "--no-verify")
    found["allocators_different"] = 0
    for setting in ("expandable_segments:True", "backend:cudaMallocAsync"):
        merged(base, lora, "-o", got, "--device", "cuda", "--no-verify", PYTORCH_CUDA_ALLOC_CONF=setting)
        found["allocators_different"] += differences(got, want) != (0.0, 0.0)
    return found | interrupted(base, lora, data)


def interrupted(base: Path, lora: Path, data: Path) -> Figures:
    """Send SIGINT in the middle of a merge."""
    folder = data / "interrupted"
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "lora_merge", base, lora, "-o", folder / "o.safetensors", "--device", "cuda"]
    with subprocess.Popen(
        [str(w) for w in words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end and not any(folder.iterdir()):
            time.sleep(0.01)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    return {"interrupted_left": len([*folder.iterdir()]), "interrupted_code": code}


STEPS: Final[Sequence[Step]] = (
    Step("machine", 0.5, machine), Step("probe", 3, probe), Step("right", 6, right), Step("races", 4, races),
    Step("whole", 4, whole), Step("sdxl", 4, sdxl), Step("flux", 5, flux), Step("rest", 3, rest),
)  # fmt: skip


def carry_out(steps: Sequence[Step], data: Path, say: Callable[[str], object] = print) -> Mapping[str, Any]:
    """Run the steps; an error of one is a figure of its own, and the others go on."""
    figures: Figures = {}
    for step in steps:
        began = time.monotonic()
        try:
            figures |= step.act(data, step.minutes * 60)
        except (RuntimeError, OSError, ValueError, KeyError, StopIteration, subprocess.TimeoutExpired) as e:
            figures[f"{step.name}_error"] = f"{type(e).__name__}: {e}"[:2000]
        say(f"{step.name}: {time.monotonic() - began:.0f} s")
    return figures
