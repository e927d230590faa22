"""`--plot FILE.png` or `.svg`: the heat maps and the bars of a page as one picture, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ...errors import UsageError
from ...text import one_line
from .content import COSINE
from .page import content

PLOT_ENDINGS: Final = (".png", ".svg", ".pdf")
SEQUENTIAL_COLOURS: Final = ("#d9e4fa", "#6390e4", "#12316f")
"""Colours from the least to the largest number, those of the page in the light."""

SIGNED_COLOURS: Final = ("#d6762a", "#ececec", "#3486d0")
"""Colours of −1, 0 and 1."""

BAR: Final = "#2458c5"
MOST_BARS: Final = 60  # bars of one picture; the largest are shown


def plot(result: Mapping[str, Any] | Sequence[Mapping[str, Any]], path: Path) -> bytes:
    """Return the picture about JSON that a command prints, in the format of the path's ending.

    UsageError for another ending, without matplotlib, or where there is nothing to draw.
    """
    drawable(path)
    from matplotlib.figure import Figure

    sections = content(result)
    heat_maps, bars = sections["heat_maps"], sections["bars"]
    if not heat_maps and not bars:
        raise UsageError("there is nothing to draw", f"`--plot {path.name}`", "read the weights too: --weights")
    heights = [1.6 + 0.22 * len(chart["rows"]) for chart in heat_maps]
    heights += [0.9 + 0.26 * min(len(chart["rows"]), MOST_BARS) for chart in bars]
    figure = Figure(figsize=(10, 0.6 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    figure.suptitle(_text(sections["title"]))
    for chart, ax in zip([*heat_maps, *bars], axes, strict=True):
        (_heat_map if "cells" in chart else _bars)(chart, ax, figure)
    raw = io.BytesIO()
    figure.savefig(
        raw, format=path.suffix[1:].lower(), dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None
    )
    return raw.getvalue()


def drawable(path: Path) -> None:
    """Raise UsageError for a path with another ending, or where matplotlib is not installed."""
    if (ending := path.suffix.lower()) not in PLOT_ENDINGS:
        raise UsageError(
            f"a plot cannot be a {ending or 'file without an ending'}",
            f"`--plot {path.name}`",
            f"use one of {', '.join(PLOT_ENDINGS)}",
        )
    if find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib", "--plot", "pip install -U matplotlib")


def _heat_map(chart: Mapping[str, Any], ax: Any, figure: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    metric = chart["metrics"][0]
    numbers = [[float("nan")] * len(chart["columns"]) for _ in chart["rows"]]
    for cell in chart["cells"]:
        value = cell["values"][metric["key"]]
        numbers[cell["row"]][cell["column"]] = float("nan") if value is None else value
    signed = metric["unit"] == COSINE  # 0 is the middle of the colours, as on a page
    colours, limits = (SIGNED_COLOURS, {"vmin": -1, "vmax": 1}) if signed else (SEQUENTIAL_COLOURS, _from_zero(numbers))
    image = ax.imshow(numbers, aspect="auto", cmap=LinearSegmentedColormap.from_list("ours", colours), **limits)
    ax.set_xticks(
        range(len(chart["columns"])), [_text(c) for c in chart["columns"]], rotation=40, ha="left", fontsize=7
    )
    ax.set_yticks(range(len(chart["rows"])), [_text(r) for r in chart["rows"]], fontsize=7)
    for axis, count in ((ax.xaxis, len(chart["columns"])), (ax.yaxis, len(chart["rows"]))):
        axis.set_ticks([n - 0.5 for n in range(1, count)], minor=True)
    ax.grid(which="minor", color="white", linewidth=0.8)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    ax.xaxis.tick_top()
    ax.set_title(_text(f"{chart['title']}: {metric['title']}"), fontsize=10, loc="left")
    scale = figure.colorbar(image, ax=ax, format="{x:.2%}" if metric["unit"] == "%" else None, pad=0.01, aspect=40)
    scale.outline.set_visible(False)
    scale.ax.tick_params(labelsize=7)


def _from_zero(numbers: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the limits of colours for numbers of which none is negative, so that no noise looks like structure."""
    known = [value for row in numbers for value in row if value == value]  # without NaN
    return {"vmin": 0.0, "vmax": max(known) or 1.0} if known and min(known) >= 0 else {}


def _bars(chart: Mapping[str, Any], ax: Any, _: Any) -> None:
    rows = chart["rows"]
    if len(rows) > MOST_BARS:
        largest = sorted(rows, key=lambda row: -abs(row[1]))[:MOST_BARS]
        rows = [row for row in rows if row in largest]
    values = [value for _, value in rows]
    whole = chart["unit"] == COSINE
    signed = whole or min(values) < 0
    colours = [SIGNED_COLOURS[0 if value < 0 else -1] if signed else BAR for value in values]
    bars = ax.barh([_text(name) for name, _ in rows], values, color=colours)
    ax.bar_label(bars, fmt="{:.3%}" if chart["unit"] == "%" else "{:.4g}", fontsize=7, padding=3)
    ax.margins(x=0.12, y=0.01)
    if whole:  # one of 0.001 is no long bar
        ax.set_xlim(-1.2, 1.2)
    ax.invert_yaxis()
    ax.tick_params(labelsize=7, length=0)
    ax.set_title(_text(chart["title"]), fontsize=10, loc="left")
    ax.xaxis.set_visible(False)  # each bar has its number
    ax.spines[:].set_visible(False)
    ax.axvline(0, color="#5b6675", linewidth=0.8)


def _text(name: str) -> str:
    """Return a text that matplotlib does not take for a formula, on one line."""
    return one_line(name).replace("$", r"\$")
