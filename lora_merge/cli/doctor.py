"""Whether this machine can merge, and how fast: versions, devices, a test of every formula, the disk."""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

from ..algorithms import ALGORITHMS
from ..disk.pages import aligned_buffer
from ..disk.publish import sibling
from ..disk.system import DIRECT_FLAG, DO_NOT_NEED, advise, read_at
from ..disk.volumes import DIRECT_ON, Mode, file_system, free_bytes
from ..disk.writer import timed_write
from ..dtypes import spoken
from ..engine.devices import place, precise, present, unusable
from ..engine.tensor_moves import TORCH_DTYPES, Placement, as_scalars, host, move, stage, stage_indices
from ..engine.torch_state import undisturbed
from ..errors import MergeError
from ..facts import Fact, line
from ..paths import exists
from ..proof.examples import EXAMPLES, Example, formula_input, shapes, tensors, weight
from ..proof.reference import REFERENCE
from ..proof.reference.floats import Array
from ..text import size
from ..version import __version__
from ..viewing.json_schemas import schema

PROBED: Final = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
MIXTURES: Final = (("F16", "BF16"), ("F32", "F16"), ("BF16", "F64"), ("F8_E4M3", "F32"))
"""Stored dtypes of base and adapter, in turn from one algorithm to the next."""

TOLERANCE: Final = {"F64": 1e-9, "F32": 2e-4}
"""Largest deviation from float64, as a share of the largest number; SVDs and small test weights cost digits."""

DISK_BYTES: Final = 256 << 20  # written and read for each rate
PROBE_BYTES: Final = 32 << 20


def examine(folder: Path, disk_bytes: int = DISK_BYTES) -> dict[str, Any]:
    """Return all that is found out; `problems` is empty if all is well. Leaves nothing in the folder."""
    auto = place("auto", "F32")
    devices = [_device(name) for name in present()]
    disk = _disk(folder, disk_bytes)
    problems = [f"{d['device']}: {p}" for d in devices for p in d["problems"]] + disk["problems"]
    return {
        "version": __version__, "python": platform.python_version(), "platform": platform.platform(),
        "packages": {name: _version(name) for name in ("torch", "safetensors", "numpy", "typer", "tqdm", "PyYAML")},
        "cpus": os.cpu_count(), "memory": _memory(), "devices": devices, "disk": disk,
        "auto": {"device": str(auto.device), "compute_dtype": "fp32", "writes": disk.pop("writes")},
        "problems": problems, "schema": schema("doctor"),
    }  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _memory() -> int:
    """Return the bytes of the machine's memory; 0 if the system does not report it."""
    if sys.platform == "win32":
        kib = ctypes.c_ulonglong()  # stays 0 if the call fails
        ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kib))
        return kib.value * 1024
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device(name: str) -> dict[str, Any]:
    """Return what is found of one device: memory, dtypes it can hold and cast, the test of every formula."""
    started = time.monotonic()
    why = unusable(torch.device(name))
    problems = [why] if why else []
    dtypes = [d for d in PROBED if not why and _holds(name, d)]
    worst: dict[str, float] = {}
    for compute in ("F32", "F64"):
        if compute not in dtypes:
            continue
        for n, algorithm in enumerate(ALGORITHMS):
            try:
                error = deviation(algorithm, place(name, compute), MIXTURES[n % len(MIXTURES)])
            except (RuntimeError, NotImplementedError, TypeError, MergeError) as e:
                problems.append(f"{algorithm} in {spoken(compute)} fails: {str(e).splitlines()[0]}")
                continue
            worst[compute] = max(worst.get(compute, 0.0), error)
            if not error <= TOLERANCE[compute]:
                problems.append(f"{algorithm} in {spoken(compute)} is off by {error:.2g} of its largest number")
    return {
        "device": name, "name": "unusable" if why else _name(name),
        "memory": {"free": 0, "total": 0} if why else _device_memory(name), "dtypes": [*map(spoken, dtypes)],
        "algorithms": len(ALGORITHMS), "worst": {spoken(d): w for d, w in worst.items()},
        "seconds": time.monotonic() - started, "problems": problems,
    }  # fmt: skip


def _holds(device: str, dtype: str) -> bool:
    """Return whether the device can hold a dtype and cast from and to it."""
    try:
        ones = stage([torch.ones(2)], Placement(torch.device(device), TORCH_DTYPES[dtype]))
        return bool((host(ones, torch.float32) == 1).all())
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def _name(device: str) -> str:
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.xpu.get_device_name(device) if kind == "xpu" else platform.processor() or platform.machine()


def _device_memory(device: str) -> dict[str, int]:
    """Return the bytes that are free, and all bytes."""
    kind = torch.device(device).type
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return {"free": free, "total": total}
    if kind == "xpu":
        return {"free": 0, "total": torch.xpu.get_device_properties(device).total_memory}
    return {"free": 0, "total": _memory()}


def deviation(algorithm: str, at: Placement, stored: tuple[str, str]) -> float:
    """Return the largest difference between the formula there and the reference, as a share of the largest number.

    Base and adapter are stored in two dtypes first; both sides then start from the same stored values.
    """
    example = EXAMPLES[algorithm]
    base = _stored(weight(example), stored[0])
    factors = {slot: _stored(value, stored[1]) for slot, value in tensors(algorithm, example).items()}
    want = REFERENCE[algorithm].formula(formula_input(algorithm, example, base, stored=factors))
    got = computed(algorithm, example, base, at, factors, stored)
    return float(abs(got - want).max() / max(abs(want).max(), abs(base).max()))


def _stored(values: Array, dtype: str) -> Array:
    """Return floating-point numbers after a trip through a dtype; integers as they are."""
    if values.dtype.kind != "f":
        return values
    once: Array = host(host(torch.from_numpy(values), TORCH_DTYPES[dtype]), torch.float64).numpy()
    return once


@undisturbed()
def computed(
    name: str, example: Example, base: Array, at: Placement, factors: dict[str, Array] | None = None,
    stored: tuple[str, str] = ("F64", "F64"),
) -> Array:  # fmt: skip
    """Return ΔW [out, cols] of the formula that merges use, for an example, at a placement, from dtypes as stored."""
    row = ALGORITHMS[name]
    at = precise(at) if row.decomposes else at
    to = precise(at) if row.prepare is not None else at
    example_tensors = tensors(name, example) if factors is None else factors
    slots = {
        slot: torch.from_numpy(v) if v.dtype.kind != "f" else host(torch.from_numpy(v), TORCH_DTYPES[stored[1]])
        for slot, v in example_tensors.items()
    }
    slots |= row.derived(shapes(example), example.shape, example.settings)
    fields = {slot: (stage_indices if slot in row.integer_slots else stage)([t], to) for slot, t in slots.items()}
    scalars = {n: as_scalars([example.scalars.get(n, 1.0)], to) for n in row.scalars}
    with torch.no_grad():
        weight = stage([host(torch.from_numpy(base), TORCH_DTYPES[stored[0]])], at)
        inputs = row.prepared(row.tensors(**fields, **scalars, **example.settings))
        change = row.delta(weight, inputs if to == at else move(inputs, at))
    result: Array = host(change[0], torch.float64).numpy()
    return result


def _disk(folder: Path, size: int) -> dict[str, Any]:
    """Return the rates of the disk in bytes per second, through the cache and past it, and the choice of `auto`."""
    facts_of_disk: dict[str, Any] = {
        "folder": str(folder),
        "file_system": "",
        "free": 0,
        "writes": "cached",
        "problems": [],
    }
    if not (exists(folder) and folder.is_dir()):
        return facts_of_disk | {"problems": [f"{folder} is not a folder"]}
    kind = file_system(folder)
    facts_of_disk |= {
        "file_system": kind,
        "free": free_bytes(folder),
        "writes": "direct" if kind in DIRECT_ON else "cached",
    }
    if facts_of_disk["free"] < 2 * size:
        return facts_of_disk | {"problems": [f"{folder}: only {facts_of_disk['free'] >> 20} MiB are free"]}
    path = sibling(folder / "doctor")  # a killed one's is removed by the next merge
    modes: tuple[Mode, ...] = ("direct", "buffered")
    try:
        for mode in modes:
            facts_of_disk[mode] = _rates(path, size, mode)
    except MergeError as e:
        facts_of_disk["problems"].append(f"{e.what} ({e.where})")
    finally:
        with suppress(OSError):  # it could not be made
            path.unlink()
    return facts_of_disk


def _rates(path: Path, size: int, mode: Mode) -> dict[str, Any]:
    """Write a file, flush it, and read it back from the disk."""
    block = aligned_buffer(PROBE_BYTES)
    block[:] = secrets.token_bytes(1 << 16) * (PROBE_BYTES >> 16)
    seconds, direct = timed_write(path, block, size, mode)
    written = time.perf_counter()
    flags = DIRECT_FLAG if direct else 0
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        advise(fd, 0, 0, DO_NOT_NEED)
        at = 0
        while at < size and (got := read_at(fd, block, at)):
            at += got
    finally:
        os.close(fd)
    read = time.perf_counter() - written
    return {"write": size / seconds, "read": size / max(read, 1e-9), "direct": direct}


def rows(examined: dict[str, Any]) -> Iterator[Fact]:
    """Yield the versions, what is known of machine, devices and disk, and the problems."""
    packages = ", ".join(f"{k} {v}" for k, v in examined["packages"].items())
    yield line("version", f"lora-merge {examined['version']}, Python {examined['python']}, {packages}")
    yield line("machine", f"{examined['platform']}, {examined['cpus']} CPUs, {size(examined['memory'])}")
    for d in examined["devices"]:
        worst = ", ".join(f"{k} within {v:.1g}" for k, v in d["worst"].items())
        yield line(d["device"], f"{d['name']}, {size(d['memory']['total'])}, {' '.join(d['dtypes'])}; "
                                f"{d['algorithms']} algorithms in {d['seconds']:.1f} s, {worst}")  # fmt: skip
    disk = examined["disk"]
    yield line("disk", f"{disk['folder']} ({disk['file_system'] or 'unknown'}), {size(disk['free'])} free")
    for mode in ("direct", "buffered"):
        if disk.get(mode):
            how = "past the cache" if disk[mode]["direct"] else "through the cache"
            rates = ", ".join(f"{verb}s {size(int(disk[mode][verb]))}/s" for verb in ("write", "read"))
            yield line("disk", f"{how}: {rates}")
    auto = examined["auto"]
    yield line("auto", f"device {auto['device']}, compute dtype {auto['compute_dtype']}, {auto['writes']} writes")
    yield from (Fact("problem", problem, style="bold red") for problem in examined["problems"])
