"""Publishes outputs, and the small files next to them: a temporary file or folder is written, synced and renamed.

So the output is complete, or it does not exist. Runs that publish into one folder take turns (`_turn`). Without that,
a run whose last flush fails would take back its rename, and with it the output that another run has published since.

What a call returns proves nothing. Network disks lose replies, so a rename that has happened may fail, and some file
systems report success for what they did not do. After each call that gives a name, `_give` looks which file has it.

A temporary file or folder is called `.<name>.<12 hex digits>.lora-merge.part`. Each run holds a lock on its own: the
next run removes the unlocked ones, which killed runs left, and keeps the locked ones. On Windows no other process can
write to a locked file, and folders cannot be locked: there the run locks an empty file, `<temporary name>.lock`. If
two names cannot be swapped, a replaced folder is called `<temporary name>.old` for a moment; if the run is killed in
that moment, the next run gives the folder its name back.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from ..addresses import UPLOADS
from ..errors import UsageError
from ..process import begin_commit, kept_back, uninterrupted
from ..progress import Progress, unwatched
from .destination import ADDED, appeared, check_kind, check_output, failures
from .system import CAN_LOCK, CAN_OPEN_FOLDERS, PLAIN_FLAGS, lock_now, path_of, swap_names
from .uploads import take_card, uploading

OLD: Final = ".old"
"""Ending of a replaced folder, after the name of the temporary folder that replaces it."""

PART_NAME: Final = re.compile(r"\.(.*)\.[0-9a-f]{12}\.lora-merge\.part(?:\.old)?")
NAME_LIMIT: Final = 255  # bytes of a file name on every usual file system
NAME_ROOM: Final = NAME_LIMIT - ADDED
"""Bytes of the target's name in the name of its temporary file; of a longer name, the beginning."""
SWEEPS: Final = 10.0  # seconds after which a process searches the same folder again for files of killed runs

NEW: Final = 0o666  # permissions of a new file, before the umask

LOCK: Final = "" if CAN_LOCK else ".lock"
"""Ending of the file that a run locks while it writes a temporary file; "" if that is the temporary file itself."""

_swept: dict[Path, float] = {}
"""Folder → time of its last search."""

DISK_ERRORS: Final = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""Errors of the disk itself. Any other error means that the file system does not support the call."""

TURN_SECONDS: Final = 120.0
"""Seconds that a run waits for its turn. A turn takes two flushes of a folder; only a stopped process holds it long."""

TURN_POLL: Final = 0.01  # seconds between two attempts to take the turn
ATTEMPTS: Final = 20  # attempts to make the folder and a file in it, while another run that failed removes the folder

LOOK_FLAGS: Final[int] = PLAIN_FLAGS | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags that open whatever has a name, but for links, without waiting."""

LOST: Final = "the file system reports that the file has its name, but another file has it"
PART_REPLACED: Final = "another program replaced the temporary file"

_unsynced: set[Path] = set()
"""Folders that this process made for an output or its claim, and whose names may not be on the disk yet."""


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
        except OSError:
            release(part, -1)
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
    """Give up the lock of a temporary file. If the lock is a file of its own, remove it if the others are gone."""
    if lock >= 0:
        with suppress(OSError):
            os.close(lock)
    if LOCK and not (os.path.lexists(part) or os.path.lexists(part.with_name(part.name + OLD))):
        remove(part.with_name(part.name + LOCK))


def sibling(target: Path) -> Path:
    """Return a new temporary name next to the target."""
    name = (
        target.name
        if len(os.fsencode(target.name)) <= NAME_ROOM
        else target.name.encode("utf-8", "replace")[:NAME_ROOM].decode("utf-8", "ignore")
    )
    return target.with_name(f".{name}.{os.urandom(6).hex()}.lora-merge.part")


def named(part: Path, target: Path) -> Callable[[str], str]:
    """Return a function that puts the name of an output in place of its temporary one in a text."""
    return lambda text: text.replace(str(part), str(target)).replace(part.name, target.name)


def moved(fd: int, part: Path) -> Path:
    """Return the path of the open temporary file after its folder was moved; `part` if the system cannot say."""
    now = path_of(fd)
    return now if now is not None and now.name == part.name else part


def try_lock(fd: int) -> bool | None:
    """Try to take the lock; return whether this process has it now, None if the file system has no locks."""
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
        match = PART_NAME.fullmatch(name) if path.name.endswith(LOCK) else None
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
                stale = all(locks.enter_context(_idle(place)) for place in running)
                if stale:
                    _settle(old, target)
                    remove(part)
            if stale:
                release(part, -1)  # Windows removes only closed files


@contextmanager
def _idle(path: Path) -> Iterator[bool]:
    """Hold the lock of a file or folder in the block; yield False if another process has it, True without a file."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)) if os.path.lexists(path) else -1
    try:
        yield fd < 0 or bool(try_lock(fd))
    finally:
        if fd >= 0:
            os.close(fd)


def _settle(old: Path, target: Path) -> None:
    """Remove a replaced folder; give it its name back if nothing has that name. It stays if its name was cut."""
    if len(os.fsencode(target.name)) > NAME_ROOM - 4:  # the last letter that fits may take four bytes
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


@contextmanager
def replacing(  # noqa: PLR0913  # what an output is, and what may be replaced
    target: Path,
    inputs: Iterable[Path] = (),
    *,
    overwrite: bool = False,
    folder: bool = False,
    contents: Iterable[str] = (),
    progress: Progress = unwatched,
) -> Iterator[Path]:
    """Yield a temporary file or folder, empty, that becomes `target` only if the block succeeds.

    The local copy of an output of another machine is uploaded, and removed, in place of that. Missing parents are made,
    and removed again on failure. `contents` are the names that an output folder will hold; a folder with other files is
    not replaced. Raises the errors of `check_output` and of `writer.failure`.
    """
    with failures(target), suppress(FileNotFoundError, NotADirectoryError):
        sweep(target.parent)  # first, as it may give an earlier output its name back
    check_output(target, inputs, overwrite=overwrite, folder=folder, contents=contents)
    # A locked temporary file or folder, in a folder that another run may remove meanwhile.
    part, lock, done = target, -1, False
    old: Path | None = None
    folders: list[Path] = []
    try:
        with failures(target):
            for left in range(ATTEMPTS)[::-1]:
                with uninterrupted():
                    make_parents(target.parent, folders)
                try:
                    with uninterrupted():
                        part, lock = create(target, folder=folder)
                    break
                except FileNotFoundError:
                    if not left:
                        raise
        # The caller writes it; then it is uploaded, or gets its name.
        with uploading(part, target, overwrite=overwrite, progress=progress) as far:
            yield part
        if not far:
            old = _rename(part, lock, target, overwrite=overwrite, contents=contents if folder else None)
            done = True
        if old is not None:
            remove(old)
    finally:
        # Whatever is left of it goes, and folders that were made for nothing.
        if part != target:
            remove(part if os.path.lexists(part) else moved(lock, part))
            release(part, lock)
        if not done:
            _unmake(folders)


def _rename(part: Path, lock: int, target: Path, *, overwrite: bool, contents: Iterable[str] | None) -> Path | None:
    """Sync the finished file or folder and give it its name; return the new name of the old output, or None."""
    with failures(target):
        _sync(part)
        with _turn(target.parent):
            if overwrite:  # other programs may have written there meanwhile
                check_output(target, overwrite=True, folder=contents is not None, contents=contents or ())
            _sync_parents(target.parent)
            sync_folder(target.parent)  # a failing disk shows here, before the rename
            if not LOCK and not _same(_look(part), os.fstat(lock)):
                raise OSError(errno.EIO, PART_REPLACED, str(part))
            if overwrite:
                _keep_modes(target, part)
            begin_commit()
            return _publish(part, target, overwrite=overwrite, replaces=os.path.lexists(target))


def put_file(path: Path, content: bytes, *, overwrite: bool = True, mode: int | None = None) -> None:
    """Write a small file: a card, a page, a report, remembered digests. It is complete and on the disk, or not there.

    The card of an output that is uploaded waits for that.

    A link at the path is replaced, and never followed. Signals wait until it is written. `mode`: the permissions, also
    of a file that replaces one with others; without it, those of the old file, or the usual ones. Raises MergeError.
    """
    if take_card(path, content):
        return
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
        end = time.monotonic() + TURN_SECONDS
        while fd >= 0 and try_lock(fd) is False:
            if time.monotonic() > end:
                raise UsageError("another run is giving an output its name and does not finish", str(folder),
                                 "let that run continue or end it, then run again")  # fmt: skip
            time.sleep(TURN_POLL)
        yield
    finally:
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


def make_parents(folder: Path, folders: list[Path]) -> None:
    """Make the missing folders, the outermost first; each is added to `folders` before it exists. So are those of
    the outbox that are there, which several runs may use."""
    for path in [p for p in (folder, *folder.parents) if UPLOADS in p.parts or not p.exists()][::-1]:
        folders.append(path)
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
    rename is undone and the old output has its name again. If the file system can neither swap nor link names, the
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
    """Rename the file over the old one; return the new name of the old file, None if it was not kept."""
    if _exchange(part, target):
        return part
    if not CAN_OPEN_FOLDERS:  # nothing is synced after the rename, so nothing has to be undone
        _give(part.replace, part, target)
        return None
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
        _give(partial(os.link, part), part, target)  # unlike a rename, it fails if the name is taken
    except FileExistsError as e:
        raise appeared(str(target)) from e
    except OSError as e:  # no links on this file system (exFAT, some networks)
        if os.path.lexists(target):
            raise appeared(str(target)) from e
        _give(part.rename, part, target)
    else:
        remove(part)


def _keep_modes(old: Path, new: Path) -> None:
    """Give the new files the permissions of those they replace: a private file or folder stays private."""
    for path in (new, *new.rglob("*")):
        replaced = old / path.relative_to(new)
        if replaced.exists() and (mode := stat.S_IMODE(replaced.stat().st_mode)) != stat.S_IMODE(path.stat().st_mode):
            path.chmod(mode)


def _publish_folder(part: Path, target: Path, *, overwrite: bool) -> None:
    try:
        _give(part.rename, part, target)  # it fails over anything but an empty folder
    except OSError as e:
        if not overwrite and os.path.lexists(target):
            raise appeared(str(target)) from e
        raise


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names; return False if that is not possible. Raises OSError if the disk itself fails."""
    reply: int | None = None

    def swap(_: Path) -> None:
        nonlocal reply
        reply = swap_names(a, b)

    try:
        _give(swap, a, b)
    except OSError:
        if reply in DISK_ERRORS:
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
        fd = os.open(path, os.O_RDONLY | LOOK_FLAGS) if CAN_OPEN_FOLDERS else -1  # opened, a network disk is asked anew
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
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) if a.st_ino else _alike(a, b)


def _alike(a: os.stat_result, b: os.stat_result) -> bool:
    """Return whether two looks saw files of one size and time."""
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)
