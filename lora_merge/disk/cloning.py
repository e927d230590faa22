"""Files that share blocks on the disk: a copy that is a second reference to the same bytes (xfs, btrfs).

Writing to one of the files later gives that one blocks of its own; the other does not change.
"""

from __future__ import annotations

import struct
import sys
from typing import Final

FICLONE: Final = 0x40049409  # ioctl_ficlone(2)
FICLONERANGE: Final = 0x4020940D  # ioctl_ficlonerange(2)


def clone(old: int, new: int) -> bool:
    """Return whether the open, empty file `new` now shares all bytes of the open file `old`."""
    return _ioctl(new, FICLONE, old)


def clone_range(old: int, offset: int, size: int, new: int, at: int) -> bool:
    """Return whether `size` bytes of `old` from `offset` on now stand at `at` in `new`. All three are multiples of a
    block.
    """
    return _ioctl(new, FICLONERANGE, struct.pack("=qQQQ", old, offset, size, at))


def _ioctl(new: int, request: int, argument: int | bytes) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    import fcntl

    try:
        fcntl.ioctl(new, request, argument)
    except OSError:
        return False  # not this file system, or two of them, or no whole blocks: the caller copies
    return True
