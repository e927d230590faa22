"""What is asked of a command that writes an adapter, before it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..options import Option

Rows: TypeAlias = Mapping[str, Option]
"""The options of a command by name, with its defaults."""


@dataclass(frozen=True)
class Request:
    """One run of a command, as plain data that can go to another process."""

    command: str
    adapters: Any  # paths, pairs of a path and a strength, or `Adapter` objects; of `extract` the tuned checkpoint
    output: str | Path | None
    base: str | Path | None
    options: Mapping[str, Any]

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The paths that are read, of `Adapter` objects."""
        return (*(a.path for a in self.adapters), *([] if self.base is None else [Path(self.base)]))

    @property
    def stated(self) -> dict[str, Any]:
        """The options that have a value."""
        return {name: value for name, value in self.options.items() if value is not None}
