"""Publishes an output: a temporary file or folder beside the target is written, synced and renamed.

So the output is complete, or it is not there. A temporary file is called `.<name>.<12 hex digits>.lora-merge.part`.
Each run holds an advisory lock on its temporary file: the next run removes the unlocked ones, which killed runs left,
and keeps the locked ones.
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
SWEEPS: Final = 10.0  # seconds after which a process searches the same folder again for files of killed runs

DISK: Final = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""Errors of the disk itself. Any other error means that the file system does not support the call."""

_swept: dict[Path, float] = {}
"""Folder → time of its last search."""

_unsynced: set[Path] = set()
"""Folders that this process made for an output or its claim, and whose names may not be on the disk yet."""


@contextmanager
def replacing(
    target: Path,
    inputs: Iterable[Path] = (),
    *,
    overwrite: bool = False,
    folder: bool = False,
    contents: Iterable[str] = (),
) -> Iterator[Path]:
    """Yield a temporary file or folder, empty, that becomes `target` only if the block succeeds.

    Missing parents are made, and removed again on failure. `contents` are the names that an output folder will hold;
    a folder with other files is not replaced. Raises the errors of `check_output` and of `writer.failure`.
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
            if overwrite:  # other programs may have written there meanwhile
                check_output(target, overwrite=True, folder=folder, contents=contents)
            _sync_parents(target.parent)
            sync_folder(target.parent)  # a failing disk shows here, before the rename
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
    """Make the missing folders, the outermost first; each is added to `made` before it exists."""
    for path in [p for p in (folder, *folder.parents) if not p.exists()][::-1]:
        made.append(path)
        path.mkdir(exist_ok=True)
        _unsynced.add(path)


def _sync_parents(folder: Path) -> None:
    """Bring the names of the folders that `make_parents` made to the disk, the outermost first."""
    for path in [p for p in (folder, *folder.parents) if p in _unsynced][::-1]:
        sync_folder(path.parent)
        _unsynced.discard(path)


def _unmake(folders: Sequence[Path]) -> None:
    for path in reversed(folders):
        with suppress(OSError):  # another program put a file there meanwhile
            path.rmdir()


def _create(target: Path, *, folder: bool) -> tuple[Path, int]:
    """Make a locked temporary file or folder; return its path and the descriptor with the lock, -1 without locks."""
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
            os.close(lock)  # another run removed it before it was locked
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


def _sweep(folder: Path) -> None:
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
                _remove(path)
                continue
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
            try:
                if try_lock(fd):
                    _remove(path)
            finally:
                os.close(fd)


def _remove(path: Path) -> None:
    """Remove a file or folder if possible. A failure is no error: the next run tries again."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync(part: Path) -> None:
    """Bring a file, or a folder with all its content, to the disk."""
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
    """Bring the names in a folder to the disk, where the system can do that."""
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
    """Rename `part` to `target` and sync the folder. Without `overwrite`, raise if `target` exists by now.

    If that sync fails, the rename is undone and the old output has its name again. Where the file system can neither
    swap nor link names, the old file is lost at that point, and the new one stays.
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
    """Rename the file over the old one; return the new name of the old file, None where it could not be kept."""
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
    """Rename the folder over the old one; return the new name of the old folder."""
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
    """Give the old output its name back, and the new output its temporary name."""
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
    """Give the new files the permissions of those they replace: a private file or folder stays private."""
    for path in (new, *new.rglob("*")):
        replaced = old / path.relative_to(new)
        if replaced.exists() and (mode := stat.S_IMODE(replaced.stat().st_mode)) != stat.S_IMODE(path.stat().st_mode):
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
    """Swap two names with renameat2(2), Linux only; return False where that is not possible.

    Raises OSError if the disk itself fails.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform.startswith("linux") else None
    if call is None or call(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0:
        return call is not None
    number = ctypes.get_errno()
    if number in DISK:
        raise OSError(number, os.strerror(number), str(a))
    return False
