"""Temporary files and folders beside outputs. One is called `.<name>.<12 hex digits>.lora-merge.part`.

Each run holds an advisory lock on its temporary file: the next run removes the unlocked ones, which killed runs left,
and keeps the locked ones.
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

_swept: dict[Path, float] = {}
"""Folder → time of its last search."""


def create(target: Path, *, folder: bool) -> tuple[Path, int]:
    """Make a locked temporary file or folder; return its path and the descriptor with the lock, -1 without locks."""
    while True:
        part = sibling(target)
        if folder:
            part.mkdir()
        else:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                os.close(fd)
            except OSError:
                remove(part)
                raise
        if not CAN_LOCK:
            return part, -1
        try:
            lock = os.open(part, os.O_RDONLY)
            if try_lock(lock) is not False and os.fstat(lock).st_nlink:
                return part, lock
            os.close(lock)  # another run removed it before it was locked
        except FileNotFoundError:
            continue
        except OSError:
            remove(part)
            raise


def sibling(target: Path) -> Path:
    """Return a new temporary name beside the target."""
    end = f".{secrets.token_hex(6)}.lora-merge.part"
    room = NAME_LIMIT - len(end) - 1
    return target.with_name("." + target.name.encode("utf-8", "replace")[:room].decode("utf-8", "ignore") + end)


def moved(fd: int, part: Path) -> Path:
    """Return the path of the open temporary file after its folder was moved; `part` if the system cannot say."""
    now = path_of(fd)
    return now if now is not None and now.name == part.name else part


def try_lock(fd: int) -> bool | None:
    """Try to take the lock; return whether this process has it now, None where the file system has no locks."""
    if not CAN_LOCK:
        return None
    try:
        lock_now(fd)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def sweep(folder: Path) -> None:
    """Call `remove_stale` at most every `SWEEPS` seconds: a batch may write thousands of outputs to one folder."""
    if time.monotonic() >= _swept.get(folder, -SWEEPS) + SWEEPS:
        remove_stale(folder)
        _swept[folder] = time.monotonic()


def remove_stale(folder: Path) -> None:
    """Remove the temporary files of killed runs in this folder. Files that are locked or cannot be opened stay."""
    for path in folder.iterdir():
        if not PART.fullmatch(path.name):
            continue
        with suppress(OSError):
            if path.is_symlink():  # a link that an output folder replaced
                remove(path)
                continue
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                if try_lock(fd):
                    remove(path)
            finally:
                os.close(fd)


def remove(path: Path) -> None:
    """Remove a file or folder if possible. A failure is no error: the next run tries again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
