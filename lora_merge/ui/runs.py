"""The queue: filled forms run one after the other in a thread, through the public Python API."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from .. import Adapter, Facts, MergeError, Step, compare, inspect, replay, run_batch, unmerge, verify
from ..adapters_out.report import AdapterReport, adapter_rows
from ..command import MERGE
from ..disk.pages import aligned_buffer
from ..disk.publish import sibling
from ..disk.writer import timed_write
from ..errors import as_merge_error, error_dict
from ..facts import STYLES, Fact
from ..progress import StageSum
from ..report import Report, merge_rows, verify_rows
from ..viewing.pages.page import page
from .forms import FORMS, adapter_tables, in_jobs_file, runnable

RunState: TypeAlias = Literal["waiting", "running", "done", "skipped", "failed", "cancelled"]
"""`skipped`: the output was there already, by the same recipe."""

ENDED: Final = ("done", "skipped", "failed", "cancelled")
PROBE: Final = 32 << 20
"""Bytes that are written once to see how fast the disk is: the speed of most merges."""
LEAST: Final = 256 << 20
"""Effort of a run that shows how fast runs are; a smaller one is over before it is at full speed."""
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
    state: RunState = "waiting"
    progress: StageSum = field(default_factory=StageSum)
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
        adapters = " · ".join(Path(adapter["path"]).name for adapter in adapter_tables(self.job))
        name = self.job.get("output") or self.job.get("product") or adapters
        return f"{FORMS[self.job.get('command', MERGE)].title}: {Path(str(name)).name}"

    def to_dict(self) -> dict[str, Any]:
        """Return its state as plain data, for the page."""
        names = ("number", "title", "state", "seconds", "text", "facts", "output")
        return {
            **{name: getattr(self, name) for name in names}, **vars(self.progress),
            "error": None if self.error is None else error_dict(self.error),
            "pictured": self.pictured, "page": self.pictures and self.pictured,
        }  # fmt: skip

    @property
    def pictured(self) -> bool:
        """Return whether its result has a page with pictures, as that of `--html`."""
        form = FORMS[self.job.get("command", MERGE)]
        drawn = in_jobs_file(self.job) or not (form.writes or form.by_recipe)
        return drawn and self.result is not None

    def step(self, step: Step) -> None:
        """Take a step of the work; KeyboardInterrupt ends a cancelled run, which then leaves nothing behind."""
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        if step.stage != "load" and not self._began:
            self._began = time.monotonic()
        self.progress.add(step)

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
        if in_jobs_file(self.job):
            (report,) = run_batch([runnable(self.job)], overwrite=self.overwrite, progress=self.step)
            if report.error is not None:
                raise report.error
            self.output, self.result = report.output, report.report
        else:
            self.result = CALLS[self.job["command"]](self)
            self.output = str(getattr(self.result, "output", ""))
        self.state = "skipped" if self.result is None else "done"
        if isinstance(self.result, Report):
            self.facts = [*map(_cells, merge_rows(vars(self.result)))]
        elif isinstance(self.result, AdapterReport):
            self.facts = [*map(_cells, adapter_rows(vars(self.result)))]
        elif self.job.get("command") == "verify":
            self.facts = [*map(_cells, verify_rows(self.result[0]))]
        elif self.result is None:
            self.text = f"{self.output} is there already, by the same recipe"
        else:
            self.text = "\n\n".join(facts.text for facts in self.result)


def _inspect(run: Run) -> list[Facts]:
    job = run.job
    options = {**_options(job), "pictures": run.pictures, "progress": run.step}
    if "base" in job:
        return [inspect(job["base"], path, **options) for path in job["adapters"]]
    return [inspect(path, **options) for path in job["adapters"]]


def _compare(run: Run) -> list[Facts]:
    first, second = run.job["adapters"]
    return [compare(first, second, base=run.job.get("base"), pictures=run.pictures, progress=run.step)]


def _verify(run: Run) -> list[Facts]:
    job = run.job
    return [verify(job["product"], job.get("base"), _adapters(job), progress=run.step, **_options(job))]


def _replay(run: Run) -> Report | AdapterReport:
    job = run.job
    return replay(job["product"], job["output"], overwrite=run.overwrite, progress=run.step, **_options(job))


def _unmerge(run: Run) -> Report:
    job = run.job
    return unmerge(job["base"], (), job["output"], overwrite=run.overwrite, progress=run.step, **_options(job))


def _adapters(job: Mapping[str, Any]) -> list[Adapter]:
    """Return the adapters of a job as functions take them."""
    return [
        Adapter(Path(a["path"]), a.get("strength", 1.0), tuple(a.get("strength_for", {}).items()))
        for a in adapter_tables(job)
    ]


def _options(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a job, and the folders that are searched."""
    return {name: value for name, value in job.items() if name in {*FORMS[job["command"]].options, "search"}}


CALLS: Final[Mapping[str, Callable[[Run], Any]]] = {
    "inspect": _inspect, "compare": _compare, "verify": _verify, "replay": _replay, "unmerge": _unmerge,
}  # fmt: skip
"""Command → the function that does it, where it is no job of a jobs file."""


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
        self._rate, self._measured = 0.0, False  # effort a second, and whether it is that of the last run
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

    def estimate(self, folder: Path) -> None:
        """Take the speed of the disk of a folder for that of merges, until one has ended."""
        path = sibling(folder / "ui")  # a killed one's is removed by the next merge
        block = aligned_buffer(PROBE)
        block[:] = secrets.token_bytes(PROBE)
        with suppress(MergeError, OSError):
            try:
                rate = PROBE / timed_write(path, block, PROBE)[0]
            finally:
                path.unlink(missing_ok=True)
            self._rate = self._rate or rate

    def times(self, effort: int) -> dict[str, Any]:
        """Return the `seconds` that a job takes, None if unknown, and whether a run has `measured` the speed."""
        return {"seconds": effort / self._rate if self._rate else None, "measured": self._measured}

    def _serve(self) -> None:
        while (run := self._next()) is not None:
            run.carry_out()
            if run.state == "done" and run.effort >= LEAST and run.worked:
                self._rate, self._measured = run.effort / run.worked, True

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
    if in_jobs_file(run.job):
        return page(_pictured(run))
    return page([dict(facts) for facts in run.result] if len(run.result) > 1 else dict(run.result[0]))


def _pictured(run: Run) -> dict[str, Any]:
    """Return the report of a job as the page of `--html` takes it."""
    from ..batch.jobs_file import load
    from ..engine.admission import plan_merge
    from ..viewing.pictures import pictured_adapter, pictured_merge  # torch

    (loaded,) = load([runnable(run.job)], overwrite=True)
    if isinstance(run.result, AdapterReport):
        return pictured_adapter(run.result, loaded.checked.paths)
    return pictured_merge(run.result, plan_merge(loaded.job, dry=True))
