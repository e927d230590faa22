"""Outputs of other machines: a local copy is written and proven like any output, and is uploaded.

The path of a local copy is below a folder `addresses.UPLOADS`, and is that of an address. Its upload begins with it:
what is final of its files is sent while the rest is written and proven. In place of a rename, `replacing` ends the
upload, which gives the files their names there, and removes the local copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..addresses import UPLOADS
from ..errors import MergeError
from ..progress import Progress
from ..text import Note, listed


class OutputUpload(Protocol):
    """The upload of a local copy that is being written."""

    def ready(self, name: str, size: int, end: int) -> None:
        """Take note that the first `end` bytes of a file of this size are final, so they may be sent.

        `name`: the file's in an output folder; "" for an output file. MergeError if what was sent before has failed.
        """

    def finish(self, card: bytes | None) -> Sequence[Note]:
        """Send the rest of the finished local copy, give all files their names, and prove the upload; return notes."""

    def stop(self) -> Sequence[str]:
        """End the upload, and remove what was uploaded; return what may be left, for people."""


class Sink(Protocol):
    """A kind of place that outputs are uploaded to."""

    def card_of(self, target: Path) -> Path | None:
        """Return the path of the model card that an output file has unless its job has none; None: as on a disk."""

    def check(self, target: Path, inputs: Sequence[Path], *, overwrite: bool, contents: Sequence[str] | None) -> bool:
        """Return whether an upload replaces something; MergeError unless it may be made.

        `contents`: the files of a folder; None: it is a file.
        """

    def begin(self, copy: Path, target: Path, *, overwrite: bool, progress: Progress) -> OutputUpload:
        """Return the upload of a local copy that is being written."""


_finders: list[Callable[[Path], Sink | None]] = []
_uploads: dict[Path, OutputUpload] = {}
"""Local copy under its temporary name → its upload."""
_cards: dict[Path, bytes] = {}
_notes: dict[Path, Sequence[Note]] = {}
_lock = threading.Lock()


def find_sinks_with(find: Callable[[Path], Sink | None]) -> None:
    """Let a function give the sink of the local copy at a path."""
    _finders[:] = [find]


def sink_of(path: Path) -> Sink | None:
    """Return the sink of the output whose local copy has a path; None for an output of this machine."""
    return _finders[0](path) if _finders and UPLOADS in path.parts else None


def is_taken(target: Path, contents: Sequence[str] | None) -> bool:
    """Return whether an upload would replace something: a repository may have other files alone. False for an output of
    this machine. `contents`: as for `Sink.check`."""
    sink = sink_of(target)
    return sink is not None and sink.check(target, (), overwrite=True, contents=contents)


def take_card(path: Path, content: bytes) -> bool:
    """Keep the card next to a local copy for its upload; return whether the path is one of a local copy's card."""
    if sink_of(path) is None:
        return False
    with _lock:
        _cards[path] = content
    return True


@contextmanager
def uploading(copy: Path, target: Path, *, overwrite: bool, progress: Progress) -> Iterator[bool]:
    """Upload the local copy that the block writes, with its card. If that fails, nothing of the upload is left, but for
    what the error names. Yields False for an output of this machine."""
    if (sink := sink_of(target)) is None:
        yield False
        return
    _uploads[copy] = upload = sink.begin(copy, target, overwrite=overwrite, progress=progress)
    try:
        yield True
        with _lock:
            card = _cards.pop(sink.card_of(target) or target.with_suffix(".md"), None)
        notes = upload.finish(card)
    except BaseException as e:
        remains = upload.stop()
        if isinstance(e, MergeError) and remains:  # the same error: the other jobs of a group go on
            where, left = e.where, listed(remains)
            e.reword(lambda text: f"{text}; may be left there: {left}" if text == where else text)
        raise
    finally:
        del _uploads[copy]
    with _lock:
        _notes[target] = notes


def upload_of(copy: Path) -> OutputUpload | None:
    """Return the upload of a local copy with this temporary name; None for an output of this machine."""
    return _uploads.get(copy)


def upload_notes(target: Path) -> Sequence[Note]:
    """Return what a report says of the upload of an output; nothing for one of this machine."""
    with _lock:
        return _notes.pop(target, ())
