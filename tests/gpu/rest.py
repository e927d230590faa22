"""What else may go wrong with a GPU: tensors in memory, other allocators, a device that is nearly full, interruptions."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.gpu.programs import ROOT, Figures, differences, merged, printed
from tests.gpu.speed import Part, files


def rest(data: Path) -> Iterator[Part]:
    """A hostile adapter in a batch; tensors in memory, two merges at once, a bound; an interrupted merge; adapters that
    are made; torch's other allocators, and a device that is nearly full."""
    base, lora = files(data, "sdxl")
    want, got = data / "want.safetensors", data / "got.safetensors"
    yield lambda seconds: printed("tests.gpu.hostile", seconds=seconds)
    yield lambda seconds: printed("tests.gpu.memory", base, lora, data, seconds=seconds)
    yield partial(interrupted, base, lora, data)
    yield lambda seconds: printed("tests.gpu.outputs", seconds=seconds)

    def first(seconds: float) -> Figures:
        merged(base, lora, "-o", want, "--device", "cuda", "--no-verify", seconds=seconds)
        return {}

    yield first
    different: list[bool] = []

    def other(seconds: float, setting: str) -> Figures:
        words = (base, lora, "-o", got, "--device", "cuda", "--no-verify")
        merged(*words, seconds=seconds, PYTORCH_CUDA_ALLOC_CONF=setting)
        different.append(differences(got, want) != (0.0, 0.0))
        return {"allocators_different": sum(different)}

    yield from (partial(other, setting=s) for s in ("expandable_segments:True", "backend:cudaMallocAsync"))
    yield partial(crowded, base, lora, got, want)


def crowded(base: Path, lora: Path, got: Path, want: Path, seconds: float) -> Figures:
    """Merge while another process holds all but 1 GiB of the device's memory."""
    hold = "import torch; n = torch.cuda.mem_get_info()[0] - 2**30; t = torch.empty(max(n, 1), dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None, "it was asked for"
            if not other.stdout.readline():
                raise RuntimeError("the other process could not take the memory")
            began = time.monotonic()
            done = merged(base, lora, "-o", got, "--device", "cuda", "--no-verify", seconds=seconds)
            took = time.monotonic() - began
        finally:
            other.kill()
    return {"crowded_s": took, "crowded_ulp": differences(got, want)[1], "crowded_says": done.text}


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
