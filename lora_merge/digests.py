"""SHA-256 of the inputs, fed with the bytes that are read for the merge anyway."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from .checkpoint import Reader
from .reader import MEMORY

GAP_BYTES: Final = 4 * 2**20  # per read, where the merge skipped something


class Digests:
    """One running digest per file. Bytes may be fed in any pieces; what was not fed is read."""

    def __init__(self, reader: Reader, sizes: dict[Path, int]) -> None:
        self._reader, self._sizes = reader, sizes
        self._digests = {path: hashlib.sha256() for path in sizes}
        self._at = dict.fromkeys(sizes, 0)

    def feed(self, file: Path, offset: int, data: memoryview) -> None:
        """Bytes of `file` from `offset` on; what lies before them is read, what is known already skipped."""
        if file not in self._at or offset >= MEMORY:  # made in memory: read from the file where its bytes lie
            return
        self._read_up_to(file, offset)
        fresh = data[max(self._at[file] - offset, 0) :]
        self._digests[file].update(fresh)
        self._at[file] += len(fresh)

    def hexdigest(self, file: Path) -> str:
        """The digest of the whole file; reads whatever was not fed."""
        self._read_up_to(file, self._sizes[file])
        return self._digests[file].hexdigest()

    def _read_up_to(self, file: Path, end: int) -> None:
        while self._at[file] < end:
            gap = bytearray(min(GAP_BYTES, end - self._at[file]))
            self._reader.read_into(memoryview(gap), file, self._at[file])
            self._digests[file].update(gap)
            self._at[file] += len(gap)
