"""The text of `inspect` and `compare`: tables and pictures on a terminal, plain lines everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...text import Lines
from ...viewing.compare import compare_lines
from ...viewing.text import lines, match_lines
from ..look import colored, console, grid, has, show, styled, text
from ..text import echo

NAME: Final = 13  # columns of a name in plain lines
NAMES: Final = ("strength", "effective", "changes", "change", "before that")
"""Names that stand two columns to the right in plain lines."""
LEFT: Final = 22  # columns left of a row of a table, at most
WIDEST: Final = 200


def show_file(facts: Mapping[str, Any], *, again: bool = False) -> None:
    """Say what a file is; `again`: only how its adapter fits, as the base was described before."""
    match = facts.get("match")
    if not styled(sys.stdout):
        echo(Lines.of(match_lines(facts["match"]) if again and match else lines(facts)))
        return
    told = dict(facts)
    if facts.get("weights"):
        told["weights"] = {**facts["weights"], "blocks": {}}
    if match and match.get("numbers"):
        told["match"] = {**match, "numbers": {**match["numbers"], "blocks": {}}}
    _show(match_lines(told["match"]) if again and match else lines(told), facts)


def show_comparison(found: Mapping[str, Any]) -> None:
    """Say where two files differ."""
    if styled(sys.stdout):
        _show(compare_lines({**found, "blocks": {}}), found)
    else:
        echo(Lines.of(compare_lines(found)))


def _row(line: str, width: int) -> str:
    """Return a row of a table of plain lines, its first cell shortened where the row is too long."""
    from .drawn import shortened

    name, _, value = line.strip().rpartition("  ")
    left = width - len(value) - 2
    return f"  {shortened(name.strip(), left) if len(name) > left else name}  {value}" if name and left > 8 else line


def _show(told: Iterable[str], found: Mapping[str, Any]) -> None:
    """Print lines as a table of names and values, and below it the pictures of the page."""
    from ...viewing.pages.page import content
    from .drawn import SHADES, bars, heat_map

    width, rows, before = min(console(sys.stdout).width, WIDEST), [], ""
    for one in told:
        at = one.find(" ", NAME)  # where a name ends, as `line` writes it
        name, value = one[:at].strip(), one[at:].strip()
        below = one.startswith("  ") and name not in NAMES
        name, value = ("", _row(one, width - LEFT)) if below else (name, value)
        rows.append((text("" if name == before else name), text(value, "dim" if below else "")))
        before = name or before
    page = content(dict(found))
    show(grid(rows))
    for one in page["heat_maps"]:
        show("", *heat_map(one, width, "" if colored() else next(s for s in SHADES if has(sys.stdout, s))))
    for one in page["bars"]:
        show("", *bars(one, width))
