"""A page stays below 5 MB: long lists are cut, and a note names what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from ...text import CONTROLS, json_text

MOST_PAGE_BYTES: Final = 5_000_000
"""The bytes of a page that browsers of phones open at once."""

LONGEST_TEXT: Final = 2000
"""Characters of one text; a stranger's metadata may hold megabytes."""


class Level(NamedTuple):
    """The share of the content that is kept."""

    rows: int  # of each list
    pictures: bool  # spectra and histograms


DETAIL_LEVELS: Final = (
    Level(10**9, pictures=True),
    *(Level(rows, pictures=False) for rows in (10**9, 20_000, 10_000, 5000, 2000, 1000, 500, 200, 100, 50, 20, 10)),
)


def encoded(content: Mapping[str, Any]) -> str:
    """Return content as JSON that is safe in HTML."""
    return json_text(content).replace("<", "\\u003c")


def fitted(content: Mapping[str, Any], room: int) -> str:
    """Return content as JSON of at most `room` bytes, as much of it as fits, with a note on what is left out."""
    short, text = {**_cut(content), "image": content.get("image", "")}, ""
    for level in DETAIL_LEVELS:
        left: list[str] = []
        shorter = _shortened(short, level, left)
        if left:
            most = MOST_PAGE_BYTES // 10**6
            note = f"This page stays below {most} MB. Left out: {'; '.join(left)}. The JSON (--json) has all."
            shorter["notes"] = [note, *shorter["notes"]]
        text = encoded(shorter)
        if len(text) <= room and len(text.encode(errors="replace")) <= room:
            break
    return text


def _cut(value: Any) -> Any:
    """Return the same with long texts cut, and with what is hidden, or turns the direction of other texts, escaped."""
    if isinstance(value, str):
        value = value.translate(CONTROLS)
        return (
            value
            if len(value) <= LONGEST_TEXT
            else f"{value[:LONGEST_TEXT]}… ({len(value) - LONGEST_TEXT} more characters)"
        )
    if isinstance(value, Mapping):
        return {_cut(name): _cut(item) for name, item in value.items()}
    return [_cut(item) for item in value] if isinstance(value, list | tuple) else value


def _shortened(content: Mapping[str, Any], level: Level, left: list[str]) -> dict[str, Any]:
    """Return the content of a level; `left` gets what is left out, in words."""
    shorter = dict(content)
    if content["image"] and not level.pictures:
        left.append("the preview picture")
        shorter["image"] = ""
    for name in ("warnings", "notes", "summary", "chips"):
        shorter[name] = _first(content[name], level.rows, name, left)
    if not level.pictures and any("details" in item for item in content["tables"]):
        left.append("what the rows of tables open to")
        content = {**content, "tables": [{k: v for k, v in t.items() if k != "details"} for t in content["tables"]]}
    for name in ("tables", "bars", "curves"):
        shorter[name] = [{**item, "rows": _first(item["rows"], level.rows, f"rows of “{item['title']}”", left)}
                      for item in content[name]]  # fmt: skip
    shorter["heat_maps"] = [_map(item, level, left) for item in content["heat_maps"]]
    return shorter


def _first(rows: list[Any], count: int, what: str, left: list[str]) -> list[Any]:
    if len(rows) > count:
        left.append(f"{len(rows) - count:,} of {len(rows):,} {what}")
    return rows[:count]


def _map(chart: Mapping[str, Any], level: Level, left: list[str]) -> dict[str, Any]:
    """Return a heat map with the names of some weights of each cell. The colours are still those of all."""
    title = f"“{chart['title']}”"
    cells = _first(chart["cells"], level.rows, f"cells of {title}", left)
    each = max(1, level.rows // max(len(cells), 1))
    cells = [{**cell, "names": cell["names"][:each]} for cell in cells]
    names = [name for cell in cells for name in cell["names"]]
    if len(names) < len(chart["weights"]):
        total = len(chart["weights"])
        left.append(f"{total - len(names):,} of {total:,} weights that the cells of {title} name")
    weights = {name: chart["weights"][name] for name in names}
    if not level.pictures and any("spectrum" in w or "histogram" in w for w in weights.values()):
        left.append(f"spectra and histograms of {title}")
        weights = {name: dict(_plain(weight)) for name, weight in weights.items()}
    rows = max((cell["row"] for cell in cells), default=-1) + 1
    return {**chart, "rows": chart["rows"][:rows], "cells": cells, "weights": weights}


def _plain(weight: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((key, value) for key, value in weight.items() if key not in ("spectrum", "histogram"))
