"""Steps that measure: what the folds reach of the link, and whole merges against the CPU, the disk and `auto`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from tests.gpu.programs import ROOT, Figures, merged, printed, program, python

Part = Callable[[float], Figures]
"""Function of the seconds that are left that returns figures."""

ROOM: Final = {"sdxl": 23e9, "flux": 26e9, "flux, whole": 51e9}
"""Bytes in the folder for data: SDXL with an adapter and two outputs; Flux with two adapters, and with an output."""


def files(data: Path, size: str, rank: int = 32) -> tuple[Path, Path]:
    """A checkpoint of full size and an adapter for it, made once."""
    from tests.bench import inputs

    dtype = "BF16" if size == "flux" else "F16"
    lora = inputs.adapter(data / f"{size}-lora{'' if rank == 32 else rank}.safetensors", size, rank=rank)
    return inputs.base(data / f"{size}.safetensors", size, dtype), lora


def folds(data: Path, size: str, seconds: float) -> Figures:
    """What the folds reach of the link, without a disk, and what they cost the host."""
    found = printed("tests.bench.device", "cuda", *files(data, size), 3, seconds=seconds)
    own, rates = found["folds"], found["rates"]
    figures: Figures = {f"{size}_link_share": own["link_share"], f"{size}_folds_gb_s": own["gb_per_s"], "rates": rates}
    figures[f"{size}_host_ms_per_gb"] = own["host_s_per_gb"] * 1e3
    if own.get("kernels"):
        figures[f"{size}_kernels_per_gb"] = own["kernels"] / (own["base"] / 1e9)
    return figures | {f"{size}_folds": own}


def merges(data: Path, size: str, rounds: int, seconds: float) -> Figures:
    """Whole merges in turn, and the floor of the folder; the least seconds of some rounds, as many as there is time
    for. The first round warms up, and counts where it is the only one."""
    base, lora = files(data, size)
    out, end = data / "out.safetensors", time.monotonic() + seconds
    found: Figures = {}
    least: dict[str, float] = {}
    try:
        for turn in range(rounds + 1):
            for name in ("cuda", "floor", "cpu", "auto"):
                began = time.monotonic()
                if name == "floor":
                    done = python("-m", "tests.bench.floor", base, out, seconds=end - began)
                    if done.code != 0:
                        raise RuntimeError(done.text)
                else:
                    options = ("-o", out, "--device", name, "--no-verify")
                    merged(base, f"{lora}:0.7", *options, seconds=end - began)
                took = time.monotonic() - began
                least[name] = took if turn == 1 else min(took, least.get(name, took))
            found = {f"{size}_seconds": dict(least), f"{size}_over_floor": least["cuda"] / least["floor"]}
            if size == "sdxl":
                found["auto_loss"] = least["auto"] / min(least["cpu"], least["cuda"])
            if time.monotonic() - end + sum(least.values()) > 0:
                break
    except RuntimeError:
        if not found:
            raise
    finally:
        out.unlink(missing_ok=True)
    return found


def sdxl(data: Path) -> Iterator[Part]:
    """SDXL in memory, what a device costs the host, whole merges, and SDXL on the disk of the repository."""
    base, lora = files(data, "sdxl")

    def host(seconds: float) -> Figures:
        found = printed("tests.bench.host", base, lora, seconds=seconds)
        return {"host_ms_per_gb": found["ms_per_gb"], "host_operations": found["operations"]}

    yield partial(folds, data, "sdxl")
    yield partial(merges, data, "sdxl", 3)
    yield host
    yield partial(on_disk, base, lora)


def on_disk(base: Path, lora: Path, seconds: float) -> Figures:
    """A merge with its output on a disk, against a copy of the base to it."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=ROOT, prefix="bench-data-") as folder:
        if shutil.disk_usage(folder).free < 2 * base.stat().st_size:
            return {"disk_skipped": "no room on the disk of the repository"}
        out, took = Path(folder) / "out.safetensors", dict[str, float]()
        for name in ("floor", "cuda"):
            began = time.monotonic()
            if name == "floor":
                done = program(sys.executable, "-m", "tests.bench.floor", base, out, seconds=end - began)
                if done.code != 0:
                    raise RuntimeError(done.text)
                took[name] = time.monotonic() - began
                out.unlink()
            else:
                merged(base, lora, "-o", out, "--device", "cuda", "--no-verify", seconds=end - began)
                took[name] = time.monotonic() - began
    return {"disk_seconds": took, "disk_over_floor": took["cuda"] / took["floor"]}


def flux(data: Path) -> Iterator[Part]:
    """The folds of Flux, also with an adapter of rank 128; whole merges where there is room for an output."""
    for name in ("want", "got"):  # of other steps
        (data / f"{name}.safetensors").unlink(missing_ok=True)
    held = sum(p.stat().st_size for p in data.glob("flux*.safetensors"))
    free = shutil.disk_usage(data).free + held
    if free < ROOM["flux"]:
        yield lambda _: {"flux_skipped": f"{ROOM['flux'] / 1e9:.0f} GB are needed in the folder for data"}
        return
    yield partial(folds, data, "flux")

    def wide(seconds: float) -> Figures:
        took, end = [], time.monotonic() + seconds
        for rank in (32, 128):
            words = ("tests.bench.device", "cuda", *files(data, "flux", rank), 1)
            took.append(printed(*words, seconds=end - time.monotonic())["folds"]["seconds"])
        return {"rank_128_ratio": took[1] / took[0]}

    yield wide
    if free >= ROOM["flux, whole"]:
        yield partial(merges, data, "flux", 1)
