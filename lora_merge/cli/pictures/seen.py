"""The text of `inspect` and `compare`: tables and pictures on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from ...text import Lines
from ...viewing.compare import compare_rows
from ...viewing.text import match_rows, rows
from ...viewing.words.rows import Fact
from ..look import colored, console, grid, has, show, show_whole, styled, text
from ..text import put

if TYPE_CHECKING:
    from rich.text import Text

GAP: Final = 2  # columns between a name and its value
WIDEST: Final = 200


def show_file(facts: Mapping[str, Any], *, again: bool = False) -> None:
    """Say what a file is; `again`: only how its adapter fits, as the base was described before."""
    match, pictured = facts.get("match"), styled(sys.stdout)
    told = match_rows(match, pictured=pictured) if again and match else rows(facts, pictured=pictured)
    _show(told, facts) if pictured else put(Lines.of(map(str, told)))


def show_comparison(found: Mapping[str, Any]) -> None:
    """Say where two files differ."""
    pictured = styled(sys.stdout)
    told = compare_rows(found, pictured=pictured)
    _show(told, found) if pictured else put(Lines.of(map(str, told)))


def _in_columns(row: Fact, width: int) -> str:
    """Return a row of a table; where it is too long, its first cell is shortened."""
    from .drawn import shortened

    left, name = width - len(row.right) - 4, row.value
    if row.right and len(name) > left > 8:
        name = shortened(name.strip(), left).ljust(left)
    return f"  {name}  {row.right}".rstrip()


def _show(told: Iterable[Fact], found: Mapping[str, Any]) -> None:
    """Print lines as a table of names and values, and below it the pictures of the page."""
    from ...viewing.pages.page import content
    from .drawn import SHADES, bars, heat_map

    width, before = min(console(sys.stdout).width, WIDEST), ""
    shown: list[tuple[Text, Text]] = []
    every = [*told]
    room = width - max((len(row.name) for row in every), default=0) - GAP
    for row in every:
        name = "" if row.name == before else row.name
        shown.append((text(name), text(row.value) if row.name else text(_in_columns(row, room), "dim")))
        before = row.name or before
    page = content(dict(found))
    for whole, some in groupby(shown, lambda row: _longest(row[1].plain) > room):
        if whole:
            show_whole(some, width, width - room)
        else:
            show(grid(some, width - room - GAP))
    shades = "" if colored() else next(s for s in SHADES if has(sys.stdout, s))
    for one in page["heat_maps"]:
        show("", *heat_map(one, width, shades))
    for one in page["bars"]:
        show("", *bars(one, width, shades))


def _longest(value: str) -> int:
    """Return the length of the longest word."""
    return max(map(len, value.split()), default=0)
