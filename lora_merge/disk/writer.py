"""Writes large files at the speed of the disk, without filling memory with dirty pages.

Direct writes (`O_DIRECT`) hand page-aligned memory to the disk without a copy and leave the page cache alone. Elsewhere
writes go through the page cache: in steps they are started, awaited and dropped from it, so that never more than
`BEHIND` bytes are unwritten and the final fsync is short.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ..addresses import upload_address
from ..errors import MergeError, ResourceError, UsageError
from ..paths import WINDOWS, exists
from ..text import size as in_units
from .files import open_regular
from .pages import PAGE, address, aligned_buffer
from .remote import remote
from .system import DIRECT_FLAG, DO_NOT_NEED, PLAIN_FLAGS, advise, allocate, sync_data, undirect, write_at
from .volumes import CLONES, RESERVES, Mode, file_system, free_bytes, goes_direct

FICLONE: Final = 0x40049409  # ioctl_ficlone(2)
FICLONERANGE: Final = 0x4020940D  # ioctl_ficlonerange(2)

PATH_TOO_LONG: Final = (206, 234)  # of `OSError.winerror`: ERROR_FILENAME_EXCED_RANGE; ERROR_MORE_DATA under Wine

IN_MEMORY: Final = 32 << 20  # bytes that wait in memory to be written; more wait in a temporary file
WRITE_BLOCK: Final = 32 << 20  # bytes of one write call; larger calls measured no faster
# copy_file_range was tried for unchanged bytes. On ext4 it takes as long as a read and a direct write (0.7 s and 0.7 to
# 0.9 s a GB), needs 1.6 times the processor time, and fills the page cache. If files share blocks, `share` copies
# nothing.
BEHIND: Final = 128 << 20  # bytes in the page cache that may still be unwritten

OUTBOX: Final = "name a folder with room in LORA_MERGE_CACHE: outputs are written here before they are uploaded"


def clone(old: int, new: int) -> bool:
    """Make the open, empty file `new` share all bytes of the open file `old`; return False if it cannot."""
    return _ioctl(new, FICLONE, old)


def clone_range(old: int, offset: int, size: int, new: int, at: int) -> bool:
    """Make `new` share, from `at` on, `size` bytes of `old` from `offset` on; return False if it cannot.

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


def _find_sync_range() -> Any:
    """Return sync_file_range(2) of the C library; None if there is none."""
    if not sys.platform.startswith("linux"):
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


_sync_range: Any = _find_sync_range()


def _sync(fd: int, at: int, size: int, flags: int) -> None:
    """Call sync_file_range(2). Linux reports a write error once per descriptor: the final fsync would not report it."""
    if _sync_range(fd, at, size, flags):
        error = ctypes.get_errno()
        if error not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):  # not supported here: the final fsync writes all
            raise OSError(error, os.strerror(error))


def start_writing(fd: int, at: int, size: int) -> None:
    """Let the system start to write a range of a file to the disk from the page cache: a later sync is short."""
    if _sync_range is not None:
        _sync(fd, at, size, 2)  # 2: start writing, do not wait


@dataclass(frozen=True)
class Room:
    """The bytes that an output needs on its disk, and those that are free there."""

    needed: int
    free: int

    @classmethod
    def at(cls, path: Path, size: int) -> Room:
        """Return the room for `size` bytes where `path` is or would be created."""
        return cls(size, free_bytes(path))

    @property
    def enough(self) -> bool:
        """Whether the output fits."""
        return self.needed <= self.free

    @property
    def facts(self) -> dict[str, Any]:
        """The object that plans print as JSON."""
        return {"needed": self.needed, "free": self.free, "enough": self.enough}

    def require(self, path: Path) -> None:
        """Raise ResourceError, which names the path of the output, unless the output fits."""
        if not self.enough:
            raise _no_space(path, self.needed, self.free)


def require_space(path: Path, size: int) -> None:
    """Raise ResourceError unless `size` bytes are free where `path` is or would be created."""
    Room.at(path, size).require(path)


def _no_space(path: Path, needed: int, free: int, *, most: bool = False) -> ResourceError:
    short = f"no space left on the disk: {'up to ' * most}{in_units(needed)} needed, {in_units(free)} free"
    if upload_address(path) is not None:
        return ResourceError(short, f"the local copy of {path}", OUTBOX)
    return ResourceError(short, str(path), "make room, or write to another disk with -o")


def elsewhere(output: Path) -> str:
    """Return what to do where a folder takes no output."""
    if upload_address(output) is not None:
        return OUTBOX
    return f"name an output in another folder, such as ~/{output.name}"


def path_too_long(path: Path) -> UsageError:
    """Return the error for an output whose path, or that of its temporary file, is too long for Windows."""
    fix = "choose a shorter -o, or enable long paths in Windows (LongPathsEnabled)"
    return UsageError("the path is longer than Windows allows", str(path), fix)


def failure(e: OSError, path: Path, needed: int, *, written: int = 0, most: bool = False) -> MergeError:
    """Return the typed error for a failed write with `needed` bytes still to be written, or so many at `most`.

    `written`: bytes that will be free again, because what was written is removed.
    """
    if e.errno == errno.EFBIG:
        fix = (
            "write to a disk with NTFS; FAT32 ends at 4 GiB"
            if WINDOWS
            else "raise the limit (ulimit -f unlimited), or write to a file system that allows large files"
        )
        return ResourceError(f"files of {needed} bytes are not allowed on this disk: {e.strerror}", str(path), fix)
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(path, needed, free_bytes(path.parent) + written, most=most)
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = (
            f"close the program that has it open, or {elsewhere(path)}" if WINDOWS and exists(path) else elsewhere(path)
        )
        return UsageError(f"no permission to write: {e.strerror}", str(path), fix)
    if getattr(e, "winerror", None) in PATH_TOO_LONG:
        return path_too_long(path)
    if e.errno in (errno.ENAMETOOLONG, errno.EILSEQ):
        return UsageError(f"the disk does not allow this name: {e.strerror}", str(path), "choose another -o")
    return MergeError(f"the output could not be written: {e.strerror}", str(path), "check the disk")


@dataclass
class _Page:
    """A page of the output of which some bytes have not arrived yet."""

    memory: memoryview = field(default_factory=lambda: aligned_buffer(PAGE))
    filled: int = 0


class Writer:
    """One output file, which exists already. Its pieces may be written in any order, by one thread at a time.

    Memory is written without a copy if its address and its place in the file are equal modulo 4096. Raises
    ResourceError if the disk is full, MergeError for any other failure.
    """

    def __init__(self, path: Path, size: int, mode: Mode = "auto") -> None:
        """Open `path` and reserve `size` bytes if the file system does that at once."""
        self.path, self.size = path, size
        self._written = 0
        self._pages: dict[int, _Page] = {}  # incomplete pages, by their place in the file
        self._bounce: memoryview | None = None
        self._dirty: deque[tuple[int, int]] = deque()  # place and size of unwritten ranges in the page cache
        self._fd = -1
        try:
            self.direct = goes_direct(path, size, mode) and self._open_direct()
            if not self.direct:
                self._fd = os.open(path, os.O_WRONLY | PLAIN_FLAGS)
            kind = file_system(path) if size else ""
            if kind in RESERVES:
                self._reserve(size, sharing=kind in CLONES)
        except OSError as e:
            if self._fd >= 0:
                os.ftruncate(self._fd, 0)  # frees the reserved space, so that the message names the free bytes
            self.close()
            raise failure(e, path, size) from e

    def _reserve(self, size: int, *, sharing: bool) -> None:
        """Reserve the whole file; a full disk is not an error if the file may share blocks with an input."""
        try:
            allocate(self._fd, size)
        except OSError as e:
            if sharing and e.errno == errno.ENOSPC:
                os.ftruncate(self._fd, 0)
            elif e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # ext4 without extents cannot reserve
                raise

    def _open_direct(self) -> bool:
        try:
            self._fd = os.open(self.path, os.O_WRONLY | DIRECT_FLAG)
        except OSError as e:
            if e.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        return True

    def write(self, data: memoryview, at: int) -> None:
        """Write `data` (bytes) at `at`. Each byte of the file is written once. The memory may be reused on return."""
        start = at
        try:
            while len(data):
                lead = at % PAGE
                if lead or len(data) < PAGE:
                    taken = min(PAGE - lead, len(data))
                    self._put_part(data[:taken], at - lead, lead)
                else:
                    taken = min(WRITE_BLOCK, len(data) // PAGE * PAGE)
                    self._put(self._aligned(data[:taken]), at)
                self._written += taken
                data, at = data[taken:], at + taken
            if not self.direct:
                self._settle(start, at - start)
        except OSError as e:
            raise failure(e, self.path, self.size - self._written) from e

    def share(self, old: int, offset: int, at: int, size: int) -> tuple[int, int]:
        """Share whole pages of `size` bytes of the open file `old`, from `offset` on, at `at`, without a copy.

        Returns (first, end) of the shared bytes, relative to `offset`; the caller writes the others. (0, 0) if none.
        """
        low = -at % PAGE
        high = low + (size - low) // PAGE * PAGE
        if high <= low or (offset - at) % PAGE or not clone_range(old, offset + low, high - low, self._fd, at + low):
            return 0, 0
        self._written += high - low
        return low, high

    def _put_part(self, data: memoryview, at: int, lead: int) -> None:
        """Store part of the page at `at`, from its byte `lead` on; write the page once it is complete."""
        page = self._pages.setdefault(at, _Page())
        page.memory[lead : lead + len(data)] = data
        page.filled += len(data)
        if page.filled == PAGE:
            self._put(self._pages.pop(at).memory, at)

    def _aligned(self, data: memoryview) -> memoryview:
        """Return `data`, or a copy of it at an address that a direct write accepts."""
        if not self.direct or (not data.readonly and address(data) % PAGE == 0):
            return data
        if self._bounce is None:
            self._bounce = aligned_buffer(WRITE_BLOCK)
        self._bounce[: len(data)] = data
        return self._bounce[: len(data)]

    def _put(self, data: memoryview, at: int) -> None:
        """Write all of `data` at `at`, with as many calls as the system needs."""
        while len(data):
            try:
                done = write_at(self._fd, data, at)
            except OSError as e:
                if e.errno != errno.EINVAL or not self.direct:
                    raise
                self._undirect()  # the file system accepted DIRECT_FLAG but refused the write
                continue
            if self.direct and done % PAGE:
                self._undirect()  # the disk is full, or the call was interrupted, within a page
            data, at = data[done:], at + done

    def _undirect(self) -> None:
        if self.direct:
            undirect(self._fd)
            self.direct = False

    def _settle(self, at: int, size: int) -> None:
        """Start to write the newest range; wait for older ranges if more than `BEHIND` bytes are unwritten."""
        self._dirty.append((at, size))
        if sum(size for _, size in self._dirty) < BEHIND:
            return
        if _sync_range is None:
            sync_data(self._fd)
            self._dirty.clear()
            return
        start_writing(self._fd, at, size)
        while sum(size for _, size in self._dirty) > BEHIND // 2:
            at, size = self._dirty.popleft()
            _sync(self._fd, at, size, 7)  # 7: wait until written
            advise(self._fd, at, size, DO_NOT_NEED)

    def finish(self) -> None:
        """Write the last, incomplete page and sync the file: every byte is on the disk on return."""
        assert self._written == self.size, f"{self._written} of {self.size} bytes written"
        try:
            for at, page in self._pages.items():  # only the last page may be incomplete
                self._undirect()
                self._put(page.memory[: page.filled], at)
            os.ftruncate(self._fd, self.size)
            os.fsync(self._fd)
        except OSError as e:
            raise failure(e, self.path, self.size % PAGE) from e

    def close(self) -> None:
        """Close the file, finished or not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._bounce = -1, None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def timed_write(path: Path, block: memoryview, size: int, mode: Mode = "auto") -> tuple[float, bool]:
    """Write a file of `size` bytes, the same block again and again, and flush it; return the seconds that it takes, and
    whether the writes are direct. MergeError if it cannot be written. The caller removes the file."""
    try:
        path.write_bytes(b"")
    except OSError as e:
        raise failure(e, path, size) from e
    start = time.perf_counter()
    with Writer(path, size, mode) as writer:
        for low in range(0, size, len(block)):
            writer.write(block[: min(len(block), size - low)], low)
        writer.finish()
        direct = writer.direct
    return max(time.perf_counter() - start, 1e-9), direct


def amend(path: Path, data: bytes, at: int = 0) -> None:
    """Replace bytes of a written file, from `at` on, without a sync."""
    try:
        with path.open("r+b") as f:
            f.seek(at)
            f.write(data)
    except OSError as e:
        raise failure(e, path, 0) from e


def copy_file(source: Path, target: Path) -> None:
    """Copy a file and sync the copy, which shares its blocks with the source if the file system can.

    Raises InputError if the source is not a regular file.
    """
    with open_regular(source) as old:
        try:
            with target.open("xb") as new:
                if remote(source) is not None or not clone(old.fileno(), new.fileno()):
                    shutil.copyfileobj(old, new, 1 << 20)
                    new.flush()
                os.fsync(new.fileno())
        except OSError as e:
            raise failure(e, target, os.fstat(old.fileno()).st_size) from e
