"""Files of checkpoints as the other rooms see them: their state, their header, their tensors' places."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

from ..algorithms import Shape
from ..errors import InputError

MEMORY: Final = 1 << 62
"""Offsets from here on are no file's: tensors that were made in memory (pickles.py) lie there."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One stored tensor: where its bytes lie. `offset` counts from the start of the file.

    `stored` is its name inside `file`, where that differs from `name` (parts of a pipeline, unwrapped
    pickles). `data` holds the bytes of a tensor that no file has as they are: `file` is then a name only.
    """

    name: str
    dtype: str
    shape: Shape
    file: Path
    offset: int
    nbytes: int
    stored: str = ""
    data: memoryview | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class FileState:
    """What tells that a file is still the one that was planned with.

    The time of the inode's own change cannot be put back, as that of the content can. It also changes with a file's
    permissions, and with a link to it or its name.
    """

    size: int
    mtime_ns: int
    inode: int
    device: int
    ctime_ns: int

    @staticmethod
    def of(fd: int) -> FileState:
        """The state of an open file."""
        return FileState._from(os.fstat(fd))

    @staticmethod
    def at(path: Path) -> FileState | None:
        """The state of the file at a path; None where there is none."""
        try:
            return FileState._from(path.stat())
        except OSError:
            return None

    @staticmethod
    def _from(s: os.stat_result) -> FileState:
        return FileState(s.st_size, s.st_mtime_ns, s.st_ino, s.st_dev, s.st_ctime_ns)

    def touched(self, since: FileState) -> bool:
        """Whether the inode's own time alone has changed since: the content may still be the same."""
        return self != since and replace(self, ctime_ns=since.ctime_ns) == since


@dataclass(frozen=True)
class Header:
    """One file: its tensors in byte order, metadata, and where the data starts."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    data_offset: int
    state: FileState
    notes: tuple[str, ...] = ()


def open_regular(path: Path) -> BinaryIO:
    """A regular file opened for reading, unbuffered; InputError for anything else. Never blocks on a FIFO."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as e:
        raise InputError("file not found", str(path), "check the path") from e
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        why = getattr(e, "strerror", None) or str(e)
        raise InputError(f"file cannot be read: {why}", str(path), "check its permissions") from e
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InputError("not a regular file", str(path), "give a file; save to one what comes from a pipe or a device")
    return os.fdopen(fd, "rb", buffering=0)
