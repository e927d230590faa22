"""The preview of a report: its lines, and a bar for each block, as long as its change.

ComfyUI's page shows pictures in every node, but texts only in its own node for texts. Drawn by Pillow, which it has.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from PIL import Image, ImageDraw, ImageFont

from ..facts import percent

KINDS: Final = {"ratio": "change by block, as a share of its weights", "norm": "change by block, as a norm"}
"""Number of a block in a report → what it is."""

LETTERS: Final = str.maketrans({"‖": "|", "Δ": "d", "✓": "ok", "→": "->", "…": "...", "×": "x"})
"""Letters that the font of Pillow lacks → what is drawn."""

WIDTH, ROW, SIDE, VALUES, BARS = 760, 20, 12, 150, 500  # pixels: all, a line, the edge, values, bars
SHORT, LONG = 86, 104  # letters of a line: of a value, and of a line without a name
MOST: Final = 80  # lines, and blocks
BACK, INK, SOFT, BAR = "#1a212b", "#e6eaf0", "#a3aebd", "#5b8def"


def picture(text: str, blocks: Mapping[str, Mapping[str, Any]]) -> Image.Image:
    """Return a picture of a report: its text, and the numbers of its blocks, if there are any."""
    lines = [*_lines(text)]
    if len(lines) > MOST:
        lines = [*lines[:MOST], ("", f"and {len(lines) - MOST} more lines in the output “report”")]
    kind, bars = _bars(blocks)
    canvas = Image.new("RGB", (WIDTH, SIDE * 2 + ROW * (len(lines) + bool(bars) * 2 + len(bars))), BACK)
    draw, font, top = ImageDraw.Draw(canvas), ImageFont.load_default(14), SIDE
    for name, value in lines:
        draw.text((SIDE, top), name, SOFT, font)
        draw.text((VALUES if name or value.startswith(" ") else SIDE, top), value.strip(), INK, font)
        top += ROW
    if bars:
        draw.text((SIDE, top + ROW // 2), kind, SOFT, font)
        top += 2 * ROW
    for block, length, number in bars:
        draw.text((SIDE, top), block, INK, font)
        draw.rectangle((VALUES, top + 3, VALUES + round(BARS * length), top + ROW - 5), BAR)
        draw.text((VALUES + BARS + SIDE, top), number, INK, font)
        top += ROW
    return canvas


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each line; the rest of a long value has no name and begins with a space."""
    for line in text.translate(LETTERS).splitlines():
        named = re.match(r"(\S.{0,24}?)\s{2,}(\S.*)", line)
        name, value = named.groups() if named else ("", line.strip())
        first, *others = textwrap.wrap(value, SHORT if name else LONG) or [""]
        yield name, first
        yield from (("", f" {rest}" if name else rest) for rest in others)


def _bars(blocks: Mapping[str, Mapping[str, Any]]) -> tuple[str, Sequence[tuple[str, float, str]]]:
    """Return what the bars are, and for each its block, its length from 0 to 1 and its number."""
    kind = next((kind for kind in KINDS if any(kind in numbers for numbers in blocks.values())), "")
    values = [(block, _finite(numbers.get(kind))) for block, numbers in blocks.items()][: MOST if kind else 0]
    most = max((value for _, value in values), default=0.0) or 1.0
    left_out = f" (the first {MOST} of {len(blocks)})" if len(blocks) > MOST else ""
    return KINDS.get(kind, "") + left_out, [
        (block[-20:], value / most, percent(value) if kind == "ratio" else f"{value:.3g}") for block, value in values
    ]


def _finite(value: float | None) -> float:
    return value if value is not None and isfinite(value) else 0.0
