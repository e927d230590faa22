"""Runs many merges: plans all of them first, makes those that share a base together, reports each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

from ..addresses import downloads_in
from ..boundary import CallersFailure, public, worded
from ..disk.destination import protect
from ..disk.locks import sweep
from ..disk.publish import remove_stale
from ..errors import MergeError, UsageError
from ..files.file_signatures import model_as_jobs
from ..options import switch, unlike, whole
from ..paths import ENDINGS, expand
from ..planning.downloads import downloads, fetch_all
from ..planning.former_plans import FormerPlans
from ..process import deliver_pending, interruptible
from ..progress import ENDED, Progress, unwatched, watched
from ..sources.inputs import Download, require_space
from ..text import shown
from ..typed_options import Jobs
from .batch_plan import JOBS_TOGETHER, PlannedJob, check_space, survey
from .executors import THIS_PROCESS, Executor, Workers
from .executors import executor as find
from .job_plan import JobPlan, job_plans
from .jobs_file import BatchJob, load, with_endings
from .report import JobReport, Reports, ended, failed
from .shared_reads import JobGroup


@dataclass(frozen=True)
class Batch:
    """Jobs, planned, and the place where they will run."""

    planned: tuple[PlannedJob, ...]
    workers: Workers
    executor: Executor

    @property
    def size(self) -> int:
        """Return the bytes that will be written."""
        return sum(s.size for s in self.planned if s.runs)

    @cached_property
    def downloads(self) -> Mapping[Path, Download]:
        """Return what has to be downloaded before the jobs run: input → its files."""
        entries = [s.entry for s in self.planned if s.runs]
        bases = {e.base for e in entries if e.base is not None}
        return downloads(bases, {path for e in entries for path in e.inputs} - bases, keep=True)

    def downloaded(self, progress: Progress) -> Batch:
        """Return the batch on inputs of this machine. Jobs whose inputs cannot be downloaded have that error.

        ResourceError if the disks have no room for the downloads and the outputs.
        """
        if not self.downloads:
            return self
        output = self.planned[0].entry.job.output.parent
        require_space(self.downloads.values(), (output, self.size))
        places: dict[Path, Path] = {}
        errors: dict[Path, MergeError] = {}
        for path, download in self.downloads.items():
            try:
                places |= fetch_all({path: download}, (output, 0), progress)
            except MergeError as e:
                errors[path] = e
        planned = []
        for s in self.planned:
            error = next((errors[path] for path in s.entry.inputs if path in errors and s.runs), s.error)
            planned.append(replace(s, entry=s.entry.at(places), error=error))
        return replace(self, planned=tuple(planned))

    def run(self, *, fail_fast: bool = False, progress: Progress = unwatched) -> Generator[JobReport, None, None]:
        """Return every job's report as it ends, first of jobs that need no running. Nothing is raised for a single job.

        With `fail_fast` the first failure ends the batch: what is under way is removed, the rest has no report.
        The call itself raises where the disk cannot hold all outputs.
        """
        check_space(self.planned, self.workers.count or 1)
        reports = self.downloaded(progress)._run(progress)
        return _until_failure(reports) if fail_fast else reports

    def _run(self, progress: Progress) -> Generator[JobReport, None, None]:
        lost: set[int] = set()  # jobs without an output
        for s in self.planned:
            if s.error is not None:
                lost.add(s.entry.number)
                yield failed(s.entry, s.error)
        self._clean()
        for s in self.planned:
            if s.done:
                yield ended(s.entry, "skipped")
        runs = sorted((s for s in self.planned if s.runs), key=lambda s: s.level)
        for _, some in groupby(runs, lambda s: s.level):
            ready = []
            for s in some:
                if s.needs in lost:
                    lost.add(s.entry.number)
                    yield failed(s.entry, _base_failed(s.entry))
                else:
                    ready.append(s)
            for report in self._level(ready, progress):
                if report.status == "failed":
                    lost.add(report.number)
                yield report

    def _clean(self) -> None:
        """Remove what killed runs left next to the outputs."""
        for folder in {s.entry.job.output.parent for s in self.planned}:
            with suppress(OSError):  # a folder that cannot be read is the failure of its own jobs
                if folder.is_dir():
                    remove_stale(folder)
                    sweep(folder)

    def _level(self, ready: Sequence[PlannedJob], progress: Progress) -> Iterator[JobReport]:
        """Run jobs whose inputs are there. Those that another process claims come last, when it has released them."""
        run, taken = self.executor.run, set[int]()
        for report in run(self.grouped(ready), self.workers, progress) if ready else ():
            if report.status == "taken":
                taken.add(report.number)
            else:
                yield report
        if left := [s for s in ready if s.entry.number in taken]:
            yield from run([replace(g, wait=True) for g in self.grouped(left)], self.workers, progress)

    def grouped(self, planned: Sequence[PlannedJob]) -> list[JobGroup]:
        """Return groups of jobs that can share a read of their base, small enough that every worker has something to
        do."""
        groups: dict[Any, list[BatchJob]] = {}
        for s in planned:
            groups.setdefault(s.read_key, []).append(s.entry)
        parts, share = [], _share(len(planned), self.workers, self.executor)
        for group in groups.values():
            step = min(JOBS_TOGETHER, ceil(len(group) / (self.workers.count or 1)))
            parts += [JobGroup(tuple(group[n : n + step]), share) for n in range(0, len(group), step)]
        return parts


def _until_failure(reports: Iterator[JobReport]) -> Generator[JobReport, None, None]:
    for report in reports:
        yield report
        if report.status == "failed":
            return


def _share(jobs: int, workers: Workers, by: Executor) -> int:
    """Return how many share the memory bound of a job: at most as many as jobs; one where each has its own machine."""
    return min(workers.count or 1, jobs) if by.shared else 1


def _base_failed(entry: BatchJob) -> MergeError:
    return UsageError("the base was not made, as its job failed", f"{entry.where}: {entry.job.base}",
                      "see the failure of that job")  # fmt: skip


def make_batch(  # noqa: PLR0913  # the options of the command
    source: Jobs,
    *,
    workers: Workers = THIS_PROCESS,
    executor: str = "local",
    overwrite: bool = False,
    redo: bool = False,
    card: bool | None = None,
    former: FormerPlans | None = None,
) -> Batch:
    """Return the jobs of a file, or of such data, planned from headers; UsageError names all mistakes at once.

    `former`: the plans of calls before.
    """
    switch(overwrite, "--overwrite")
    card = None if card is None else switch(card, "--card")
    by = find(executor)
    if isinstance(workers.count, str):
        whole(workers.count, "--workers")  # raises
    if workers.count is not None and (type(workers.count) is not int or workers.count < 1):
        raise UsageError(f"{shown(workers.count)} workers", "--workers", "give 1 or more")
    if isinstance(source, str) or not isinstance(source, Mapping | Sequence):
        if str(source).endswith(ENDINGS):
            raise model_as_jobs(str(source))
        source = expand(source)
    jobs = with_endings(load(source, overwrite=overwrite, card=card))
    entries = [replace(e, redo=switch(redo, "--redo")) for e in jobs]
    for path in [source] if isinstance(source, Path) else []:
        for e in entries:
            protect(e.job.output, [path])
    return Batch(survey(entries, workers=_share(len(entries), workers, by), former=former), workers, by)


@public
def plan_batch(  # noqa: PLR0913  # the options of the command
    path: Jobs, *, cache: str | Path | None = None, overwrite: bool = False, redo: bool = False,
    card: bool | None = None, former: FormerPlans | None = None,
) -> list[JobPlan]:  # fmt: skip
    """Plan what `run_batch` would do with every job, from headers alone: no weight is read and nothing is written.

    It serves merges and all commands of a jobs file. A job that cannot run does not raise: its plan has the status
    "failed" and an `error`. With `former`, merges that differ from earlier ones in strength and output alone are
    planned in a few milliseconds, as a page with sliders needs it.

    Parameters:
        path: As for `run_batch`, like all other parameters.
        cache: The folder in which files of addresses are kept, for jobs that name none.
        overwrite: Whether outputs may be made again that another recipe made.
        redo: Whether outputs are made again that this very recipe has made.
        card: Whether merges get a model card.
        former: The `FormerPlans` that calls before this one have filled, for one thread at a time.

    Returns:
        One `JobPlan` for each job, in the order of the file: `status`, `bytes`, `memory`, `disk`, `error`,
        `to_json()`.

    Raises:
        UsageError: The jobs file has mistakes (all are named at once), or outputs get in each other's way.
        InputError: The jobs file cannot be read.

    Examples:
        >>> (job,) = lora_merge.plan_batch([{"base": "base.safetensors", "adapters": ["style.safetensors"],
        ...                                  "output": "merged.safetensors"}])
        >>> job.status, job.bytes
        ('to run', 2132696762)
    """
    with downloads_in(cache):
        return job_plans(make_batch(path, overwrite=overwrite, redo=redo, card=card, former=former).planned)


@public
def run_batch(  # noqa: PLR0913  # the options of the command
    path: Jobs,
    *,
    workers: int | None = None,
    executor: str = "local",
    ray_address: str | None = None,
    cache: str | Path | None = None,
    overwrite: bool = False,
    redo: bool = False,
    card: bool | None = None,
    fail_fast: bool = False,
    on_report: Callable[[JobReport], object] | None = None,
    progress: bool | Progress = False,
) -> Reports:
    """Run all merges of a jobs file and return one report for each, in the order in which they ended.

    The call returns when all jobs have ended. It plans them all before the first one runs; jobs that share a base are
    made together. A job that fails does not raise: its report has the status "failed" and an `error`, and the others
    go on. An output that is there already, by the same recipe and with its header as it was written, has the status
    "skipped". An adapter's bytes are then compared with their hash; the weights of a merge are read by `verify` alone.

    Ctrl-C ends the call with KeyboardInterrupt: finished outputs stay, and of an unfinished one nothing is left. The
    next call skips what is finished. An exception from `on_report` ends the call in the same way.

    Parameters:
        path: The jobs file (YAML or JSON); or its content as plain data, or a list of its `jobs`, or of `Job` objects.
        workers: Processes on this machine, or tasks at a time on a Ray cluster. None: one process, or as many tasks
            as the cluster has room for.
        executor: "local", or "ray" (needs Ray: `pip install "ray>=2.60"`).
        ray_address: A running Ray cluster. None: a cluster on this machine, for the time of the call.
        cache: The folder in which files of addresses are kept, for jobs that name none.
        overwrite: Whether to make outputs again that another recipe made. Without it such a job fails.
        redo: Whether to make outputs again that this very recipe has made. Without it such a job is skipped.
        card: Whether merges get a model card, if the jobs file does not say it; None: merges that write folders.
        fail_fast: Whether the first failure ends the batch; jobs that have not ended then have no report.
        on_report: A function that is called with each job's report as soon as the job ends.
        progress: True for a bar that counts jobs (tqdm), or a function that is called with each `lora_merge.Step` of
            every job, named by its `output`; with several workers about ten times a second. As for `merge`, its
            errors and its slowness do not concern the jobs.

    Returns:
        `Reports`, a list with one `JobReport` for each job: `number`, `status`, `output`, `error`, `report` (the
        merge's own), `to_json()`.

    Raises:
        UsageError: The jobs file has mistakes (all are named at once), or an option has a wrong value.
        InputError: The jobs file cannot be read.
        ResourceError: The disks cannot hold all outputs, or no Ray cluster answers.

    Examples:
        >>> reports = lora_merge.run_batch("jobs.yaml", workers=2, on_report=lambda r: print(r.output, r.status))
        >>> [r.error.what for r in reports if r.status == "failed"]
        []
    """
    if on_report is not None and not callable(on_report):
        raise unlike(on_report, "on_report", "a function of a lora_merge.JobReport")
    ended, at = Reports(), Workers(workers, ray_address)
    with interruptible(), downloads_in(cache):
        batch = make_batch(path, workers=at, executor=executor, overwrite=overwrite, redo=redo, card=card)
        with (
            watched(progress, jobs=len(batch.planned)) as watcher,
            closing(batch.run(fail_fast=fail_fast, progress=watcher)) as reports,
        ):
            for report in map(worded, reports):
                ended.append(report)
                if progress is True:
                    watcher(ENDED)
                _report_to_caller(report, on_report)
    return ended


def _report_to_caller(report: JobReport, on_report: Callable[[JobReport], object] | None) -> None:
    """Pass the report of a job that has ended to the caller."""
    try:
        deliver_pending()  # an interrupt that came while the output got its name
    finally:
        if on_report is not None:
            try:
                on_report(report)
            except Exception as e:
                raise CallersFailure from e
