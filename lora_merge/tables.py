"""Tables for notebooks: what an object says of itself, as HTML."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from .lines import one_line


def html_table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """Return a table of names and values as HTML, all of it escaped."""
    cells = "".join(
        f"<tr><th style='text-align:left;vertical-align:top'>{_plain(name)}</th>"
        f"<td style='text-align:left'>{_plain(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption style='text-align:left'><b>{_plain(title)}</b></caption>{cells}</table>"


def _plain(value: Any) -> str:
    return escape(one_line(str(value)))
