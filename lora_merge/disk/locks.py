"""Claims: a file beside an output says that a process is making it, so that several can share one jobs file.

A claim holds as long as the lock on its file, which ends with its process, however that ends: `filelock` takes it with
flock, on Windows with LockFileEx. Nothing has to be judged by age or clock, and what a dead process left is simply
locked by the next one. Where a file system has no locks, as some network disks have none, nothing is claimed: outputs
still appear whole, but two processes may do the same work.
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
from .publish import make_parents
from .writer import failure

CLAIM: Final = re.compile(r"\..*\.[0-9a-f]{8}\.lora-merge\.claim")
FLAGS: Final = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
"""A claim is written anew: through a link in its place, that would be a file of somebody else."""

POLL: Final = 0.2  # seconds between looks at a claim that is held by another process
TRIES: Final = 20  # times that a folder may be removed between its making and the claim in it


@contextmanager
def claimed(output: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether the output is ours to make, until the block ends; with `wait`, not before it is."""
    path, made = claim_path(output), list[Path]()
    fd = None
    try:
        try:
            while True:
                with uninterrupted():
                    fd = _reach(path, made)
                if fd is not None or not wait:
                    break
                time.sleep(POLL)
        except OSError as e:
            raise failure(e, output, 0) from e
        yield fd is not None
    finally:
        if fd is not None:
            _release(path, fd)
        for folder in reversed(made):
            with suppress(OSError):  # the output is in it
                folder.rmdir()


def _reach(path: Path, made: list[Path]) -> int | None:
    """As `_acquire`, in a folder that is made if missing: a process that was interrupted removes what it had made."""
    for _ in range(TRIES):
        try:
            make_parents(path.parent, made)
            return _acquire(path)
        except FileNotFoundError:  # removed since
            time.sleep(POLL / TRIES)
    make_parents(path.parent, made)
    return _acquire(path)


def claim_path(output: Path) -> Path:
    """Return the claim's file: beside the output, so that whoever shares its disk sees it."""
    name = output.name.encode("utf-8", "replace")
    short = name[:200].decode("utf-8", "ignore")
    return output.with_name(f".{short}.{hashlib.sha256(name).hexdigest()[:8]}.lora-merge.claim")


def sweep(folder: Path) -> None:
    """Remove the claims that dead processes left in a folder."""
    for path in folder.iterdir():
        if CLAIM.fullmatch(path.name):
            with suppress(OSError):
                if path.is_symlink():  # none of ours
                    path.unlink()
                    continue
                fd = _acquire(path)
                if fd is not None:
                    _release(path, fd)


def _acquire(path: Path) -> int | None:
    """Return the locked claim's descriptor; None while another process holds it."""
    while True:
        fd = _open(path)
        if not _lock(fd):
            os.close(fd)
            return None
        with suppress(FileNotFoundError):
            if os.fstat(fd).st_ino == path.lstat().st_ino:
                with suppress(OSError):  # for people to read, where it is not another user's
                    os.ftruncate(fd, 0)
                    os.write(fd, f"{here()}\n".encode())
                return fd
        os.close(fd)  # its holder removed it between our opening and our locking


def _lock(fd: int) -> bool:
    """Return whether no other process holds the file; where there are no locks, none does."""
    try:
        return lock_descriptor(fd, blocking=False)
    except OSError:
        return True


def _release(path: Path, fd: int) -> None:
    """Remove the claim while it is held, so that it is nobody else's by then. Windows removes closed files only."""
    try:
        with suppress(FileNotFoundError):
            path.unlink()
    except OSError:
        os.close(fd)
        with suppress(OSError):  # the next process has it
            path.unlink()
    else:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, FLAGS, 0o666)
    except PermissionError:
        if not os.path.lexists(path):
            raise
        # Another user's, whose process may be dead: its lock can be had without the right to write.
        return os.open(path, FLAGS & ~(os.O_RDWR | os.O_CREAT) | os.O_RDONLY)
