"""Merges on a GPU against the CPU and the disk's floor; what its kernels and transfers reach of what it can do."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import inputs
from tests.bench.measure import run

if TYPE_CHECKING:
    from tests.bench.__main__ import Bench

FIGURES = {
    "seconds": ("s, all folds", 1.0), "gb_per_s": ("GB/s of the base", 1.0), "kernels": ("kernels", 1.0),
    "kernel_s_per_gb": ("ms of kernels per GB", 1e3), "host_s_per_gb": ("ms of processors per GB", 1e3),
    "memory_share": ("% of the memory's rate", 100.0),
    "up_share": ("% of the link's rate, up", 100.0), "down_share": ("% of it, down", 100.0),
    "link_share": ("% of the time the link needs", 100.0),
}  # fmt: skip
"""Figure → what is said of it, and its factor."""


@cache
def names() -> tuple[str, ...]:
    """The CUDA devices of this machine."""
    return tuple(json.loads(run([sys.executable, "-m", "tests.bench.device"]).output.strip().rpartition("\n")[2]))


def suite(b: Bench) -> None:
    """SD1.5, of many small layers, and the size asked for; nothing but a line where there is no CUDA device."""
    if not names():
        print("\ngpu: no CUDA device here")
        return
    measure(b, b.device if b.device.startswith("cuda") else "cuda")


def measure(b: Bench, device: str) -> None:
    """Folds without the disk, then whole merges."""
    for size in dict.fromkeys(("sd1", b.size)):
        base = inputs.base(b.file(f"{size}.safetensors"), size)
        lora = inputs.adapter(b.file(f"{size}-lora.safetensors"), size)
        folds(b, size, device, base, lora)
        commands = {
            "disk floor": [sys.executable, "-m", "tests.bench.floor", str(base), str(b.file("out.safetensors"))],
            "cpu": b.ours(base, lora, device="cpu", options=["--no-verify"]),
            device: b.ours(base, lora, device=device, options=["--no-verify"]),
            "auto": b.ours(base, lora, device="auto", options=["--no-verify"]),
        }  # fmt: skip
        for state in b.caches:
            b.compare(f"gpu, {size}", commands, dict.fromkeys(commands, (base, lora)), state)
        if size != b.size:
            b.drop(base.name, lora.name)


def folds(b: Bench, size: str, device: str, base: Path, lora: Path) -> None:
    """What the folds of a merge reach."""
    command = [sys.executable, "-m", "tests.bench.device", device, str(base), str(lora), str(b.rounds)]
    found = json.loads(run(command).output.strip().rpartition("\n")[2])
    print(f"\ngpu, {size}: copies " + ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in found["rates"].items()))
    b.results.append({"suite": "gpu", "name": f"{size}, rates", **found["rates"]})
    print("  " + told(found["folds"]), flush=True)
    b.results.append({"suite": "gpu", "name": f"{size}, folds", **found["folds"]})


def told(figures: Mapping[str, Any]) -> str:
    """The figures in words; what was not found out is left out."""
    return " · ".join(f"{figures[k] * factor:.4g} {what}" for k, (what, factor) in FIGURES.items() if k in figures)
