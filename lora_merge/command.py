"""A row of the table of commands that write (recipes/commands.py), and what one run of a command is asked for.

The class is below all rooms, as a job holds its row: what differs between commands is a field or a method of the row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from .options import Option
from .progress import Progress

MERGE: Final = "merge"
"""The command that is meant where none is named."""

Rows: TypeAlias = Mapping[str, Option]
"""The options of a command by name, with its defaults."""

InputKind: TypeAlias = Literal["adapters", "snapshots", "adapter", "checkpoints"]
"""What a command reads: some adapters; some of one training, the oldest first; one adapter; or a base and the tuned
checkpoint, which takes the place of one adapter."""

Torch: TypeAlias = Literal["first", "meanwhile", "rarely"]
"""When a process that only runs the command loads torch: before anything else, while inputs are opened, or only
if a layer needs it."""


@dataclass(frozen=True, eq=False)
class Command(ABC):
    """A command that writes a checkpoint or an adapter. Its methods import what they need when they are called: rows
    are read for `--help` too. Subclasses say of which type their jobs, plans and reports are."""

    name: str
    done: str  # of its report: "combined"
    inputs: InputKind
    needs: tuple[str, ...]
    """What a job cannot do without: `adapters`, `base`."""
    options: Rows  # with the defaults that they have here; None: no rule, or a value that depends on the inputs
    torch: Torch
    combines: bool = False
    """Whether the changes of all adapters of a weight become one change by a method."""
    cuts: bool = False
    """Whether small directions are cut even if the rule for ranks is `exact`."""
    effort: float = 0.25
    """The time for a byte of what is counted, relative to a byte that a merge writes: of the output of a merge, of the
    weights in fp64 of others. Measured with adapters of SDXL in fp16."""
    merges: ClassVar[bool] = False
    """Whether it writes a checkpoint: its jobs can share a read of their base, which may be the output of another."""

    @abstractmethod
    def make(self, request: Request, cache: Any) -> Any:
        """Return the checked job. `cache`, here and below: the checkpoints that are open, or None."""

    @abstractmethod
    def plan(self, job: Any, cache: Any) -> Any:
        """Return what `run` would do, from headers."""

    @abstractmethod
    def run(self, job: Any, progress: Progress, cache: Any) -> Any:
        """Write the output; return the report."""

    @abstractmethod
    def fetch(self, job: Any, cache: Any, progress: Progress, announce: Callable[[str], object] | None = None) -> Any:
        """Return the job on inputs of this machine. `announce`: shows what is downloaded."""

    @property
    def typed(self) -> str:
        """The word that names it, "" for the command that is meant without one."""
        return "" if self.name == MERGE else self.name

    @property
    def several(self) -> bool:
        """Whether it takes more than one adapter."""
        return self.inputs in ("adapters", "snapshots")

    @property
    def fields(self) -> tuple[str, ...]:
        """The options that a job of a jobs file has."""
        return tuple(name for name, option in self.options.items() if option.in_batch)

    def job(
        self, adapters: Any, output: str | Path | None, base: str | Path | None, options: Mapping[str, Any],
        cache: Any = None,
    ) -> Any:  # fmt: skip
        """Return the checked job; UsageError or FitError for what is wrong.

        `cache`: the checkpoints that are open. With one, headers are read where they decide the output's name.
        """
        return self.make(Request(self, adapters, output, base, options), cache)


class Request(NamedTuple):
    """What one run of a command is asked for, as it was stated."""

    command: Command
    adapters: Any  # paths, pairs of a path and a strength, or `Adapter` objects; of `extract` the tuned checkpoint
    output: str | Path | None
    base: str | Path | None
    options: Mapping[str, Any]

    @property
    def stated(self) -> dict[str, Any]:
        """The options that have a value."""
        return {name: value for name, value in self.options.items() if value is not None}
