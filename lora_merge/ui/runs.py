"""The queue: filled forms run one after the other in a thread, through the public Python API."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from .. import MergeError, Step, compare, inspect, run_batch
from ..adapters_out.report import AdapterReport, adapter_rows
from ..batch.commands import MERGE
from ..batch.report import JobReport
from ..errors import as_merge_error, error_dict
from ..facts import STYLES, Fact
from ..report import Report, merge_rows
from ..viewing.pages.page import page
from .forms import FORMS, runnable

State: TypeAlias = Literal["waiting", "running", "done", "skipped", "failed", "cancelled"]
"""`skipped`: the output was there already, by the same recipe."""

ENDED: Final = ("done", "skipped", "failed", "cancelled")
FINISHED: Final = 100
"""Runs that have ended and stay in the list."""


@dataclass
class Run:
    """One filled form on its way."""

    number: int
    job: Mapping[str, Any]
    overwrite: bool
    pictures: bool
    """Whether a page can be drawn."""
    effort: int = 0
    state: State = "waiting"
    stage: str = ""
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    worked: float = 0.0
    """Seconds of the work itself, without the opening of inputs and the import of torch."""
    text: str = ""
    facts: Sequence[tuple[str, str, str]] = ()
    """Names, values and styles of its report, if that is no text."""
    output: str = ""
    error: MergeError | None = None
    result: Any = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    _began: float = 0.0

    @property
    def title(self) -> str:
        """Return what it does, for the list."""
        name = self.job.get("output") or (self.job.get("adapters") or [self.job.get("base", "")])[0]
        return f"{FORMS[self.job.get('command', MERGE)].title}: {Path(str(name)).name}"

    def to_dict(self) -> dict[str, Any]:
        """Return its state as plain data, for the page."""
        names = ("number", "title", "state", "stage", "done", "total", "seconds", "text", "facts", "output")
        return {
            **{name: getattr(self, name) for name in names},
            "error": None if self.error is None else error_dict(self.error),
            "page": self.pictures and self.result is not None,
        }  # fmt: skip

    def step(self, step: Step) -> None:
        """Take a step of the work; KeyboardInterrupt ends a cancelled run, which then leaves nothing behind."""
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        if step.stage != "load" and not self._began:
            self._began = time.monotonic()
        self.done = step.done + (self.done if step.stage == self.stage else 0)
        self.stage, self.total = step.stage, step.total or (self.total if step.stage == self.stage else 0)

    def carry_out(self) -> None:
        """Do the work; the state then is how it ended."""
        start, self.state = time.monotonic(), "running"
        try:
            self._work()
        except KeyboardInterrupt:
            self.state = "cancelled"
        except Exception as e:  # noqa: BLE001  # whatever it is, the queue goes on
            self.error, self.state = as_merge_error(e, self.title), "failed"
        self.seconds = time.monotonic() - start
        self.worked = time.monotonic() - (self._began or start)

    def cancel(self) -> None:
        """End the run at its next step, or before it begins."""
        self.cancelled.set()
        if self.state == "waiting":
            self.state = "cancelled"

    def _work(self) -> None:
        command = self.job.get("command", MERGE)
        if command == "inspect":
            (path,), base = self.job["adapters"], self.job.get("base")
            files = (base, path) if base else (path,)
            facts = inspect(*files, weights=True, pictures=self.pictures, progress=self.step)
        elif command == "compare":
            facts = compare(
                *self.job["adapters"], base=self.job.get("base"), pictures=self.pictures, progress=self.step
            )
        else:
            (report,) = run_batch([runnable(self.job)], overwrite=self.overwrite, progress=self.step)
            self._take(report)
            return
        self.result, self.text, self.state = dict(facts), facts.text, "done"

    def _take(self, report: JobReport) -> None:
        """Take the report of a job of a batch."""
        if report.error is not None:
            raise report.error
        self.output, self.result = report.output, report.report
        self.state = "skipped" if report.report is None else "done"
        if isinstance(report.report, Report):
            self.facts = [*map(_cells, merge_rows(vars(report.report)))]
        elif report.report is not None:
            self.facts = [*map(_cells, adapter_rows(vars(report.report)))]
        else:
            self.text = f"{report.output} is there already, by the same recipe"


def _cells(row: Fact) -> tuple[str, str, str]:
    """Return name, value and style of a fact; a row of a table is one value."""
    return row.name, row.value if row.name else str(row), row.style or STYLES.get(row.name, "")


class Queue:
    """Runs, in order, and the thread that works on them."""

    def __init__(self, *, pictures: bool) -> None:
        self.pictures = pictures
        self._runs: dict[int, Run] = {}
        self._numbers = itertools.count(1)
        self._change = threading.Condition()
        self._closed = False
        self._rate = 0.0  # effort of the last run a second
        self._thread = threading.Thread(target=self._serve, name="queue", daemon=True)

    def __enter__(self) -> Queue:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End what runs, and wait until nothing of it is left."""
        with self._change:
            self._closed = True
            for run in self._runs.values():
                run.cancel()
            self._change.notify_all()
        self._thread.join()

    def add(self, job: Mapping[str, Any], *, overwrite: bool, effort: int = 0) -> Run:
        """Add a job at the end."""
        with self._change:
            run = Run(next(self._numbers), job, overwrite, self.pictures, effort)
            ended = [number for number, other in self._runs.items() if other.state in ENDED]
            for number in ended[: max(0, len(ended) - FINISHED)]:
                del self._runs[number]
            self._runs[run.number] = run
            self._change.notify_all()
        return run

    def run(self, number: int) -> Run | None:
        """Return a run; None if it is not in the list any more."""
        return self._runs.get(number)

    def to_dict(self) -> dict[str, Any]:
        """Return all runs as plain data, for the page."""
        with self._change:
            return {"runs": [run.to_dict() for run in self._runs.values()]}

    def seconds(self, effort: int) -> float | None:
        """Return how long a job takes at the speed of the last one; None before one has ended."""
        return effort / self._rate if self._rate else None

    def _serve(self) -> None:
        while (run := self._next()) is not None:
            run.carry_out()
            if run.state == "done" and run.effort and run.worked:
                self._rate = run.effort / run.worked

    def _next(self) -> Run | None:
        """Wait for the next run; None when the queue is closed."""
        with self._change:
            while not self._closed:
                waiting = next((run for run in self._runs.values() if run.state == "waiting"), None)
                if waiting is not None:
                    return waiting
                self._change.wait()
        return None


def report_page(run: Run) -> str:
    """Return the page about the result of a run, with its pictures."""
    if not isinstance(run.result, dict):
        return page(_pictured(run))
    return page(run.result)


def _pictured(run: Run) -> dict[str, Any]:
    """Return the report of a job as the page of `--html` takes it."""
    from ..batch.jobs_file import load
    from ..engine.admission import plan_merge
    from ..viewing.pictures import pictured_adapter, pictured_merge  # torch

    (loaded,) = load([runnable(run.job)], overwrite=True)
    if isinstance(run.result, AdapterReport):
        return pictured_adapter(run.result, loaded.inputs)
    return pictured_merge(run.result, plan_merge(loaded.job, dry=True))
