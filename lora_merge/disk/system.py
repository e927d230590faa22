"""System calls that not every platform has, each with its replacement if it is missing.

The other modules call these names and do not check the platform. All calls are looked up when this module is imported,
so a test can first remove calls from `os` and `mmap` and then run the program without them.
"""

from __future__ import annotations

import ctypes
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
"""Flags for every file: binary mode on Windows, and no descriptor for child processes."""

DIRECT_FLAG: Final[int] = getattr(os, "O_DIRECT", 0)
"""Flag that opens a file past the page cache; 0 if the system has none."""

RANDOM: Final[int] = getattr(os, "POSIX_FADV_RANDOM", 0)
NORMAL: Final[int] = getattr(os, "POSIX_FADV_NORMAL", 0)
WILL_NEED: Final[int] = getattr(os, "POSIX_FADV_WILLNEED", 0)
DO_NOT_NEED: Final[int] = getattr(os, "POSIX_FADV_DONTNEED", 0)

NO_WAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
"""Flag of `read_cached`; 0 if the system has none (it came with Linux 4.14)."""

_os: Final[Any] = os
"""The module, for calls that type checkers do not find on every platform."""

_seek_lock: Final = threading.Lock()

CAN_ADVISE: Final = hasattr(os, "posix_fadvise")
"""Whether the system has posix_fadvise."""

HAS_PREADV: Final = hasattr(os, "preadv")
HAS_PWRITE: Final = hasattr(os, "pwrite")

CAN_READ_DIRECT: Final = bool(DIRECT_FLAG) and HAS_PREADV
"""Whether files can be read past the page cache."""

CAN_LOCK: Final = find_spec("fcntl") is not None
"""Whether the system has advisory locks: they end with their process, even if it is killed, and nobody else notices."""

HAS_HUGE_PAGES: Final = hasattr(mmap, "MADV_HUGEPAGE")
"""Whether `private_memory` may use huge pages; buffers then begin at a huge page."""


def _opens_folders() -> bool:
    try:
        os.close(os.open(Path(__file__).parent, os.O_RDONLY))
    except OSError:
        return False
    return True


CAN_OPEN_FOLDERS: Final = _opens_folders()
"""Whether folders can be opened and synced; Windows cannot."""


def advise(fd: int, offset: int, size: int, advice: int) -> None:
    """Advise the system how a range of a file will be used (size 0: to the end); without posix_fadvise do nothing."""
    if CAN_ADVISE:
        _os.posix_fadvise(fd, offset, size, advice)


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Read with one call into `buffer`; return the number of bytes read, 0 at the end of the file."""
    if HAS_PREADV:
        return int(_os.preadv(fd, [buffer], offset))
    return read_seeking(fd, buffer, offset)


def read_seeking(fd: int, buffer: memoryview, offset: int) -> int:
    """Do the same as `read_at` by seeking. Threads take turns, since they share the position in the file."""
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def read_cached(fd: int, buffer: memoryview, offset: int) -> int:
    """Do the same as `read_at` from the page cache alone; BlockingIOError if it holds nothing. Needs NO_WAIT."""
    return int(_os.preadv(fd, [buffer], offset, NO_WAIT))


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write with one call at `offset`; return the number of bytes written. Without pwrite threads take turns."""
    if HAS_PWRITE:
        return int(_os.pwrite(fd, data, offset))
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def sync_data(fd: int) -> None:
    """Bring the bytes of a file to the disk; its times only if the system has no fdatasync."""
    getattr(os, "fdatasync", os.fsync)(fd)


def allocate(fd: int, size: int) -> None:
    """Reserve the first `size` bytes of a file on the disk; OSError (EOPNOTSUPP) if the system cannot."""
    if not hasattr(os, "posix_fallocate"):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    _os.posix_fallocate(fd, 0, size)


def lock_now(fd: int) -> bool:
    """Take a lock that ends with the descriptor; return False if another process holds it. OSError without locks.

    The library `filelock`, which does the same on every system, would add 9 ms to the start of every merge.
    """
    if sys.platform == "win32" or not CAN_LOCK:
        from filelock import lock_descriptor

        return lock_descriptor(fd, blocking=False)
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def undirect(fd: int) -> None:
    """Let later writes to a file that was opened with DIRECT_FLAG go through the page cache."""
    if sys.platform != "win32":  # Windows has no DIRECT_FLAG
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~DIRECT_FLAG)


def private_memory(size: int) -> mmap.mmap:
    """Return zeroed memory of this process, in huge pages if the system has them."""
    if sys.platform == "win32" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets small pages
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # after a fork the disk could write to pages of the child
        with suppress(OSError, AttributeError):  # the kernel does not know this advice
            memory.madvise(getattr(mmap, advice))
    return memory


def path_of(fd: int) -> Path | None:
    """Return the present path of an open file or folder, which may have moved; None if the system does not say."""
    try:
        if sys.platform == "darwin":
            import fcntl

            return Path(os.fsdecode(fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
        return Path(os.readlink(f"/proc/self/fd/{fd}"))  # noqa: PTH115  # not a link on a disk
    except OSError:
        return None


def swap_names(a: Path, b: Path) -> int | None:
    """Swap two names with renameat2(2), Linux only; return its error, 0 for none, None if there is no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform.startswith("linux") else None
    if call is None:
        return None
    return ctypes.get_errno() if call(-100, os.fsencode(a), -100, os.fsencode(b), 2) else 0


def takes_long_paths() -> bool:
    """Return whether paths may have more than 260 characters: on Windows that is a setting.

    Source: learn.microsoft.com/windows/win32/fileio/maximum-file-path-limitation.
    """
    if sys.platform != "win32":
        return True
    import winreg

    place = "SYSTEM\\CurrentControlSet\\Control\\FileSystem"
    with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, place) as settings:
        return bool(winreg.QueryValueEx(settings, "LongPathsEnabled")[0])
    return False


def user_id() -> int | None:
    """Return the effective user id of this process; None if the system has no user ids."""
    return _os.geteuid() if hasattr(os, "geteuid") else None


def is_read_only(path: os.PathLike[str]) -> bool:
    """Return whether a file is on a file system that is mounted read-only; False if the system does not say."""
    return hasattr(os, "statvfs") and bool(_os.statvfs(path).f_flag & getattr(os, "ST_RDONLY", 0))


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes; 0 if the system does not say.

    If Linux shows it, that of this program alone: `getrusage` begins with the size of the process that started it.
    """
    if sys.platform == "win32":
        counters = (ctypes.c_size_t * 9)(72)  # PROCESS_MEMORY_COUNTERS: its size, page faults, PeakWorkingSetSize, …
        ctypes.windll.kernel32.K32GetProcessMemoryInfo(ctypes.c_void_p(-1), counters, 72)
        return int(counters[1])
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def has_gpu() -> bool:
    """Return whether a driver for GPUs is loaded, as far as Linux shows it; nothing is started for that."""
    signs = "/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg"  # in sandboxes only some of them
    return any(Path(path).exists() for path in signs)
