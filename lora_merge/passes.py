"""One pass: jobs that share a base, claimed, made together, tried again where the disk stumbled."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from .claims import claimed
from .jobs_file import Entry
from .opened import Opened
from .outcome import JobReport, failed, here
from .planning import Plan, draw
from .report import Report
from .resume import Hashes, done
from .run import Progress, run_together
from .windows import layout_key

TRIES: Final = 3
PAUSE: Final = 1.0  # seconds before the second try, twice that before the third
TRANSIENT: Final = frozenset(
    {errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET,
     errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOLCK}
)  # fmt: skip
"""Failures of disks and networks that may be over in a moment."""


@dataclass(frozen=True)
class Pass:
    """Jobs for one read of a base, and the share of the machine they get."""

    entries: tuple[Entry, ...]
    workers: int = 1  # how many share the machine
    wait: bool = False  # for jobs that another process is at; otherwise they come back as `taken`


def carry_out(this: Pass, opened: Opened, progress: Progress = lambda _: None) -> Iterator[JobReport]:
    """Every job's report, as it ends. Nothing is raised for a job; SystemExit and the like end the pass."""
    entries = [_bounded(e, this.workers) for e in this.entries]
    with ExitStack() as claims:
        held: dict[int, ExitStack] = {}
        left: list[Entry] = []
        for e in entries:
            held[e.number] = claims.enter_context(ExitStack())
            try:
                if held[e.number].enter_context(claimed(e.job.output, wait=this.wait)):
                    left.append(e)
                    continue
                report = JobReport(e.number, e.where, str(e.job.output), "taken", worker=here())
            except Exception as failure:  # noqa: BLE001  # reported as this job's end
                report = failed(e, failure)
            yield report
        for attempt in range(1, TRIES + 1):
            again: list[Entry] = []
            for entry, report in _once(left, opened, progress, attempt):
                if attempt < TRIES and report.error is not None and _transient(report.error):
                    again.append(entry)
                else:
                    held[entry.number].close()  # before it is told: who dies later leaves no claim of it
                    yield report
            left = again
            if not left:
                return
            time.sleep(PAUSE * attempt)


def _bounded(entry: Entry, workers: int) -> Entry:
    return replace(entry, job=replace(entry.job, max_memory=entry.job.max_memory // workers))


def _once(
    entries: Sequence[Entry], opened: Opened, progress: Progress, tries: int
) -> Iterator[tuple[Entry, JobReport]]:
    """Each job's outcome of one try."""
    groups: dict[object, list[tuple[Entry, Plan]]] = {}
    hashes = Hashes()
    for e in entries:
        try:
            if done(e.job, opened, hashes):
                yield e, JobReport(e.number, e.where, str(e.job.output), "skipped", tries=tries, worker=here())
                continue
            plan = draw(e.job, opened)
        except Exception as failure:  # noqa: BLE001  # reported as this job's end
            yield e, failed(e, failure, tries=tries)
            continue
        groups.setdefault(layout_key(plan), []).append((e, plan))
    for group in groups.values():
        yield from _together(group, progress, tries)


def _together(group: Sequence[tuple[Entry, Plan]], progress: Progress, tries: int) -> Iterator[tuple[Entry, JobReport]]:
    started = time.monotonic()
    open_still = dict(enumerate(group))
    try:
        for n, outcome in run_together([plan for _, plan in group], progress):
            entry, _ = open_still.pop(n)
            yield entry, _report(entry, outcome, time.monotonic() - started, tries)
    except Exception as failure:  # noqa: BLE001  # what concerns all that are left is reported for each
        for entry, _ in open_still.values():
            yield entry, failed(entry, failure, seconds=time.monotonic() - started, tries=tries)


def _report(entry: Entry, outcome: Report | Exception, seconds: float, tries: int) -> JobReport:
    if isinstance(outcome, Exception):
        return failed(entry, outcome, seconds=seconds, tries=tries)
    return JobReport(entry.number, entry.where, str(entry.job.output), "merged", seconds, tries, outcome, None, here())


def _transient(error: BaseException | None) -> bool:
    """Whether an I/O error that may pass stands behind a failure."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            return True
        error = error.__cause__
    return False
