"""Whether an output may be written to a path: it must not replace inputs or files that it does not write anew."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import OutputExists, UsageError
from ..paths import WEIGHT_SUFFIXES, WINDOWS, exists, forbidden, real_path, typed
from ..text import listed, plural
from .system import takes_long_paths
from .uploads import sink_of
from .volumes import same
from .writer import elsewhere, failure, path_too_long

ADDED: Final = len("..0123456789ab.lora-merge.part.lock")
"""Characters that the name of a temporary file, or of its lock, has more than that of the output."""

LONGEST: Final = 260
"""Characters of a path of Windows without long paths, with the zero at its end."""


def check_output(
    target: Path,
    inputs: Iterable[Path] = (),
    *,
    overwrite: bool = False,
    folder: bool = False,
    contents: Iterable[str] = (),
) -> bool:
    """Return whether an output at `target` replaces something; UsageError unless it may be written.

    It must not be an input, must be a file or a folder as `folder` says, and must be free unless `overwrite` is given.
    An output folder may replace only `contents`.
    """
    if (sink := sink_of(target)) is not None:
        _check_suffix(target, folder=folder)
        return sink.check(target, [*inputs], overwrite=overwrite, contents=[*contents] if folder else None)
    with failures(target):
        if ".." in target.parent.parts:  # new/../name exists as soon as new is made
            target = real_path(target.parent) / target.name
        protect(target, inputs)
        _check_name(target, folder=folder)
        check_kind(target, overwrite=overwrite, folder=folder)
        lost = sorted({*files_under(target)} - {*contents}) if folder and target.is_dir() else []
    if lost:
        raise UsageError(
            f"the output folder holds {plural(len(lost), 'file')} that the merged model does not have",
            f"{target}: {listed(lost)}",
            "choose another -o, or move them away",
        )
    return exists(target)


def protect(target: Path, inputs: Iterable[Path]) -> None:
    """Raise UsageError if the output would replace one of these files, or a folder that holds one."""
    if not exists(target):
        return
    real = real_path(target)
    read = next((file for file in inputs if any(same(real, p) for p in (file, *file.parents))), None)
    if read is not None:
        what = f"the output would replace the base, an adapter or another file that is read: {read.name}"
        raise UsageError(what, str(target), f"choose another name: `-o {target.stem}-new{target.suffix}`")


def _check_name(target: Path, *, folder: bool) -> None:
    """Raise UsageError for a name that no output can have, or whose suffix is wrong for the output."""
    if WINDOWS and (part := forbidden(target)):
        raise UsageError("Windows allows no such name", f"{target}: {part}",
                         'choose another -o: without < > : " | ? *, a point at the end, and names such as CON and NUL'
                         )  # fmt: skip
    if len(str(target)) + ADDED >= LONGEST and not str(target).startswith("\\\\?\\") and not takes_long_paths():
        raise path_too_long(target)
    _check_suffix(target, folder=folder)
    try:
        target.lstat()  # a name that is too long must fail before the work
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise UsageError("the output's folder is a link to itself", str(target), "choose another -o") from e


def _check_suffix(target: Path, *, folder: bool) -> None:
    """Raise UsageError for a name whose suffix is wrong for the output."""
    if folder and target.suffix.lower() in WEIGHT_SUFFIXES and not target.is_dir():
        raise UsageError("the output is a folder, but its name is that of a file", str(target),
                         f"name a folder: `-o {target.stem}`")  # fmt: skip
    if not folder and target.suffix.lower() in WEIGHT_SUFFIXES - {".safetensors", ".gguf"}:
        error = UsageError("outputs are .safetensors files, never pickles or other formats", str(target),
                           f"name it {target.stem}.safetensors")  # fmt: skip
        raise error.instead(str(target), str(target.with_suffix(".safetensors")))


def check_kind(target: Path, *, overwrite: bool, folder: bool = False) -> None:
    """Raise UsageError unless a file, or a folder, may have this path by what is there."""
    if not os.path.lexists(target):
        around = next((p for p in target.parents if os.path.lexists(p)), Path())
        if not around.is_dir():
            raise UsageError("the output's folder is a file", str(around), "choose another -o")
        if shutil.disk_usage(around).total == 0:
            raise UsageError("the output's folder is not on a disk", str(around), "choose another -o")  # such as /proc
        _check_writable(around, target)
        return
    if not (target.is_symlink() or target.is_file() or target.is_dir()):
        raise UsageError("the output is a device, a pipe or the like", str(target), "choose another -o")
    if target.is_dir() and not folder:
        raise UsageError("the output is a folder", str(target), "name a file in it: `-o FOLDER/NAME.safetensors`")
    if folder and not target.is_dir():
        raise UsageError("the base is a folder, so the output must be a folder", str(target), "name a folder with -o")
    if not overwrite:
        raise OutputExists("the output exists", str(target), "choose another -o, or give `--overwrite`")
    if WINDOWS and not target.lstat().st_mode & stat.S_IWRITE:  # it cannot be replaced, nor removed
        raise UsageError("the output is read-only", str(target),
                         f"choose another -o, or permit it: {typed(['attrib', '-r', str(target)])}")  # fmt: skip
    _check_writable(target.parent, target)


def _check_writable(folder: Path, target: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError("no permission to write into this folder", str(folder), elsewhere(target))


def files_under(folder: Path) -> list[str]:
    """Return the sorted paths of all files below a folder, relative to it, with forward slashes."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


@contextmanager
def failures(target: Path) -> Iterator[None]:
    """Raise the typed error for any OSError in the block."""
    try:
        yield
    except OSError as e:
        raise failure(e, target, 0) from e


def appeared(where: str) -> UsageError:
    """Return the error for an output that was free when the run began, and is there at its end."""
    what = "another program created the output during the run"
    return UsageError(what, where, "choose another -o, or wait for the other run")
