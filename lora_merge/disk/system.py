"""System calls that not every platform has, each with what is done where it is missing.

The other modules call these names and ask nothing about the platform. Everything is looked up when this module is
imported, so a test can take calls away from `os` and `mmap` first and see how the program does without them.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

PLAIN_FLAGS: Final[int] = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags for every file of ours: bytes as they are, and no descriptor for child processes."""

DIRECT_FLAG: Final[int] = getattr(os, "O_DIRECT", 0)
"""Opens a file past the page cache; 0 where no such flag is known."""

RANDOM: Final[int] = getattr(os, "POSIX_FADV_RANDOM", 0)
NORMAL: Final[int] = getattr(os, "POSIX_FADV_NORMAL", 0)
WILL_NEED: Final[int] = getattr(os, "POSIX_FADV_WILLNEED", 0)
DO_NOT_NEED: Final[int] = getattr(os, "POSIX_FADV_DONTNEED", 0)

NO_WAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
"""Flag of `read_cached`; 0 where the system has none (it came with Linux 4.14)."""

_os: Final[Any] = os
"""The module, for calls that type checkers do not find on every platform."""

_seek_lock: Final = threading.Lock()

CAN_ADVISE: Final = hasattr(os, "posix_fadvise")
"""Whether the system takes advice on its page cache."""

HAS_PREADV: Final = hasattr(os, "preadv")
HAS_PWRITE: Final = hasattr(os, "pwrite")

CAN_READ_DIRECT: Final = bool(DIRECT_FLAG) and HAS_PREADV
"""Whether files can be read past the page cache, straight into memory of ours."""


CAN_LOCK: Final = find_spec("fcntl") is not None
"""Whether a lock on a file can be had that ends with its process, however that ends."""


def _opens_folders() -> bool:
    try:
        os.close(os.open(Path(__file__).parent, os.O_RDONLY))
    except OSError:
        return False
    return True


CAN_OPEN_FOLDERS: Final = _opens_folders()
"""Whether folders can be opened, so that the names in them can be brought to the disk; not on Windows."""


def advise(fd: int, offset: int, size: int, advice: int) -> None:
    """Tell the system how a range of a file will be used; 0 bytes mean up to its end. Does nothing where it cannot."""
    if CAN_ADVISE:
        _os.posix_fadvise(fd, offset, size, advice)


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Read bytes of a file into memory, as many as one call gives; returns how many, 0 at the end of the file."""
    if HAS_PREADV:
        return int(_os.preadv(fd, [buffer], offset))
    return read_seeking(fd, buffer, offset)


def read_seeking(fd: int, buffer: memoryview, offset: int) -> int:
    """As `read_at`, by seeking: threads take turns, since the place in the file is one for all of them."""
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def read_cached(fd: int, buffer: memoryview, offset: int) -> int:
    """As `read_at`, but only what the page cache holds; BlockingIOError where that is nothing. Needs NO_WAIT."""
    return int(_os.preadv(fd, [buffer], offset, NO_WAIT))


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write bytes at a place of a file; returns how many one call took. Without pwrite, one thread at a time."""
    if HAS_PWRITE:
        return int(_os.pwrite(fd, data, offset))
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def sync_data(fd: int) -> None:
    """Bring the bytes of a file to the disk, without its times where the system knows the difference."""
    getattr(os, "fdatasync", os.fsync)(fd)


def allocate(fd: int, size: int) -> None:
    """Reserve the first `size` bytes of a file on the disk; OSError (EOPNOTSUPP) where that cannot be done."""
    if not hasattr(os, "posix_fallocate"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    _os.posix_fallocate(fd, 0, size)


def lock_now(fd: int) -> None:
    """Take an advisory lock on an open file that ends with its descriptor; BlockingIOError if somebody else has it.

    For temporary files and folders. The library `filelock`, which claims use, would cost every merge 9 ms at its start,
    and while it holds a lock on Windows nobody else can write to the file.
    """
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def undirect(fd: int) -> None:
    """Let later writes to a file that was opened with DIRECT_FLAG go through the page cache."""
    if sys.platform != "win32":  # where the flag exists, so does this
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~DIRECT_FLAG)


def private_memory(size: int) -> mmap.mmap:
    """Zeroed memory of this process, in huge pages where the system has them."""
    if sys.platform == "win32" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets small pages
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a fork would give pages away to which the disk writes
        with suppress(OSError, AttributeError):  # a kernel that knows no such advice
            memory.madvise(getattr(mmap, advice))
    return memory


HAS_HUGE_PAGES: Final = hasattr(mmap, "MADV_HUGEPAGE")
"""Whether `private_memory` may lie in huge pages, so that it pays to begin at one."""


def path_of(fd: int) -> Path | None:
    """Return where an open file or folder is now, whatever it was opened as; None where the system does not say."""
    try:
        if sys.platform == "darwin":
            import fcntl

            return Path(os.fsdecode(fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
        return Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115  # of a link that is none on the disk
    except OSError:
        return None


def user_id() -> int | None:
    """Return the number of the user whose rights this process has; None where users have none."""
    return _os.geteuid() if hasattr(os, "geteuid") else None


def is_read_only(path: os.PathLike[str]) -> bool:
    """Return whether a file lies on a file system that is mounted for reading alone; False where the system does not
    say.
    """
    return hasattr(os, "statvfs") and bool(_os.statvfs(path).f_flag & getattr(os, "ST_RDONLY", 0))


def peak_memory() -> int:
    """Return the bytes of this process's largest resident size so far; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    if sys.platform == "win32":
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
