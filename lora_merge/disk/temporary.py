"""Temporary files and folders beside outputs. One is called `.<name>.<12 hex digits>.lora-merge.part`.

Each run holds a lock on its temporary file: the next run removes the unlocked ones, which killed runs left, and keeps
the locked ones. On Windows no other process can write to a locked file, and folders cannot be locked: there the run
locks an empty file beside it, `<name of the temporary file>.lock`.

Where two names cannot be swapped, a replaced folder is called `<name of the temporary folder>.old` for a moment. If the
run is killed in that moment, the next run gives the folder its name back.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from .system import CAN_LOCK, lock_now, path_of

OLD: Final = ".old"
"""Ending of a replaced folder, after the name of the temporary folder that replaces it."""

PART: Final = re.compile(r"\.(.*)\.[0-9a-f]{12}\.lora-merge\.part(?:\.old)?")
NAME_LIMIT: Final = 255  # bytes of a file name on every usual file system
ROOM: Final = NAME_LIMIT - len("..0123456789ab.lora-merge.part.lock")
"""Bytes of the target's name in the name of its temporary file; of a longer name, the beginning."""
SWEEPS: Final = 10.0  # seconds after which a process searches the same folder again for files of killed runs

NEW: Final = 0o666  # permissions of a new file, before the umask

LOCK: Final = "" if CAN_LOCK else ".lock"
"""Ending of the file that a run locks while it writes a temporary file; "" where that is the temporary file itself."""

_swept: dict[Path, float] = {}
"""Folder → time of its last search."""


def create(target: Path, *, folder: bool, mode: int = NEW) -> tuple[Path, int]:
    """Make a temporary file or folder and lock it; return its path and the descriptor with the lock.

    `mode`: permissions of a file, from which the system takes those of its umask.
    """
    while True:
        part = sibling(target)
        locked = part.with_name(part.name + LOCK)
        try:
            if LOCK:
                locked.touch(exist_ok=False)
            _make(part, folder=folder, mode=mode)
        except FileExistsError:  # a network disk lost the reply to the first attempt: the random name is ours
            remove(part)
            continue
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


def _make(part: Path, *, folder: bool, mode: int) -> None:
    """Make the temporary file or folder; FileExistsError if the name is taken, also by a link."""
    if folder:
        part.mkdir()
        return
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        os.close(fd)
    except OSError:
        remove(part)
        raise


def release(part: Path, lock: int) -> None:
    """Give up the lock of a temporary file. Where the lock is a file of its own, remove it if the others are gone."""
    if lock >= 0:
        with suppress(OSError):
            os.close(lock)
    if LOCK and not (os.path.lexists(part) or os.path.lexists(part.with_name(part.name + OLD))):
        remove(part.with_name(part.name + LOCK))


def sibling(target: Path) -> Path:
    """Return a new temporary name beside the target."""
    name = (
        target.name if _fits(target.name) else target.name.encode("utf-8", "replace")[:ROOM].decode("utf-8", "ignore")
    )
    return target.with_name(f".{name}.{secrets.token_hex(6)}.lora-merge.part")


def named(part: Path, target: Path) -> Callable[[str], str]:
    """Return a function that puts the name of an output in place of its temporary one in a text."""
    return lambda text: text.replace(str(part), str(target)).replace(part.name, target.name)


def _fits(name: str) -> bool:
    return len(os.fsencode(name)) <= ROOM


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
    """Remove the temporary files of killed runs in this folder. Files that are locked or cannot be opened stay.

    A folder that a killed run was about to replace gets its name back if nothing has that name.
    """
    for path in folder.iterdir():
        name = path.name.removesuffix(LOCK)
        match = PART.fullmatch(name) if path.name.endswith(LOCK) else None
        if match is None:
            continue
        with suppress(OSError):
            if path.is_symlink():  # a link that an output folder replaced
                remove(path)
                continue
            part, target = path.with_name(name.removesuffix(OLD)), path.with_name(match[1])
            old = part.with_name(part.name + OLD)
            with ExitStack() as locks:
                # The run that replaces a folder has a lock on the new one, whichever name that has by now.
                running = (part, target) if os.path.lexists(old) and not LOCK else (path,)
                stale = all(locks.enter_context(_idle(one)) for one in running)
                if stale:
                    _settle(old, target)
                    remove(part)
            if stale:
                release(part, -1)  # Windows removes only closed files


@contextmanager
def _idle(path: Path) -> Iterator[bool]:
    """Hold the lock of a file or folder in the block; yield False where another process has it, True without a file."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)) if os.path.lexists(path) else -1
    try:
        yield fd < 0 or bool(try_lock(fd))
    finally:
        if fd >= 0:
            os.close(fd)


def _settle(old: Path, target: Path) -> None:
    """Remove a replaced folder; give it its name back if nothing has that name. It stays if its name was cut."""
    if len(os.fsencode(target.name)) > ROOM - 4:  # the last letter that fits may take four bytes
        return
    if os.path.lexists(target):
        remove(old)
    elif os.path.lexists(old):
        old.rename(target)


def remove(path: Path) -> None:
    """Remove a file or folder if possible. A failure is not an error: the next run tries again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
