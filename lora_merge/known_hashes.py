"""SHA-256 of large files, remembered between runs: on two cores, that of a base takes as long as its merge.

A file counts as unchanged while device, inode, size and both its times are what they were, which is also what git
goes by. A proof (`verify`, `replay`) never asks here: it reads the bytes.
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

WORTH: Final = 16 << 20  # bytes from which on a file is remembered; smaller ones are hashed in ten milliseconds
SETTLED: Final = 2.0  # seconds since the last change: a second one within the tick of a coarse clock would not show
MOST: Final = 4096  # files; the oldest are forgotten

_DIGEST: Final = re.compile("[0-9a-f]{64}")


def place() -> Path:
    """Where they are kept: in the user's cache folder, which may be emptied at any time."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path("~/.cache").expanduser()) / "lora-merge" / "sha256.json"


def state(path: Path) -> str | None:
    """What tells that a file is the same; None for one that is not there, too small, or changed just now."""
    try:
        s = path.stat()
    except OSError:
        return None
    settled = time.time() - max(s.st_mtime, s.st_ctime) > SETTLED
    if s.st_size < WORTH or not settled:
        return None
    return f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}:{s.st_ctime_ns}"


def recall() -> dict[str, str]:
    """State → hex digest; empty where nothing can be read."""
    try:
        known = json.loads(place().read_bytes())
    except (OSError, ValueError, RuntimeError, RecursionError):
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
        handle, part = tempfile.mkstemp(dir=folder, prefix=".sha256.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as f:
                json.dump(dict(kept), f)
            Path(part).replace(place())
        except BaseException:
            Path(part).unlink()
            raise
