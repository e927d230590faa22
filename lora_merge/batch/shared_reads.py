"""Makes one group of jobs: claims their outputs, merges them together, tries again where the disk stumbled."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from ..adapters_out.report import AdapterReport
from ..disk.locks import claimed
from ..engine.merge import run_together
from ..engine.windows import layout_key
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.output_files import contents
from ..planning.plan import Plan
from ..process import deliver_pending, here
from ..progress import Progress, unwatched
from ..recipes.resume import Hashes, is_adapter_done, is_done
from ..report import Report
from ..text import Note
from .jobs_file import BatchJob
from .report import JobReport, Status, ended, failed

MOST_RETRIES: Final = 3
PAUSE: Final = 1.0  # seconds before the second try, twice that before the third
TRANSIENT: Final = frozenset(
    {errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET,
     errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOLCK}
)  # fmt: skip
"""Failures of disks and networks that may be over in a moment."""

IDLE_DEFAULT: Final = "{} of the defaults is left out: it has no effect on this job"

T = TypeVar("T")


@dataclass(frozen=True)
class JobGroup:
    """Jobs that are made in one read of their base, and the share of the machine that they get."""

    entries: tuple[BatchJob, ...]
    workers: int = 1  # how many share the machine
    wait: bool = False  # for jobs that another process is at; otherwise they come back as `taken`


def carry_out(group: JobGroup, opened: CheckpointCache, progress: Progress = unwatched) -> Iterator[JobReport]:
    """Return every job's report, as it ends. Nothing is raised for a job; SystemExit and the like end the group."""
    entries = [_bounded(e, group.workers) for e in group.entries]
    with ExitStack() as claims:
        claim_by_number: dict[int, ExitStack] = {}
        left: list[BatchJob] = []
        for e in entries:
            claim_by_number[e.number] = claims.enter_context(ExitStack())
            ours = _caught(partial(claim_by_number[e.number].enter_context, claimed(e.job.output, wait=group.wait)))
            if ours is True:
                left.append(e)
            else:
                yield failed(e, ours) if isinstance(ours, Exception) else _ended(e, "taken")
        for attempt in range(1, MOST_RETRIES + 1):
            again: list[BatchJob] = []
            for entry, report in _once(left, opened, progress, attempt):
                if attempt < MOST_RETRIES and report.error is not None and _transient(report.error):
                    again.append(entry)
                else:
                    claim_by_number[entry.number].close()  # before it is reported: who dies later leaves no claim of it
                    yield report
            left = again
            if not left:
                return
            deliver_pending()
            time.sleep(PAUSE * attempt)


def _bounded(entry: BatchJob, workers: int) -> BatchJob:
    """Return the job with a worker's share of both bounds on memory: all workers may be at one GPU."""
    vram = entry.job.max_vram
    share = None if vram is None else vram // workers
    return entry.changed(max_memory=entry.job.max_memory // workers, max_vram=share)


def _once(
    entries: Sequence[BatchJob], opened: CheckpointCache, progress: Progress, tries: int
) -> Iterator[tuple[BatchJob, JobReport]]:
    """Try each job once; return its report."""
    groups: dict[object, list[tuple[BatchJob, Plan]]] = {}
    hashes = Hashes()
    for e in entries:
        if not e.command.merges:
            yield e, _caught_report(e, hashes, progress, tries)
            continue
        plan = _caught(partial(_needed, e, opened, hashes))
        if isinstance(plan, Plan):
            groups.setdefault(layout_key(plan), []).append((e, plan))
        else:
            yield e, _ended(e, "skipped", tries=tries) if plan is None else failed(e, plan, tries=tries)
    for group in groups.values():
        yield from _together(group, progress, tries)


def _needed(entry: BatchJob, opened: CheckpointCache, hashes: Hashes) -> Plan | None:
    """Return the plan for a job; None if its output is there and is not to be made again."""
    plan: Plan = entry.command.plan(entry.job, opened)
    return None if not entry.redo and is_done(entry.job, contents(plan), opened, hashes) else plan


def _caught_report(entry: BatchJob, hashes: Hashes, progress: Progress, tries: int) -> JobReport:
    """Make an adapter; return what became of it."""
    started = time.monotonic()

    def make() -> AdapterReport | None:
        skipped = not entry.redo and is_adapter_done(entry.checked, hashes)
        return None if skipped else entry.command.run(entry.checked, progress, None)

    result = _caught(make)
    seconds = time.monotonic() - started
    if isinstance(result, Exception):
        return failed(entry, result, seconds=seconds, tries=tries)
    status: Status = "skipped" if result is None else "made"
    return _ended(entry, status, seconds=seconds, tries=tries, report=result)


def _together(
    group: Sequence[tuple[BatchJob, Plan]], progress: Progress, tries: int
) -> Iterator[tuple[BatchJob, JobReport]]:
    last = time.monotonic()
    left = dict(enumerate(group))
    with closing(run_together([plan for _, plan in group], progress)) as outcomes:
        while left:
            step = _caught(partial(next, outcomes))
            # What concerns all that are left is reported for each.
            ended = dict.fromkeys(left, step) if isinstance(step, Exception) else dict([step])
            seconds = (time.monotonic() - last) / len(ended)
            for n, outcome in ended.items():
                entry, _ = left.pop(n)
                if isinstance(outcome, Report):
                    yield entry, _ended(entry, "merged", seconds=outcome.seconds, tries=tries, report=outcome)
                else:
                    yield entry, failed(entry, outcome, seconds=seconds, tries=tries)
            last = time.monotonic()


def _ended(entry: BatchJob, status: Status, *, report: Report | AdapterReport | None = None, **more: Any) -> JobReport:
    """Return the report of a job, with the parts of the defaults that it is without."""
    if report is not None and entry.idle:
        report = replace(report, notes=(*report.notes, *(Note(IDLE_DEFAULT.format(part)) for part in entry.idle)))
    more["report"] = report
    return ended(entry, status, worker=here(), **more)


def _caught(act: Callable[[], T]) -> T | Exception:
    """Return what the act returns, or what it raises, whatever that is: it becomes the report of one job."""
    try:
        return act()
    except Exception as e:  # noqa: BLE001
        return e


def _transient(error: BaseException | None) -> bool:
    """Return whether an I/O error that may pass is behind a failure."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            return True
        error = error.__cause__
    return False
