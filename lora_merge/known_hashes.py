"""SHA-256 of large files, remembered between runs: that of a base is a third of the work of its merge.

A file counts as unchanged while device, inode, size and both its times are what they were, which is also what git
goes by; but only where these are kept truly. A proof (`verify`, `replay`) never asks here: it reads the bytes.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from .errors import MergeError
from .header import open_regular
from .json_text import from_json
from .system import is_read_only
from .volumes import KEEP_TIMES, file_system

WORTH: Final = 16 << 20  # bytes from which on a file is remembered; smaller ones are hashed in ten milliseconds
SETTLED: Final = 60.0  # seconds since the last change: one through mapped memory may get its time half a minute later
MOST: Final = 4096  # files; the oldest are forgotten
LARGEST: Final = 4 << 20  # bytes of what is remembered, several times what `MOST` files need
ABANDONED: Final = 3600.0  # seconds after which nobody is writing to a temporary file any more

_DIGEST: Final = re.compile("[0-9a-f]{64}")


def place() -> Path:
    """Where they are kept: in the user's cache folder, which may be emptied at any time; RuntimeError without one."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not named.is_absolute():
        home = Path.home()
        if not home.is_absolute() or home == Path(home.anchor):
            raise RuntimeError("there is no home folder")
        named = home / ".cache"
    return named / "lora-merge" / "sha256.json"


def state(path: Path) -> str | None:
    """What tells that a file is the same; None where nothing does, or it is small, or was changed just now."""
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


def recall() -> dict[str, str]:
    """State → hex digest; empty where nothing can be read."""
    try:
        with open_regular(place()) as f:
            text = f.read(LARGEST + 1)
        known = from_json(text if len(text) <= LARGEST else b"")
    except (MergeError, OSError, ValueError, RuntimeError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, str) and _DIGEST.fullmatch(v)}


def remember(digests: Mapping[str, str]) -> None:
    """Add what was computed; without a word where nothing can be written."""
    if not digests:
        return
    old = recall()
    kept = [*((k, v) for k, v in old.items() if k not in digests), *digests.items()][-MOST:]
    with suppress(OSError, RuntimeError):
        folder = place().parent
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".sha256.*"):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()
        handle, name = tempfile.mkstemp(dir=folder, prefix=".sha256.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                json.dump(dict(kept), f)
            Path(name).replace(place())
        except BaseException:
            Path(name).unlink()
            raise
