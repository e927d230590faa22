"""Publishes outputs, and the small files next to them: a temporary file or folder is written, synced and renamed.

So the output is complete, or it is not there. Runs that publish into one folder take turns (`_turn`). Without that,
a run whose last flush fails would take back its rename, and with it the output that another run has published since.

What a call returns proves nothing. Network disks lose replies, so a rename that has happened may fail, and some file
systems report success for what they did not do. After each call that gives a name, `_give` looks which file has it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from ..errors import MergeError, UsageError
from ..process import begin_commit, kept_back, uninterrupted
from .destination import check_kind, check_output, failures
from .system import CAN_OPEN_FOLDERS, PLAIN_FLAGS, swap_names
from .temporary import LOCK, NEW, OLD, create, moved, release, remove, sibling, sweep, try_lock

DISK: Final = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""Errors of the disk itself. Any other error means that the file system does not support the call."""

PATIENCE: Final = 120.0
"""Seconds that a run waits for its turn. A turn takes two flushes of a folder; only a stopped process holds it long."""

POLL: Final = 0.01  # seconds between two attempts to take the turn
TRIES: Final = 20  # attempts to make the folder and a file in it, while another run that failed removes the folder

LOOKING: Final[int] = PLAIN_FLAGS | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags that open whatever has a name, but for links, without waiting."""

LOST: Final = "the file system reports that the file has its name, but another file has it"
REPLACED: Final = "another program replaced the temporary file"

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
    with failures(target), suppress(FileNotFoundError, NotADirectoryError):
        sweep(target.parent)  # first, as it may give an earlier output its name back
    check_output(target, inputs, overwrite=overwrite, folder=folder, contents=contents)
    part, lock, done = target, -1, False
    old: Path | None = None
    made: list[Path] = []
    try:
        with failures(target):
            for left in range(TRIES)[::-1]:
                with uninterrupted():
                    make_parents(target.parent, made)
                try:
                    with uninterrupted():
                        part, lock = create(target, folder=folder)
                    break
                except FileNotFoundError:
                    if not left:
                        raise
        yield part
        with failures(target):
            _sync(part)
            with _turn(target.parent):
                if overwrite:  # other programs may have written there meanwhile
                    check_output(target, overwrite=True, folder=folder, contents=contents)
                _sync_parents(target.parent)
                sync_folder(target.parent)  # a failing disk shows here, before the rename
                if not LOCK and not _same(_look(part), os.fstat(lock)):
                    raise OSError(errno.EIO, REPLACED, str(part))
                if overwrite:
                    _keep_modes(target, part)
                begin_commit()
                old = _publish(part, target, overwrite=overwrite, replaces=os.path.lexists(target))
                done = True
        if old is not None:
            remove(old)
    finally:
        if part != target:
            remove(part if os.path.lexists(part) else moved(lock, part))
            release(part, lock)
        if not done:
            _unmake(made)


def put_file(path: Path, content: bytes, *, overwrite: bool = True, mode: int | None = None) -> None:
    """Write a small file: a card, a page, a report, remembered digests. It is complete and on the disk, or not there.

    A link at the path is replaced, and never followed. Signals wait until it is written. `mode`: the permissions, also
    of a file that replaces one with others; without it, those of the old file, or the usual ones. Raises MergeError.
    """
    with failures(path), kept_back():
        check_kind(path, overwrite=overwrite)
        with suppress(OSError):
            sweep(path.parent)
        part, lock = create(path, folder=False, mode=NEW if mode is None else mode)
        try:
            part.write_bytes(content)
            if mode is None:
                _keep_modes(path, part)
            _sync(part)
            with _turn(path.parent):
                old = _publish(part, path, overwrite=overwrite, replaces=os.path.lexists(path))
            if old is not None:
                remove(old)
        finally:
            remove(part)
            release(part, lock)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Let one run at a time give outputs of this folder their names, where the file system can lock folders.

    Raises UsageError if another run does not end its turn.
    """
    fd = os.open(folder, os.O_RDONLY) if CAN_OPEN_FOLDERS else -1
    try:
        end = time.monotonic() + PATIENCE
        while fd >= 0 and try_lock(fd) is False:
            if time.monotonic() > end:
                raise UsageError("another run is giving an output its name and does not finish", str(folder),
                                 "let that run continue or end it, then run again")  # fmt: skip
            time.sleep(POLL)
        yield
    finally:
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


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


def _publish(part: Path, target: Path, *, overwrite: bool, replaces: bool) -> Path | None:
    """Rename `part` to `target` and sync the folder. Without `overwrite`, raise if `target` exists by now.

    Returns the new name of the old output, which the caller removes, or None. If that sync fails, the
    rename is undone and the old output has its name again. Where the file system can neither swap nor link names, the
    old file is lost at that point, and the new one stays.
    """
    old: Path | None = None
    if overwrite and replaces:
        old = _swap_folder(part, target) if part.is_dir() else _swap_file(part, target)
    elif part.is_dir():
        _publish_folder(part, target, overwrite=overwrite)
    elif overwrite:
        _give(part.replace, part, target)
    else:
        _publish_new(part, target)
    try:
        sync_folder(target.parent)
    except OSError:
        if not replaces:
            _give(target.rename, target, part)
        elif old is not None and os.path.lexists(old):
            _undo(old, target, part)
        raise
    return old


def _swap_file(part: Path, target: Path) -> Path | None:
    """Rename the file over the old one; return the new name of the old file, None where it could not be kept."""
    if _exchange(part, target):
        return part
    old = sibling(target)
    try:
        _give(partial(os.link, target, follow_symlinks=False), target, old)
    except (OSError, NotImplementedError):
        _give(part.replace, part, target)
        return None
    try:
        _give(part.replace, part, target)
    except OSError:
        remove(old)
        raise
    return old


def _swap_folder(part: Path, target: Path) -> Path:
    """Rename the folder over the old one; return the new name of the old folder."""
    if _exchange(part, target):
        return part
    old = part.with_name(part.name + OLD)
    _give(target.rename, target, old)
    try:
        _give(part.rename, part, target)
    except OSError:
        _give(old.rename, old, target)
        raise
    return old


def _undo(old: Path, target: Path, part: Path) -> None:
    """Give the old output its name back, and the new output its temporary name."""
    if _exchange(old, target):
        if old != part:
            _give(old.rename, old, part)
        return
    _give(target.rename, target, part)
    _give(old.rename, old, target)


def _publish_new(part: Path, target: Path) -> None:
    try:
        _give(partial(os.link, part), part, target)  # unlike a rename, it fails where the name is taken
    except FileExistsError as e:
        raise _appeared(target) from e
    except OSError as e:  # no links on this file system (exFAT, some networks)
        if os.path.lexists(target):
            raise _appeared(target) from e
        _give(part.rename, part, target)
    else:
        remove(part)


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
        _give(part.rename, part, target)  # it fails over anything but an empty folder
    except OSError as e:
        if not overwrite and os.path.lexists(target):
            raise _appeared(target) from e
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names; return False where that is not possible. Raises OSError if the disk itself fails."""
    reply: int | None = None

    def swap(_: Path) -> None:
        nonlocal reply
        reply = swap_names(a, b)

    try:
        _give(swap, a, b)
    except OSError:
        if reply in DISK:
            raise OSError(reply, os.strerror(reply), str(a)) from None
        return False
    return True


def _give(call: Callable[[Path], object], source: Path, name: Path) -> None:
    """Give a file or folder a name by `call(name)`, and look whether it has it.

    Raises the error of the call, or one of its own, if it has not; an error of a call that did its work is none.
    """
    file, before = _look(source), _look(name)
    reply = OSError(errno.EIO, LOST, str(name))
    try:
        call(name)
    except OSError as e:
        reply = e
    now = _look(name)
    # Some file systems give each name an inode of its own: then the name has another file than before, with our times.
    if file is None or now is None or not (_same(now, file) or (not _same(now, before) and _alike(now, file))):
        raise reply


def _look(path: Path) -> os.stat_result | None:
    """Return what has this name, links not followed; None if nothing has it."""
    try:
        fd = os.open(path, os.O_RDONLY | LOOKING) if CAN_OPEN_FOLDERS else -1  # opened, a network disk is asked anew
    except OSError:
        fd = -1
    try:
        return os.fstat(fd) if fd >= 0 else path.lstat()
    except FileNotFoundError:
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def _same(a: os.stat_result | None, b: os.stat_result | None) -> bool:
    """Return whether two looks saw one file, or both of them nothing."""
    if a is None or b is None:
        return a is b
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) if a.st_ino and b.st_ino else _alike(a, b)


def _alike(a: os.stat_result, b: os.stat_result) -> bool:
    """Return whether two looks saw files of one size and time."""
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)
