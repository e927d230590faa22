"""Facts about the file systems of inputs and outputs."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from ..paths import real_path
from .remote import has_remote

Mode = Literal["auto", "direct", "buffered"]

MOUNTS: Final = Path("/proc/self/mountinfo")  # Linux's table of what is mounted where
DIRECT_ABOVE: Final = 64 << 20  # bytes; for smaller files direct I/O is not worth its cost
DIRECT_ON: Final = frozenset({"ext4", "ext3", "ext2", "xfs"})
"""File systems where direct I/O is known to work; on others it is used only with the mode `direct`."""

RESERVES: Final = frozenset({"ext4", "xfs", "tmpfs"} if hasattr(os, "posix_fallocate") else ())
"""File systems that reserve space without writing zeros to it; a full disk then shows before the work. btrfs is not
here: it keeps a whole reserved extent while any part of it is in use, so shared blocks would save no space."""

SPARSE_SYSTEMS: Final = RESERVES | DIRECT_ON | {"btrfs", "overlay", "nfs", "nfs4", "zfs", "f2fs"}
"""File systems where a write behind a gap costs nothing; others, such as exFAT, first fill the gap with zeros."""

CLONES: Final = frozenset({"xfs", "btrfs", "bcachefs"})
"""File systems where files may share blocks (xfs: unless made without reflinks); a copy then costs nothing."""

KEEP_TIMES: Final = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs"})
"""File systems that give every change of a file a new time. Read-only images repeat times and inodes, network file
systems and FAT invent them, and tmpfs never writes mapped memory back, which is when a mapped change gets its time."""

UNSEEN: Final = frozenset({"overlay"})
"""File systems for which Linux reports an empty page cache, though DO_NOT_NEED drops the pages of the file below."""


def free_bytes(path: Path) -> int:
    """Return the number of free bytes where `path` is or would be created."""
    return shutil.disk_usage(existing(path)).free


def file_system(path: Path) -> str:
    """Return the type of the file system of `path`, which need not exist yet, such as `ext4`; "" if unknown."""
    if not MOUNTS.exists():
        return ""
    here, best, kind = f"{real_path(existing(path))}/".replace("//", "/"), "", ""
    for line in MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]:
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), left.split(" ")[4]).rstrip("/") + "/"
        if here.startswith(point) and point.startswith(best):
            best, kind = point, right.split()[0]
    return kind


def share_blocks(a: Path, b: Path) -> bool:
    """Return whether the files at two paths, which need not exist yet, are on one file system with shared blocks."""
    if has_remote(a) or has_remote(b):
        return False
    return existing(a).stat().st_dev == existing(b).stat().st_dev and file_system(a) in CLONES


def goes_direct(path: Path, size: int, mode: Mode) -> bool:
    """Return whether a file of `size` bytes is worth reading or writing past the page cache."""
    if not hasattr(os, "O_DIRECT") or mode == "buffered":
        return False
    return mode == "direct" or (size >= DIRECT_ABOVE and file_system(path) in DIRECT_ON)


def same(a: Path, b: Path) -> bool:
    """Return whether two paths lead to the same file, by any name or link.

    If file names ignore case, FUSE drivers may give each spelling its own inode; then the names are compared.
    """
    try:
        if a.samefile(b):
            return True
    except OSError:
        return False  # one of them is not there
    a, b = real_path(a), real_path(b)
    return a != b and str(a).casefold() == str(b).casefold() and ignores_case(a.parent)


def ignores_case(folder: Path) -> bool:
    """Return whether file names in a folder ignore case, as on most disks of Windows and macOS.

    The folder need not exist yet.
    """
    folder = existing(folder)
    with suppress(OSError):  # a folder that may not be listed
        for place in (*folder.iterdir(), folder):
            other = place.with_name(place.name.swapcase())
            if place.name.isascii() and other.name != place.name:  # the first name with letters decides
                return os.path.lexists(other) and other not in place.parent.iterdir()
    return False


def existing(path: Path) -> Path:
    """Return a path if something is there, else the innermost folder around it that exists."""
    path = path.absolute()
    paths = (p for p in (path, *path.parents) if os.path.exists(p))  # noqa: PTH110  no error without permission
    return next(paths, Path(path.anchor))
