"""Heat maps as coloured cells and bars of block letters, by Rich, for any width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from rich.color import Color
from rich.style import Style
from rich.text import Text

from ..viewing.pages.content import COSINE
from .terminal import COLUMN_GAP, text

Ramp: TypeAlias = Sequence[tuple[int, int, int]]

RAMP: Final[Ramp] = ((40, 52, 92), (52, 104, 178), (98, 178, 190), (240, 226, 140))
"""Colours from the least to the greatest; they differ in brightness too, and can be seen on dark and light grounds."""

SIGNED_COLOURS: Final[Ramp] = ((214, 118, 42), (96, 96, 100), (52, 134, 208))
"""Colours of −1, 0 and 1."""

SHADES: Final = ("░▒▓█", "-+*#")
"""Cells without colours, for terminals with and without these letters."""

EIGHTHS: Final = " ▏▎▍▌▋▊▉"
FULL_BLOCK: Final = "█"
CELL_COLUMNS: Final = 2  # columns of a cell
WIDEST_CELL: Final = 6
COLOUR_COLUMNS: Final = 20  # columns of the colours from the least to the greatest


def end_of(label: str, width: int) -> str:
    """Return a label of at most `width` letters: its end, which differs more than its beginning."""
    return label if len(label) <= width else f"…{label[1 - width :].lstrip('…')}" if width > 1 else "…"


def number(value: float | None, unit: str = "") -> str:
    """Return a number as a person reads it."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if unit == COSINE and not value.is_integer():
        return f"{value:.3f}".replace("-0.000", "0.000")
    if unit == "%":
        return f"{_digits(100 * value)}%" if value < 0.9995 else f"{value:.0%}"
    return f"{value:g}" if value.is_integer() and abs(value) < 1000 else _digits(value)


def _digits(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:#.3g}".removesuffix(".")


def colored(share: float, ramp: Ramp = RAMP) -> Style:
    """Return the ground of a cell, for a share from 0 to 1 of the way from the least to the greatest number."""
    at = min(max(share, 0.0), 1.0) * (len(ramp) - 1)
    low = min(int(at), len(ramp) - 2)
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(ramp[low], ramp[low + 1], strict=True))
    return Style(bgcolor=Color.from_rgb(*mixed))


def _filled(share: float, cell: int, ramp: Ramp, shades: str) -> Text:
    """Return a cell, for a share from 0 to 1 of the way from the least to the greatest number."""
    if shades:
        return Text(shades[min(int(max(share, 0.0) * len(shades)), len(shades) - 1)] * cell)
    return Text(" " * cell, colored(share, ramp))


def heat_map(chart: Mapping[str, Any], width: int, shades: str = "") -> Iterator[Text]:
    """Yield the lines of a heat map of a page: a cell for each block and kind of layer, at most `width` columns.

    The columns are numbered, and named below. Kinds of layers without room get a second picture below.
    `shades`: letters for the cells, from the least number to the greatest, where colours are not to be used.
    """
    metric = chart["metrics"][0]
    values = {(c["row"], c["column"]): c["values"][metric["key"]] for c in chart["cells"]}
    known = [v for v in values.values() if v is not None]
    signed = metric["unit"] == COSINE
    (least, most), ramp = ((-1.0, 1.0), SIGNED_COLOURS) if signed else ((min(0.0, *known), max(known)), RAMP)
    wide = min(max(map(len, chart["rows"])), max(width // 3, 8))
    room = width - wide - COLUMN_GAP
    cell = min(max(room // len(chart["columns"]), CELL_COLUMNS), WIDEST_CELL)
    cell = max(cell, len(str(len(chart["columns"]))) + 1)
    count = max(room // cell, 1)
    yield text(end_of(chart["title"], width), "bold")
    scale = Text(f"{metric['title']}  {number(least, metric['unit'])} ", "dim")
    for n in range(COLOUR_COLUMNS):
        scale.append_text(_filled(n / (COLOUR_COLUMNS - 1), 1, ramp, shades))
    yield scale.append(f" {number(most, metric['unit'])}", "dim")
    for first in range(0, len(chart["columns"]), count):
        shown = range(first, min(first + count, len(chart["columns"])))
        yield Text(" " * (wide + COLUMN_GAP) + "".join(f"{n + 1:^{cell}}" for n in shown), "dim")
        for row, label in enumerate(chart["rows"]):
            if not any((row, column) in values for column in shown):
                continue  # all its cells are in another picture
            line = text(end_of(label, wide).ljust(wide + COLUMN_GAP))
            for column in shown:
                value = values.get((row, column))
                share = (value - least) / (most - least) if value is not None and most > least else 1.0
                empty = Text(("." if shades == SHADES[1] else "·").center(cell), "dim")
                line.append_text(_filled(share, cell, ramp, shades) if value is not None else empty)
            yield line
    yield from _columns(chart["columns"], width)


def _columns(names: Sequence[str], width: int) -> Iterator[Text]:
    """Yield the names of the numbered columns, as many on a line as there is room for."""
    digits = len(str(len(names))) + 1
    labels = [f"{n + 1} {end_of(name, width - digits - COLUMN_GAP)}" for n, name in enumerate(names)]
    wide = min(max(map(len, labels)) + COLUMN_GAP, width)
    count = max(width // wide, 1)
    for first in range(0, len(labels), count):
        yield text(
            "".join(end_of(label, wide - 1).ljust(wide) for label in labels[first : first + count]).rstrip(), "dim"
        )


def bars(chart: Mapping[str, Any], width: int, shades: str = "") -> Iterator[Text]:
    """Yield the lines of bars of a page: a name, a bar, a number; bars of numbers below zero have another colour.

    `shades`: where colours are not to be used, the letters of cells; their first and last are those of bars.
    """
    rows = [(name, value) for name, value in chart["rows"] if value is not None]
    labels = [number(value, chart["unit"]) for _, value in rows]
    wide = min(max(len(name) for name, _ in rows), max(width // 3, 8))
    room = max(width - wide - max(map(len, labels)) - 2 * COLUMN_GAP, 4)
    most = max((abs(value) for _, value in rows), default=0.0) if chart["unit"] != COSINE else 1.0
    most = most or 1.0
    yield text(chart["title"], "bold")
    for (name, value), words in zip(rows, labels, strict=True):
        line = text(end_of(name, wide).ljust(wide + COLUMN_GAP))
        letter = (shades[-1] if value >= 0 else shades[0]) if shades else FULL_BLOCK
        line.append(
            _bar(abs(value) / most, room, letter), Style(color=Color.from_rgb(*SIGNED_COLOURS[2 if value >= 0 else 0]))
        )
        yield line.append(f"  {words}")


def _bar(share: float, width: int, letter: str) -> str:
    """Return a bar of so many of the columns, of full ones to an eighth of one."""
    eighths = round(share * width * 8)
    return letter * (eighths // 8) + (EIGHTHS[eighths % 8] if letter == FULL_BLOCK and eighths % 8 else "")
