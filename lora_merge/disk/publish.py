"""How an output gets its name: written beside it, synced, renamed; complete or not at all.

Siblings are called `.<name>.<12 hex digits>.lora-merge.part`. A run holds an advisory lock on its own, so
the next run can tell those of killed runs, which it removes, from those of live ones, which it leaves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ..errors import MergeError, UsageError
from ..process import begin_commit, uninterrupted
from .destination import check_output, failures
from .system import CAN_LOCK, CAN_OPEN_FOLDERS, lock_now, path_of

PART: Final = re.compile(r"\..*\.[0-9a-f]{12}\.lora-merge\.part")
NAME_LIMIT: Final = 255  # bytes of a file name on every usual file system
SWEEPS: Final = 10.0  # seconds between two looks of a process at a folder for what killed runs left

DISK: Final = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""Failures of the disk itself. Others mean that the file system cannot do what was asked of it."""

_swept: dict[Path, float] = {}
"""Folder → when it was last looked at."""

_unsynced: set[Path] = set()
"""Folders that this process made, for an output or its claim, whose names may not be on the disk yet."""


@contextmanager
def replacing(
    target: Path,
    inputs: Iterable[Path] = (),
    *,
    overwrite: bool = False,
    folder: bool = False,
    contents: Iterable[str] = (),
) -> Iterator[Path]:
    """Return A sibling path, an empty file or folder, that becomes `target` only if the block succeeds.

    Missing parents are made, and removed again on failure. `contents` are the names a folder will have;
    a folder that holds others is not replaced. Raises as `check_output`, and what writing can raise.
    """
    check_output(target, inputs, overwrite=overwrite, folder=folder, contents=contents)
    part, lock, done = target, -1, False
    made: list[Path] = []
    try:
        with failures(target):
            with uninterrupted():
                make_parents(target.parent, made)
            _sweep(target.parent)
            with uninterrupted():
                part, lock = _create(target, folder=folder)
        yield part
        with failures(target):
            _sync(part)
            if overwrite:  # what others have put there meanwhile is not lost
                check_output(target, overwrite=True, folder=folder, contents=contents)
            _sync_parents(target.parent)
            sync_folder(target.parent)  # a disk that fails at this had better do so before
            begin_commit()
            _publish(part, target, overwrite=overwrite, replaces=os.path.lexists(target))
            done = True
    finally:
        if part != target:
            _remove(part if os.path.lexists(part) else _moved(lock, part))
        if lock >= 0:
            with suppress(OSError):
                os.close(lock)
        if not done:
            _unmake(made)


def make_parents(folder: Path, made: list[Path]) -> None:
    """Make the missing folders; adds them to `made`, the outermost first, each before it is there."""
    for path in [p for p in (folder, *folder.parents) if not p.exists()][::-1]:
        made.append(path)
        path.mkdir(exist_ok=True)
        _unsynced.add(path)


def _sync_parents(folder: Path) -> None:
    """The names of the folders that were made on the way to this one on the disk, the outermost first."""
    for path in [p for p in (folder, *folder.parents) if p in _unsynced][::-1]:
        sync_folder(path.parent)
        _unsynced.discard(path)


def _unmake(folders: Sequence[Path]) -> None:
    for path in reversed(folders):
        with suppress(OSError):  # somebody else put something there meanwhile
            path.rmdir()


def _create(target: Path, *, folder: bool) -> tuple[Path, int]:
    """Return a new, locked sibling and the descriptor that holds the lock, -1 where there are no locks."""
    while True:
        part = _sibling(target)
        if folder:
            part.mkdir()
        else:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                os.close(fd)
            except OSError:
                _remove(part)
                raise
        if not CAN_LOCK:
            return part, -1
        try:
            lock = os.open(part, os.O_RDONLY)
            if try_lock(lock) is not False and os.fstat(lock).st_nlink:
                return part, lock
            os.close(lock)  # another run took it for a stale one before it was locked, and removes it
        except FileNotFoundError:
            continue
        except OSError:
            _remove(part)
            raise


def _sibling(target: Path) -> Path:
    """Return a new temporary name beside the target."""
    end = f".{secrets.token_hex(6)}.lora-merge.part"
    room = NAME_LIMIT - len(end) - 1
    return target.with_name("." + target.name.encode("utf-8", "replace")[:room].decode("utf-8", "ignore") + end)


def _moved(fd: int, part: Path) -> Path:
    """Return where the open temporary file or folder is now, as the folder around it was moved; `part` where nothing
    tells.
    """
    there = path_of(fd)
    return there if there is not None and there.name == part.name else part


def try_lock(fd: int) -> bool | None:
    """Return whether the lock was free and is now ours; None where there are no locks."""
    if not CAN_LOCK:
        return None
    try:
        lock_now(fd)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sweep(folder: Path) -> None:
    """Remove what killed runs left, unless this process has just done so: a batch may fill a folder with thousands."""
    if time.monotonic() >= _swept.get(folder, -SWEEPS) + SWEEPS:
        remove_stale(folder)
        _swept[folder] = time.monotonic()


def remove_stale(folder: Path) -> None:
    """Remove what killed runs left in this folder; what cannot be opened or is in use stays."""
    for path in folder.iterdir():
        if not PART.fullmatch(path.name):
            continue
        with suppress(OSError):
            if path.is_symlink():  # to a folder, swapped with the one that replaced it
                _remove(path)
                continue
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                if try_lock(fd):
                    _remove(path)
            finally:
                os.close(fd)


def _remove(path: Path) -> None:
    """Gone, or left to the next run: what has been done does not fail for it."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync(part: Path) -> None:
    """Everything below on the disk."""
    paths = [part, *part.rglob("*")] if part.is_dir() else [part]
    for path in paths:
        if path.is_dir():
            sync_folder(path)
        else:
            fd = os.open(path, os.O_RDWR)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def sync_folder(folder: Path) -> None:
    """The names in a folder on the disk, where the system can do that."""
    if not CAN_OPEN_FOLDERS:
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def _publish(part: Path, target: Path, *, overwrite: bool, replaces: bool) -> None:
    """Give `part` its name, on the disk. Without `overwrite`, never over something that appeared meanwhile.

    If the disk fails at the last moment, that is undone: what was replaced has its name again. Where names can neither
    be swapped nor linked, a replaced file is gone by then, and the new one stays.
    """
    if overwrite and target.exists():
        _keep_modes(target, part)
    old: Path | None = None
    if overwrite and replaces:
        old = _swap_folder(part, target) if part.is_dir() else _swap_file(part, target)
    elif part.is_dir():
        _publish_folder(part, target, overwrite=overwrite)
    elif overwrite:
        part.replace(target)
    else:
        _publish_new(part, target)
    try:
        sync_folder(target.parent)
    except OSError:
        if not replaces:
            target.rename(part)
        elif old is not None and os.path.lexists(old):
            _undo(old, target, part)
        raise
    if old is not None:
        _remove(old)


def _swap_file(part: Path, target: Path) -> Path | None:
    """Rename the file over the old one. Returns the name that the old one has now; None where it can have no other."""
    if _exchange(part, target):
        return part
    old = _sibling(target)
    try:
        os.link(target, old, follow_symlinks=False)
    except (OSError, NotImplementedError):
        part.replace(target)
        return None
    try:
        part.replace(target)
    except OSError:
        _remove(old)
        raise
    return old


def _swap_folder(part: Path, target: Path) -> Path:
    """Rename the folder to the old one's name. Returns the name that the old one has now."""
    if _exchange(part, target):
        return part
    old = part.with_name(part.name + ".old")
    target.rename(old)
    try:
        part.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


def _undo(old: Path, target: Path, part: Path) -> None:
    """Give the old output its name again, and the new one its temporary name."""
    if _exchange(old, target):
        if old != part:
            old.rename(part)
        return
    target.rename(part)
    old.rename(target)


def _publish_new(part: Path, target: Path) -> None:
    try:
        os.link(part, target)  # unlike a rename, it fails where the name is taken
    except FileExistsError as e:
        raise _appeared(target) from e
    except OSError as e:  # no links on this file system (exFAT, some networks)
        if os.path.lexists(target):
            raise _appeared(target) from e
        part.rename(target)
    else:
        _remove(part)


def _keep_modes(old: Path, new: Path) -> None:
    """The permissions of what is replaced: a private file, or folder, stays private."""
    for path in (new, *new.rglob("*")):
        there = old / path.relative_to(new)
        if there.exists() and (mode := stat.S_IMODE(there.stat().st_mode)) != stat.S_IMODE(path.stat().st_mode):
            path.chmod(mode)


def _appeared(target: Path) -> MergeError:
    what = "the output appeared while it was made"
    return UsageError(what, str(target), "choose another -o; is another run at it?")


def _publish_folder(part: Path, target: Path, *, overwrite: bool) -> None:
    try:
        part.rename(target)  # it fails over anything but an empty folder
    except OSError as e:
        if not overwrite and os.path.lexists(target):
            raise _appeared(target) from e
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Return whether two names were swapped at once: renameat2(2), Linux only. OSError where it is the disk that
    fails.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform.startswith("linux") else None
    if call is None or call(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0:
        return call is not None
    number = ctypes.get_errno()
    if number in DISK:
        raise OSError(number, os.strerror(number), str(a))
    return False
