"""SHA-256 of the inputs, fed with the bytes that are read for the merge anyway.

A digest cannot be split over cores, so with a fast disk and several cores it is what the whole merge waits for. One
merge therefore starts it before the first window: while torch is imported, the beginning of the base is hashed
already, and read once more later. Several that share a base have more to do than to wait for it: it is read once.
What an earlier run has hashed is not hashed again (known_hashes.py).
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

PIECE: Final = 32 * 2**20  # bytes read and hashed in one go; shorter ones would wait for the import's lock too often
GAP: Final = 4 * 2**20  # the same where the merge skipped something


class RunningHashes:
    """One running digest per file, from `with` on. Bytes of the base may be fed in any pieces; the rest is read."""

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
        """Whether there is anything to feed."""
        self.ahead = ahead and self.hashing
        """Whether it begins with the base before anything is fed."""
        if not ahead:
            self._fed.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="digests")

    def __enter__(self) -> RunningHashes:
        """Begin with the base, until it is fed; then all of the adapters."""
        self._ahead = self._thread.submit(self._read_ahead)
        self._rest = self._thread.submit(self._read_others)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._fed.set()
        self._closed.set()
        self._thread.shutdown(cancel_futures=True)
        remember(self._learnt)

    def feed(self, file: Source, offset: int, data: memoryview) -> None:
        """Bytes of `file` from `offset` on; what lies before them is read, what is known already skipped."""
        if isinstance(file, Memory) or file not in self._base:  # the bytes that memory was made of are read instead
            return
        self._meet()
        self._read_up_to(file, offset)
        fresh = data[max(self._at[file] - offset, 0) :]
        self._digests[file].update(fresh)
        self._at[file] += len(fresh)

    def hexdigest(self, file: Path) -> str:
        """Return the digest of the whole file; reads whatever was not fed."""
        if file not in self._done:
            self._meet()
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

    def _meet(self) -> None:
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
                self._read_up_to(file, self._sizes[file], GAP, self._closed)

    def _read_up_to(self, file: Path, end: int, most: int = GAP, until: Event | None = None) -> None:
        """Not into pages, so through the page cache: what is read here is read once more, for the merge."""
        buffer = memoryview(bytearray(max(0, min(most, end - self._at[file]))))
        while self._at[file] < end and not (until and until.is_set()):
            piece = buffer[: end - self._at[file]]
            self.reader.read_into(piece, file, self._at[file])
            self._digests[file].update(piece)
            self._at[file] += len(piece)
