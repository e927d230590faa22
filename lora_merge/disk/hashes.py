"""SHA-256 of the inputs, computed from the bytes that the merge reads anyway, and remembered between runs.

One digest cannot use several cores, so with a fast disk the whole merge waits for it. A single merge therefore starts
to hash the base while torch is imported, and later reads that part of the base a second time. Several merges that
share a base have enough other work: they read the base once.

Remembered digests: a file counts as unchanged while its device, inode, size and both its times are the same, as in
git. This holds only on the file systems in `KEEP_TIMES`. A proof (`verify`, `replay`) reads the bytes. Entries that
another user could have written are ignored: the folder and the file must belong to the user or root, and nobody else
may write to them. Each entry is signed, together with some bytes of its file, with a key that only the user can read.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Final

from ..dtypes import Memory, Source
from ..errors import MergeError
from ..text import from_json
from .files import FileState, open_regular, sha256
from .pages import PAGE
from .publish import put_file
from .reader import Reader
from .remote import remote
from .system import is_read_only, user_id
from .volumes import KEEP_TIMES, file_system

REMEMBERED_ABOVE: Final = 16 << 20  # bytes; smaller files are not remembered: they are hashed in ten milliseconds
SETTLED: Final = 60.0  # seconds since the last change: Linux may set the time of a mapped write half a minute late
MOST_CACHED_FILES: Final = 4096  # files; the oldest entries are removed
MOST_CACHE_BYTES: Final = 4 << 20  # of the file with the entries; several times what `MOST_CACHED_FILES` of them need
PRIVATE: Final = 0o600  # mode of the files in the cache folder

SAMPLES: Final = 16  # blocks of a file that the signature of its entry covers
KEY_BYTES: Final = 32

_ENTRY: Final = re.compile("[0-9a-f]{64} [0-9a-f]{64}")

_known: dict[Path, tuple[FileState | None, str]] = {}
"""File → its state and digest, if this process has hashed it."""

HASHED_BYTES: Final = 32 * 2**20
"""Bytes that are hashed at once while other threads run Python; shorter pieces wait too often for the GIL."""

GAP_BYTES: Final = 4 * 2**20  # bytes hashed at once of ranges of the base that the merge does not read


def cache_file() -> Path:
    """Return the path of the file with the entries, in the user's cache folder; RuntimeError without a home folder.

    The cache folder may be emptied at any time. It is `$XDG_CACHE_HOME` or `~/.cache` on Linux, `~/Library/Caches` on
    macOS and `%LOCALAPPDATA%` on Windows.
    """
    from platformdirs import user_cache_path  # imported here: small merges do not need it

    folder = user_cache_path("lora-merge", appauthor=False)
    if not folder.is_absolute() or folder.parent == Path(folder.anchor, ".cache"):  # the home of users without one is /
        raise RuntimeError("there is no home folder")
    return folder / "sha256.json"


def state(path: Path) -> str | None:
    """Return a text that changes with the file; None if the file is small, just changed or not on `KEEP_TIMES`."""
    if remote(path) is not None:
        return None
    try:
        s = path.stat()
        settled = time.time() - max(s.st_mtime, s.st_ctime) > SETTLED
        if s.st_size < REMEMBERED_ABOVE or not settled or file_system(path) not in KEEP_TIMES:
            return None
        if is_read_only(path):
            return None
    except OSError:
        return None
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


def know(path: Path, digest: str) -> None:
    """Take note of the digest of a file that was just downloaded."""
    _known[path] = FileState.at(path), digest


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file; it need not be computed again while the file stays as it is."""
    before, digest = FileState.at(path), sha256(path)
    _known[path] = before, digest
    return digest


def known_hash(path: Path) -> str | None:
    """Return the SHA-256 of a file if this process has computed it and the file is as it was then; else None."""
    last, digest = _known.get(path, (None, ""))
    return digest if last is not None and last == FileState.at(path) else None


def hash_once(path: Path) -> str:
    """Return the SHA-256 of a file, computed unless this process has done so and the file is as it was then."""
    return known_hash(path) or hash_file(path)


class RememberedHashes:
    """The remembered digests. They are read once, when the first is needed."""

    @cached_property
    def _remembered(self) -> tuple[dict[str, str], bytes | None]:
        return recall(), _key()

    def digest(self, path: Path) -> str | None:
        """Return the hex digest of a file; None if it is not known, or if its signature is wrong."""
        if known := known_hash(path):
            return known
        now = state(path)
        if now is None:
            return None
        entries, key = self._remembered
        if now not in entries or key is None:
            return None
        entry, digest = entries[now], entries[now][:64]
        with suppress(MergeError, OSError):  # an unreadable file is reported when the merge reads it
            if hmac.compare_digest(entry, _signed(key, path, now, digest)):
                return digest
        return None


def recall() -> dict[str, str]:
    """Return file state → signed digest; empty if nothing can be read, or if another user could have written it."""
    try:
        if not _ours(cache_file().parent) or not _ours(cache_file()):
            return {}
        with open_regular(cache_file()) as f:
            text = f.read(MOST_CACHE_BYTES + 1)
        known = from_json(text if len(text) <= MOST_CACHE_BYTES else b"")
    except (MergeError, OSError, ValueError, RuntimeError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str) and _ENTRY.fullmatch(v)}


def remember(learnt: Mapping[Path, tuple[str, str]]) -> None:
    """Save new digests (file → state, digest). If they cannot be written, nothing is saved and nothing is reported."""
    if not learnt:
        return
    with suppress(OSError, RuntimeError, MergeError):
        folder = cache_file().parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _ours(folder, 0):
            return
        old = recall()
        folder.chmod(0o700)  # `recall` has returned nothing if others could write here
        key = _key() or _new_key(folder)
        new = {now: _signed(key, path, now, digest) for path, (now, digest) in learnt.items()}
        entries = [*((k, v) for k, v in old.items() if k not in new), *new.items()][-MOST_CACHED_FILES:]
        put_file(cache_file(), json.dumps(dict(entries)).encode(), mode=PRIVATE)


def _ours(path: Path, others: int = 0o022) -> bool:
    """Return whether the user or root owns the path, and others have none of these permissions, as ssh requires."""
    s = path.stat() if path.is_dir() else path.lstat()  # a folder may be on another disk, behind a link
    user = user_id()
    return user is None or (s.st_uid in (0, user) and not s.st_mode & others)


def _key() -> bytes | None:
    """Return the user's secret key; None if there is none, or if another user could have read or made it."""
    try:
        path = cache_file().with_name("key")
        if not _ours(path.parent) or not _ours(path, 0o077):
            return None
        with open_regular(path) as f:
            key = f.read(KEY_BYTES + 1)
    except (MergeError, OSError, RuntimeError):
        return None
    return key if len(key) == KEY_BYTES else None


def _new_key(folder: Path) -> bytes:
    key = secrets.token_bytes(KEY_BYTES)
    put_file(folder / "key", key, mode=PRIVATE)
    return key


def _signed(key: bytes, path: Path, now: str, digest: str) -> str:
    """Return the digest and its signature: an HMAC over the file's state, the digest and some bytes of the file.

    The bytes are `SAMPLES` blocks of 4 KiB, evenly spread over the file: 64 KiB for any size.
    """
    code = hmac.new(key, f"{now} {digest} ".encode(), "sha256")
    with open_regular(path) as f:
        last = max(0, os.fstat(f.fileno()).st_size - PAGE)
        for n in range(SAMPLES):
            f.seek(last * n // (SAMPLES - 1))
            code.update(f.read(PAGE))
    return f"{digest} {code.hexdigest()}"


class RunningHashes:
    """One running digest per input file. The merge feeds bytes of the base; all other bytes are read."""

    def __init__(self, reader: Reader, base: Sequence[Path], others: Sequence[Path], *, ahead: bool = True) -> None:
        files = dict.fromkeys((*base, *others))
        self._states, known = {path: state(path) for path in files}, RememberedHashes()
        self._done = {path: digest for path in files if (digest := known.digest(path))}
        self._learnt: dict[Path, tuple[str, str]] = {}
        self.reader, self._base = reader, [p for p in base if p not in self._done]
        self._others = [p for p in files if p not in base]
        self._sizes = {path: path.stat().st_size for path in files if path not in self._done}
        self._digests = {path: hashlib.sha256() for path in self._sizes}
        self._at = dict.fromkeys(self._sizes, 0)
        self._fed, self._closed, self._turn = Event(), Event(), Lock()
        ahead = ahead and not any(map(remote, self._base))  # such bytes would come twice
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
        with self._turn:
            self._read_up_to(file, offset)
            fresh = data[max(self._at[file] - offset, 0) :]
            self._digests[file].update(fresh)
            self._at[file] += len(fresh)

    def hexdigest(self, file: Path) -> str:
        """Return the digest of the whole file; the bytes that were not fed are read."""
        if file not in self._done:
            self._stop_reading_ahead()
            self._rest.result()
            with self._turn:
                self._read_up_to(file, self._sizes[file])
            digest = self._done[file] = self._digests[file].hexdigest()
            before = self._states[file]
            if before is not None and before == state(file):
                self._learnt[file] = before, digest
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
                self._read_up_to(file, self._sizes[file], HASHED_BYTES, self._fed)

    def _read_others(self) -> None:
        for file in self._others:  # adapters: their factors are read in small pieces, which would wait for the disk
            if file in self._done:
                self.reader.expect_all(file)
            else:
                self._read_up_to(file, self._sizes[file], HASHED_BYTES, self._closed)

    def _read_up_to(self, file: Path, end: int, most: int = GAP_BYTES, until: Event | None = None) -> None:
        """Hash `file` up to `end`. Its bytes stay in the page cache, since the merge reads them again."""
        buffer = memoryview(bytearray(max(0, min(most, end - self._at[file]))))
        while self._at[file] < end and not (until and until.is_set()):
            piece = buffer[: end - self._at[file]]
            self.reader.read_into(piece, file, self._at[file])
            self._digests[file].update(piece)
            self._at[file] += len(piece)
