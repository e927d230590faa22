"""Writing to stdout, stderr and report files whose reader may be gone: that does not undo the work."""

from __future__ import annotations

import codecs
import errno
import os
import select
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ..errors import MergeError, UsageError, as_resource_error, cause, failure
from ..paths import exists, expand, is_folder, real_path
from ..text import CONTROLS, json_text, one_line

KINDS: Final = {
    "--report": ((".json", ".jsonl"), (b"{", b"[")),
    "--html": ((".html",), (b"<",)),
    "--plot": ((".png", ".svg", ".pdf"), (b"\x89PNG", b"<", b"%PDF")),
}
"""Option → endings of its file, and the beginnings of such files; other files are not written over."""
ESCAPED: Final = "lora_merge.escaped"
REPORTS: Final = (b'{"output": ', b'{"dry_run": ', b'{"error": {"kind": ')
"""The beginning of the reports of merges."""


def _escaped(e: UnicodeError) -> tuple[str, int]:
    """Return what an encoding lacks as JSON escapes it: JSON stays JSON, and text can be read."""
    assert isinstance(e, UnicodeEncodeError), "used for writing alone"
    units = struct.iter_unpack(">H", e.object[e.start : e.end].encode("utf-16-be", "surrogatepass"))
    return "".join(f"\\u{unit:04x}" for (unit,) in units), e.end


codecs.register_error(ESCAPED, _escaped)


READER_SECONDS: Final = 60.0
"""Seconds that a report waits for a reader that does not read."""

LINKS: Final = 40
"""Links that lead to each other at most, as in Linux."""

STREAMS: Final = {"/dev/stdin": "0", "/dev/stdout": "1", "/dev/stderr": "2"}
DESCRIPTORS: Final = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd", f"/proc/{os.getpid()}/fd")
"""Paths of the descriptors of this process, and folders of them."""

_select: Final[Any] = select
"""The module, for calls that type checkers do not find on every platform."""

WRITING: Final[int] = (
    os.O_WRONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
)
"""Flags that open a report without waiting."""


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


def _descriptor(path: Path) -> int | None:
    """Return the number of the descriptor of this process that a path names, itself or by links: /dev/stdout."""
    for _ in range(LINKS):
        if str(path) in STREAMS or path.parent.as_posix() in DESCRIPTORS:
            name = STREAMS.get(str(path), path.name)
            return int(name) if name.isdecimal() else None
        if not path.is_symlink():
            return None
        path = Path(os.path.normpath(path.parent / path.readlink()))
    return None


def _stream(path: Path) -> int:
    """Open what a path leads to if that is a pipe, a terminal or a device, without waiting for a reader; -1 for a file.

    Raises OSError, with ENXIO for a pipe without a reader.
    """
    number = _descriptor(path)
    if number is None and (not os.path.exists(path) or stat.S_ISREG(path.stat().st_mode)):  # noqa: PTH110
        return -1
    if number is None and not any(kind(path.stat().st_mode) for kind in (stat.S_ISFIFO, stat.S_ISCHR)):
        raise OSError(errno.EINVAL, "no file, pipe or terminal")
    fd = os.dup(number) if number is not None else os.open(path, WRITING)
    try:
        _require_writable(fd)
        if hasattr(select, "poll") and _events(fd, 0) & _select.POLLERR:  # a pipe without a reader
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    except OSError:
        os.close(fd)
        raise
    return fd


def _require_writable(fd: int) -> None:
    """Raise OSError for a descriptor that is open for reading alone; a full device has its turn when it is written."""
    try:
        os.write(fd, b"")
    except OSError as e:
        if e.errno == errno.EBADF:
            raise


def _events(fd: int, seconds: float) -> int:
    """Return what has happened to a stream, or happens in this time: it can be written, its reader is gone."""
    poll = _select.poll()
    poll.register(fd, _select.POLLOUT)
    return int(next((events for _, events in poll.poll(seconds * 1000)), 0))


class ReportFile:
    """The file of `--report`. It is checked before the work begins, so that it is not the work that fails.

    A file is replaced as a whole, as outputs are; links to files are replaced too. A pipe, a terminal or a descriptor
    such as /dev/fd/3 is opened at once and written to at the end; a file whose folder allows no new file as well.
    """

    def __init__(self, text: str, flag: str = "--report") -> None:
        """Raise UsageError if a report cannot be written there."""

        self._text, self.path, self._flag, self._spares = text, expand(text), flag, False
        if text == "-":
            raise UsageError(
                "the report is a file, not a stream", f"{flag} -", "give its name, or print the report with --json"
            )
        if is_folder(self.path):
            raise self._elsewhere("the report cannot be written there: it is a folder")
        try:
            self._fd = _stream(self.path)
            self._streams, self._written = self._fd >= 0, False
            present = exists(self.path)
            if not self._streams and not (
                is_folder(self.path.parent)
                and os.access(self.path.parent, os.W_OK)
                and (not present or os.access(self.path, os.W_OK))
            ):
                self._open(0 if present else os.O_CREAT)
        except OSError as e:
            if e.errno == errno.ENXIO and self.path.is_fifo():
                raise UsageError("the pipe has no reader", f"{flag} {text}",
                                 "start its reader first, or choose a file") from e  # fmt: skip
            raise self._elsewhere(f"the report cannot be written there: {e.strerror}") from e

    def _elsewhere(self, what: str, *, is_other: bool = False) -> UsageError:
        """Return the error about a file that no report can be, with a name in the current folder that can. `is_other`:
        whether it is another file of the command, whose name stays."""
        endings, _ = KINDS[self._flag]
        ending = self.path.suffix if self.path.suffix in endings else endings[0]
        name = f"{self.path.stem or 'report'}{ending}"
        name = f"report{ending}" if is_other or is_folder(self.path) or exists(name) else name
        error = UsageError(what, f"{self._flag} {self._text}", f"choose another file, such as {self._flag} {name}")
        return error if is_other else error.instead(self._text, name)

    def _open(self, flags: int) -> None:
        """Write to the file itself from now on."""
        self._fd = os.open(self.path, WRITING | flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    def close(self) -> None:
        """Close it; what was written to a file is on the disk."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def protect(self, inputs: Iterable[Path], outputs: Iterable[Path] = ()) -> None:
        """Raise UsageError if the report would be written over one of these, or over a file of another kind."""
        for role, paths in (("an input", inputs), ("an output", outputs)):
            if any(self._hits(path, new=role == "an output") for path in paths):
                raise self._elsewhere(f"the report would be written over {role}", is_other=True)
        start = self._start().lstrip() if self.path.is_file() and not self._streams else b""
        if start and not start.startswith(KINDS[self._flag][1]):
            raise self._elsewhere("a file of another kind is there")
        self._spares = True

    def _hits(self, path: Path, *, new: bool) -> bool:
        """Return whether the report is this file, or inside this folder: anywhere in a new one, else over a file."""
        from ..disk.volumes import same

        here, other, present = real_path(self.path), real_path(path), self.path.exists()
        inside = other in here.parents and (new or present)
        return here == other or inside or (present and same(self.path, path))

    def begin(self) -> None:
        """Empty the report of an earlier run, which would be taken for that of this one if it is killed."""
        if self._fd < 0 and self.path.is_file():
            try:
                self.put(b"")
            except MergeError:  # such as a file that is mounted by itself
                self._begin_in_place(0)
        elif self._fd >= 0 and not self._streams:
            self.replace("")

    def begin_lines(self) -> None:
        """Open the report for `append`. Lines of earlier runs stay; a link is replaced."""
        if self._fd < 0:
            if self.path.is_symlink() or not self.path.exists():
                self.put(b"")
            self._begin_in_place(os.O_APPEND)

    def _begin_in_place(self, flags: int) -> None:
        try:
            self._open(flags)
        except OSError as e:
            raise self._elsewhere(f"the report cannot be written there: {e.strerror}") from e

    def fail(self, e: BaseException) -> None:
        """Report a failure, unless something else than a report is there, or may get there: an input, the output."""
        with suppress(OSError):
            if self._streams:
                ours = not self._written
            else:
                ours = self._is_report() if self.path.is_file() else self._spares and not self.path.exists()
            if ours:
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
        self._report_failure(line, self.put)

    def append(self, line: str) -> None:
        """Add a line; it is on the disk on return."""
        self._report_failure(line, self._write)

    def _report_failure(self, line: str, put: Callable[[bytes], None]) -> None:
        try:
            put((line and line + "\n").encode(errors=ESCAPED))
        except (OSError, MergeError) as e:
            where = one_line(str(self.path))
            print(f"warning: the report could not be written: {cause(e)} ({where})", file=sys.stderr)  # noqa: T201

    def put(self, content: bytes) -> None:
        """Make this all of the file; OSError or MergeError if that fails."""
        if self._fd < 0:
            from ..disk.publish import put_file

            put_file(self.path, content)
            return
        if not self._streams:
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
        self._write(content)

    def _write(self, content: bytes) -> None:
        """Write to what is open."""
        self._written = self._written or bool(content)
        if self._streams:
            sys.stdout.flush()  # the stream may be the same
        left = memoryview(content)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                self._wait()
        if not self._streams:
            os.fsync(self._fd)

    def _wait(self) -> None:
        """Wait until the reader of a full pipe has read some of it; OSError if it reads nothing."""
        if not _events(self._fd, READER_SECONDS):
            raise OSError(errno.ETIMEDOUT, "its reader does not read")


@contextmanager
def reporting(text: str | None) -> Iterator[ReportFile | None]:
    """Give the block the file for its report, if one is wanted; report a failure of the block there too."""
    file = None if text is None else ReportFile(text)
    try:
        yield file
    except BaseException as e:
        if file is not None:
            file.fail((isinstance(e, Exception) and as_resource_error(e)) or e)
        raise
    finally:
        if file is not None:
            file.close()
