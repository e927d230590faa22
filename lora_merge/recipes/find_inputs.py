"""Finds the inputs that a recipe names, by their content.

Names in a recipe are only compared with names of files: they cannot lead out of the searched folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, filterfalse
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

from ..adapters.network_settings import side_file
from ..disk.files import sha256
from ..errors import InputError, MergeError, UsageError, VerificationFailed
from ..files.checkpoint import configuration, open_checkpoint
from ..paths import absolute, current_folders, of_index
from ..planning.downloads import Announce, downloaded_paths
from ..planning.recipe import config_hash
from ..progress import Progress, unwatched
from ..sources.inputs import folder_of_links, locate, record_origin
from ..text import quoted
from .read_recipe import Input

MOST_FILES: Final = 20_000  # looked at while searching for inputs
FOLDER_LEVELS: Final = 3  # folders below the searched ones
SEARCH: Final = "name its folder with --search"

Digest: TypeAlias = Callable[[Path], str]


def around(output: Path, search: Sequence[Path]) -> list[Path]:
    """Return the folders in which the inputs of an output are searched: the folders that the user names, that of
    the output, and the current one."""
    return [*search, absolute(output).parent, *current_folders()]


def find(
    inputs: Iterable[Input], folders: Iterable[Path], progress: Progress = unwatched, announce: Announce | None = None,
    digest: Digest = sha256,
) -> list[Path]:  # fmt: skip
    """Return the paths of these inputs, by content, searched in these folders and FOLDER_LEVELS levels below; those
    that came from another machine are downloaded if they are not there.

    VerificationFailed if there is a file of the right name but other content; InputError if there is none. `digest`:
    the SHA-256 of a file; a proof reads its bytes.
    """
    present = _SearchedFiles(folders)
    paths = []
    for named in inputs:
        paths.append(_find(named, present, progress, announce, digest))
        record(named, paths[-1])
    return paths


def record(named: Input, path: Path) -> None:
    """Record what the recipe says of the origin of an input that is at `path` now."""
    whole = of_index(path)
    record_origin(path, [whole / name if whole.is_dir() else path for name, _, _ in named.files], named.source)


class _SearchedFiles:
    """The files in the searched folders, listed as far as they are asked for: most inputs are next to the output."""

    def __init__(self, folders: Iterable[Path]) -> None:
        tops = list(folders)
        for top in tops:
            if not top.is_dir():
                raise UsageError("no such folder", f"`--search {top}`", "name a folder that is there, or leave it out")
        self._paths: list[Path] = []
        self._more = _walk(tops)

    def __iter__(self) -> Iterator[Path]:
        for n in count():
            if n == len(self._paths):
                path = next(self._more, None)
                if path is None:
                    return
                self._paths.append(path)
            yield self._paths[n]


def _find(
    sought: Input, present: Iterable[Path], progress: Progress, announce: Announce | None, digest: Digest
) -> Path:  # fmt: skip
    # Step 1: the name that its first file ends in.
    name, size, stated = sought.files[0]
    depth = len(PurePosixPath(name).parts) if sought.folder else 0
    within = sought.folder and sought.name not in {file for file, _, _ in sought.files}  # else a part is taken for all
    ending = f"/{sought.name}/{name}" if within else f"/{name}"

    def named(path: Path) -> bool:
        return f"/{path.as_posix()}".endswith(ending)

    # Step 2: the files of its size, those of its name first.
    others: list[str] = []
    alone: Path | None = None  # the first file of a folder, next to files that do not belong to it
    for path in chain(filter(named, present), filterfalse(named, present)):
        if _size(path) == size and depth <= len(path.parents):
            root = path.parents[depth - 1] if sought.folder else path
            try:
                other = different(sought, root, digest)
            except InputError as e:  # its configuration cannot be read
                other = f"{e.where} ({e.what})"
            if other is None and within and not named(path) and not _is_opened_as(sought, root):
                alone = root / name
                continue
            if other is None:
                return root if within else path
            if named(path):
                others.append(other)
    # Step 3: none is here: another machine has it, or it is missing.
    if sought.is_elsewhere:
        return _linked(sought, alone) or _downloaded(sought, progress, announce)
    namesake = next(filter(named, present), None)
    if namesake is not None:
        raise VerificationFailed("the output is older or newer than one of its inputs",
                                 f"{[*others, namesake][0]} is not that of {quoted(sought.name)} then, "
                                 f"whose weights have the SHA-256 {stated}",
                                 f"merge again, or {SEARCH}")  # fmt: skip
    raise InputError(f"the input {quoted(sought.name)} is not found", f"SHA-256 {stated}, {size} bytes",
                     SEARCH)  # fmt: skip


def _is_opened_as(sought: Input, folder: Path) -> bool:
    """Return whether a folder of another name is opened as the input, and not as other files that are in it too."""
    for adapter in (False, True):
        with suppress(MergeError):
            files = open_checkpoint(folder, adapter=adapter).files
            if {file.relative_to(folder).as_posix() for file in files} == {name for name, _, _ in sought.files}:
                return True
    return False


def _linked(sought: Input, file: Path | None) -> Path | None:
    """Return a folder like that of a repository with one file, for a copy of that file next to others; None if the
    folder had more."""
    if file is None or len(sought.files) > 1 or sought.config or sought.stated:
        return None
    return folder_of_links(sought.name, {sought.files[0][0]: file})


def _downloaded(sought: Input, progress: Progress, announce: Announce | None) -> Path:
    """Return the path of an input that came from another machine, downloaded if it is not here; VerificationFailed if
    its source has other bytes now."""
    path = locate(sought.source)
    if path is not None:
        path = downloaded_paths([path], [path], progress=progress, announce=announce)[path]
    if path is None or (other := different(sought, path)) is not None:
        raise VerificationFailed(f"the source of {quoted(sought.name)} has other bytes than the merge read",
                                 f"{sought.source}: {other if path is not None else ''}", SEARCH)  # fmt: skip
    return path


def different(named: Input, path: Path, digest: Digest = sha256) -> str | None:
    """Return the file of the input at `path` that is not as the recipe says; None if all are the same. `digest`: as for
    `find`."""
    whole = of_index(path)
    for name, size, stated in named.files:
        file = whole / name if whole.is_dir() else path
        if _size(file) != size or digest(file) != stated:
            return str(file)
    if named.config and config_hash(path) != named.config:
        return str(configuration(path) or path)
    if named.stated:
        stating = side_file(open_checkpoint(path, adapter=True))
        if stating is None or sha256(stating) != named.stated:
            return str(stating or path)
    return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _walk(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield regular files in these folders and FOLDER_LEVELS levels below, MOST_FILES at most; links to folders are not
    followed."""
    paths: set[Path] = set()
    for top in folders:
        for here, below, files in os.walk(top):
            level = len(Path(here).relative_to(top).parts)
            below[:] = [] if level >= FOLDER_LEVELS else sorted(b for b in below if not b.startswith("."))
            for name in sorted(files):
                path = Path(here) / name
                if path not in paths and not name.startswith(".") and os.path.isfile(path):  # noqa: PTH113  # never raises
                    paths.add(path)
                    yield path
                if len(paths) >= MOST_FILES:
                    return
