"""Output streams that nobody may read, and report files: a message that cannot be written does not undo the work."""

from __future__ import annotations

import codecs
import errno
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ..disk.volumes import same
from ..errors import UsageError, as_resource_error, failure
from ..text import CONTROLS, json_text, one_line

ELSEWHERE: Final = "choose another file"
ESCAPED: Final = "lora_merge.escaped"
REPORTS: Final = (b'{"output": ', b'{"dry_run": ', b'{"error": {"kind": ')
"""The beginning of the reports of merges."""

KINDS: Final = {"--report": (b"{", b"["), "--html": (b"<",), "--plot": (b"\x89PNG", b"<")}
"""Option → the beginnings of files of its kind; other files are not written over."""


def _escaped(e: UnicodeError) -> tuple[str, int]:
    """Return what an encoding lacks as JSON escapes it: JSON stays JSON, and text can be read."""
    assert isinstance(e, UnicodeEncodeError), "used for writing alone"
    units = struct.iter_unpack(">H", e.object[e.start : e.end].encode("utf-16-be", "surrogatepass"))
    return "".join(f"\\u{unit:04x}" for (unit,) in units), e.end


codecs.register_error(ESCAPED, _escaped)


class SafeStream:
    """A text stream that goes on when it cannot be written: a closed pipe, a full disk, letters it does not have.

    What it writes cannot command a terminal.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = Path(os.devnull).open("w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors=ESCAPED)
        self.lost: OSError | None = None
        """Why something could not be written; a closed pipe does not count."""

    def write(self, text: str) -> int:
        """Write, or leave it."""
        try:
            self._stream.write(text.translate(CONTROLS))
        except OSError as e:
            self._note(e)
        return len(text)

    def command(self, text: str) -> None:
        """Write a text of ours that may command a terminal; the names in it are escaped already."""
        try:
            self._stream.write(text)
        except OSError as e:
            self._note(e)

    def flush(self) -> None:
        """Flush, or leave it."""
        try:
            self._stream.flush()
        except OSError as e:
            self._note(e)

    def _note(self, e: OSError) -> None:
        if e.errno != errno.EPIPE:
            self.lost = e

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def commanding(stream: Any) -> Callable[[str], object]:
    """Return the function of a stream that writes texts of ours that may command a terminal."""
    return stream.command if isinstance(stream, SafeStream) else stream.write


def open_descriptors() -> None:
    """Give descriptors 0 to 2 a place if they were closed; the first files to be opened would be taken for them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


class ReportFile:
    """The file of `--report`. It is checked before the work begins, so that it is not the work that fails."""

    def __init__(self, text: str, flag: str = "--report") -> None:
        """Raise UsageError if a report cannot be written there."""
        from ..paths import exists, expand, is_folder

        self.path, self._flag, self._spares = expand(text), flag, False
        if is_folder(self.path) or not os.access(self.path if exists(self.path) else self.path.parent, os.W_OK):
            raise UsageError("the report cannot be written there", f"{flag} {text}", ELSEWHERE)
        if text == "-":
            raise UsageError("a file is wanted", f"{flag} -", "give its name; --json prints the report")

    def protect(self, inputs: Iterable[Path], outputs: Iterable[Path] = ()) -> None:
        """Raise UsageError if the report would be written over one of these, or over a file of another kind."""
        for role, paths in (("an input", inputs), ("an output", outputs)):
            if any(self._hits(path, new=role == "an output") for path in paths):
                raise UsageError(f"the report would be written over {role}", f"{self._flag} {self.path}", ELSEWHERE)
        there = self._start().lstrip() if self.path.is_file() else b""
        if there and not there.startswith(KINDS[self._flag]):
            raise UsageError("a file of another kind is there", f"{self._flag} {self.path}", ELSEWHERE)
        self._spares = True

    def _hits(self, path: Path, *, new: bool) -> bool:
        """Return whether the report is this file, or lies in this folder: anywhere in a new one, else over a file."""
        here, there, present = self.path.resolve(), path.resolve(), self.path.exists()
        inside = there in here.parents and (new or present)
        return here == there or inside or (present and same(self.path, path))

    def begin(self) -> None:
        """Empty the report of an earlier run, which would be taken for that of this one if it is killed."""
        if self.path.is_file():
            self._put("", "w")

    def fail(self, e: BaseException) -> None:
        """Report a failure, unless something else than a report is there, or may get there: an input, the output."""
        with suppress(OSError):
            if self._is_report() if self.path.is_file() else self._spares and not self.path.exists():
                self.replace(json_text(failure(e)))

    def _is_report(self) -> bool:
        start = self._start()
        return not start or start.startswith(REPORTS)

    def _start(self) -> bytes:
        try:
            with self.path.open("rb") as f:
                return f.read(20)
        except OSError:  # it may be written and not be read
            return b""

    def replace(self, line: str) -> None:
        """Make the line all of the report."""
        self._put(line, "w")

    def append(self, line: str) -> None:
        """Add a line; it is on its way to the disk on return."""
        self._put(line, "a")

    def _put(self, line: str, mode: str) -> None:
        try:
            with self.path.open(mode, encoding="utf-8", errors=ESCAPED) as f:
                f.write(line and line + "\n")
        except OSError as e:
            where = one_line(str(self.path))
            print(f"warning: the report could not be written: {e.strerror} ({where})", file=sys.stderr)  # noqa: T201


@contextmanager
def reporting(text: str | None) -> Iterator[ReportFile | None]:
    """Give the block the file for its report, if one is wanted; report a failure of the block there too."""
    told = None if text is None else ReportFile(text)
    try:
        yield told
    except BaseException as e:
        if told is not None:
            told.fail((isinstance(e, Exception) and as_resource_error(e)) or e)
        raise
