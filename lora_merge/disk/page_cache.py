"""Asks what of a file the system's page cache holds; asking reads nothing that is not there."""

from __future__ import annotations

import ctypes
import errno
import sys
from mmap import PAGESIZE
from typing import Final

from .pages import PAGE
from .system import NO_WAIT, read_cached

_CACHESTAT: Final = 451  # number of the system call, the same on every processor but Alpha; Linux 6.5 and later
_libc: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_counted: bool = _libc is not None  # until the system says that it knows no such call


class Unknown(Exception):
    """The system does not say what its page cache holds of this file."""


def holds(fd: int, offset: int, block: memoryview) -> bool:
    """Return whether the page cache holds the `len(block)` bytes of a file at `offset`, both multiples of the page.

    `block` is memory that may be overwritten. Raises Unknown, and OSError where the file cannot be read.
    """
    counted = _pages(fd, offset, len(block))
    if counted is not None and counted <= (offset + len(block) - 1) // PAGESIZE - offset // PAGESIZE:
        return False
    # Pages that are still on their way are counted too. Whoever waited for them would set off the next read-ahead, and
    # so on: a whole cold file came through the cache, at twice the processor time.
    last = len(block) - PAGE
    return _at_once(fd, offset + last, block[last:]) and (not last or _at_once(fd, offset, block[:PAGE]))


def _pages(fd: int, offset: int, size: int) -> int | None:
    """Return how many pages of a range are in memory, by cachestat(2); None where it is not to be had."""
    global _counted
    if _libc is None or not _counted:
        return None
    asked, told = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
    if not _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), asked, told, ctypes.c_uint(0)):
        return told[0]
    _counted = ctypes.get_errno() != errno.ENOSYS  # any other refusal is of this file: another user's, say
    return None


def _at_once(fd: int, offset: int, page: memoryview) -> bool:
    """Return whether one page can be read without waiting.

    Only ever one page is asked for: asking for more starts reading what is missing, which the next question then
    finds, so that a whole cold file comes through the cache: 9 s of processor time for 7 GB, not 1. On a busy machine
    the one page, too, is there now and then before the system looks whether it is: 16 wrong answers in a row were seen
    where pages were not counted before.
    """
    if not NO_WAIT:
        raise Unknown
    try:
        return read_cached(fd, page, offset) == len(page)
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            raise Unknown from None
        raise
