"""What a job needs of the machine: room for the windows that are under way at once, in `--max-memory`, and a device."""

from __future__ import annotations

from typing import Final

from ..dtypes import COMPUTE_DTYPES
from ..errors import ResourceError
from ..job import Job

WINDOW_BYTES: Final = 32 * 2**20  # full disk speed; larger ones measured no faster, and the system zeroes their memory
SMALLEST_WINDOW: Final = 2**20
SLOTS: Final = 4  # one being read, one hashed, one folded, one written


def window_room(job: Job) -> int:
    """Bytes that a window's output may have, and its input; ResourceError if nothing fits."""
    room = job.max_memory // (2 * SLOTS)
    if room < SMALLEST_WINDOW:
        raise ResourceError("the memory bound is too small", f"--max-memory {job.max_memory}",
                            f"give at least {2 * SLOTS * SMALLEST_WINDOW >> 20} MiB")  # fmt: skip
    return min(room, WINDOW_BYTES)


def require_device(job: Job) -> None:
    """ResourceError where the device is not here. Only torch can tell, which is imported unless it is the default.

    For plans that are not carried out: a merge finds out while it reads, when torch has been imported beside.
    """
    if job.device not in {"auto", "cpu"}:
        from .devices import places

        places(job.device, COMPUTE_DTYPES[job.compute_dtype])
