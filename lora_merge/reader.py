"""Reads byte ranges of checkpoint files, from any thread, and notices when a file is not the planned one."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from .errors import InputError
from .header import FileState, Header, TensorInfo, open_regular

MEMORY: Final = 1 << 62
"""Offsets from here on are no file's: tensors that were made in memory (pickles.py) lie there."""

BLOCK: Final = 32 << 20  # bytes a single read asks for


class Reader:
    """Open files of some checkpoints; made from their indexes, closed after the run."""

    def __init__(self, indexes: Iterable[_Index]) -> None:
        """InputError when a file is missing or no longer the one its header was read from."""
        self._fds: dict[Path, int] = {}
        self._states: dict[Path, FileState] = {}
        self._memory: dict[tuple[Path, int], memoryview] = {}
        try:
            for index in indexes:
                for path, header in index.headers.items():
                    self._open(path, header)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, header: Header) -> None:
        for info in header.tensors.values():
            if info.data is not None:
                self._memory[path, info.offset] = info.data
        if path not in self._fds:
            with open_regular(path) as f:
                self._fds[path] = os.dup(f.fileno())
            self._states[path] = header.state
            self._check(path)

    def read_into(self, buffer: memoryview, file: Path, offset: int) -> None:
        """Fill `buffer` with the bytes of `file` from `offset` on; InputError if it ends before."""
        if offset >= MEMORY:
            self._copy(buffer, file, offset)
            return
        done = 0
        while done < len(buffer):
            got = read_at(self._fds[file], buffer[done : done + BLOCK], offset + done, file)
            if not got:
                raise changed(file, f"it ends at byte {offset + done}")
            done += got

    def _copy(self, buffer: memoryview, file: Path, offset: int) -> None:
        done = 0
        for (path, start), data in sorted(self._memory.items(), key=lambda m: m[0][1]):
            if path == file and start <= offset + done < start + len(data):
                piece = data[offset + done - start :][: len(buffer) - done]
                buffer[done : done + len(piece)] = piece
                done += len(piece)
        assert done == len(buffer), "a range that no tensor in memory covers"

    def check_unchanged(self) -> None:
        """InputError if any file, open or at its path, is not as it was when its header was read."""
        for path in self._fds:
            self._check(path)

    def _check(self, path: Path) -> None:
        if FileState.of(self._fds[path]) != self._states[path]:
            raise changed(path, "its size or time of change differ")
        try:
            s = path.stat()
        except OSError as e:
            raise changed(path, f"it is gone ({e.strerror})") from e
        if (s.st_ino, s.st_dev) != (self._states[path].inode, self._states[path].device):
            raise changed(path, "another file has taken its place")

    def close(self) -> None:
        """Close all files; the reader is of no use afterwards."""
        while self._fds:
            os.close(self._fds.popitem()[1])
        self._memory.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class _Index(Protocol):
    @property
    def headers(self) -> Mapping[Path, Header]: ...


def changed(path: Path, why: str) -> InputError:
    """The error for an input that is no longer what it was."""
    return InputError(
        "an input was changed while being read",
        f"{path}: {why}",
        "let nothing write to it, and run again",
    )


_seek_lock = threading.Lock()


def _read_seeking(fd: int, buffer: memoryview, offset: int) -> int:
    """preadv for systems without it (Windows): seek and read, one thread at a time."""
    with _seek_lock:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def _preadv(fd: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(fd, [buffer], offset)


_read: Any = _preadv if hasattr(os, "preadv") else _read_seeking


def read_at(fd: int, buffer: memoryview, offset: int, file: Path) -> int:
    """Bytes read into `buffer`, 0 at the end; interrupted calls are repeated by Python (PEP 475)."""
    try:
        return int(_read(fd, buffer, offset))
    except OSError as e:
        raise InputError(
            f"file cannot be read: {e.strerror}", f"{file} at byte {offset}", "check the disk"
        ) from e


def read_bytes(info: TensorInfo) -> bytes:
    """All bytes of one tensor; for small ones. InputError if the file ends before."""
    if info.data is not None:
        return bytes(info.data)
    out = memoryview(bytearray(info.nbytes))
    with open_regular(info.file) as f:
        done = 0
        while done < len(out):
            got = read_at(f.fileno(), out[done:], info.offset + done, info.file)
            if not got:
                raise changed(info.file, f"it ends at byte {info.offset + done}")
            done += got
    return bytes(out)
