"""How the work is shared out: threads, cores, and how many blocks go into one batched call."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Lock
from typing import Any, ClassVar, Final

import torch

from .placement import Placement

CPU_STACK: Final = 2**20
DEVICE_STACK: Final = 2**26
DEVICE_BYTES: Final = 5 * 2**30
NARROW: Final = 16  # rows or columns


class _Sharing:
    """How many workers use the cores of this machine; set once, in a worker's own process."""

    workers: ClassVar[int] = 1


def share_cores(workers: int) -> None:
    """Say that this process is one of several on this machine."""
    _Sharing.workers = workers
    torch.set_num_threads(1)


def threads(at: Sequence[Placement]) -> int:
    """How many blocks to fold side by side: on a CPU one per core that torch leaves idle within an operation, on
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
