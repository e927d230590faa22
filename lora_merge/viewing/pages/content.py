"""The content of a page: plain values that JSON can hold, which the page's script shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, Final, NamedTuple, TypeAlias

from ...facts import Fact
from ...grouping import by_key
from ...models.blocks import in_order
from ...models.prefixes import innermost
from ...paths import typed
from ...text import json_text, plural

Values: TypeAlias = Mapping[str, Any]
TableRow: TypeAlias = list[Any]
Column: TypeAlias = str | Mapping[str, Any]

COSINE: Final = "cosine"
"""The unit of numbers from −1 to 1."""


def root(values: Sequence[float]) -> float:
    """Return the norm of several parts from the norms of each."""
    return sqrt(sum(v * v for v in values))


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


SHARE_COLUMN: Final = {"unit": "%", "bar": True, "longest": 1}
"""A column of shares of a whole: a bar over the whole width is all of it."""


class Metric(NamedTuple):
    """A number of each weight: its entry in the JSON, its title, its unit, and how those of several weights join."""

    key: str
    title: str
    unit: str = ""
    join: Callable[[Sequence[float]], float] = mean


SURVIVES: Final = "survives"
"""The title of the share of a change that is in an output."""

CHANGED: Final = (
    Metric("ratio", "‖ΔW‖ / ‖W‖", "%"),
    Metric("change", "‖ΔW‖", join=root),
    Metric("share", SURVIVES, "%"),
    Metric("changed", "values that differ", "%"),
    Metric("noise", "noise / change", "%"),
    Metric("largest", "largest |ΔW|", join=max),
    Metric("rank", "rank", join=max),
)
"""Numbers of the change of a weight."""

UNPICTURED: Final = (
    "One or both pictures are missing: a page has them of 2,000 weights at most. Vectors, and matrices of more than 16 "
    "million numbers that are no product of two factors, have no spectrum; changes whose formulas read the base's "
    "weights have neither if the base is not named."
)
"""Why a weight has no spectrum or histogram."""

LEAST_LOSS: Final = 0.001  # a share that is worth a picture
CURVE_TITLE: Final = "Rank and share that survives"
CURVE_AXES: Final = ("rank of all layers", "share that survives")
CLICK: Final = "The stronger the colour, the larger. Click a cell for its weights."


class PageContent:
    """The sections of one page. `data` is what the page's script reads."""

    def __init__(self, kind: str, title: str) -> None:
        self.data: dict[str, Any] = {
            "kind": kind,
            "title": title,
            "verdict": {},
            "chips": [],
            "summary": [],
            "warnings": [],
            "notes": [],
            "tables": [],
            "heat_maps": [],
            "bars": [],
            "curves": [],
            "stages": [],
            "commands": [],
            "footer": "Made by lora-merge. This page makes no request.",
        }

    def summary(self, rows: Iterable[tuple[str, Any] | Fact]) -> None:
        """Add rows of the summary; those without a value are left out. Warnings and notes have places of their own."""
        for name, value, *_ in (row for row in rows if row[0]):
            if name == "verdict":  # on top of the page
                continue
            if name in ("warning", "note"):
                self.data[f"{name}s"].append(str(value))
            elif value not in (None, "", [], {}, ()):
                self.data["summary"].append([name, str(value)])

    def verdict(self, level: str, text: str) -> None:
        """Set the sentence on top of the page. `level`: good, warning or bad, which is its colour."""
        self.data["verdict"] = {"level": level, "text": text}

    def chip(self, label: str, text: str) -> None:
        """Add a short text with a button to copy it."""
        if text:
            self.data["chips"].append({"label": label, "text": text})

    def curve(self, title: str, of: tuple[str, str], points: Sequence[Sequence[float]], unit: str = "") -> None:
        """Add a curve through points, if there are at least two; `of`: what its two axes show."""
        if len(points) > 1:
            self.data["curves"].append({"title": title, "of": [*of], "unit": unit, "rows": [[*p] for p in points]})

    def table(  # noqa: PLR0913  # what a table may have
        self, title: str, columns: Sequence[Column], rows: Iterable[TableRow], *, first: bool = False,
        details: Sequence[Values] = (), marks: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Add a sortable table, if it has rows. A column may have a unit, and `bar` for bars below its numbers:
        `longest` is the number of the longest one, else the largest of the column.

        `first`: it comes before the pictures. `details`: the summary and the tables to which each row opens. `marks`:
        the level of each row, which is its colour.
        """
        named = [{"title": c} if isinstance(c, str) else dict(c) for c in columns]
        if lines := list(rows):
            opened = {**({"details": [*details]} if details else {}), **({"marks": [*marks]} if any(marks) else {})}
            self.data["tables"].append({"title": title, "columns": named, "rows": lines, "first": first, **opened})

    def bars(self, title: str, of: str, rows: Iterable[tuple[str, float | None]], unit: str = "") -> None:
        """Add a picture of bars, if there are at least two."""
        values = [[name, value] for name, value in rows if value is not None]
        if len(values) > 1:
            self.data["bars"].append({"title": title, "of": of, "unit": unit, "rows": values})

    def heat_map(  # noqa: PLR0913, PLR0917  # the texts of a picture, and its numbers
        self, title: str, text: str, metrics: Sequence[Metric], weights: Mapping[str, Values],
        blocks: Iterable[str], of: str = "ΔW",
    ) -> None:  # fmt: skip
        """Add a heat map of weights, if there are several: block × kind of layer. `blocks`: in the model's order; `of`:
        what its pictures show."""
        known = [m for m in metrics if any(numbers.get(m.key) is not None for numbers in weights.values())]
        if len(weights) < 2 or not known:
            return
        # Each weight has a cell: its block is the row, its kind of layer the column.
        at = grid_places({name: numbers.get("block", "") for name, numbers in weights.items()}, blocks)
        rows, columns = list(dict.fromkeys(b for b, _ in at.values())), list(dict.fromkeys(k for _, k in at.values()))
        row_of, column_of = ({name: n for n, name in enumerate(names)} for names in (rows, columns))
        cells = by_key(((row_of[block], column_of[kind]), name) for name, (block, kind) in at.items())
        self.data["heat_maps"].append(
            {
                "title": title,
                "help": text,
                "of": of,
                "unpictured": UNPICTURED,
                "rows": rows,
                "columns": columns,
                "metrics": [{"key": m.key, "title": m.title, "unit": m.unit} for m in known],
                "cells": [
                    {
                        "row": row,
                        "column": column,
                        "names": names,
                        "count": len(names),
                        "values": {
                            m.key: m.join(values) if (values := _numbers(weights, names, m.key)) else None
                            for m in known
                        },
                    }
                    for (row, column), names in cells.items()
                ],
                "weights": {name: _weight_numbers(weights[name], known) for name in at},
            }
        )

    def change(self, numbers: Values, title: str) -> None:
        """Add pictures and tables of what a merge does to the weights, if it is known."""
        if not numbers:
            return
        every = numbers["all"]
        if unlisted := numbers["unlisted"]:
            hidden = plural(unlisted, "tensor")
            self.data["notes"].append(f"the numbers of {hidden} are shown by part and by block alone")
        self.heat_map(title, CLICK, CHANGED, numbers["tensors"], numbers["blocks"])
        for kind, of in (("components", "part"), ("blocks", "block")):
            rows = [*numbers[kind].items()]
            self.bars(f"‖ΔW‖ / ‖W‖ by {of}", of, ((name, row["ratio"]) for name, row in rows), "%")
            lost = [(name, 1 - share) for name, row in rows if (share := row["share"]) is not None]
            if any(share > LEAST_LOSS for _, share in lost):
                self.bars(f"Lost to the output's dtype by {of}", of, lost, "%")
            metrics = [m for m in CHANGED if m.key in every]
            shown = {"share": SHARE_COLUMN, "ratio": {"unit": "%", "bar": True}}
            columns = [{"title": m.title, **shown.get(m.key, {"unit": m.unit})} for m in metrics]
            if len(rows) > 1:
                self.table(f"By {of}", [of, *columns], ([name, *(row[m.key] for m in metrics)] for name, row in rows))

    def command(self, label: str, *words: str) -> None:
        """Add a command with a button to copy it."""
        self.data["commands"].append({"label": label, "text": typed(words), "lines": False})

    def recipe(self, entries: Values | None) -> None:
        """Add a recipe with a button to copy it, if there is one."""
        if entries:
            text = json_text(entries, indent=2)
            self.data["commands"].append({"label": "The recipe, as the output's metadata hold it", "text": text,
                                          "lines": True})  # fmt: skip


def _numbers(weights: Mapping[str, Values], names: Sequence[str], key: str) -> list[float]:
    return [value for name in names if (value := weights[name].get(key)) is not None]


def _weight_numbers(facts: Values, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the numbers of one weight that the page shows."""
    pictures = {key: facts[key] for key in ("spectrum", "histogram") if facts.get(key)}
    return {m.key: facts.get(m.key) for m in metrics} | pictures


# The place of a weight in a heat map: its block is the row, its kind of layer the column.

BLOCK_PATH: Final = re.compile(
    r".*?(?:^|[._])(?:mid(?:dle)?_block|(?:blocks?|layers?|h|resblocks)[._][0-9]+)(?=[._]|$)"
)
"""The path of a block at the beginning of a module's name: `lora_unet_down_blocks_1`, `model.layers.3`."""
NUMBERED_LEVELS: Final = re.compile(
    r"^(?:[._]*(?:transformer_blocks|blocks?|layers?|resnets|attentions)?[._]*[0-9]+)+(?=[._]|$)"
)
"""Numbers, and the levels that they count, at the beginning of the rest of a name behind its block."""
DROPPED_ENDINGS: Final = (".weight", ".bias")
REST_ROW: Final = "(the rest)"  # the row of what is in no part that is known
NAME_NUMBERS: Final = re.compile(r"(?:(?<=[._])|^)[0-9]+(?=[._]|$)")


def grid_places(blocks: Mapping[str, str], order: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
    """Return name → (block, kind of layer), in the order of the blocks, and of the names. `blocks`: name → block."""
    place = {block: number for number, block in enumerate(dict.fromkeys((*order, *blocks.values())))}
    names = sorted(blocks, key=lambda name: (place[blocks[name]], in_order(name)))
    return {name: (blocks[name] or REST_ROW, _kind(name)) for name in names}


def _kind(name: str) -> str:
    """Return the kind of layer of one weight or module: its name behind the path of its block."""
    stem = next((name.removesuffix(end) for end in DROPPED_ENDINGS if name.endswith(end)), name)
    block = BLOCK_PATH.match(stem)
    kind = NUMBERED_LEVELS.sub("", stem[block.end() :] if block else innermost(stem)[1]).strip("._")
    return (NAME_NUMBERS.sub("#", kind) if kind else "whole block") + (".bias" if name.endswith(".bias") else "")
