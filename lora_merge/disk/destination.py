"""Where an output may go: over no input, of the right kind, over nothing that it does not write anew."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import UsageError
from ..paths import exists
from ..text import listed
from .volumes import same
from .writer import failure


def check_output(  # noqa: PLR0913  # what an output may not be
    target: Path,
    inputs: Iterable[Path] = (),
    *,
    overwrite: bool = False,
    folder: bool = False,
    contents: Iterable[str] = (),
    spared: Iterable[Path] = (),
) -> None:
    """Raise UsageError unless `target` may be written: it is no input, of the right kind, and free or ours to replace.

    `spared` are inputs that are not replaced whatever `overwrite` says.
    """
    with failures(target):
        if ".." in target.parent.parts:  # new/../name is there when new is made
            target = Path(os.path.realpath(target.parent), target.name)
        protect(target, spared)
        _check_name(target, folder=folder)
        _check_kind(target, inputs, overwrite=overwrite, folder=folder)
        lost = sorted({*files_under(target)} - {*contents}) if folder and target.is_dir() else []
    if lost:
        raise UsageError(
            f"the output folder holds {len(lost)} files that the merged model does not have",
            f"{target}: {listed(lost)}",
            "choose another -o, or move them away; --overwrite replaces only what it writes anew",
        )


def protect(target: Path, spared: Iterable[Path]) -> None:
    """Raise UsageError where the output would take the place of one of these files, or of a folder with one in it."""
    real = Path(os.path.realpath(target))
    if exists(real) and any(same(real, p) for file in spared for p in (file, *file.parents)):
        what = "the output is an adapter or another file that is read, or a folder with one in it"
        raise UsageError(what, str(target), "choose another -o; not even --overwrite replaces anything but the base")


def _check_name(target: Path, *, folder: bool) -> None:
    """Raise UsageError for a name that no output can have, or that says it is something else."""
    if folder and target.suffix.lower() in WEIGHTS and not target.is_dir():
        raise UsageError("the output is a folder, as the base is, its name that of a file", str(target),
                         "name a folder with -o")  # fmt: skip
    if not folder and target.suffix.lower() in WEIGHTS - {".safetensors"}:
        raise UsageError("outputs are never pickles, nor of any kind but .safetensors", str(target),
                         "name it .safetensors")  # fmt: skip
    try:
        target.lstat()  # says now, not after the work, that the name is too long
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise UsageError("the output's folder is a link to itself", str(target), "choose another -o") from e


def _check_kind(target: Path, inputs: Iterable[Path], *, overwrite: bool, folder: bool) -> None:
    if not os.path.lexists(target):
        around = next((p for p in target.parents if os.path.lexists(p)), Path())
        if not around.is_dir():
            raise UsageError("the output's folder is a file", str(around), "choose another -o")
        if shutil.disk_usage(around).total == 0:
            raise UsageError("what is there is no disk", str(around), "choose another -o")  # /proc and the like
        _check_writable(around)
        return
    if not (target.is_symlink() or target.is_file() or target.is_dir()):
        raise UsageError("the output is a device, a pipe or the like", str(target), "choose another -o")
    if target.is_dir() and not folder:
        raise UsageError("the output is a folder", str(target), "name a file in it: -o FOLDER/NAME.safetensors")
    if folder and not target.is_dir():
        raise UsageError("the output is a file, the base a folder", str(target), "name a folder with -o")
    if not overwrite:
        if any(same(target, p) for p in inputs):
            raise UsageError("the output is the base, perhaps your only copy of it", str(target), "choose another -o")
        raise UsageError("the output exists", str(target), "choose another -o, or give --overwrite")
    _check_writable(target.parent)


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError("no permission to write", str(folder), "choose another -o")


def files_under(folder: Path) -> list[str]:
    """Return every file in a folder and below, relative, with forward slashes, sorted."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


@contextmanager
def failures(target: Path) -> Iterator[None]:
    """Return A typed error for whatever the system says against writing there."""
    try:
        yield
    except OSError as e:
        raise failure(e, target, 0) from e


WEIGHTS: Final = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".msgpack", ".h5", ".tflite")
)
"""Suffixes of files that hold weights; the base's own would be stale beside the merged ones."""
