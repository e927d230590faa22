"""Temporary files and folders beside outputs. One is called `.<name>.<12 hex digits>.lora-merge.part`.

Each run holds a lock on its temporary file: the next run removes the unlocked ones, which killed runs left, and keeps
the locked ones. On Windows no other process can write to a locked file, and folders cannot be locked: there the run
locks an empty file beside it, `<name of the temporary file>.lock`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from .system import CAN_LOCK, lock_now, path_of

PART: Final = re.compile(r"\..*\.[0-9a-f]{12}\.lora-merge\.part")
NAME_LIMIT: Final = 255  # bytes of a file name on every usual file system
SWEEPS: Final = 10.0  # seconds after which a process searches the same folder again for files of killed runs

LOCK: Final = "" if CAN_LOCK else ".lock"
"""Ending of the file that a run locks while it writes a temporary file; "" where that is the temporary file itself."""

_swept: dict[Path, float] = {}
"""Folder → time of its last search."""


def create(target: Path, *, folder: bool) -> tuple[Path, int]:
    """Make a temporary file or folder and lock it; return its path and the descriptor with the lock."""
    while True:
        part = sibling(target)
        locked = part.with_name(part.name + LOCK)
        if LOCK:
            locked.touch(exist_ok=False)
        if folder:
            part.mkdir()
        else:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                os.close(fd)
            except OSError:
                remove(part)
                raise
        try:
            lock = os.open(locked, os.O_RDONLY)
            if try_lock(lock) is not False and part.exists():
                return part, lock
            release(part, lock)  # another run removed it before it was locked
        except FileNotFoundError:
            remove(part)
        except OSError:
            remove(part)
            raise


def release(part: Path, lock: int) -> None:
    """Give up the lock of a temporary file. Where the lock is a file of its own, remove it if the part is gone."""
    if lock >= 0:
        with suppress(OSError):
            os.close(lock)
    if LOCK and not os.path.lexists(part):
        remove(part.with_name(part.name + LOCK))


def sibling(target: Path) -> Path:
    """Return a new temporary name beside the target."""
    end = f".{secrets.token_hex(6)}.lora-merge.part"
    room = NAME_LIMIT - len(end) - len(LOCK) - 1
    return target.with_name("." + target.name.encode("utf-8", "replace")[:room].decode("utf-8", "ignore") + end)


def moved(fd: int, part: Path) -> Path:
    """Return the path of the open temporary file after its folder was moved; `part` if the system cannot say."""
    now = path_of(fd)
    return now if now is not None and now.name == part.name else part


def try_lock(fd: int) -> bool | None:
    """Try to take the lock; return whether this process has it now, None where the file system has no locks."""
    try:
        return lock_now(fd)
    except OSError:
        return None


def sweep(folder: Path) -> None:
    """Call `remove_stale` at most every `SWEEPS` seconds: a batch may write thousands of outputs to one folder."""
    if time.monotonic() >= _swept.get(folder, -SWEEPS) + SWEEPS:
        remove_stale(folder)
        _swept[folder] = time.monotonic()


def remove_stale(folder: Path) -> None:
    """Remove the temporary files of killed runs in this folder. Files that are locked or cannot be opened stay."""
    for path in folder.iterdir():
        part = path.with_name(path.name.removesuffix(LOCK))
        if not path.name.endswith(LOCK) or not PART.fullmatch(part.name):
            continue
        with suppress(OSError):
            if path.is_symlink():  # a link that an output folder replaced
                remove(path)
                continue
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                stale = try_lock(fd)
                if stale:
                    remove(part)
            finally:
                os.close(fd)
            if stale:
                release(part, -1)  # Windows removes only closed files


def remove(path: Path) -> None:
    """Remove a file or folder if possible. A failure is not an error: the next run tries again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
