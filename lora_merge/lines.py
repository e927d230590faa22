"""Escapes control characters in printed text: names of tensors, files and metadata are untrusted and may hold any.

All printed text goes through `showing.echo` or is the text of a MergeError. Both escape line ends, so that no name can
look like a line that this program has written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LINE_ENDS: Final = "\n\r"
CONTROLS: Final = {
    c: f"\\u{c:04x}"
    for c in (*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    if chr(c) not in LINE_ENDS + "\t"
}
"""Character that a terminal or an editor takes for a command, a line end or a change of direction → its JSON escape.
Line feeds, which end our own lines, and carriage returns, which progress bars need, are not among them."""

_ALL: Final = CONTROLS | {ord(c): f"\\u{ord(c):04x}" for c in LINE_ENDS}


def one_line(text: str) -> str:
    """Return the text with control characters and line ends escaped."""
    return text.translate(_ALL)


class Lines(str):
    """Text of several lines, each of which is escaped: the line feeds between them are ours."""

    @classmethod
    def of(cls, lines: Iterable[str]) -> Lines:
        """Return the lines, each escaped, joined by line feeds."""
        return cls("\n".join(map(one_line, lines)))


def shown(text: str) -> str:
    """Return the text escaped to one line; `Lines` stay as they are."""
    return text if isinstance(text, Lines) else one_line(text)
