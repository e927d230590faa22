"""Which devices are here, what they can, which one to take, and how the work is shared out on them."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Condition, Lock
from typing import Any, ClassVar, Final

import torch

from ..errors import ResourceError
from ..options import DEVICES
from .placement import TORCH_DTYPES, WHOLE, Placement

KINDS: Final = ("cpu", "cuda", "mps", "xpu")
FAST: Final = ("cuda", "xpu", "mps")  # in the order in which `auto` takes them

CPU_STACK: Final = 2**20
DEVICE_STACK: Final = 2**26
DEVICE_BYTES: Final = 5 * 2**30
NARROW: Final = 16  # rows or columns


def places(devices: str, dtype: str) -> tuple[Placement, ...]:
    """Return the placements for `--device`, one or a list with commas, of one kind; ResourceError if one is not
    here.
    """
    found = tuple(place(d.strip(), dtype) for d in devices.split(","))
    if len(found) > 1 and (len(set(found)) < len(found) or len({p.device.type for p in found}) > 1):
        raise ResourceError(f"{devices!r} is no list of devices to share the work", "--device", "write cuda:0,cuda:1")
    return found


def place(device: str, dtype: str) -> Placement:
    """Return the placement for `--device` and a dtype by its name in files; ResourceError if there is no such device,
    or it does not compute."""
    found = _tried(dtype)[-1][0] if device == "auto" else device
    try:
        where = torch.device(found)
    except RuntimeError as e:
        raise ResourceError(f"unknown device {found!r}", "--device", f"use {DEVICES}") from e
    if (where.index or 0) >= _count(where.type):
        names, why = ", ".join(k for k in KINDS if _count(k)), _refusal(where.type)
        raise ResourceError(f"no device {found!r} here", f"--device: {why}" if why else "--device",
                            f"use one of: auto, {names}")  # fmt: skip
    if dtype == "F64" and not _doubles(where):
        raise ResourceError(f"{found} computes no fp64", "--compute-dtype", "use fp32, or --device cpu")
    if device != "auto" and (why := unusable(where)):
        raise ResourceError(f"{found} cannot be used", f"--device: {why}", "use --device cpu, or another device")
    return Placement(_numbered(where), TORCH_DTYPES[dtype])


def _numbered(where: torch.device) -> torch.device:
    """Return the device with its number: without one torch takes the current device, and each thread has its own."""
    if where.index is None and where.type in {"cuda", "xpu"}:
        return torch.device(where.type, torch.get_device_module(where.type).current_device())
    return where


def passed_over(device: str, dtype: str) -> list[str]:
    """Return what `auto` would have taken if it worked, and why it does not."""
    return [f"{kind} is not used: {why}" for kind, why in _tried(dtype)[:-1]] if device == "auto" else []


def fallback_device(device: str, at: Sequence[Placement]) -> Placement | None:
    """Return where `auto` folds what does not fit a GPU's memory; who names a device is to get it, or an error."""
    return Placement(torch.device("cpu"), at[0].dtype) if device == "auto" and at[0].device.type != "cpu" else None


def _tried(dtype: str) -> list[tuple[str, str]]:
    """Return what `auto` looks at, the fastest first, and what is wrong with it; the last one is taken."""
    tried = []
    for kind in FAST:
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
    """Return why CUDA finds no device where it is not for want of one: its driver is too old, or broken. torch only
    warns of that, once in a process."""
    if kind != "cuda" or not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    return next((str(w.message).splitlines()[0].partition(" (Triggered")[0] for w in said), "")


def unusable(where: torch.device) -> str:
    """Return why nothing can be computed there; nothing if it can. A driver may see a GPU that this torch was not
    built for, or whose memory others fill."""
    if where.type == "cpu":
        return ""
    try:
        torch.ones(1, device=where).add_(1).item()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as e:  # the last two as CUDA is started
        return next(iter(str(e).splitlines()), type(e).__name__)
    return ""


def _count(kind: str) -> int:
    """Return how many devices of a kind are here."""
    _refusal(kind)  # before torch warns of it
    if kind in ("cuda", "xpu"):
        module = torch.cuda if kind == "cuda" else torch.xpu
        return module.device_count() if module.is_available() else 0
    return 1 if kind == "cpu" else int(kind == "mps" and torch.backends.mps.is_available())


def _doubles(where: torch.device) -> bool:
    """Return whether it computes fp64."""
    if where.type == "xpu":
        return bool(torch.xpu.get_device_properties(where).has_fp64)
    return where.type != "mps"


def precise(at: Placement) -> Placement:
    """Return where inverses and decompositions are computed: in fp64, on the CPU for a device that may not have them.

    In fp32 they would round up to 1 % of an fp16 output's elements differently.
    """
    if at.device.type not in WHOLE:
        return Placement(torch.device("cpu"), torch.float64)
    if at.device.type == "cuda" and torch.cuda.is_available():
        _load_decompositions(at.device)
    return Placement(at.device, torch.float64)


def _load_decompositions(device: torch.device) -> None:
    """torch loads what it has of them for CUDA at the first call, and fails if two threads make it at a time."""
    with _loading:
        if not _loaded:
            torch.linalg.inv(torch.ones(1, 1, device=device))
            _loaded.append(device)


_loading = Lock()
_loaded: list[torch.device] = []


def release(at: Sequence[Placement]) -> None:
    """Give memory that nobody uses any more back to the devices, and pinned memory to the system."""
    for kind in {p.device.type for p in at} & set(KINDS[1:]):
        torch.get_device_module(kind).empty_cache()
        if kind == "cuda" and hasattr(torch._C, "_host_emptyCache"):  # newer ones have a public name for it
            torch._C._host_emptyCache()


def present() -> list[str]:
    """Return every device here, as --device takes it."""
    numbered = [f"{kind}:{n}" for kind in ("cuda", "xpu") for n in range(_count(kind))]
    return ["cpu", *numbered] + ["mps"] * _count("mps")


def nth_device(device: str, number: int) -> str:
    """Return the device for the n-th of several workers: GPUs go round, whatever names one device stays. `auto` takes
    its own way where this one's GPU is of no use."""
    count = _count("cuda") if device in {"auto", "cuda"} else 0
    own = f"cuda:{number % count}" if count > 1 else device
    return device if own != device and device == "auto" and unusable(torch.device(own)) else own


class _Sharing:
    """How many workers use the cores of this machine; set once, in a worker's own process."""

    workers: ClassVar[int] = 1


def share_cores(workers: int) -> None:
    """Say that this process is one of several on this machine."""
    _Sharing.workers = workers
    torch.set_num_threads(1)


def threads(at: Sequence[Placement]) -> int:
    """Return how many blocks to fold side by side: on a CPU one per core that torch leaves idle within an operation, on
    CUDA one going up, one computed, one coming down. Others have one queue, and Metal's is not safe from several."""
    if at[0].device.type != "cpu":
        return len(at) * (3 if at[0].device.type == "cuda" else 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // _Sharing.workers // (1 if _omp_set_num_threads() else torch.get_num_threads()))


def one_core() -> None:
    """Let operations that this thread starts run on this thread alone; other threads are not affected.

    Cores are used by folding blocks side by side. Within an operation they would change its bytes: matrix products
    add in another order for another number of threads, 6 of 15 million numbers in fp16 for 2 instead of 1.
    """
    torch.get_num_threads()  # the first time it is asked, torch gives a thread the number that the program has set
    limit = _omp_set_num_threads()
    if limit is not None:
        limit(1)


def _omp_set_num_threads() -> Any:
    """OpenMP's function of that name, whose effect is on the calling thread alone; None where it is not found."""
    return None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


class DeviceMemory:
    """A device's memory, as far as it showed: lanes use it side by side, or one of them has it to itself."""

    def __init__(self) -> None:
        self.most = sys.maxsize
        """How many numbers may go into one call: half of what did not fit."""
        self._door, self._left, self._inside = Lock(), Condition(), 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Side by side with others, once nobody wants it for himself."""
        with self._door, self._left:
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """With nobody else inside; not to be entered by who is inside."""
        with self._door:
            with self._left:
                self._left.wait_for(lambda: not self._inside)
            yield


def stack_size(at: Placement, max_vram: int | None, rows: int, cols: int) -> int:
    """At most how many blocks go into one batched call: the caches' size on a CPU, plenty of work elsewhere.

    In flight are three lanes with the stored values, the base, ΔW and two temporaries of its size. A CPU rounds batched
    products of narrow matrices otherwise than single ones, and how many lie in a window is the memory bound's doing:
    these go one by one.
    """
    if at.device.type == "cpu":
        most = CPU_STACK if min(rows, cols) >= NARROW else 0
    else:
        each = 56 if at.dtype == torch.float64 else 24  # bytes a number; fp64 is rounded with the help of more of them
        most = min(DEVICE_STACK, (DEVICE_BYTES if max_vram is None else max_vram) // (3 * each))
    return max(1, most // max(rows * cols, 1))
