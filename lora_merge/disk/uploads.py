"""Outputs of other machines: a local copy is written and proven like any output, and is then uploaded.

The path of a local copy is below a folder `addresses.UPLOADS`, and is that of an address. `replacing` hands the
finished copy to the sink of that address in place of a rename, and removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ..addresses import UPLOADS
from ..errors import UsageError
from ..progress import Progress
from ..text import Note


class Sink(Protocol):
    """A kind of place that outputs are uploaded to."""

    def card_of(self, target: Path) -> Path | None:
        """Return the path of the model card that an output file has unless its job has none; None: as on a disk."""

    def check(self, target: Path, inputs: Sequence[Path], *, overwrite: bool, contents: Sequence[str] | None) -> None:
        """Raise MergeError unless an output may be uploaded. `contents`: the files of a folder; None: it is a file."""

    def send(
        self, copy: Path, target: Path, card: bytes | None, *, overwrite: bool, progress: Progress
    ) -> Sequence[Note]:  # fmt: skip
        """Upload a local copy and prove the upload; return notes on it. After a failure nothing of it is left there,
        but for what the error names."""


_finders: list[Callable[[Path], Sink | None]] = []
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
    if (sink := sink_of(target)) is None:
        return False
    try:
        sink.check(target, (), overwrite=False, contents=contents)
    except UsageError:
        return True
    return False


def take_card(path: Path, content: bytes) -> bool:
    """Keep the card next to a local copy for its upload; return whether the path is one of a local copy's card."""
    if sink_of(path) is None:
        return False
    with _lock:
        _cards[path] = content
    return True


def upload(sink: Sink, copy: Path, target: Path, *, overwrite: bool, progress: Progress) -> None:
    """Upload a local copy, with its card."""
    with _lock:
        card = _cards.pop(sink.card_of(target) or target.with_suffix(".md"), None)
    notes = sink.send(copy, target, card, overwrite=overwrite, progress=progress)
    with _lock:
        _notes[target] = notes


def upload_notes(target: Path) -> Sequence[Note]:
    """Return what a report says of the upload of an output; nothing for one of this machine."""
    with _lock:
        return _notes.pop(target, ())
