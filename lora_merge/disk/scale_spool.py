"""Scales and other small parts of quantised weights, which wait until the files with the codes are complete.

They are elsewhere in the file than the codes, or in another file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .writer import IN_MEMORY, amend, failure


class PartBytes(NamedTuple):
    """New bytes of a tensor: its name, the first byte in it, and the bytes."""

    name: str
    first: int
    data: bytes


class Spool:
    """Bytes of parts that wait until the files are written; beyond `IN_MEMORY` in a temporary file next to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY, dir=str(folder))  # noqa: SIM115  closed by `close`
        self._places: list[tuple[str, int, int]] = []  # tensor, first byte, bytes

    @property
    def empty(self) -> bool:
        """Whether no bytes wait."""
        return not self._places

    def put(self, parts: Sequence[PartBytes]) -> None:
        """Keep bytes; if two calls give the same bytes of a file, the later one counts."""
        try:
            for name, first, data in parts:
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
