"""SHA-256 of the inputs, computed from the bytes that the merge reads anyway.

One digest cannot use several cores, so with a fast disk the whole merge waits for it. A single merge therefore starts
to hash the base while torch is imported, and later reads that part of the base a second time. Several merges that
share a base have enough other work: they read the base once. Digests of earlier runs are reused (known_hashes.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Final

from .files import Memory, Source
from .known_hashes import Known, remember, state
from .reader import Reader

PIECE: Final = 32 * 2**20  # bytes hashed at once beside threads of Python; shorter pieces wait too often for the GIL
GAP: Final = 4 * 2**20  # bytes hashed at once of ranges of the base that the merge does not read


class RunningHashes:
    """One running digest per input file. The merge feeds bytes of the base; all other bytes are read."""

    def __init__(self, reader: Reader, base: Sequence[Path], others: Sequence[Path], *, ahead: bool = True) -> None:
        files = dict.fromkeys((*base, *others))
        self._states, known = {path: state(path) for path in files}, Known()
        self._done = {path: digest for path in files if (digest := known.digest(path))}
        self._learnt: dict[Path, tuple[str, str]] = {}
        self.reader, self._base = reader, [p for p in base if p not in self._done]
        self._others = [p for p in files if p not in base]
        self._sizes = {path: path.stat().st_size for path in files if path not in self._done}
        self._digests = {path: hashlib.sha256() for path in self._sizes}
        self._at = dict.fromkeys(self._sizes, 0)
        self._fed, self._closed = Event(), Event()
        self.hashing = bool(self._base)
        """Whether the digest of some base file is not known yet."""
        self.ahead = ahead and self.hashing
        """Whether the base is hashed before the merge feeds its first bytes."""
        if not ahead:
            self._fed.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests")

    def __enter__(self) -> RunningHashes:
        """Start to hash the base until the merge feeds its first bytes, then all adapters."""
        self._ahead = self._thread.submit(self._read_ahead)
        self._rest = self._thread.submit(self._read_others)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._fed.set()
        self._closed.set()
        self._thread.shutdown(cancel_futures=True)
        remember(self._learnt)

    def feed(self, file: Source, offset: int, data: memoryview) -> None:
        """Hash bytes of `file` from `offset` on. Bytes before them are read first, bytes hashed before are skipped."""
        if isinstance(file, Memory) or file not in self._base:  # the file behind a `Memory` is read instead
            return
        self._stop_reading_ahead()
        self._read_up_to(file, offset)
        fresh = data[max(self._at[file] - offset, 0) :]
        self._digests[file].update(fresh)
        self._at[file] += len(fresh)

    def hexdigest(self, file: Path) -> str:
        """Return the digest of the whole file; the bytes that were not fed are read."""
        if file not in self._done:
            self._stop_reading_ahead()
            self._rest.result()
            self._read_up_to(file, self._sizes[file])
            found = self._done[file] = self._digests[file].hexdigest()
            before = self._states[file]
            if before is not None and before == state(file):
                self._learnt[file] = before, found
        return self._done[file]

    def of(self, files: Iterable[Path]) -> list[str]:
        """Return the digests of whole files, in their order."""
        return [self.hexdigest(file) for file in files]

    def _stop_reading_ahead(self) -> None:
        """Let the thread stop hashing ahead, and wait until it has."""
        self._fed.set()
        self._ahead.result()

    def _read_ahead(self) -> None:
        for file in self._base:
            if not self._fed.is_set():
                self._read_up_to(file, self._sizes[file], PIECE, self._fed)

    def _read_others(self) -> None:
        for file in self._others:  # adapters: their factors are read in small pieces, which would wait for the disk
            if file in self._done:
                self.reader.expect_all(file)
            else:
                self._read_up_to(file, self._sizes[file], PIECE, self._closed)

    def _read_up_to(self, file: Path, end: int, most: int = GAP, until: Event | None = None) -> None:
        """Hash `file` up to `end`. Its bytes stay in the page cache, since the merge reads them again."""
        buffer = memoryview(bytearray(max(0, min(most, end - self._at[file]))))
        while self._at[file] < end and not (until and until.is_set()):
            piece = buffer[: end - self._at[file]]
            self.reader.read_into(piece, file, self._at[file])
            self._digests[file].update(piece)
            self._at[file] += len(piece)
