"""Finds the devices of this machine, chooses one, and divides the work among devices and threads.

Chooses between a GPU and the CPU for `--device auto`: the one that a model of the merge's seconds says is faster.

The constants are those of common machines: PCIe 3, a disk that writes 3 GB/s, the start of CUDA on Linux. They decide
only whether a GPU is worth its start; a device that is named is used whatever they say.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple

import torch

from .. import process
from ..algorithms import ALGORITHMS
from ..errors import DeviceFailed, ResourceError
from ..options import DEVICES
from ..planning.plan import OutputTensor, Plan
from ..text import Note
from .device_memory import lane_count
from .row_blocks import Block
from .tensor_moves import FULL_DEVICES, HOST, TORCH_DTYPES, Placement

DEVICE_KINDS: Final = ("cpu", "cuda", "mps", "xpu")
ACCELERATORS: Final = ("cuda", "xpu", "mps")  # in the order in which `auto` takes them

DEVICE_BYTES: Final = 5 * 2**30

_failed: Final[dict[str, str]] = {}  # device → the error after which this process cannot use it

_loading = Lock()
_loaded: list[torch.device] = []

START: Final = {"cuda": 1.5, "xpu": 1.5, "mps": 0.3}
"""Seconds until a device computes: its context, its libraries, pinned memory."""

DISK_SPEED: Final = 3e9
LINK: Final = 12e9
"""Bytes per second: written to the disk; to a device and at the same time from it."""

HOSTED: Final = 60e-12
"""Seconds of one thread of the host for a byte that a device folds; tests/bench measures it."""

CASTS: Final = 1.6e-9
USED: Final = 1.3e-9
COMBINED: Final = 1e-7
DECOMPOSED: Final = 4e-9
"""Seconds of one core for one number: its casts; one formula; one change that `--method` combines with others by size;
a decomposition in fp64, times the smaller side of the matrix."""

CORES: Final = {"plain": 200.0, "decomposed": 10.0}
"""The number of cores that a GPU replaces: for most formulas, where its memory decides; for decompositions."""

CLEAR: Final = 0.9
"""The largest share of the CPU's seconds at which a GPU is taken."""


def places(devices: str, dtype: str) -> tuple[Placement, ...]:
    """Return the placements for `--device`, one device or several of one kind; ResourceError if one is missing."""
    placements = tuple(place(d.strip(), dtype) for d in devices.split(","))
    if len(placements) > 1 and (len(set(placements)) < len(placements) or len({p.device.type for p in placements}) > 1):
        raise ResourceError(
            f"{devices!r} names devices that cannot share the work: they must differ and be of one kind",
            "--device",
            "write cuda:0,cuda:1",
        )
    return placements


def place(device: str, dtype: str) -> Placement:
    """Return the placement for `--device` and a dtype by its name in files; ResourceError if the device is missing or
    does not work."""
    name = _tried(dtype)[-1][0] if device == "auto" else device
    try:
        where = torch.device(name)
    except RuntimeError as e:
        raise ResourceError(f"unknown device {name!r}", "--device", f"use {DEVICES}") from e
    if (where.index or 0) >= _count(where.type):
        names, why, install = ", ".join(k for k in DEVICE_KINDS if _count(k)), _refusal(where.type), ""
        if where.type == "cuda" and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
            why = f"this torch ({torch.__version__}) is a build without CUDA"
            install = "; or install torch for CUDA, see https://pytorch.org/get-started/locally"
        called = "--device cuda, or gpu" if name == "cuda" else "--device"
        raise ResourceError(f"no device {name!r} here", f"{called}: {why}" if why else called,
                            f"use one of: auto, {names}{install}")  # fmt: skip
    if dtype == "F64" and not _doubles(where):
        raise ResourceError(f"{name} computes no fp64", "--compute-dtype", "use fp32, or `--device cpu`")
    if device != "auto" and (why := unusable(where)):
        if _failed_before(where):
            raise DeviceFailed(str(where), why)
        raise ResourceError(f"{name} cannot be used", f"--device: {why}", "use `--device cpu`, or another device")
    return Placement(_numbered(where), TORCH_DTYPES[dtype])


def _numbered(where: torch.device) -> torch.device:
    """Return the device with its number: without one torch takes the current device, which differs between threads."""
    if where.index is None and where.type in {"cuda", "xpu"}:
        rank = os.environ.get("LOCAL_RANK", "")  # of torchrun: one process for each GPU
        if where.type == "cuda" and not torch.cuda.is_initialized() and rank.isdecimal() and int(rank) < _count("cuda"):
            return torch.device("cuda", int(rank))
        return torch.device(where.type, torch.get_device_module(where.type).current_device())
    return where


def device_failed(where: torch.device, text: str) -> DeviceFailed:
    """Return the error of a device that failed, and remember it: later merges of this process do not use the device."""
    _failed[str(where)] = text
    return DeviceFailed(str(where), text)


def _failed_before(where: torch.device) -> str:
    """Return the error after which this process cannot use a device; "" if there is none."""
    return _failed.get(str(_numbered(where)), "") if _failed else ""


def fast_kinds() -> list[str]:
    """Return the kinds of GPU that this machine has, in the order in which `auto` takes them."""
    return [kind for kind in ACCELERATORS if _count(kind)]


def started(kind: str) -> bool:
    """Return whether this process has used a kind of GPU before."""
    return kind in ("cuda", "xpu") and bool(torch.get_device_module(kind).is_initialized())


def passed_over(device: str, dtype: str) -> list[Note]:
    """Return a note for each faster device that `auto` did not take, with the reason."""
    return [Note(f"{kind} is not used: {why}") for kind, why in _tried(dtype)[:-1]] if device == "auto" else []


def fallback_device(device: str, at: Sequence[Placement]) -> Placement | None:
    """Return the CPU for blocks that do not fit the memory of a GPU that `auto` took; None for a device by name."""
    return Placement(torch.device("cpu"), at[0].dtype) if device == "auto" and at[0].device.type != "cpu" else None


def _tried(dtype: str) -> list[tuple[str, str]]:
    """Return (device, why it cannot be used) for the devices that `auto` tries, the fastest first; the last is used."""
    tried = []
    for kind in ACCELERATORS:
        if _count(kind):
            where = torch.device(kind)
            why = f"{kind} computes no fp64" if dtype == "F64" and not _doubles(where) else unusable(where)
            tried.append((kind, why))
            if not why:
                return tried
        elif why := _refusal(kind):
            tried.append((kind, why))
    return [*tried, ("cpu", "")]


@cache
def _refusal(kind: str) -> str:
    """Return why CUDA does not find a device that is present: its driver is too old, or broken. torch only warns of
    that, once in a process."""
    if kind != "cuda" or not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    return next((str(w.message).splitlines()[0].partition(" (Triggered")[0] for w in caught), "")


def unusable(where: torch.device) -> str:
    """Return why a device cannot compute; "" if it can. A driver may find a GPU that this torch was not built for, or
    whose memory other programs fill."""
    if where.type == "cpu":
        return ""
    if failed := _failed_before(where):
        return f"it failed before in this process: {failed}"
    try:
        torch.ones(1, device=where).add_(1).item()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as e:  # the last two when CUDA starts
        return next(iter(str(e).splitlines()), type(e).__name__)
    return ""


def _count(kind: str) -> int:
    """Return how many devices of a kind this machine has."""
    _refusal(kind)  # catches the warning that torch gives once
    if kind in ("cuda", "xpu"):
        module = torch.cuda if kind == "cuda" else torch.xpu
        return module.device_count() if module.is_available() else 0
    return 1 if kind == "cpu" else int(kind == "mps" and torch.backends.mps.is_available())


def _doubles(where: torch.device) -> bool:
    """Return whether a device computes fp64."""
    if where.type == "xpu":
        return bool(torch.xpu.get_device_properties(where).has_fp64)
    return where.type != "mps"


def precise(at: Placement) -> Placement:
    """Return the placement for inverses and decompositions: fp64, and the CPU for devices that may lack them.

    In fp32 they would change the rounding of up to 1 % of an fp16 output's elements.
    """
    load_decompositions(at.device)
    return _precise(at)


def _precise(at: Placement) -> Placement:
    return Placement(at.device if at.device.type in FULL_DEVICES else torch.device("cpu"), torch.float64)


def precise_at(at: Placement, block: Block) -> Placement:
    """Return the placement for a block: in fp64 if one of its formulas decomposes or inverts a matrix, if its terms
    cancel, or if its method chooses entries by their size: in fp32 the choice would depend on rounding. The device is
    not touched."""
    rows = [ALGORITHMS[s.use.patch.algorithm] for s in block.slices]
    exact = block.exact or block.target.combines
    return _precise(at) if exact or any(r.decomposes for r in rows) else at


def load_decompositions(device: torch.device) -> None:
    """Load torch's decompositions for CUDA: torch loads them at the first call, and fails if two threads make it."""
    if device.type == "cuda" and torch.cuda.is_available():
        _load_decompositions(device)


def _load_decompositions(device: torch.device) -> None:
    with _loading:
        if not _loaded:
            torch.linalg.inv(torch.ones(1, 1, device=device))
            _loaded.append(device)


def release(at: Sequence[Placement]) -> None:
    """Give unused memory back to the devices, and unused pinned memory to the system."""
    used = {p.device.type: p.device for p in at if str(p.device) not in _failed and p.device.type in DEVICE_KINDS[1:]}
    for kind, device in used.items():
        module = torch.get_device_module(kind)
        # CUDA would start the thread's current device for that: half a GB of memory of GPU 0 (pytorch#25752).
        here = nullcontext() if device.index is None else module.device(device)
        with suppress(RuntimeError), here:  # of a device that has just failed: the first error is the one to report
            module.empty_cache()
            if kind == "cuda" and hasattr(torch._C, "_host_emptyCache"):  # newer versions of torch have a public name
                torch._C._host_emptyCache()


def present() -> list[str]:
    """Return all devices of this machine, as `--device` takes them."""
    numbered = [f"{kind}:{n}" for kind in ("cuda", "xpu") for n in range(_count(kind))]
    return ["cpu", *numbered] + ["mps"] * _count("mps")


def nth_device(device: str, number: int) -> str:
    """Return the device of the n-th of several workers: each gets the next GPU, unless the user has named one device.
    If `auto` cannot use that GPU, the worker chooses for itself."""
    count = _count("cuda") if device in {"auto", "cuda"} else 0
    numbered = f"cuda:{number % count}" if count > 1 else device
    return device if numbered != device and device == "auto" and unusable(torch.device(numbered)) else numbered


def share_cores(workers: int) -> None:
    """Let this process use its share of the cores, as one of several workers on this machine."""
    process.share_cores(workers)
    torch.set_num_threads(1)


def threads(at: Sequence[Placement], max_vram: int | None = None) -> int:
    """Return how many blocks to fold side by side: on a CPU one for each core that an operation of torch leaves idle,
    elsewhere one for each lane."""
    if at[0].device.type != "cpu":
        return len(at) * lane_count(at[0], device_bytes(max_vram))
    return max(1, process.cores() // (1 if _thread_limits() else torch.get_num_threads()))


def one_core() -> None:
    """Let operations that this thread starts run on this thread alone; other threads are not affected.

    The cores fold blocks side by side instead. Several threads in one operation would change bytes, as matrix products
    then add in another order: 2 threads instead of 1 change 6 of 15 million values in fp16.
    """
    torch.get_num_threads()  # the first call in a thread applies the program's own setting, which is replaced below
    for limit in _thread_limits():
        limit(1)


@cache
def _thread_limits() -> tuple[Any, ...]:
    """Return the functions that set the number of threads for what the calling thread starts: OpenMP's, and MKL's,
    which has a number apart once a program has called `torch.set_num_threads`. None on Windows.

    They are those of torch's library and of what it was linked with: a process may have loaded another OpenMP.
    """
    if sys.platform == "win32":
        return ()
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    library = Path(torch.__file__).parent / "lib" / name
    linked = ctypes.CDLL(str(library) if library.exists() else None)
    limits = (getattr(linked, name, None) for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"))
    return tuple(limit for limit in limits if limit is not None)


def device_bytes(max_vram: int | None) -> int:
    """Return the bytes of a device's memory that a merge may use."""
    return DEVICE_BYTES if max_vram is None else max_vram


class DeviceChoice(NamedTuple):
    """The device to use, as `--device` names it, and why; "" if there was no choice."""

    device: str
    why: str = ""


def choose(plans: Sequence[Plan]) -> DeviceChoice:
    """Return the device for merges that share a base; nothing is started for that."""
    targets = [t for p in plans for t in p.targets]
    return fastest(plans[0].job.device, targets, sum(p.size for p in plans) / DISK_SPEED, threads([HOST]))


def fastest(asked: str, targets: Iterable[OutputTensor], disk: float, cores: int) -> DeviceChoice:
    """Return the device for the targets of merges, and of a CPU as many cores.

    `asked`: the value of `--device`. `disk`: the seconds that the disk needs; 0 for tensors in memory.
    """
    kinds = fast_kinds() if asked == "auto" else []
    if not kinds:
        return DeviceChoice(asked)
    kind, changed = kinds[0], [t for t in targets if t.uses or t.recoded]
    plain, decomposed = map(sum, zip(*map(_core_seconds, changed), strict=True)) if changed else (0.0, 0.0)
    moved = sum(max(t.nbytes, t.source.nbytes) for t in changed if t.uses)
    on_cpu = max(disk, (plain + decomposed) / cores)
    folded = plain / CORES["plain"] + decomposed / CORES["decomposed"]
    on_device = (0.0 if started(kind) else START[kind]) + max(disk, folded, moved / LINK, moved * HOSTED)
    why = f"about {on_cpu:.1f} s on the CPU ({cores} cores), {on_device:.1f} s on {kind} with its start"
    return DeviceChoice("auto" if on_device < CLEAR * on_cpu else "cpu", why)


def _core_seconds(target: OutputTensor) -> tuple[float, float]:
    """Return the seconds of one core for a tensor: of most formulas, and of formulas that decompose a matrix."""
    elements = prod(target.matrix)
    rows = [ALGORITHMS[u.patch.algorithm] for u in target.uses]
    each = COMBINED if target.combines else USED
    sides = [min(u.patch.view.matrix) for u, row in zip(target.uses, rows, strict=True) if row.decomposes]
    return elements * (CASTS + each * len(rows)), elements * DECOMPOSED * sum(sides)
