"""Colours, tables and panels on a terminal, by Rich. Pipes get plain text, and nothing here is imported for them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, get_args

from ..errors import UsageError
from ..paths import exists
from ..text import one_line
from .stdio import commanding

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

Color: TypeAlias = Literal["auto", "always", "never"]

COLORS: Final = get_args(Color)
COLOR_FLAG: Final = "--color"
DEBUG: Final = "--debug"

EVERYWHERE: Final = (
    (f"{COLOR_FLAG} <{'|'.join(COLORS)}>", "Use colours and tables; auto: on a terminal without NO_COLOR."),
    (DEBUG, "Print tracebacks."),
)
"""The options of every command, as its help lists them. They may be anywhere on the command line."""

PANEL_COLUMNS: Final = 100
"""Columns of a panel at most; longer lines are hard to read."""

INSET: Final = 2
"""Columns by which the rows of a panel are moved to the right."""

COLUMN_GAP: Final = 2  # columns between a name and its value


REFLOWING: Final = (
    "VTE_VERSION", "WT_SESSION", "KITTY_WINDOW_ID", "KONSOLE_VERSION", "ALACRITTY_WINDOW_ID", "WEZTERM_PANE",
    "ITERM_SESSION_ID", "GHOSTTY_RESOURCES_DIR", "VSCODE_INJECTION",
)  # fmt: skip
"""Variables of terminals that break long lines again when their width changes."""

CUTTING_TERMINALS: Final = ("XTERM_VERSION", "STY")
"""Variables of terminals that cut such lines, xterm and GNU screen. They count first, as they run inside others."""


def without_global_options(args: Sequence[str], *, checked: bool) -> list[str]:
    """Return the arguments without the options of every command, and without the name of the program if it is typed
    twice.

    Raises UsageError where `--color` lacks a value, if that is to be `checked`: a shell completes words one by one.
    """
    rest, at = list[str](), int([*args[:1]] in (["lora-merge"], ["lora_merge"]) and not exists(args[0]))
    while at < len(args):
        name, equals, value = args[at].partition("=")
        if args[at] == "--":
            return [*rest, *args[at:]]
        if name != COLOR_FLAG:
            rest += [args[at]] if args[at] != DEBUG else []
        elif not equals:
            at, value = at + 1, args[at + 1] if at + 1 < len(args) else ""
        if checked and name == COLOR_FLAG and value not in COLORS:
            what = f"{value[:40]!r} is not a value of {COLOR_FLAG}" if value else f"{COLOR_FLAG} has no value"
            raise UsageError(what, COLOR_FLAG, f"use one of {', '.join(COLORS)}")
        at += 1
    return rest


def before_dashes(args: Sequence[str]) -> Sequence[str]:
    """Return the arguments before `--`, behind which no word is an option."""
    return args[: args.index("--")] if "--" in args else args


def color_choice() -> str:
    """Return the value of `--color` on the command line."""
    for word, after in pairwise([*before_dashes(sys.argv), ""]):
        name, _, value = word.partition("=")
        if name == COLOR_FLAG:
            return value or after
    return "auto"


def debugging() -> bool:
    """Return whether tracebacks are wanted."""
    return DEBUG in before_dashes(sys.argv)


def styled(stream: Any) -> bool:
    """Return whether a stream gets tables: a terminal does, and whatever there is with `--color always`."""
    return color_choice() == "always" or (stream.isatty() and os.environ.get("TERM") != "dumb")


def colored() -> bool:
    """Return whether tables and pictures have colours."""
    return color_choice() == "always" or (color_choice() != "never" and not os.environ.get("NO_COLOR"))


class _RichStream:
    """A stream for Rich, whose texts may command the terminal; the names in them are escaped before."""

    def __init__(self, stream: Any) -> None:
        self.write, self.flush, self.isatty = commanding(stream), stream.flush, stream.isatty
        self.encoding = getattr(stream, "encoding", None) or "ascii"


def columns(stream: Any) -> int:
    """Return how wide a stream's terminal is now; where it is none, COLUMNS or 80."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    except (OSError, ValueError):  # a file, a pipe, or nothing with a descriptor
        return shutil.get_terminal_size().columns


def reflows() -> bool:
    """Return whether this is a terminal that breaks long lines again when it gets another width; False if not known."""
    environment = os.environ
    if environment.get("TMUX") and environment.get("TERM", "").startswith(("tmux", "screen")):
        return True
    return not any(map(environment.get, CUTTING_TERMINALS)) and any(map(environment.get, REFLOWING))


def console(stream: Any) -> Console:
    """Return a console of Rich on a stream, as wide as the terminal; with colours where they are wanted."""
    from rich.console import Console

    plain, width = not colored(), columns(stream)
    return Console(
        file=cast("IO[str]", _RichStream(stream)), width=width, force_terminal=not plain, no_color=plain,
        color_system=None if plain else "auto", highlight=False, markup=False, emoji=False,
    )  # fmt: skip


def prepare(stream: Any) -> None:
    """Import what `show` needs for a stream. On a busy machine that takes a second, in which nothing else is shown."""
    if styled(stream):
        from rich import box, console, constrain, padding, table, text  # noqa: F401


def show(*shown: RenderableType, err: bool = False) -> None:
    """Print tables, panels and texts of Rich."""
    stream = sys.stderr if err else sys.stdout
    target = console(stream)
    for item in shown:
        target.print(item)
    stream.flush()


def text(content: object, style: str = "") -> Text:
    """Return a text whose control characters are escaped."""
    from rich.text import Text

    return Text(one_line(str(content)), style)


def mark(name: Literal["done", "failed", "note"], stream: Any | None = None) -> str:
    """Return ✓, ✗ or !, or plain letters if the terminal lacks these."""
    letters = {"done": ("✓", "OK"), "failed": ("✗", "X"), "note": ("!", "!")}[name]
    return letters[0 if has(stream or sys.stdout, letters[0]) else 1]


def has(stream: Any, letters: str) -> bool:
    """Return whether a stream can show these letters."""
    try:
        letters.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def cell(content: object) -> RenderableType:
    """Return a text of Rich as it is, and anything else as an escaped text."""
    from rich.text import Text

    return content if isinstance(content, Text) else text(content)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", right: Iterable[int] = ()
) -> Any:
    """Return a table; `right`: numbers of the columns that are aligned at the right."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    numbers = set(right)
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for n, name in enumerate(columns):
        drawn.add_column(text(name), justify="right" if n in numbers else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(cell, row))
    return Group(text(title, "bold"), drawn) if title else drawn


def grid(rows: Iterable[Sequence[object]], wide: int = 0) -> Any:
    """Return rows whose first cells are names; `wide`: the least number of columns of a name."""
    from rich.table import Table

    lines = list(rows)
    drawn = Table.grid(padding=(0, 2))
    drawn.add_column(style="bold", no_wrap=True, min_width=wide)
    for _ in range(max(map(len, lines), default=1) - 1):
        drawn.add_column(overflow="fold")
    for row in lines:
        drawn.add_row(*map(cell, row))
    return drawn


def panel(title: str, rows: Iterable[Sequence[object]], style: str = "green") -> Any:
    """Return a title and such rows below it, of at most 100 columns."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.padding import Padding

    body = Constrain(Padding(grid(rows), (0, 0, 0, INSET)), min(PANEL_COLUMNS, columns(sys.stdout)))
    return Group(text(title, f"bold {style}"), body)


def show_whole(rows: Iterable[tuple[Text, Text]], width: int, indent: int) -> None:
    """Print rows of a grid that hold a word longer than the room, such as a hash that is to be copied: it stays whole
    on a line of its own, and further left if the width requires that."""
    from rich.text import Text

    target = console(sys.stdout)
    for name, value in rows:
        start = Text(name.plain, "bold")
        for words in _broken(value.plain, width - indent):
            left = max(min(indent, width - len(words)), 0)
            if len(start) > max(left - 2, 0):  # the name has a line of its own
                target.print(start)
                start = Text()
            start.pad_right(left - len(start))
            target.print(Text.assemble(start, (words, value.style)), soft_wrap=True)
            start = Text()
    sys.stdout.flush()


def show_error(words: str) -> None:
    """Print an error, "what / where: … / fix: …", in colours, broken between words."""
    from rich.text import Text

    first, *rest = words.split("\n")
    target = console(sys.stderr)
    sign = f"{mark('failed', sys.stderr)} error: "
    for row in _broken(first, target.width - INDENT):
        target.print(Text.assemble((sign.ljust(INDENT), "bold red"), (row, "bold")), soft_wrap=True)
        sign = ""
    for line in rest:
        head, colon, tail = line.partition(":")
        known = head.strip() if colon and head in ("  where", "  fix") else ""
        style = {"where": "dim", "fix": "green"}.get(known, "")
        start = f"  {known}:" if known else ""
        for row in _broken((tail if known else line).strip(), target.width - INDENT):
            target.print(Text.assemble((start.ljust(INDENT), f"bold {style}"), row), soft_wrap=True)
            start = ""
    sys.stderr.flush()


INDENT: Final = 9
"""Columns of the words that begin the lines of an error."""


def _broken(words: str, width: int) -> Sequence[str]:
    """Return lines of at most so many letters; a longer word, such as a path that is to be copied, stays whole."""
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False) or ("",)


def broken(line: str, width: int) -> str:
    """Return a line of text in rows that fit; those below the first begin where the text of the first does."""
    if len(line) <= width:
        return line
    match = re.match(r"( *)([a-z]+ {2,})?", line)  # a label such as "needs    "
    start, label = match.groups("") if match else ("", "")
    return "\n".join(textwrap.wrap(
        line, width, subsequent_indent=start + (" " * len(label) or "  "), break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    ))  # fmt: skip
