"""SHA-256 of large files, remembered between runs: that of a base is a third of the work of its merge.

A file counts as unchanged while device, inode, size and both its times are what they were, which is also what git
goes by; but only where these are kept truly. A proof (`verify`, `replay`) never asks here: it reads the bytes.

Nothing is believed that others could have written: folder and file have to be the user's or root's own, and writable by
nobody else. Each entry is signed with a key that the user alone can read, together with some bytes of the file. An
entry that was edited, or came from another machine or another file, is none.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final

from ..errors import MergeError
from ..json_text import from_json
from .files import open_regular
from .pages import PAGE
from .system import is_read_only, user_id
from .volumes import KEEP_TIMES, file_system

WORTH: Final = 16 << 20  # bytes from which on a file is remembered; smaller ones are hashed in ten milliseconds
SETTLED: Final = 60.0  # seconds since the last change: one through mapped memory may get its time half a minute later
MOST: Final = 4096  # files; the oldest are forgotten
LARGEST: Final = 4 << 20  # bytes of what is remembered, several times what `MOST` files need
ABANDONED: Final = 3600.0  # seconds after which nobody is writing to a temporary file any more

SAMPLES: Final = 16  # blocks of a file that an entry is checked against
KEY_BYTES: Final = 32

_ENTRY: Final = re.compile("[0-9a-f]{64} [0-9a-f]{64}")


def place() -> Path:
    """Return the file that keeps them, in the user's cache folder; RuntimeError where the user has none.

    The cache folder may be emptied at any time. It is `$XDG_CACHE_HOME` or `~/.cache` on Linux, `~/Library/Caches` on
    macOS and `%LOCALAPPDATA%` on Windows.
    """
    from platformdirs import user_cache_path  # here, since small merges never ask

    folder = user_cache_path("lora-merge", appauthor=False)
    if not folder.is_absolute() or folder.parent == Path(folder.anchor, ".cache"):  # the home of users without one is /
        raise RuntimeError("there is no home folder")
    return folder / "sha256.json"


def state(path: Path) -> str | None:
    """Return what tells that a file is the same; None where nothing does, or it is small, or was changed just now."""
    try:
        s = path.stat()
        settled = time.time() - max(s.st_mtime, s.st_ctime) > SETTLED
        if s.st_size < WORTH or not settled or file_system(path) not in KEEP_TIMES:
            return None
        if is_read_only(path):
            return None
    except OSError:
        return None
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


class Known:
    """What is remembered, as it was when it was first asked for."""

    @cached_property
    def _remembered(self) -> tuple[dict[str, str], bytes | None]:
        return recall(), _key()

    def digest(self, path: Path) -> str | None:
        """Return the hex digest of a file; None if it is not known, or if the entry was not made by this user of it."""
        now = state(path)
        if now is None:
            return None
        entries, key = self._remembered
        if now not in entries or key is None:
            return None
        entry, digest = entries[now], entries[now][:64]
        with suppress(MergeError, OSError):  # what cannot be read now is told when it is needed
            if hmac.compare_digest(entry, _signed(key, path, now, digest)):
                return digest
        return None


def recall() -> dict[str, str]:
    """State → signed digest; empty where nothing can be read, or others could have written there."""
    try:
        if not _ours(place().parent) or not _ours(place()):
            return {}
        with open_regular(place()) as f:
            text = f.read(LARGEST + 1)
        known = from_json(text if len(text) <= LARGEST else b"")
    except (MergeError, OSError, ValueError, RuntimeError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str) and _ENTRY.fullmatch(v)}


def remember(learnt: Mapping[Path, tuple[str, str]]) -> None:
    """Add what was computed: file → its state, its digest. Without a word where nothing can be written."""
    if not learnt:
        return
    with suppress(OSError, RuntimeError, MergeError):
        folder = place().parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _ours(folder, 0):
            return
        old = recall()
        folder.chmod(0o700)  # where others could write, nothing was recalled
        key = _key() or _new_key(folder)
        new = {now: _signed(key, path, now, digest) for path, (now, digest) in learnt.items()}
        kept = [*((k, v) for k, v in old.items() if k not in new), *new.items()][-MOST:]
        for part in folder.glob(".sha256.*"):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()
        _put(place(), json.dumps(dict(kept)).encode())


def _put(path: Path, content: bytes) -> None:
    """The content under this name, whole or not at all; for the user alone."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".sha256.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def _ours(path: Path, others: int = 0o022) -> bool:
    """Return whether a file or folder is the user's or root's own, and others have none of these permissions; as ssh
    asks.
    """
    s = path.stat() if path.is_dir() else path.lstat()  # a folder may lie on another disk, behind a link
    user = user_id()
    return user is None or (s.st_uid in (0, user) and not s.st_mode & others)


def _key() -> bytes | None:
    """Return the user's secret; None where there is none that nobody else could have read or made."""
    try:
        path = place().with_name("key")
        if not _ours(path.parent) or not _ours(path, 0o077):
            return None
        with open_regular(path) as f:
            key = f.read(KEY_BYTES + 1)
    except (MergeError, OSError, RuntimeError):
        return None
    return key if len(key) == KEY_BYTES else None


def _new_key(folder: Path) -> bytes:
    key = secrets.token_bytes(KEY_BYTES)
    _put(folder / "key", key)
    return key


def _signed(key: bytes, path: Path, now: str, digest: str) -> str:
    """Return the digest and a code that only this user can make of it, of the file's state and of some of its bytes.

    The bytes are `SAMPLES` blocks of 4 KiB from the first to the last: 64 KiB, whatever the file's size.
    """
    code = hmac.new(key, f"{now} {digest} ".encode(), "sha256")
    with open_regular(path) as f:
        last = max(0, os.fstat(f.fileno()).st_size - PAGE)
        for n in range(SAMPLES):
            f.seek(last * n // (SAMPLES - 1))
            code.update(f.read(PAGE))
    return f"{digest} {code.hexdigest()}"
