"""Files of other machines that have a path here: an empty placeholder of the same size, whose bytes are read by ranges.

A placeholder is a sparse file, so that size, times and identity of the file are those of any input. `open_regular` and
`Reader` read its bytes from the other machine; nothing may read them by the descriptor.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

SMALL_RANGE: Final = 256 << 10
"""Bytes of a range for headers and other small reads, which are kept: most headers take one or two such ranges."""

CHUNKS: Final = 64
"""Ranges of a file that are kept: 16 MiB, the largest header of a GGUF file."""

WIDEST_NUMBER: Final = 8
"""Bytes of the largest single number."""

WEIGHT_RANGE: Final = 8 << 20
"""Bytes of a range of weights."""

NEAR_BYTES: Final = 256 << 10
"""Bytes between two small reads that are cheaper to read than to leave out: a connection brings them in less time than
a request takes."""

EXPECTED: Final = 64 << 20
"""Bytes of small reads of all files that are begun, or kept, before they are needed; later ones are read when they are,
and the first are dropped for new ones."""

RANGES_AT_ONCE: Final = 8
"""Ranges of one read that are read side by side: object stores give one of them about 100 MB/s."""

CONNECTIONS: Final = 16
"""Ranges of all files that are read side by side."""

ReadRange: TypeAlias = Callable[[int, int], "bytes | memoryview"]
"""Returns so many bytes from an offset on, which are inside the file."""


_received, _counting = 0, threading.Lock()

_begun: deque[tuple[RemoteFile, int, int]] = deque()
"""The small reads that were begun or kept, in their order: file, first byte, the byte behind the last."""
_begun_bytes = 0
_expecting = threading.Lock()


def received() -> int:
    """Return how many bytes of placeholders have arrived in this process."""
    return _received


class RemoteFile:
    """A file of another machine. Any thread may read it. `sha256`: as its source states it, or empty."""

    def __init__(self, size: int, read: ReadRange, sha256: str = "") -> None:
        self.size, self.sha256 = size, sha256
        self._source = read
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, bytes | memoryview] = OrderedDict()
        self._expected: dict[int, tuple[int, Future[bytes | memoryview]]] = {}  # from → to, the bytes
        self._starts: list[int] = []
        self._to_keep: list[tuple[int, int]] = []  # from, to

    def _read(self, offset: int, count: int) -> bytes | memoryview:
        global _received
        data = self._source(offset, count)
        with _counting:
            _received += len(data)
        if self._to_keep:
            self._keep_parts(offset, memoryview(data))
        return data

    def keep(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Keep small ranges (offset, size) for a later reader when larger reads bring their bytes."""
        room, groups = EXPECTED, _groups(ranges, gap=0)
        with _expecting:
            self._to_keep = [(start, end) for start, end in groups if (room := room - (end - start)) >= 0]

    def _keep_parts(self, offset: int, data: memoryview) -> None:
        stop, rest = offset + len(data), list[tuple[int, int]]()
        with _expecting:
            first = bisect_right(self._to_keep, offset, key=itemgetter(1))
            last = bisect_left(self._to_keep, stop, key=itemgetter(0))
            for start, end in self._to_keep[first:last]:
                low, high = max(start, offset), min(end, stop)
                self._add(low, high, _done(bytes(data[low - offset : high - offset])))
                rest += [(a, b) for a, b in ((start, low), (high, end)) if a < b]
            self._to_keep[first:last] = rest

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begin to read small ranges (offset, size), which will be read one after another, except kept ones and single
        values that came with the header."""
        missing = [(at, size) for at, size in ranges if not (self._has(at, size) or self._came_with_header(at, size))]
        room = EXPECTED
        with _expecting:
            for start, end in _groups(missing, gap=NEAR_BYTES):
                room -= end - start
                if room >= 0 and start not in self._expected:
                    self._add(start, end, _connections().submit(self._read, start, end - start))

    def _add(self, start: int, end: int, data: Future[bytes | memoryview]) -> None:
        global _begun_bytes
        if start in self._expected and self._expected[start][0] >= end:
            return
        number = bisect_left(self._starts, start)
        while number < len(self._starts) and self._expected[self._starts[number]][0] <= end:
            del self._expected[self._starts.pop(number)]  # which it has, too
        self._starts.insert(number, start)
        self._expected[start] = end, data
        _begun.append((self, start, end))
        _begun_bytes += end - start
        while _begun_bytes > EXPECTED:
            file, first, stop = _begun.popleft()
            _begun_bytes -= stop - first
            file._drop(first)

    def _drop(self, start: int) -> None:
        if self._expected.pop(start, None):
            self._starts.remove(start)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer from an offset on; return the number of bytes, which are fewer at the end of the file."""
        count = max(0, min(len(buffer), self.size - offset))
        done = 0
        while done < count and (piece := self._of_expected(offset + done, count - done)):
            buffer[done : done + len(piece)] = piece
            done += len(piece)
        rest, at = buffer[done:count], offset + done
        if len(rest) <= SMALL_RANGE:
            self._from_chunks(rest, at)
        elif len(rest) <= WEIGHT_RANGE:
            rest[:] = self._read(at, len(rest))
        else:
            self._side_by_side(rest, at)
        return count

    def _side_by_side(self, buffer: memoryview, offset: int) -> None:
        starts = deque(range(0, len(buffer), WEIGHT_RANGE))
        under_way: deque[tuple[int, Future[bytes | memoryview]]] = deque()
        while starts or under_way:
            while starts and len(under_way) < RANGES_AT_ONCE:
                at = starts.popleft()
                count = min(WEIGHT_RANGE, len(buffer) - at)
                under_way.append((at, _connections().submit(self._read, offset + at, count)))
            at, future = under_way.popleft()
            piece = future.result()
            buffer[at : at + len(piece)] = piece

    def _piece(self, offset: int) -> tuple[int, int, Future[bytes | memoryview]] | None:
        """Return the expected or kept piece that has the byte at an offset: its begin, its end, its bytes."""
        with _expecting:
            number = bisect_right(self._starts, offset) - 1
            if number < 0:
                return None
            start = self._starts[number]
            end, data = self._expected[start]
        return (start, end, data) if offset < end else None

    def _has(self, offset: int, size: int) -> bool:
        at = offset
        while at < offset + size and (piece := self._piece(at)):
            at = piece[1]
        return at >= offset + size

    def _of_expected(self, offset: int, most: int) -> bytes | memoryview | None:
        """Return at most so many bytes from an offset on, as far as an expected or kept piece has them."""
        if (piece := self._piece(offset)) is None:
            return None
        start, _, data = piece
        try:
            return data.result()[offset - start : offset - start + most]
        except Exception:  # the next read, as of a second try, asks the other machine again
            with _expecting:
                self._drop(start)
            raise

    def _from_chunks(self, buffer: memoryview, offset: int) -> None:
        done = 0
        while done < len(buffer):
            number, lead = divmod(offset + done, SMALL_RANGE)
            piece = self._chunk(number)[lead : lead + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    def _came_with_header(self, offset: int, size: int) -> bool:
        """Return whether these are the bytes of a single number that were read and kept, as those near a header are."""
        numbers = range(offset // SMALL_RANGE, -(-(offset + size) // SMALL_RANGE))
        return size <= WIDEST_NUMBER and all(number in self._chunks for number in numbers)

    def _chunk(self, number: int) -> bytes | memoryview:
        with self._lock:
            if number not in self._chunks:
                start = number * SMALL_RANGE
                self._chunks[number] = self._read(start, min(SMALL_RANGE, self.size - start))
                while len(self._chunks) > CHUNKS:
                    self._chunks.popitem(last=False)
            self._chunks.move_to_end(number)
            return self._chunks[number]


def _groups(ranges: Iterable[tuple[int, int]], *, gap: int) -> list[tuple[int, int]]:
    """Return ranges (offset, size) as (from, to), in order; those with at most `gap` bytes between them are one, if it
    is no longer than a range of weights. Longer ranges are left out."""
    groups: list[tuple[int, int]] = []
    for offset, size in sorted(ranges):
        if groups and offset - groups[-1][1] <= gap and offset + size - groups[-1][0] <= WEIGHT_RANGE:
            groups[-1] = groups[-1][0], max(groups[-1][1], offset + size)
        elif size <= WEIGHT_RANGE:
            groups.append((offset, offset + size))
    return groups


def _done(data: bytes) -> Future[bytes | memoryview]:
    from concurrent.futures import Future  # imported here, as below

    future: Future[bytes | memoryview] = Future()
    future.set_result(data)
    return future


@cache
def _connections() -> ThreadPoolExecutor:
    """Return the threads that read ranges."""
    from concurrent.futures import ThreadPoolExecutor  # imported here: files of this machine have no use for it

    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="ranges")


_files: dict[Path, RemoteFile] = {}
"""Placeholder → its file. Placeholders are made while arguments are read, and last as long as the process."""


def remote(path: Path) -> RemoteFile | None:
    """Return the file of another machine that a placeholder represents; None for any other path."""
    return _files.get(path) if _files else None


def has_remote(path: Path) -> bool:
    """Return whether a path is a placeholder, or a folder of them."""
    return bool(_files) and (path in _files or any(path in file.parents for file in _files))


def place(path: Path, file: RemoteFile) -> None:
    """Write the placeholder of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as f:
        _make_sparse(f)
        f.truncate(file.size)
    _files[path] = file


def complete(path: Path) -> None:
    """Write all bytes of the file into its placeholder, for libraries that open it by its path."""
    file = _files.get(path)
    if file is None:
        return
    begin(path, file.size)
    del _files[path]


def begin(path: Path, count: int) -> None:
    """Write the first bytes of the file into its placeholder, for libraries that read its header by its path."""
    file = _files.get(path)
    if file is None:
        return
    state, count = path.stat(), min(count, file.size)
    with path.open("r+b") as f:
        for start in range(0, count, RANGES_AT_ONCE * WEIGHT_RANGE):
            buffer = bytearray(min(RANGES_AT_ONCE * WEIGHT_RANGE, count - start))
            file.read_into(memoryview(buffer), start)
            f.seek(start)
            f.write(buffer)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


class PlaceholderReader(io.FileIO):
    """An open placeholder, which returns the bytes of the file that it represents."""

    def __init__(self, fd: int, file: RemoteFile) -> None:
        super().__init__(fd, "rb")
        self._file = file

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the current place on."""
        at = self.tell()
        count = self._file.read_into(memoryview(buffer).cast("B"), at)
        self.seek(at + count)
        return count

    def read(self, size: int | None = -1) -> bytes:
        """Return so many bytes from the current place on, or all."""
        left = max(0, self._file.size - self.tell())
        raw = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(raw)
        return bytes(raw)

    def readall(self) -> bytes:
        """Return all bytes from the current place on."""
        return self.read()


def _make_sparse(f: Any) -> None:
    """Let the file system leave out zeros; only NTFS has to be asked to."""
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        handle, done = msvcrt.get_osfhandle(f.fileno()), ctypes.c_ulong()
        ctypes.windll.kernel32.DeviceIoControl(  # FSCTL_SET_SPARSE; if it fails, zeros take space on the disk
            ctypes.c_void_p(handle), 0x900C4, None, 0, None, 0, ctypes.byref(done), None
        )
