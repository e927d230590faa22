"""The plan of one job of a batch: what would become of it, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

from ..errors import MergeError, error_dict
from ..facts import Fact, line
from ..text import Shown, by_component, json_text, size
from .batch_plan import PlannedJob, disk_rooms

Fate: TypeAlias = Literal["to run", "done", "failed"]
"""`done`: the output is there already, by the same recipe. `failed`: the job cannot run."""


@dataclass(frozen=True, repr=False)
class JobPlan(Shown):
    """What would become of one job; `to_json()` is a line of `lora-merge batch --dry-run --json`.

    Attributes:
        number: From 1, in the order of the file.
        where: The line that asks for it.
        output: The file or folder.
        command: "merge", "combine" …
        base: Path of the base; None for commands without one.
        adapters: For each adapter a table of `path`, `strength` and, as they will be applied, `strengths`.
        status: "to run", "done" (the output is there already, by the same recipe) or "failed".
        bytes: That it would write.
        memory: Bytes of weights in flight at most; None if it cannot run.
        effort: Bytes that a merge writes in the time that this job takes.
        disk: `needed` and `free` bytes of the output's disk, for all jobs that write there, and whether that is
            `enough`; None if it does not run.
        error: Why it cannot run.

    Examples:
        >>> [job.error.fix for job in lora_merge.plan_batch("jobs.yaml") if job.error is not None]
        []
    """

    number: int
    where: str
    output: str
    command: str
    base: str | None
    adapters: Sequence[Mapping[str, Any]]
    status: Fate
    bytes: int
    memory: int | None
    effort: int
    disk: Mapping[str, Any] | None
    error: MergeError | None = None

    def _heading(self) -> str:
        return f"Job {self.number}"

    def _facts(self) -> Iterator[Fact]:
        why = f": {self.error.what}" if self.error is not None else f", {size(self.bytes)}"
        yield line(f"{self.number} {self.status}", f"{self.output}{why}")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON.

        Returns:
            A table of names and values.
        """
        return {
            "dry_run": True, "number": self.number, "where": self.where, "output": self.output,
            "command": self.command, "base": self.base, "adapters": [*map(dict, self.adapters)],
            "status": self.status, "bytes": self.bytes, "memory": self.memory, "disk": self.disk,
            "error": None if self.error is None else error_dict(self.error), "schema": "lora-merge/job-plan/1",
        }  # fmt: skip

    def to_json(self) -> str:
        """Return the plan as one JSON object on one line.

        Returns:
            A line, as `lora-merge schema job-plan` describes it.
        """
        return json_text(self.to_dict())


def job_plans(planned: Sequence[PlannedJob], workers: int = 1) -> list[JobPlan]:
    """Return the plans of jobs, in the order of their file."""
    rooms = {s.entry.number: room.facts for some, room in disk_rooms(planned, workers) for s in some}
    return [_plan(s, rooms.get(s.entry.number)) for s in planned]


def _plan(s: PlannedJob, disk: Mapping[str, Any] | None) -> JobPlan:
    job = s.entry.job
    adapters = [
        {"path": str(a.path), "strength": a.strength, "strengths": by_component(applied or {})}
        for a, applied in zip_longest(job.adapters, s.strengths)
    ]
    return JobPlan(
        s.entry.number, s.entry.where, job.output_name, s.entry.command.name,
        None if s.entry.base is None else str(s.entry.base), adapters,
        "failed" if s.error else "done" if s.done else "to run", s.size, s.memory, s.effort, disk, s.error,
    )  # fmt: skip
