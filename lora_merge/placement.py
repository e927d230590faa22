"""Decides device and dtype, and is the only module that moves or casts a tensor.

Everything that meets in one formula is brought to one place by `stage` and `load`; results leave it once,
by `land`. A test holds the rest of the project to that.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from math import prod
from threading import Lock
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from .errors import ResourceError

TORCH_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
FILE_DTYPES: Final = {v: k for k, v in TORCH_DTYPES.items()}

CPU_STACK: Final = 2**20
DEVICE_STACK: Final = 2**26
NARROW: Final = 16  # rows or columns
PIECE: Final = 2**18  # numbers


@dataclass(frozen=True)
class Placement:
    """Where and how exactly the formulas are computed."""

    device: torch.device
    dtype: torch.dtype


def places(devices: str, dtype: str) -> tuple[Placement, ...]:
    """The placements for `--device`, one or a list with commas, of one kind; ResourceError if one is not here."""
    found = tuple(place(d.strip(), dtype) for d in devices.split(","))
    if len(found) > 1 and (len(set(found)) < len(found) or len({p.device.type for p in found}) > 1):
        raise ResourceError(f"{devices!r} is no list of devices to share the work", "--device", "write cuda:0,cuda:1")
    return found


def place(device: str, dtype: str) -> Placement:
    """The placement for `--device` and a dtype by its name in files; ResourceError if there is no such device."""
    found = _fastest() if device == "auto" else device
    try:
        where = torch.device(found)
    except RuntimeError as e:
        raise ResourceError(f"unknown device {found!r}", "--device", "use auto, cpu, cuda, cuda:N, mps or xpu") from e
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
               "xpu": torch.xpu.is_available()}  # fmt: skip
    count = (
        torch.cuda.device_count() if where.type == "cuda" else torch.xpu.device_count() if where.type == "xpu" else 1
    )
    if not present.get(where.type, False) or (where.index or 0) >= count:
        names = ", ".join(k for k, v in present.items() if v)
        raise ResourceError(f"no device {found!r} here", "--device", f"use one of: auto, {names}")
    if where.type == "mps" and dtype == "F64":
        raise ResourceError("mps computes no fp64", "--compute-dtype", "use fp32, or --device cpu")
    return Placement(where, TORCH_DTYPES[dtype])


def precise(at: Placement) -> Placement:
    """The same place in fp64, or in fp32 where it computes no fp64.

    Inverses and decompositions in fp32 would round up to 1 % of an fp16 output's elements differently.
    """
    return Placement(at.device, torch.float32 if at.device.type in ("mps", "xpu") else torch.float64)


def present() -> list[str]:
    """Every device here, as --device takes it."""
    found = ["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()) if torch.cuda.is_available())]
    found += [f"xpu:{n}" for n in range(torch.xpu.device_count()) if torch.xpu.is_available()]
    return found + ["mps"] * torch.backends.mps.is_available()


def _fastest() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


class Lane:
    """One thread's way to a device: memory that is kept from block to block, and on CUDA a stream of its own.

    A new tensor for every block costs as much again as the cast into it: the system zeroes its pages. On CUDA, one
    lane's bytes go up while another computes and a third's come down; transfers need pinned memory for that.
    """

    def __init__(self, at: Placement) -> None:
        self.at = at
        on_cuda = at.device.type == "cuda" and torch.cuda.is_available()  # fake tensors know cuda where there is none
        self.stream = torch.cuda.Stream(at.device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._memory: dict[str, Tensor] = {}

    def turn(self) -> AbstractContextManager[Any]:
        """What is done inside is queued on the lane's stream."""
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def recover(self) -> None:
        """After a failure: wait for what is still queued, and give unused memory back to the device."""
        self.settle()
        if self.stream:
            torch.cuda.empty_cache()

    def settle(self) -> None:
        """Wait until what is queued is done, so that other lanes may use it."""
        if self.stream:
            self.stream.synchronize()

    def host(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised [shape] on the host; what an earlier call gave for this use is overwritten."""
        count, old = prod(shape), self._memory.get(use)
        if old is None or old.numel() < count or old.dtype != dtype:
            old = self._memory[use] = torch.empty(count, dtype=dtype, pin_memory=self.stream is not None)
        return old[:count].view(*shape)


class _Sharing:
    """How many workers use the cores of this machine; set once, in a worker's own process."""

    workers: ClassVar[int] = 1


def share_cores(workers: int) -> None:
    """Say that this process is one of several on this machine."""
    _Sharing.workers = workers
    torch.set_num_threads(1)


def threads(at: Sequence[Placement]) -> int:
    """How many blocks to fold side by side: on a CPU one per core that torch leaves idle within an operation, on
    other devices one going up, one computed, one coming down."""
    if at[0].device.type != "cpu":
        return 3 * len(at)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // _Sharing.workers // (1 if _omp_set_num_threads() else torch.get_num_threads()))


def one_core() -> None:
    """Let operations that this thread starts run on this thread alone; other threads are not affected.

    Cores are used by folding blocks side by side. Within an operation they would change its bytes: matrix products
    add in another order for another number of threads, 6 of 15 million numbers in fp16 for 2 instead of 1.
    """
    torch.ones(1).add_(1)  # torch sets a thread's number at its first operation
    limit = _omp_set_num_threads()
    if limit is not None:
        limit(1)


def _omp_set_num_threads() -> Any:
    """OpenMP's function of that name, whose effect is on the calling thread alone; None where it is not found."""
    return None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "omp_set_num_threads", None)


def stack_size(at: Sequence[Placement], max_vram: int | None, rows: int, cols: int) -> int:
    """At most how many blocks go into one batched call: the caches' size on a CPU, plenty of work elsewhere.

    In flight are three lanes with the stored values, the base, ΔW and two temporaries of its size: 24 bytes each.
    A CPU rounds batched products of narrow matrices otherwise than single ones, and how many lie in a window is the
    memory bound's doing: these go one by one.
    """
    if at[0].device.type == "cpu":
        most = CPU_STACK if min(rows, cols) >= NARROW else 0
    else:
        most = DEVICE_STACK if max_vram is None else min(DEVICE_STACK, max_vram // (3 * 24))
    return max(1, most // max(rows * cols, 1))


@contextmanager
def exact_products() -> Iterator[None]:
    """fp32 products in fp32 on CUDA, also where the user has allowed TF32, whose ten bits lose small changes.

    The switch is the process's: it is turned only where it has to be, and turned back when nobody needs it any more.
    """
    with _switch:
        if not _exact_users:
            _exact_users.append(torch.get_float32_matmul_precision())
            if _exact_users[0] != "highest":
                torch.set_float32_matmul_precision("highest")
        _exact_users.append("")
    try:
        yield
    finally:
        with _switch:
            _exact_users.pop()
            if len(_exact_users) == 1 and (before := _exact_users.pop()) != "highest":
                torch.set_float32_matmul_precision(before)


_switch = Lock()
_exact_users: list[str] = []  # the user's setting, then one entry for each that needs the other


def stage(tensors: Sequence[Tensor], at: Placement, lane: Lane | None = None) -> Tensor:
    """[n, …] on the compute device; one copy per tensor, cast after the transfer (fewer bytes to move).

    With a lane, its memory is used: the result on a CPU, and the way there on CUDA, are overwritten by the next call.
    """
    shape = (len(tensors), *tensors[0].shape)
    if at.device.type == "cpu":
        out = lane.host("values", shape, at.dtype) if lane else torch.empty(shape, dtype=at.dtype)
    elif lane is None or lane.stream is None:
        return torch.stack([t.to(at.device).to(at.dtype) for t in tensors])
    else:
        out = lane.host("up", shape, tensors[0].dtype)
    for slot, tensor in zip(out.unbind(), tensors, strict=True):
        slot.copy_(tensor.to(out.device))
    return out if at.device.type == "cpu" else out.to(at.device, non_blocking=True).to(at.dtype)


def move(tensors: Any, at: Placement) -> Any:
    """A dataclass with its tensors at the placement."""
    held = {f.name: getattr(tensors, f.name) for f in fields(tensors)}
    return replace(tensors, **{k: stage([v], at)[0] for k, v in held.items() if isinstance(v, Tensor)})


def stage_indices(tensors: Sequence[Tensor], at: Placement) -> Tensor:
    """[n, …] int64 on the compute device."""
    return torch.stack([t.to(at.device).to(torch.int64) for t in tensors])


def numbers(values: Sequence[float], at: Placement) -> Tensor:
    """[n, 1, 1] at the placement."""
    return torch.tensor(values, dtype=at.dtype, device=at.device).reshape(-1, 1, 1)


def land(merged: Tensor, into: Sequence[Tensor], lane: Lane | None = None) -> None:
    """Write merged [n, …] into n host tensors: detached, cast once (fp8 saturates), one transfer for all."""
    dtype, merged = into[0].dtype, merged.detach()
    if merged.device.type != "cpu":
        merged = _ready(merged, dtype).to(dtype)
        if lane is None or lane.stream is None:
            merged = merged.cpu()
        else:
            merged = lane.host("down", merged.shape, dtype).copy_(merged, non_blocking=True)
            lane.stream.synchronize()
    for target, source in zip(into, merged.unbind(), strict=True):
        convert(source, target)


def convert(source: Tensor, into: Tensor) -> None:
    """Cast a host tensor into another of the same shape; fp8 saturates. Where that takes tensors on the way, a piece
    at a time: these stay in the caches."""
    many = source.numel() > PIECE and (source.dtype == torch.float64 or into.dtype.itemsize == 1)
    rows = max(1, PIECE * len(source) // source.numel()) if many else max(1, len(source))
    for first in range(0, len(source), rows):
        into[first : first + rows].copy_(_ready(source[first : first + rows], into.dtype))


def host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor detached, contiguous, on the CPU; the same object's data where it is that already."""
    dtype = dtype or tensor.dtype
    return _ready(tensor.detach(), dtype).to(dtype).cpu().contiguous()


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in a form that one cast rounds correctly: in the range of fp8, and out of fp64."""
    tensor = _saturated(tensor, dtype)
    if tensor.dtype != torch.float64 or not dtype.is_floating_point or dtype.itemsize > 2:
        return tensor
    # torch casts fp64 to 16 and 8 bits by way of fp32, which rounds twice: about one number in 2**13 ends on the
    # wrong side. Rounded to odd in fp32 (towards zero, and the last bit says that something was cut off), it does not.
    single = tensor.float()
    bits, back = single.view(torch.int32), single.double()
    bits -= (back.abs() > tensor.abs()).to(torch.int32)
    bits |= (back != tensor).to(torch.int32)
    return single


def _saturated(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamped to the finite range of an 8-bit float; every other dtype has room, or overflow must show."""
    if not dtype.is_floating_point or dtype.itemsize > 1 or tensor.dtype.itemsize == 1:
        return tensor
    limit = torch.finfo(dtype).max
    return tensor.clamp(-limit, limit)


def nth_device(device: str, number: int) -> str:
    """The device for the n-th of several workers: GPUs go round, whatever names one device stays."""
    if device not in ("auto", "cuda") or torch.cuda.device_count() < 2:
        return device
    return f"cuda:{number % torch.cuda.device_count()}"
