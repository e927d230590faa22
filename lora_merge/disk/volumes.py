"""What is known of the file systems that inputs lie on and outputs go to."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

Mode = Literal["auto", "direct", "buffered"]

MOUNTS: Final = Path("/proc/self/mountinfo")  # Linux's table of what is mounted where
SMALL: Final = 64 << 20  # below this a file is not worth direct writes
DIRECT_ON: Final = frozenset({"ext4", "ext3", "ext2", "xfs"})
"""File systems where direct writes are known to be what they say; others only if asked for."""

RESERVES: Final = frozenset({"ext4", "xfs", "tmpfs"} if hasattr(os, "posix_fallocate") else ())
"""File systems that reserve space without writing zeros to it; a full disk then shows before the work. Not btrfs, which
keeps all of a reserved extent for as long as any part of it is in use: shared blocks would save nothing there."""

SPARSE: Final = RESERVES | DIRECT_ON | {"btrfs", "overlay", "nfs", "nfs4", "zfs", "f2fs"}
"""File systems where bytes may be written behind a gap; others may fill it with zeros first, as exFAT does."""

CLONES: Final = frozenset({"xfs", "btrfs", "bcachefs"})
"""File systems where files may share blocks (xfs: unless made without); a range then costs nothing to copy."""

KEEP_TIMES: Final = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs"})
"""File systems that give every change a new time. Images made for reading repeat times and inodes, networks and FAT
make them up, and memory never writes back what is mapped, which is when a mapped change gets its time."""

UNSEEN: Final = frozenset({"overlay"})
"""File systems of whose files Linux says that the page cache holds nothing, and drops the pages of the file below."""


def free_bytes(path: Path) -> int:
    """Return the bytes a user may still write where `path` is or would be created."""
    return shutil.disk_usage(_existing(path)).free


def file_system(path: Path) -> str:
    """Return the type of the file system `path` is or would be on, as `ext4`; empty where that cannot be known."""
    if not MOUNTS.exists():
        return ""
    here, best, kind = _existing(path).resolve(), Path("/"), ""
    for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]:
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split(" ")[4]))
        if here.is_relative_to(point) and point.is_relative_to(best):
            best, kind = point, right.split()[0]
    return kind


def share_blocks(a: Path, b: Path) -> bool:
    """Return whether files at two paths, there or yet to be made, may share blocks: on one file system that can do
    that.
    """
    one, two = (_existing(p).stat().st_dev for p in (a, b))
    return one == two and file_system(a) in CLONES


def goes_direct(path: Path, size: int, mode: Mode) -> bool:
    """Return whether a file of `size` bytes is worth reading or writing past the page cache."""
    if not hasattr(os, "O_DIRECT") or mode == "buffered":
        return False
    return mode == "direct" or (size >= SMALL and file_system(path) in DIRECT_ON)


def same(a: Path, b: Path) -> bool:
    """Return whether two paths are one file, by any name or link.

    Where names in other letters are the same file, drivers of FUSE may give each spelling an inode of its own.
    """
    try:
        if a.samefile(b):
            return True
    except OSError:
        return False  # one of them is not there
    one, two = (Path(os.path.realpath(p)) for p in (a, b))
    return one != two and str(one).casefold() == str(two).casefold() and ignores_case(one.parent)


def ignores_case(folder: Path) -> bool:
    """Return whether a name in other letters is the same file in a folder that is or would be there, as on most disks
    of Windows and macOS."""
    folder = _existing(folder)
    with suppress(OSError):  # a folder that may not be listed
        for place in (*folder.iterdir(), folder):
            other = place.with_name(place.name.swapcase())
            if place.name.isascii() and other.name != place.name:  # the first with letters tells
                return os.path.lexists(other) and other not in place.parent.iterdir()
    return False


def _existing(path: Path) -> Path:
    path = path.absolute()
    there = (p for p in (path, *path.parents) if os.path.exists(p))  # noqa: PTH110  no error where one may not look
    return next(there, Path(path.anchor))
