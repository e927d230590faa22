"""Reads byte ranges of checkpoint files, from any thread, and notices when a file is not the planned one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol

from ..errors import InputError
from . import volumes
from .files import FileState, Header, Memory, Source, StoredTensor, open_regular
from .page_cache import Unknown, holds
from .pages import PAGE, address, aligned_buffer
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

BLOCK: Final = 8 << 20  # bytes that come from one place: the page cache or the disk

AT_ONCE: Final = 8  # blocks the disk is asked for in one call; one by one, reads stand back behind the merge's writes

AHEAD: Final = 1 << 30  # bytes of a file that may be brought into the page cache before they are needed

HINT: Final = 1 << 20  # bytes of one such hint; of a longer one, Linux takes up only the beginning


@dataclass
class _File:
    """An open input. `direct` is a second descriptor that reads past the page cache, -1 where there is none."""

    fd: int
    direct: int
    state: FileState
    refused: bool = False  # whether the file system took the flag of direct reads, but no read
    hints: bool = CAN_ADVISE  # whether the system says what is in its page cache
    drop: bool = False  # whether what is read through the page cache is to be taken out of it again

    def close(self) -> None:
        for fd in (self.fd, self.direct):
            if fd >= 0:
                os.close(fd)


class Reader:
    """Open files of some checkpoints; made from their indexes, closed after the run.

    What the page cache holds is copied from it; the rest of a large file is read past it, straight into
    the buffer: a third of the processor time, and nothing of the user's cache is pushed out for it.
    """

    def __init__(self, indexes: Iterable[_Index], mode: Mode = "auto") -> None:
        """Raise InputError when a file is missing or no longer the one its header was read from."""
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
            one = self._files[path] = _File(os.dup(f.fileno()), -1, header.state)
        if self._check(path) != header.state:
            raise changed(path, "its permissions, links or bytes did")
        if CAN_READ_DIRECT and goes_direct(path, header.state.size, self._mode):
            with suppress(OSError):  # refused: the cache will do
                one.direct = os.open(path, os.O_RDONLY | DIRECT_FLAG | PLAIN_FLAGS)
        if one.hints and header.state.size >= volumes.SMALL:
            advise(one.fd, 0, 0, RANDOM)  # asking must not make the system read ahead
            if one.direct < 0:
                one.drop = volumes.file_system(path) not in volumes.UNSEEN and _mostly_cold(one) and one.hints
                advise(one.fd, 0, 0, NORMAL)

    def read_into(self, buffer: memoryview, source: Source, offset: int) -> None:
        """Fill `buffer` with the bytes of a source from `offset` on; InputError if it ends before.

        Fastest where the address of `buffer` and `offset` agree modulo 4096.
        """
        if isinstance(source, Memory):
            buffer[:] = source.content()[offset : offset + len(buffer)]
            return
        one = self._files[source]
        _fill(buffer, source, offset, lambda part, at: _some(one, part[: AT_ONCE * BLOCK], at))

    def view(self, info: StoredTensor) -> memoryview:
        """Return the bytes of one tensor, not to be written to: those in memory themselves, those of a file read
        now.
        """
        if isinstance(info.source, Memory):
            return info.source.content()[info.offset : info.offset + info.nbytes]
        return memoryview(self.read(info))

    def read(self, info: StoredTensor, first: int = 0, count: int | None = None) -> bytearray:
        """Return the bytes of one tensor, `count` from `first` on or all of them; InputError as `read_into`."""
        raw = bytearray(info.nbytes - first if count is None else count)
        if raw:
            self.read_into(memoryview(raw), info.source, info.offset + first)
        return raw

    def descriptor(self, file: Path) -> int:
        """Of an open file, for calls of the system."""
        return self._files[file].fd

    def expect(self, info: StoredTensor, first: int, count: int) -> None:
        """Bytes of a tensor that will be read soon, in small pieces: lets the disk begin."""
        if not isinstance(info.source, Memory):
            advise(self._files[info.source].fd, info.offset + first, count, WILL_NEED)

    def expect_all(self, file: Path) -> None:
        """A file that will be read in small pieces, in any order: lets the disk begin, unless it is very large."""
        one = self._files[file]
        if one.state.size <= AHEAD and CAN_ADVISE:
            for at in range(0, one.state.size, HINT):
                advise(one.fd, at, HINT, WILL_NEED)

    def check_unchanged(self, files: Iterable[Path] | None = None) -> dict[Path, FileState]:
        """Raise InputError if any of the files (default: all), open or at its path, is not as its header was read from.

        Returns the files that were touched, with their states now: their permissions or links were changed, or their
        bytes, and the time of that put back. Only their bytes tell which.
        """
        states = {path: self._check(path) for path in (self._files if files is None else files)}
        return {path: state for path, state in states.items() if state != self._files[path].state}

    def _check(self, path: Path) -> FileState:
        """Returns the state of an open file; InputError if it tells that the bytes are others."""
        one = self._files[path]
        now = FileState.of(one.fd)
        if now != one.state and not now.touched(one.state):
            raise changed(path, "its size or time of change differ")
        try:
            s = path.stat()
        except OSError as e:
            raise changed(path, f"it is gone ({e.strerror})") from e
        if (s.st_ino, s.st_dev) != (one.state.inode, one.state.device):
            raise changed(path, "another file has taken its place")
        return now

    def close(self) -> None:
        """Close all files; the reader is of no use afterwards."""
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
    """Return the error for an input that is no longer what it was."""
    return InputError(
        "an input was changed while being read",
        f"{path}: {why}",
        "let nothing write to it, and run again",
    )


def _some(file: _File, buffer: memoryview, offset: int) -> int:
    """Read as much as one call gives, by the best way there is for this place; 0 at the end of the file."""
    if file.direct < 0 or file.refused:
        return _through_cache(file, buffer, offset)
    lead = -offset % PAGE
    if lead or len(buffer) < PAGE or buffer.readonly or address(buffer) % PAGE:
        return read_at(file.fd, buffer[: lead or len(buffer)], offset)
    whole = buffer[: len(buffer) // PAGE * PAGE]
    missing = _missing(file, whole, offset)
    if not missing:
        return read_at(file.fd, buffer[:BLOCK], offset)
    try:
        return read_at(file.direct, whole[:missing], offset)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        file.refused = True
        return _through_cache(file, buffer, offset)


def _through_cache(file: _File, buffer: memoryview, offset: int) -> int:
    done = read_at(file.fd, buffer, offset)
    if file.drop:
        advise(file.fd, offset, done, DO_NOT_NEED)
    return done


def _missing(file: _File, buffer: memoryview, offset: int) -> int:
    """Return how many of these bytes, whole blocks from the first on, the page cache does not hold."""
    for at in range(0, len(buffer), BLOCK):
        if _held(file, buffer[at : at + BLOCK], offset + at):
            return at
    return len(buffer)


def _mostly_cold(file: _File) -> bool:
    """Return whether the page cache lacks most of a file: most of 16 places of it."""
    page, places = aligned_buffer(PAGE), range(16)
    return sum(_held(file, page, file.state.size * i // 16 // PAGE * PAGE) for i in places) <= 8


def _held(file: _File, block: memoryview, offset: int) -> bool:
    """Return whether the page cache holds these bytes, as far as the system says; `block` may be overwritten."""
    if file.hints:
        try:
            return holds(file.fd, offset, block)
        except Unknown:
            file.hints = False
    return False


def _fill(buffer: memoryview, file: Path, offset: int, some: Callable[[memoryview, int], int]) -> None:
    """Fill the buffer with calls that each give some of it."""
    done = 0
    while done < len(buffer):
        try:
            got = some(buffer[done:], offset + done)
        except OSError as e:
            where = f"{file} at byte {offset + done}"
            raise InputError(f"file cannot be read: {e.strerror}", where, "check the disk") from e
        if not got:
            raise changed(file, f"it ends at byte {offset + done}")
        done += got


def read_bytes(info: StoredTensor, first: int = 0, count: int | None = None) -> bytes:
    """Return the bytes of one tensor, `count` from `first` on or all of them; for few. InputError if the file ends
    before.
    """
    count = info.nbytes - first if count is None else count
    if isinstance(info.source, Memory):
        return bytes(info.source.content()[info.offset + first : info.offset + first + count])
    out = bytearray(count)
    with open_regular(info.source) as f:
        _fill(memoryview(out), info.source, info.offset + first, lambda part, at: read_at(f.fileno(), part, at))
    return bytes(out)
