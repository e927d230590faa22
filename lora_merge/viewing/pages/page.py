"""One HTML file of content, style, script and the compressed library that draws."""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, Final

from ...errors import UsageError
from ...text import one_line
from ..json_schemas import kind_of
from .file_pages import comparison_page, file_page, files_page
from .limit import LONGEST_TEXT, MOST_PAGE_BYTES, fitted
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
