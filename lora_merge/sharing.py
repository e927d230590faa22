"""How the work is shared out: threads, cores, and how many blocks go into one batched call."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch

from .placement import Placement

CPU_STACK: Final = 2**20
DEVICE_STACK: Final = 2**26
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
