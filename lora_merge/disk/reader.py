"""Reads byte ranges of checkpoint files, from any thread; raises InputError if a file was changed or replaced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from ..dtypes import Memory, Source, StoredTensor
from ..errors import InputError
from . import volumes
from .files import FileState, Header, open_regular
from .pages import PAGE, ReadAhead, Unknown, address, aligned_buffer, holds
from .remote import WIDEST_NUMBER, RemoteFile, remote
from .system import (
    CAN_ADVISE,
    CAN_READ_DIRECT,
    DIRECT_FLAG,
    DO_NOT_NEED,
    NORMAL,
    PLAIN_FLAGS,
    RANDOM,
    WILL_NEED,
    advise,
    read_at,
)
from .volumes import Mode, goes_direct

READ_BLOCK: Final = 8 << 20  # bytes that are read together from the page cache, or together from the disk

BLOCKS_PER_CALL: Final = 8  # blocks per read call; with single blocks the disk prefers the writes of the merge

READ_AHEAD_BELOW: Final = 1 << 30  # bytes; only smaller files are read ahead into the page cache


HINT: Final = 1 << 20  # bytes of one advice to read ahead; Linux ignores the rest of a longer range


@dataclass
class _File:
    """An open input. `direct` is a second descriptor that reads past the page cache, -1 if there is none. `remote`: the
    file that it represents, if it is a placeholder."""

    fd: int
    direct: int
    state: FileState
    refused: bool = False  # whether the file system accepted DIRECT_FLAG but refused the read
    hints: bool = CAN_ADVISE  # whether the system reports what its page cache holds
    drop: bool = False  # whether to drop pages from the page cache after reading them
    ahead: ReadAhead = field(default_factory=ReadAhead)
    remote: RemoteFile | None = None

    def close(self) -> None:
        for fd in (self.fd, self.direct):
            if fd >= 0:
                os.close(fd)


class Reader:
    """The open files of some checkpoints.

    Bytes in the page cache are copied from there. All other bytes of a large file are read directly into the buffer:
    this takes a third of the processor time and leaves the page cache of other programs alone.
    """

    def __init__(self, indexes: Iterable[_Index], mode: Mode = "auto") -> None:
        """Open the files; InputError if one is missing or has changed since its header was read."""
        self._files: dict[Path, _File] = {}
        self._mode = mode
        try:
            for index in indexes:
                for path, header in index.headers.items():
                    self._open(path, header)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, header: Header) -> None:
        if path in self._files:
            return
        with open_regular(path) as f:
            file = self._files[path] = _File(os.dup(f.fileno()), -1, header.state, remote=remote(path))
        if self._check(path) != header.state:
            raise changed(path, "its permissions, links or bytes were changed")
        if file.remote is not None:
            file.hints = False
            return
        if CAN_READ_DIRECT and goes_direct(path, header.state.size, self._mode):
            with suppress(OSError):  # the page cache is used instead
                file.direct = os.open(path, os.O_RDONLY | DIRECT_FLAG | PLAIN_FLAGS)
        if file.hints and header.state.size >= volumes.DIRECT_ABOVE:
            advise(file.fd, 0, 0, RANDOM)  # the checks of the page cache must not start read-ahead
            if file.direct < 0:
                file.drop = volumes.file_system(path) not in volumes.UNSEEN and _mostly_cold(file) and file.hints
                advise(file.fd, 0, 0, NORMAL)

    @property
    def paths(self) -> list[Path]:
        """The open files."""
        return [*self._files]

    def read_into(self, buffer: memoryview, source: Source, offset: int) -> None:
        """Fill `buffer` with the bytes of a source from `offset` on; InputError if the source ends too early.

        This is fastest if the address of `buffer` and `offset` are equal modulo 4096.
        """
        if isinstance(source, Memory):
            buffer[:] = source.content()[offset : offset + len(buffer)]
            return
        file = self._files[source]
        _fill(buffer, source, offset, lambda part, at: _read_some(file, part[: BLOCKS_PER_CALL * READ_BLOCK], at))

    def view(self, info: StoredTensor) -> memoryview:
        """Return the bytes of one tensor, which the caller must not change; bytes in memory are not copied."""
        if isinstance(info.source, Memory):
            return info.source.content()[info.offset : info.offset + info.nbytes]
        return memoryview(self.read(info))

    def read(self, info: StoredTensor, first: int = 0, count: int | None = None) -> bytearray:
        """Return the bytes of one tensor, `count` from `first` on or all of them; InputError as `read_into`."""
        size = info.nbytes - first if count is None else count
        raw = bytearray(size)
        self.read_into(memoryview(raw), info.source, info.offset + first)
        return raw

    def descriptor(self, file: Path) -> int:
        """Return the descriptor of an open file, for system calls."""
        return self._files[file].fd

    def expect(self, pieces: Iterable[tuple[StoredTensor, int, int]]) -> None:
        """Start to read bytes of tensors ahead, which will soon be read in small pieces: (tensor, first, count)."""
        far = []
        for info, first, count in pieces:
            if isinstance(info.source, Memory):
                continue
            file = self._files[info.source]
            if file.remote is None:
                file.ahead.expect(file.fd, info.offset + first, count)
            else:
                far.append((info, first, count))
        for remote_file, ranges in self._remote_ranges(far):
            remote_file.expect(ranges)

    def keep(self, pieces: Iterable[tuple[StoredTensor, int, int]]) -> None:
        """Keep such bytes of files of other machines when larger reads bring them."""
        for remote_file, ranges in self._remote_ranges(pieces):
            remote_file.keep(ranges)

    def _remote_ranges(
        self, pieces: Iterable[tuple[StoredTensor, int, int]]
    ) -> list[tuple[RemoteFile, list[tuple[int, int]]]]:
        ranges: dict[Path, list[tuple[int, int]]] = {}
        for info, first, count in pieces:
            if not isinstance(info.source, Memory) and self._files[info.source].remote is not None:
                ranges.setdefault(info.source, []).append((info.offset + first, count))
        return [(file, some) for path, some in ranges.items() if (file := self._files[path].remote) is not None]

    def expect_single_values(self, tensors: Iterable[StoredTensor]) -> None:
        """Start to read those tensors ahead that hold one number: read one after another, each waits for the disk."""
        self.expect((info, 0, info.nbytes) for info in tensors if 0 < info.nbytes <= WIDEST_NUMBER)

    def expect_all(self, file: Path) -> None:
        """Start to read a file ahead that will be read in small pieces, in any order; not if it is over
        `READ_AHEAD_BELOW`."""
        size = self._files[file].state.size
        if size <= READ_AHEAD_BELOW and CAN_ADVISE and self._files[file].remote is None:
            for at in range(0, size, HINT):
                advise(self._files[file].fd, at, HINT, WILL_NEED)

    def check_unchanged(self, files: Iterable[Path] | None = None) -> dict[Path, FileState]:
        """Raise InputError if one of the files (default: all) was changed or replaced since its header was read.

        Returns the touched files with their present states: their permissions or links were changed, or their bytes
        were changed and `mtime_ns` set back. Only the bytes show which.
        """
        states = {path: self._check(path) for path in (self._files if files is None else files)}
        return {path: state for path, state in states.items() if state != self._files[path].state}

    def _check(self, path: Path) -> FileState:
        """Return the state of an open file; InputError if its bytes were changed or another file has its path."""
        file = self._files[path]
        now = FileState.of(file.fd)
        if now != file.state and not now.touched(file.state):
            raise changed(path, "its size or time of change differ")
        try:
            s = path.stat()
        except OSError as e:
            raise changed(path, f"it is gone ({e.strerror})") from e
        if (s.st_ino, s.st_dev) != (file.state.inode, file.state.device):
            raise changed(path, "another file has taken its place")
        return now

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Index(Protocol):
    @property
    def headers(self) -> Mapping[Path, Header]: ...


def changed(path: Path, why: str) -> InputError:
    """Return the error for an input that was changed during the run."""
    return InputError(
        "an input was changed while being read",
        f"{path}: {why}",
        "let no other program write to it, and run again",
    )


def _read_some(file: _File, buffer: memoryview, offset: int) -> int:
    """Read with one call, directly or through the page cache; return the number of bytes, 0 at the end of the file."""
    if file.direct < 0 or file.refused or file.remote is not None:
        return _through_cache(file, buffer, offset)
    lead = -offset % PAGE
    if buffer.readonly or len(buffer) < lead + PAGE or (address(buffer) + lead) % PAGE:
        return read_at(file.fd, buffer, offset)
    if lead:
        return read_at(file.fd, buffer[:lead], offset)
    whole = buffer[: len(buffer) // PAGE * PAGE]
    missing = _missing(file, whole, offset)
    if not missing:
        return read_at(file.fd, buffer[:READ_BLOCK], offset)
    try:
        return read_at(file.direct, whole[:missing], offset)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        file.refused = True
        return _through_cache(file, buffer, offset)


def _through_cache(file: _File, buffer: memoryview, offset: int) -> int:
    if file.remote is not None:
        return file.remote.read_into(buffer, offset)
    done = read_at(file.fd, buffer, offset)
    if file.drop:
        advise(file.fd, offset, done, DO_NOT_NEED)
    return done


def _missing(file: _File, buffer: memoryview, offset: int) -> int:
    """Return how many bytes come before the first block that the page cache holds."""
    for at in range(0, len(buffer), READ_BLOCK):
        if _in_pages(file, buffer[at : at + READ_BLOCK], offset + at):
            return at
    return len(buffer)


def _mostly_cold(file: _File) -> bool:
    """Return whether the page cache lacks at least 8 of 16 sampled pages of a file."""
    page, places = aligned_buffer(PAGE), range(16)
    return sum(_in_pages(file, page, file.state.size * i // 16 // PAGE * PAGE) for i in places) <= 8


def _in_pages(file: _File, block: memoryview, offset: int) -> bool:
    """Return whether the page cache holds these bytes, False if unknown; `block` may be overwritten."""
    if file.hints:
        try:
            return holds(file.fd, offset, block)
        except Unknown:
            file.hints = False
    return False


def _fill(buffer: memoryview, file: Path, offset: int, read: Callable[[memoryview, int], int]) -> None:
    """Call `read` until the buffer is full; InputError at a read error or the end of the file."""
    done = 0
    while done < len(buffer):
        try:
            got = read(buffer[done:], offset + done)
        except OSError as e:
            where = f"{file} at byte {offset + done}"
            raise InputError(f"file cannot be read: {e.strerror}", where, "check the disk") from e
        if not got:
            raise changed(file, f"it ends at byte {offset + done}")
        done += got


def read_bytes(info: StoredTensor, first: int = 0, count: int | None = None) -> bytes:
    """Return bytes of one tensor as `Reader.read` does, for small tensors: the file is opened for this call alone."""
    count = info.nbytes - first if count is None else count
    if isinstance(info.source, Memory):
        return bytes(info.source.content()[info.offset + first : info.offset + first + count])
    out = bytearray(count)
    with open_regular(info.source) as f:
        far = remote(info.source)
        read = (lambda part, at: read_at(f.fileno(), part, at)) if far is None else far.read_into
        _fill(memoryview(out), info.source, info.offset + first, read)
    return bytes(out)
