"""The text of `inspect` and `compare`: tables and pictures on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, Final

from ...text import Lines
from ...viewing.compare import compare_lines
from ...viewing.text import lines, match_lines
from ..look import colored, console, grid, has, show, show_whole, styled, text
from ..text import put

NAME: Final = 13  # columns of a name in plain lines
NAMES: Final = ("why", "strength", "effective", "patterns", "changes", "change", "before that")
"""Names that stand two columns to the right in plain lines."""
GAP: Final = 2  # columns between a name and its value
WIDEST: Final = 200


def show_file(facts: Mapping[str, Any], *, again: bool = False) -> None:
    """Say what a file is; `again`: only how its adapter fits, as the base was described before."""
    match = facts.get("match")
    if not styled(sys.stdout):
        put(Lines.of(match_lines(facts["match"]) if again and match else lines(facts)))
        return
    told = dict(facts)
    if facts.get("weights"):
        told["weights"] = {**facts["weights"], "blocks": {}}
    if facts.get("sizes"):
        told["sizes"] = {**facts["sizes"], "blocks": {}}
    if match and match.get("numbers"):
        told["match"] = {**match, "numbers": {**match["numbers"], "blocks": {}}}
    _show(match_lines(told["match"]) if again and match else lines(told), facts)


def show_comparison(found: Mapping[str, Any]) -> None:
    """Say where two files differ."""
    if styled(sys.stdout):
        _show(compare_lines(found, blocks=False), found)
    else:
        put(Lines.of(compare_lines(found)))


def _row(line: str, width: int) -> str:
    """Return a row of a table of plain lines; where it is too long, its first cell is shortened, and its second one is
    at the right."""
    from .drawn import shortened

    name, _, value = line.strip().rpartition("  ")
    left = width - len(value) - 4
    return f"  {shortened(name.strip(), left).ljust(left)}  {value}" if name and len(name) > left > 8 else line


def _parted(line: str) -> tuple[str, str]:
    """Return a plain line as a name and a value; a row of a table has no name."""
    at = line.find(" ", NAME)  # where a name ends, as `line` writes it
    name, value = line[:at].strip(), line[at:].strip()
    return ("", line) if line.startswith("  ") and name not in NAMES else (name, value)


def _show(told: Iterable[str], found: Mapping[str, Any]) -> None:
    """Print lines as a table of names and values, and below it the pictures of the page."""
    from ...viewing.pages.page import content
    from .drawn import SHADES, bars, heat_map

    width, before = min(console(sys.stdout).width, WIDEST), ""
    parted = [_parted(one) for one in told]
    room = width - max((len(name) for name, _ in parted), default=0) - GAP
    rows = []
    for name, value in parted:
        value = value if name else _row(value, room)
        rows.append((text("" if name == before else name), text(value, "" if name else "dim")))
        before = name or before
    page = content(dict(found))
    for whole, some in groupby(rows, lambda row: _longest(row[1].plain) > room):
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
