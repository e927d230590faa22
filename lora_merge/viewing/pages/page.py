"""One HTML file of content, style, script and the compressed library that draws.

It stays below 5 MB: long lists are cut, and a note names what is left out.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from ...errors import UsageError
from ...text import CONTROLS, json_text, one_line
from ..json_schemas import kind_of
from .file_pages import comparison_page, file_page, files_page
from .output_pages import adapter_page, batch_page, merge_page

PAGES: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "report": merge_page, "adapter": adapter_page, "inspect": file_page, "compare": comparison_page,
}  # fmt: skip
"""Kind in the schema of a command's JSON → its page."""

LIST_PAGES: Final = {"job-report": batch_page, "inspect": files_page}
"""The same for a list of such objects."""


def content(result: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the page about JSON that a command printed; of a batch, the list of its lines."""
    if isinstance(result, Mapping):
        return PAGES[kind_of(result)](result)
    return LIST_PAGES[kind_of(result[0])](result) if result else batch_page(result)


def page(result: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML page about JSON that a command prints; UsageError without Plotly.

    Names in the JSON are a stranger's text: the content holds no `<`, and the script sets it as text.
    """
    sections = content(result)
    hashes = f"{_hash(_text('page.js'))} {_hash(plotly())}"
    parts = {"title": escape(one_line(f"{sections['title'][:LONGEST_TEXT]} · lora-merge")), "style": _text("page.css"),
             "script": _text("page.js"), "library": library(), "hashes": hashes}  # fmt: skip
    frame = _text("page.html").split("{{")
    others = sum(len(part.encode(errors="replace")) for part in (*frame, *parts.values()))
    parts["content"] = fitted(sections, MOST_PAGE_BYTES - others)
    return frame[0] + "".join(parts[name] + rest for name, _, rest in (part.partition("}}") for part in frame[1:]))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return how the policy of a page names a script that may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def library() -> str:
    """Return plotly.js, compressed, in base64."""
    return base64.b64encode(gzip.compress(plotly().encode(), 9, mtime=0)).decode()


def drawable() -> bool:
    """Return whether pages can be drawn here: whether Plotly is installed."""
    return find_spec("plotly") is not None


def plotly() -> str:
    """Return plotly.js; UsageError where Plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as e:
        raise UsageError("pages and plots need Plotly", "--html", "pip install -U plotly") from e
    script: str = get_plotlyjs()
    return script


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
