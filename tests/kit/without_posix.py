"""Runs `lora-merge` with everything taken away that Windows lacks. Run: python -m tests.kit.without_posix ARGUMENTS

`--then` between ARGUMENTS begins another run in the same process, if the one before has done what it should.
What stays is what Python has everywhere. `sys.platform` stays too: torch asks it which libraries to load.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import itertools
import mmap
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

GONE = (
    "preadv", "pread", "pwrite", "pwritev", "posix_fadvise", "posix_fallocate", "fdatasync", "sched_getaffinity",
    "statvfs", "sysconf", "sysconf_names", "fork", "geteuid", "getuid", "getgid", "getegid", "fchmod", "fchown", "chown",
    "O_DIRECT", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "RWF_NOWAIT", "ST_RDONLY", "copy_file_range",
    "POSIX_FADV_RANDOM", "POSIX_FADV_NORMAL", "POSIX_FADV_WILLNEED", "POSIX_FADV_DONTNEED",
)  # fmt: skip
"""Names of `os` that are not there on Windows."""

MODULES = frozenset({"fcntl", "resource", "pwd", "grp", "termios"})


class _Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _found(find_spec: Any) -> Any:
    return lambda name, *rest: None if name in MODULES else find_spec(name, *rest)


def opened() -> set[tuple[int, int]]:
    """Device and inode of every file that this process has open."""
    files = set()
    for number in Path("/proc/self/fd").iterdir():
        try:
            state = os.fstat(int(number.name))
            files.add((state.st_dev, state.st_ino))
        except OSError:
            continue
    return files


def take_away() -> None:
    """Make `os`, `mmap` and the imports of this process those of a system without POSIX."""
    import filelock  # noqa: F401  # with its locks, as it has others on Windows
    import platformdirs.unix  # noqa: F401  # it asks for the system by its name, which stays

    usage, statvfs = shutil._ntuple_diskusage, os.statvfs  # type: ignore[attr-defined]

    def disk_usage(path: Any) -> Any:
        """As Windows has it, by another call."""
        s = statvfs(path)
        return usage(s.f_blocks * s.f_frsize, (s.f_blocks - s.f_bfree) * s.f_frsize, s.f_bavail * s.f_frsize)

    shutil.disk_usage = disk_usage  # type: ignore[assignment]
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it opens folders
    for name in GONE:
        if hasattr(os, name):
            delattr(os, name)
    for name in [n for n in dir(mmap) if n.startswith("MADV_")]:
        delattr(mmap, name)
    sys.meta_path.insert(0, _Missing())
    importlib.util.find_spec = _found(importlib.util.find_spec)
    for name in MODULES:
        sys.modules.pop(name, None)
    real_open, real_replace, real_rename, real_unlink = os.open, os.replace, os.rename, os.unlink

    def open_file(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if isinstance(path, str | bytes | Path) and os.path.isdir(path):  # noqa: PTH112  # bytes too
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, flags, *rest, **options)

    def refusing(call: Any) -> Any:
        def rename(source: Any, target: Any, **options: Any) -> None:
            busy = opened()
            for path in (source, target):
                if os.path.lexists(path) and not os.path.isdir(path):  # noqa: PTH112
                    state = os.stat(path)  # noqa: PTH116
                    if (state.st_dev, state.st_ino) in busy:
                        raise PermissionError(13, "The file is used by another process", str(path))
            call(source, target, **options)

        return rename

    def unlink(path: Any, **options: Any) -> None:
        state = os.lstat(path)
        if (state.st_dev, state.st_ino) in opened():
            raise PermissionError(13, "The file is used by another process", str(path))
        real_unlink(path, **options)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    os.open = open_file  # type: ignore[assignment]
    os.replace, os.rename = refusing(real_replace), refusing(real_rename)
    os.unlink = os.remove = unlink  # type: ignore[assignment]
    os.symlink = refused  # type: ignore[assignment]


if __name__ == "__main__":
    take_away()
    from lora_merge.__main__ import start
    from lora_merge.cli.main import main

    runs = [list(run) for is_break, run in itertools.groupby(sys.argv[1:], key="--then".__eq__) if not is_break]
    for run in runs[:-1]:
        sys.argv = ["lora-merge", *run]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    sys.argv = ["lora-merge", *(runs[-1] if runs else [])]
    start()  # ends the process
