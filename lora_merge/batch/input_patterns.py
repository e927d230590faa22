"""Finds the paths that match a `glob` of a jobs file, with a bound on how much of the disk is looked at.

The rules are those of Python's `glob`: `*`, `?` and `[a-z]` match a part of one name, `**` any number of
folders, and each of them no name that begins with a dot.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import translate
from glob import has_magic
from pathlib import Path
from typing import Final

from ..paths import real_path
from .templates import NoSuchName

MOST_SEARCHED: Final = 300_000  # names in folders, for all patterns of one jobs file; a second
FOLDER_COST: Final = 20  # as many names take as long as to open a folder
LONGEST_STEP: Final = 1000  # characters for one name, which has up to 255; the library reads it in their square
ANY_FOLDERS: Final = "**"


class Search:
    """The patterns of one jobs file, whose paths are relative to this folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left = MOST_SEARCHED

    def paths(self, pattern: str) -> list[str]:
        """Return sorted paths; NoSuchName where there are none, or where too many names would have to be looked at."""
        start = Path(Path(pattern).anchor)
        steps = Path(pattern).parts[len(start.parts) :]
        matches = [start]
        for number, step in enumerate(steps, 1):
            if not matches or len(step) > LONGEST_STEP:
                matches = []
                break
            folders = number < len(steps)
            if step == ANY_FOLDERS:
                matches = list(self._below(matches, folders=folders))
            elif has_magic(step):
                matches = list(self._named(matches, step, folders=folders))
            else:
                matches = [path / step for path in matches if self._exists(path / step)]
        if pattern.endswith("/"):
            matches = [path for path in matches if (self.folder / path).is_dir()]
        if not (paths := sorted(str(path) for path in matches if path != start)):
            raise NoSuchName(f"no file matches {pattern[:200]} in {self.folder}; check the folder and the ending")
        return paths

    def _named(self, folders_in: Iterable[Path], step: str, *, folders: bool) -> Iterator[Path]:
        """Return what has such a name in these folders."""
        pattern = re.compile(translate(os.path.normcase(step)))
        for path in folders_in:
            for entry in self._entries(path):
                shown = step.startswith(".") or not entry.name.startswith(".")
                if shown and pattern.match(os.path.normcase(entry.name)) and (not folders or _is_folder(entry)):
                    yield path / entry.name

    def _below(self, folders_in: Iterable[Path], *, folders: bool) -> Iterator[Path]:
        """Return these folders, and what is in them at any depth, each once."""
        waiting, visited = [path for path in folders_in if (self.folder / path).is_dir()], set[Path]()
        while waiting:
            path = waiting.pop()
            if path in visited:
                continue
            visited.add(path)
            yield path
            for entry in self._entries(path):
                if entry.name.startswith("."):
                    continue
                if _is_folder(entry) and not self._leads_back(path, entry):
                    waiting.append(path / entry.name)
                elif not folders:
                    yield path / entry.name

    def _leads_back(self, path: Path, entry: os.DirEntry[str]) -> bool:
        """Return whether it is a link to a folder that it is in."""
        return entry.is_symlink() and real_path(self.folder / path).is_relative_to(real_path(Path(entry.path)))

    def _entries(self, path: Path) -> list[os.DirEntry[str]]:
        """Return what is in a folder; nothing for a path that is not a folder, or that cannot be read."""
        self._look(FOLDER_COST)
        try:
            with os.scandir(self.folder / path) as entries:
                return [entry for entry in entries if self._look()]
        except OSError:
            return []

    def _exists(self, path: Path) -> bool:
        return self._look() and os.path.lexists(self.folder / path)

    def _look(self, count: int = 1) -> bool:
        self.left -= count
        if self.left < 0:
            raise NoSuchName(f"more than {MOST_SEARCHED} names would be looked at; name the folder of the files")
        return True


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False
