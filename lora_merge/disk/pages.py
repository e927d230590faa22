"""Memory that the disk reads and writes without a copy."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

from .system import HAS_HUGE_PAGES, private_memory

PAGE: Final = 4096
HUGE: Final = 2 << 20  # bytes of a huge page on x86 and most ARM systems


def aligned_buffer(size: int) -> memoryview:
    """Return `size` bytes of zeroed memory that begin at a page. The memory is freed with its last view.

    Large buffers lie in huge pages where the system has them. One request to the disk then covers megabytes; with
    small pages it covers at most the 254 scattered pages that a controller takes. Measured for 7 GB past the page
    cache: 2.4 instead of 4.2 s to write, 3.5 instead of 9 s to read, at a quarter of the processor time.
    """
    if size < HUGE or not HAS_HUGE_PAGES:
        return memoryview(mmap.mmap(-1, max(size, 1)))[:size]
    view = memoryview(private_memory(size + HUGE))
    lead = -address(view) % HUGE
    return view[lead : lead + size]


def address(data: memoryview) -> int:
    """Return the address of the first byte of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) else 0
