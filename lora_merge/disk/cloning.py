"""Copies that share blocks with their source on the disk (xfs, btrfs).

A later write to one of the two files gives that file its own blocks; the other file does not change.
"""

from __future__ import annotations

import struct
import sys
from typing import Final

FICLONE: Final = 0x40049409  # ioctl_ficlone(2)
FICLONERANGE: Final = 0x4020940D  # ioctl_ficlonerange(2)


def clone(old: int, new: int) -> bool:
    """Make the open, empty file `new` share all bytes of the open file `old`; return False where it cannot."""
    return _ioctl(new, FICLONE, old)


def clone_range(old: int, offset: int, size: int, new: int, at: int) -> bool:
    """Make `new` share, from `at` on, `size` bytes of `old` from `offset` on; return False where it cannot.

    `offset`, `size` and `at` are multiples of a block of the file system.
    """
    return _ioctl(new, FICLONERANGE, struct.pack("=qQQQ", old, offset, size, at))


def _ioctl(new: int, request: int, argument: int | bytes) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    import fcntl

    try:
        fcntl.ioctl(new, request, argument)
    except OSError:
        return False  # no such call here, two file systems, or incomplete blocks: the caller copies
    return True
