"""The files of `--html` and `--plot`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import MergeError, UsageError, cause
from ..text import one_line
from .progress_display import watching
from .stdio import ReportFile


class Pictures:
    """The files of `--html` and `--plot`. Everything that can fail beforehand is checked before the work begins."""

    def __init__(self, html: str | None, plot: str | None, *, quiet: bool, dry_run: bool = False) -> None:
        """Raise UsageError if one cannot be written there, or cannot be made here."""
        self._quiet = quiet
        self._files: list[tuple[ReportFile, Callable[[Any], bytes]]] = []
        if dry_run and (html or plot):
            raise UsageError("a dry run has nothing to show", "--html" if html else "--plot", "leave one of them out")
        if html is not None:
            from ..viewing.pages.page import library, page

            library()
            self._files.append((ReportFile(html, "--html"), lambda result: page(result).encode(errors="replace")))
        if plot is not None:
            from ..viewing.pages.plot import drawable
            from ..viewing.pages.plot import plot as draw

            file = ReportFile(plot, "--plot")
            drawable(file.path)
            self._files.append((file, lambda result: draw(result, file.path)))

    def protect(self, inputs: Iterable[Path], outputs: Iterable[Path] = ()) -> None:
        """Raise UsageError if a picture would be written over one of these."""
        inputs, outputs = list(inputs), list(outputs)
        for file, _ in self._files:
            file.protect(inputs, outputs)

    def write(self, result: Callable[[], Any]) -> None:
        """Write all of them about what `result` returns, the JSON that the command prints; warn where that fails."""
        if not self._files:
            return
        with watching(quiet=self._quiet, doing="drawing"):
            failed = [*self._failed(result)]
        for path, error in failed:
            _unwritten(path, error)

    def _failed(self, result: Callable[[], Any]) -> Iterator[tuple[Path, Exception]]:
        """Write all of them; yield the path of each that failed, with the error."""
        try:
            facts = result()
        except (OSError, MergeError) as e:  # what it is about is written and proven
            yield self._files[0][0].path, e
            return
        for file, make in self._files:
            try:
                file.put(make(facts))
            except (OSError, MergeError) as e:
                yield file.path, e
            file.close()


def _unwritten(path: Path, error: Exception) -> None:
    """Warn that a picture could not be written."""
    where = one_line(str(path))
    print(f"warning: the picture could not be written: {cause(error)} ({where})", file=sys.stderr)  # noqa: T201
