"""Adapter files, whose header is known last. `Draft`: the data are written at once, behind room for the header.

So no byte is written twice, and the disk works while the processors do. A small file waits in memory. `Heap`: if the
order of the tensors is known last too, they wait in memory and in a temporary file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from ..errors import MergeError
from .publish import NEW
from .system import PLAIN_FLAGS, read_at, write_at
from .volumes import existing
from .writer import IN_MEMORY, failure, start_writing

WRITE_BATCH: Final = 4 << 20
"""Bytes that one call writes."""

COPY_BYTES: Final = 1 << 24
"""Bytes that one call reads."""

DISK_BLOCK: Final = 512
"""The unit of `st_blocks`."""

QUEUED: Final = 16
"""Batches that wait for the disk at most."""


@dataclass(frozen=True)
class DraftBytes:
    """Consecutive bytes of a draft's data."""

    draft: Draft
    first: int
    nbytes: int

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order."""
        return self.draft.read(self.first, self.nbytes)


class Draft:
    """The data of a file, in the order in which they are put.

    Parameters:
        target: The file or folder for messages.
        begin: Makes the temporary file or folder; it gets its name when the context ends without an error.
        inside: The name of the file in a folder; "" for a file.
        room: Bytes to leave for the header.
        hashed: Whether the SHA-256 of the data will be asked for.
        most: The bytes that the data will have at most, as far as that is known; for messages.
    """

    def __init__(  # noqa: PLR0913  # a file, its room, and what is asked of it
        self, target: Path, begin: Callable[[], AbstractContextManager[Path]], *, inside: str = "", room: int = 0,
        hashed: bool = False, most: int = 0,
    ) -> None:  # fmt: skip
        self._target, self._begin, self._inside, self._room, self._most = target, begin, inside, room, most
        self.nbytes = 0
        self._waiting: dict[int, memoryview] = {}  # first byte → bytes, until there is a file
        self._fd = -1
        self._digest = hashlib.sha256() if hashed else None
        self._batch: list[memoryview] = []
        self._batched = self._written = 0  # bytes that wait for each other, and those that are in the queue
        self._queue: deque[Future[None]] = deque()
        self._published, self._opened = ExitStack(), ExitStack()
        self._part: Path | None = None

    def __enter__(self) -> Draft:
        """Return the draft. The temporary file is made when it is needed first."""
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """Remove what was written, unless it was published."""
        self._opened.close()
        if self._part is not None:
            self._published.__exit__(kind or InterruptedError, e or InterruptedError("it was not published"), tb)

    @property
    def part(self) -> Path:
        """The temporary file or folder."""
        if self._part is None:
            self._part = self._published.enter_context(self._begin())
        return self._part

    @property
    def waiting(self) -> int:
        """The bytes that are in memory."""
        return 0 if self._fd >= 0 else self.nbytes

    def put(self, data: memoryview) -> DraftBytes:
        """Add bytes. Until they are written they are not copied, so they must not change."""
        data = data.cast("B") if data.nbytes else memoryview(b"")
        drafted = DraftBytes(self, self.nbytes, data.nbytes)
        self.nbytes += data.nbytes
        if self._fd >= 0:
            self._append(data)
        elif data.nbytes:
            self._waiting[drafted.first] = data
            if self.nbytes > IN_MEMORY:
                self._open()
        return drafted

    def read(self, first: int, count: int) -> Iterator[memoryview]:
        """Yield bytes in order; they are those of one or several calls of `put`."""
        end = first + count
        while first < end and self._fd < 0:
            yield self._waiting[first]
            first += self._waiting[first].nbytes
        self._wait()
        while first < end:
            piece = memoryview(bytearray(min(COPY_BYTES, end - first)))
            piece = piece[: read_at(self._fd, piece, self._room + first)]
            yield piece
            first += len(piece)

    def sha256(self) -> str:
        """Return the SHA-256 of all data."""
        self._wait()
        digest = self._digest
        if digest is None or self._fd < 0:
            digest = hashlib.sha256()
            for piece in self.read(0, self.nbytes):
                digest.update(piece)
        return digest.hexdigest()

    def complete(self, header: Callable[[int], bytes]) -> int:
        """Write the header, and what is in memory; return the bytes of the file. `header`: returns it with spaces to a
        number of bytes at least."""
        try:
            if self._fd < 0:
                self._room = len(header(0))
                self._open()
            self._wait()
            new = header(self._room)
            self._make_room(len(new))
            self._write(memoryview(new), 0)
        except OSError as e:
            raise self._failure(e) from e
        self._opened.close()
        return len(new) + self.nbytes

    def publish(self) -> None:
        """Give the file its name."""
        self._part = None
        self._published.close()

    def _failure(self, e: OSError) -> MergeError:
        """Return the typed error for a failed write; what was written of the file is removed."""
        blocks: int = getattr(os.fstat(self._fd), "st_blocks", 0) if self._fd >= 0 else 0  # 0 on Windows
        needed, known = self._room + max(self._most, self.nbytes), self._most > self.nbytes
        return failure(e, self._target, needed, written=blocks * DISK_BLOCK, most=known)

    def _open(self) -> None:
        path = self.part / self._inside if self._inside else self.part
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | PLAIN_FLAGS, NEW)
        except OSError as e:
            raise self._failure(e) from e
        self._opened.callback(os.close, self._fd)
        self._pool = self._opened.enter_context(ThreadPoolExecutor(1, thread_name_prefix="draft"))
        for data in self._waiting.values():
            self._append(data)
        self._waiting.clear()

    def _append(self, data: memoryview) -> None:
        self._batch.append(data)
        self._batched += data.nbytes
        if self._batched >= WRITE_BATCH:
            self._hand_over()

    def _hand_over(self) -> None:
        self._queue.append(self._pool.submit(self._store, self._batch, self._written))
        self._written += self._batched
        self._batch, self._batched = [], 0
        while len(self._queue) > QUEUED:
            self._wait_for_one()

    def _wait(self) -> None:
        if self._batch:
            self._hand_over()
        while self._queue:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        try:
            self._queue.popleft().result()
        except OSError as e:
            raise self._failure(e) from e

    def _store(self, batch: list[memoryview], first: int) -> None:
        begin = first
        for data in batch:
            self._write(data, self._room + first)
            first += data.nbytes
            if self._digest is not None:
                self._digest.update(data)
        start_writing(self._fd, self._room + begin, first - begin)

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            done = write_at(self._fd, data, at)
            data, at = data[done:], at + done

    def _make_room(self, size: int) -> None:
        """Move the data behind a header that is longer than the room for it, the last bytes first."""
        old, self._room = self._room, max(size, self._room)
        end = self.nbytes if self._room > old else 0
        while end:
            piece = memoryview(bytearray(min(COPY_BYTES, end)))
            end -= len(piece)
            read = 0
            while read < len(piece):
                read += read_at(self._fd, piece[read:], old + end + read)
            self._write(piece, self._room + end)


@dataclass(frozen=True)
class HeapBytes:
    """Bytes in memory, or a range of a temporary file."""

    nbytes: int
    data: memoryview | None = None
    file: IO[bytes] | None = None
    first: int = 0

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes in order."""
        if self.data is not None:
            yield self.data
            return
        assert self.file is not None, "the bytes are in memory or in the file"
        self.file.seek(self.first)
        left = self.nbytes
        while left:
            piece = self.file.read(min(left, COPY_BYTES))
            left -= len(piece)
            yield memoryview(piece)


class Heap:
    """Tensors that wait to be written: in memory up to `room` bytes, others in a temporary file without a name."""

    def __init__(self, folder: Path, room: int) -> None:
        self._folder, self._room = folder, room
        self._file: IO[bytes] | None = None
        self._first = 0

    def put(self, data: memoryview) -> HeapBytes:
        """Keep bytes; those in memory are not copied."""
        if data.nbytes <= self._room:
            self._room -= data.nbytes
            return HeapBytes(data.nbytes, data)
        try:
            if self._file is None:
                folder = existing(self._folder)
                self._file = tempfile.TemporaryFile(dir=str(folder))  # noqa: SIM115  closed by `close`
            self._file.seek(self._first)
            self._file.write(data)
        except OSError as e:
            raise failure(e, self._folder, 0) from e
        stored = HeapBytes(data.nbytes, None, self._file, self._first)
        self._first += data.nbytes
        return stored

    def close(self) -> None:
        """Drop all bytes."""
        if self._file is not None:
            self._file.close()
