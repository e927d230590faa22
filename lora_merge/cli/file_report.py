"""The text of `inspect` and `compare`: tables and pictures on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from ..text import Lines
from ..viewing.compare import compare_rows
from ..viewing.facts import Fact
from ..viewing.text import match_rows, rows
from .reports import put
from .terminal import colored, console, grid, has, show, show_whole, styled, text

if TYPE_CHECKING:
    from rich.text import Text

GAP: Final = 2  # columns between a name and its value
BETWEEN: Final = 4  # columns before and between the cells of a table
COPIED: Final = frozenset({"file", "adapter", "hash", "undo", "A", "B"})
"""Names of facts whose words are copied: they stay whole where others are broken."""
WIDEST: Final = 200


def show_file(facts: Mapping[str, Any], *, again: bool = False) -> None:
    """Say what a file is; `again`: only how its adapter fits, as the base was described before."""
    match, pictured = facts.get("match"), styled(sys.stdout)
    lines = match_rows(match, pictured=pictured) if again and match else rows(facts, pictured=pictured)
    _show(lines, facts) if pictured else put(Lines.of(map(str, lines)))


def show_comparison(comparison: Mapping[str, Any]) -> None:
    """Say where two files differ."""
    pictured = styled(sys.stdout)
    lines = compare_rows(comparison, pictured=pictured)
    _show(lines, comparison) if pictured else put(Lines.of(map(str, lines)))


def _in_columns(row: Fact, width: int) -> Text:
    """Return a row of a table. Where it is too long, its first cell is shortened, and if that is not enough the second
    one goes on below itself."""
    from .charts import shortened

    left, name = width - len(row.right) - BETWEEN, row.value
    if not row.right or len(name) <= left:
        return text(f"  {name}  {row.right}".rstrip(), "dim")
    left = max(left, min(len(name), width // 3))
    name = shortened(name.strip(), left).ljust(left)
    first, *rest = textwrap.wrap(row.right, max(width - left - BETWEEN, 1), break_on_hyphens=False)
    lines = [f"  {name}  {first}", *(" " * (left + BETWEEN) + words for words in rest)]
    return text("").append("\n").join(text(line, "dim") for line in lines)


def _show(facts_shown: Iterable[Fact], facts: Mapping[str, Any]) -> None:
    """Print lines as a table of names and values, and below it the pictures of the page."""
    from ..viewing.pages.page import content
    from .charts import SHADES, bars, heat_map

    width, before = min(console(sys.stdout).width, WIDEST), ""
    shown: list[tuple[Text, Text]] = []
    every = [*facts_shown]
    copied = [row.name in COPIED for row in every]
    room = width - max((len(row.name) for row in every), default=0) - GAP
    for row in every:
        name = "" if row.name == before else row.name
        shown.append((text(name), text(row.value) if row.name else _in_columns(row, room)))
        before = row.name or before
    page = content(dict(facts))
    longer = (whole and _longest(row[1].plain) > room for whole, row in zip(copied, shown, strict=True))
    for whole, some in groupby(zip(longer, shown, strict=True), lambda pair: pair[0]):
        lines = [row for _, row in some]
        if whole:
            show_whole(lines, width, width - room)
        else:
            show(grid(lines, width - room - GAP))
    shades = "" if colored() else next(s for s in SHADES if has(sys.stdout, s))
    for chart in page["heat_maps"]:
        show("", *heat_map(chart, width, shades))
    for chart in page["bars"]:
        show("", *bars(chart, width, shades))


def _longest(value: str) -> int:
    """Return the length of the longest word."""
    return max(map(len, value.split()), default=0)
