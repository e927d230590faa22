"""Text that is shown a line at a time. Names of tensors, files and metadata come from strangers, and may hold anything.

What is printed goes through `showing.echo` or is the text of a MergeError. Both escape what would begin another line,
so that no name can look like a line of this program.
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
"""What a terminal or an editor takes for a command, a line end or another direction of writing, as JSON escapes it.
Without line feeds, which end our own lines, and carriage returns, which progress bars need."""

_ALL: Final = CONTROLS | {ord(c): f"\\u{ord(c):04x}" for c in LINE_ENDS}


def one_line(text: str) -> str:
    """Returns the text with everything escaped that would end the line."""
    return text.translate(_ALL)


class Lines(str):
    """Text of several lines that are safe one by one: the line feeds in it are ours."""

    @classmethod
    def of(cls, lines: Iterable[str]) -> Lines:
        """Returns the lines, joined."""
        return cls("\n".join(map(one_line, lines)))


def shown(text: str) -> str:
    """Returns the text on one line, but for Lines, which stay as they are."""
    return text if isinstance(text, Lines) else one_line(text)
