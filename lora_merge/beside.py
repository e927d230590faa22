"""What an output folder holds beside the weights: written with them, and looked at when a batch is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from .job import DTYPES
from .planning import Plan
from .sidefiles import configured

Side: TypeAlias = bytes | Path
"""The content of a file, or the file of the base that it is a copy of."""


@dataclass(frozen=True)
class Contents:
    """All files of an output by name, relative to its folder; the weights of a single file have an empty name."""

    weights: frozenset[str]
    sides: Mapping[str, Side]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them."""
        return (*self.weights, *self.sides)


def contents(plan: Plan) -> Contents:
    """What the output of a plan holds."""
    sides: dict[str, Side] = dict(plan.indexes)
    for name in plan.sides:
        file = plan.base.path / name
        sides[name] = file
        if file.name == "config.json":
            resized = plan.resized(str(Path(name).parent))
            sides[name] = configured(file.read_bytes(), DTYPES.get(plan.job.dtype), resized)
    return Contents(frozenset(f.name for f in plan.files), sides)
