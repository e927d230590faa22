"""Bytes that are known before they can be written.

`Spool`: small pieces of a file that wait until the file is complete.
The scales of a quantised weight lie elsewhere in the file than its codes, or in another file. `Heap`: all tensors of a
file whose header is known last.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, NamedTuple

from .writer import amend, failure

HELD: Final = 32 << 20  # bytes that wait in memory; more wait in a temporary file


COPIED: Final = 1 << 24  # bytes that are read at once


@dataclass(frozen=True)
class Waiting:
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
        assert self.file is not None, "the bytes are somewhere"
        self.file.seek(self.first)
        left = self.nbytes
        while left:
            piece = self.file.read(min(left, COPIED))
            left -= len(piece)
            yield memoryview(piece)


class Heap:
    """Bytes that wait to be written: in memory up to a bound, further ones in a temporary file without a name."""

    def __init__(self, folder: Path, held: int) -> None:
        self._folder, self._held = folder, held
        self._file: IO[bytes] | None = None
        self._first = 0

    def put(self, data: memoryview) -> Waiting:
        """Keep bytes; those in memory are not copied."""
        if data.nbytes <= self._held:
            self._held -= data.nbytes
            return Waiting(data.nbytes, data)
        try:
            if self._file is None:
                there = next(f for f in (self._folder, *self._folder.parents) if f.exists())
                self._file = tempfile.TemporaryFile(dir=str(there))  # noqa: SIM115  closed by `close`
            self._file.seek(self._first)
            self._file.write(data)
        except OSError as e:
            raise failure(e, self._folder, 0) from e
        found = Waiting(data.nbytes, None, self._file, self._first)
        self._first += data.nbytes
        return found

    def close(self) -> None:
        """Drop all bytes."""
        if self._file is not None:
            self._file.close()


class PartBytes(NamedTuple):
    """New bytes of a tensor: its name, the first byte in it, and the bytes."""

    name: str
    first: int
    data: bytes


class Spool:
    """Bytes of parts that wait until the files are written; beyond `HELD` bytes in a temporary file beside them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = tempfile.SpooledTemporaryFile(HELD, dir=str(folder))  # noqa: SIM115  closed by `close`
        self._places: list[tuple[str, int, int]] = []  # tensor, first byte, bytes

    @property
    def empty(self) -> bool:
        """Whether no bytes wait."""
        return not self._places

    def put(self, found: Sequence[PartBytes]) -> None:
        """Keep bytes; if two calls give the same bytes of a file, the later one counts."""
        try:
            for name, first, data in found:
                self._file.write(data)
                self._places.append((name, first, len(data)))
        except OSError as e:
            raise failure(e, self._folder, 0) from e

    def write(self, homes: Mapping[str, tuple[Path, int]]) -> None:
        """Write all bytes to their places: tensor → its file and its first byte there."""
        self._file.seek(0)
        for name, first, count in self._places:
            path, start = homes[name]
            amend(path, self._file.read(count), start + first)
        self._places.clear()
        self._file.seek(0)

    def close(self) -> None:
        """Drop all bytes."""
        self._file.close()
