"""Files of checkpoints as the other rooms see them: opening, state and header."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from ..dtypes import StoredTensor
from ..errors import InputError
from ..text import Note
from .remote import PlaceholderReader, remote


@dataclass(frozen=True)
class FileState:
    """Size, times and identity of a file; they show whether it is still the file that the merge was planned with.

    Programs can set `mtime_ns` back, but not `ctime_ns`. `ctime_ns` also changes with the permissions, the links and
    the name of a file.
    """

    size: int
    mtime_ns: int
    inode: int
    device: int
    ctime_ns: int

    @staticmethod
    def of(fd: int) -> FileState:
        """Return the state of an open file."""
        return FileState._from(os.fstat(fd))

    @staticmethod
    def at(path: Path) -> FileState | None:
        """Return the state of the file at a path; None if there is none."""
        try:
            return FileState._from(path.stat())
        except OSError:
            return None

    @staticmethod
    def _from(s: os.stat_result) -> FileState:
        return FileState(s.st_size, s.st_mtime_ns, s.st_ino, s.st_dev, s.st_ctime_ns)

    def touched(self, since: FileState) -> bool:
        """Return whether only `ctime_ns` has changed since: the content may still be the same."""
        return self != since and replace(self, ctime_ns=since.ctime_ns) == since


@dataclass(frozen=True)
class Header:
    """The header of one file: its tensors in byte order, its metadata, and the offset of its data."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    data_offset: int
    state: FileState
    notes: tuple[Note, ...] = ()
    fields: Mapping[str, Any] | None = None
    """All entries of a GGUF file but long arrays: numbers, texts, short arrays. None for other containers."""
    alignment: int = 1
    """Every tensor begins at a multiple of this, counted from the start of the data."""


def unreadable(path: Path, error: OSError | ValueError) -> InputError:
    """Return the error for a path that cannot be read, with the command that permits it if permission is missing."""
    why, fix = getattr(error, "strerror", None) or str(error), "check the path and its permissions"
    if isinstance(error, PermissionError) and os.name != "nt":
        closed = next((p for p in [*path.parents][::-1] if not os.access(p, os.X_OK)), None)
        right, what = ("r", path) if closed is None else ("x", closed)
        fix = f"you may not read it; its owner can permit it: chmod a+{right} {shlex.quote(str(what))}"
    return InputError(f"cannot be read: {why}", str(path), fix)


def _alike(path: Path) -> list[Path]:
    """Return the file of its folder whose name is most like that of a missing one; [] if none is."""
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return []
    same = [name for name in names if Path(name).stem in (path.name, path.stem)]  # without its ending, or with another
    return [path.with_name(name) for name in same[:1] or get_close_matches(path.name, names, 1, 0.8)]


def open_regular(path: Path) -> BinaryIO:
    """Return a regular file opened for reading, unbuffered; InputError for anything else. Never blocks on a FIFO."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as e:
        near = _alike(path)
        error = InputError("file not found", str(path), f"did you mean {near[0].name}?" if near else "check the path")
        raise error.instead(str(path), *map(str, near)) from e
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise unreadable(path, e) from e
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        os.close(fd)
        raise InputError("a folder, but a file is needed", str(path), "name a file in it")
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise InputError(
            "not a regular file",
            str(path),
            "give a regular file; save the output of a pipe or a device to a file first",
        )
    if (file := remote(path)) is not None:
        return PlaceholderReader(fd, file)
    return os.fdopen(fd, "rb", buffering=0)


def content_of_file(path: Path) -> bytes:
    """Return all bytes of a regular file; InputError as `open_regular`."""
    with open_regular(path) as f:
        return f.read()


def sha256(path: Path, start: int = 0) -> str:
    """Return the SHA-256 of a regular file, or of its bytes from a place on."""
    import hashlib  # imported here: most runs of the command line hash nothing

    digest = hashlib.sha256()
    with open_regular(path) as f:
        f.seek(start)
        while data := f.read(1 << 24):
            digest.update(data)
    return digest.hexdigest()
