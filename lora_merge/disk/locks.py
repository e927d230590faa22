"""Claims: a locked file next to an output marks it as in progress, so several processes can share one jobs file.

A claim is valid while its file is locked. The lock ends with its process, even a killed one: `filelock` uses flock,
and LockFileEx on Windows. So no age or clock is compared, and the next process simply locks the file of a dead one.
Some network disks have no locks. There nothing is claimed: outputs are still complete, but two processes may do the
same work.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from filelock import lock_descriptor

from ..process import here, uninterrupted
from .publish import ATTEMPTS, NEW, make_parents
from .writer import failure

CLAIM: Final = re.compile(r"\..*\.[0-9a-f]{8}\.lora-merge\.claim")
CLAIM_FLAGS: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
"""O_NOFOLLOW: a claim is overwritten, and through a link that would overwrite a file of another user."""

CLAIM_POLL: Final = 0.2  # seconds between two attempts to take a claim that another process holds


@contextmanager
def claimed(output: Path, *, wait: bool = False) -> Iterator[bool]:
    """Claim an output for the block; yield whether this process has the claim. With `wait`, wait for the claim."""
    path, folders = claim_path(output), list[Path]()
    fd = None
    try:
        try:
            while True:
                with uninterrupted():
                    fd = _reach(path, folders)
                if fd is not None or not wait:
                    break
                time.sleep(CLAIM_POLL)
        except OSError as e:
            raise failure(e, output, 0) from e
        yield fd is not None
    finally:
        if fd is not None:
            _release(path, fd)
        for folder in reversed(folders):
            with suppress(OSError):  # the folder holds the output
                folder.rmdir()


def _reach(path: Path, folders: list[Path]) -> int | None:
    """Make the folder and call `_acquire`, again if an interrupted process removes the folder in between."""
    for _ in range(ATTEMPTS):
        try:
            make_parents(path.parent, folders)
            return _acquire(path)
        except FileNotFoundError:
            time.sleep(CLAIM_POLL / ATTEMPTS)
    make_parents(path.parent, folders)
    return _acquire(path)


def claim_path(output: Path) -> Path:
    """Return the path of the claim. It is next to the output, so every machine that shares the disk sees it."""
    name = output.name.encode("utf-8", "replace")
    short = name[:200].decode("utf-8", "ignore")
    return output.with_name(f".{short}.{hashlib.sha256(name).hexdigest()[:8]}.lora-merge.claim")


def sweep(folder: Path) -> None:
    """Remove the claims that dead processes left in a folder."""
    for path in folder.iterdir():
        if CLAIM.fullmatch(path.name):
            with suppress(OSError):
                if path.is_symlink():  # claims are never links
                    path.unlink()
                    continue
                fd = _acquire(path)
                if fd is not None:
                    _release(path, fd)


def _acquire(path: Path) -> int | None:
    """Lock the claim; return its descriptor, None while another process holds it."""
    while True:
        fd = _open(path)
        if not _lock(fd):
            os.close(fd)
            return None
        with suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.lstat().st_ino:
                with suppress(OSError):  # only people read this text; the file may be another user's
                    os.ftruncate(fd, 0)
                    os.write(fd, f"{here()}\n".encode())
                return fd
        os.close(fd)  # its holder removed the file after it was opened here and before it was locked


def _lock(fd: int) -> bool:
    """Lock the file; return False if another process holds the lock. Without locks, return True."""
    try:
        return lock_descriptor(fd, blocking=False)
    except OSError:
        return True


def _release(path: Path, fd: int) -> None:
    """Remove the claim while it is locked, so that no other process can hold it. Windows removes only closed files."""
    try:
        with suppress(FileNotFoundError):
            path.unlink()
    except OSError:
        os.close(fd)
        with suppress(OSError):  # the next process has taken the claim
            path.unlink()
    else:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, CLAIM_FLAGS, NEW)
    except PermissionError:
        if not os.path.lexists(path):
            raise
        # The file is another user's, whose process may be dead. Read permission is enough for its lock.
        return os.open(path, CLAIM_FLAGS & ~(os.O_RDWR | os.O_CREAT) | os.O_RDONLY)
