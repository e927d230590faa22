"""The command `lora-merge batch`: runs a jobs file, prints a line for each job and the counts at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import UsageError
from ..facts import line
from ..options import OPTIONS
from ..paths import expand
from ..process import check_room
from ..progress import unwatched
from ..text import Lines, size
from .argument_values import whole_number
from .options import DRY_RUN, HTML, JSON_TENSORS, with_options
from .progress_display import BatchJobs, paused, watching
from .reports import (
    BatchDisplay,
    PageFiles,
    announced,
    announcing,
    broken_jobs,
    echo,
    failure,
    planned_job,
    put,
    show_batch,
    show_lines,
    show_remarks,
    with_error,
)

if TYPE_CHECKING:
    from ..batch.report import JobReport
    from ..batch.run import Batch
    from ..disk.writer import Room
    from .stdio import ReportFile


@with_options(OPTIONS["cache"], before="dry_run")
def batch(
    jobs: Annotated[str | None, typer.Argument(metavar="JOBS.yaml", help="The jobs file.")] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Run this many jobs at a time, in processes or on the cluster.")
    ] = None,
    executor: Annotated[
        Literal["local", "ray"], typer.Option(help="Run the jobs on this machine or on a Ray cluster.")
    ] = "local",
    ray_address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Use this running Ray cluster. [default: a local one]")
    ] = None,
    dry_run: DRY_RUN = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing outputs that were made differently.")
    ] = False,
    redo: Annotated[
        bool, typer.Option("--redo", help="Write finished outputs again instead of skipping them.")
    ] = False,
    card: Annotated[
        bool | None, typer.Option("--card/--no-card", help="Write model cards, unless the jobs file says otherwise.")
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")] = False,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Append a JSON line per job to this file, as each ends.")
    ] = None,
    html: HTML = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per job on stdout.")] = False,
    json_tensors: JSON_TENSORS = False,
    init: Annotated[
        bool, typer.Option("--init", help="Write a first jobs file to change, here or to JOBS.yaml.")
    ] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of jobs files.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print no progress and only failed jobs.")] = False,
    **_: Any,
) -> None:
    """Run all merges of a jobs file.

    Plans every job first, reads a shared base once, and resumes an interrupted run.
    """
    if schema:
        from ..viewing.json_schemas import JOBS_SCHEMA, schema_of

        put(Lines.of(json.dumps(schema_of(JOBS_SCHEMA), indent=2).splitlines()))
        return
    if init:
        _write_first(jobs or "jobs.yaml")
        return
    if jobs is None:
        fix = "`lora-merge batch JOBS.yaml`; `lora-merge batch --init` writes a first one"
        raise UsageError("no jobs file was given", "lora-merge batch", fix)
    from .stdio import ReportFile

    pictures = PageFiles(html, None, quiet=quiet, dry_run=dry_run)
    number = None if workers is None else whole_number(workers, "--workers")
    with watching(quiet=quiet, doing="planning the jobs"):  # from here on, as the imports take a second
        from ..batch.executors import Workers
        from ..batch.run import make_batch

        planned = make_batch(
            jobs, workers=Workers(number, ray_address), executor=executor, overwrite=overwrite, redo=redo, card=card
        )
    if not (dry_run or quiet or as_json):
        echo(announced(planned))
    file = None if report is None else ReportFile(report)
    if file is not None:
        file.protect(*_files(planned, jobs))
    pictures.protect(*_files(planned, jobs))
    if file is not None:
        file.begin_lines()
    if dry_run:
        _dry_run(planned, file, as_json=as_json, quiet=quiet)
        return
    check_room()  # once, as it holds for every worker
    run = partial(planned.run, fail_fast=fail_fast)
    here = executor.lower() == "local" and number in (None, 1)
    to_json = methodcaller("to_json", tensors=json_tensors)
    ended = _run(planned, run, file, to_json, as_json=as_json, quiet=quiet, here=here)
    pictures.write(lambda: [job.to_dict() for job in ended])
    show_batch(planned, ended, err=as_json)


def _write_first(name: str) -> None:
    """Write a first jobs file; UsageError if there is a file of this name."""
    from ..batch.short_form import FIRST_FILE
    from ..disk.publish import put_file

    path = expand(name)
    if os.path.lexists(path):
        raise UsageError("the file exists", str(path), "name another: `lora-merge batch --init OTHER.yaml`")
    put_file(path, FIRST_FILE.format(name=name).encode(), overwrite=False)
    echo(f"wrote    {path}: change its paths, then lora-merge batch {name} --dry-run")


def _run(
    planned: Batch, run: Any, file: ReportFile | None, to_json: Callable[[JobReport], str], *, as_json: bool,
    quiet: bool, here: bool,
) -> list[JobReport]:  # fmt: skip
    """Run the jobs and print how each of them ends; returns all reports. `here`: whether this process runs them."""
    ended: list[JobReport] = []
    from ..engine.torch_preload import keep_freed_memory, preload

    runs = {s.entry.job.output_name: (s.size, s.effort) for s in planned.planned if s.runs}
    with ExitStack() as stack:
        display = stack.enter_context(watching(quiet=quiet, jobs=BatchJobs(len(planned.planned), runs)))
        _show_downloads(planned, announcing(display, quiet=quiet))
        if runs and here:
            preload(wait=True)
            keep_freed_memory(min(s.entry.job.max_memory for s in planned.planned))
        if file is not None:
            stack.callback(file.close)
        batch_display = BatchDisplay(len(planned.planned), quiet)
        # Where a signal stops it, what is unfinished is removed.
        for job in stack.enter_context(closing(run(progress=display or unwatched))):
            ended.append(job)
            if display is not None:
                display.end(job.output)
            if file is not None:
                file.append(to_json(job))
            with paused(display):
                if as_json:
                    put(to_json(job))
                else:
                    batch_display.end(job)
        with paused(display):
            batch_display.flush()
    return ended


def _files(planned: Batch, jobs: str) -> tuple[set[Path], set[Path]]:
    """Return the paths of inputs and of outputs."""

    entries = [s.entry for s in planned.planned]
    return {expand(jobs), *(p for e in entries for p in e.sources)}, {e.job.output for e in entries}


def _show_downloads(planned: Batch, show: Callable[[str], object] | None) -> None:
    """Show what is downloaded before the jobs run."""
    if show is not None:
        for download in (d for d in planned.downloads.values() if d.size):
            show(download.text())


def _dry_run(planned: Batch, file: ReportFile | None, *, as_json: bool, quiet: bool) -> None:
    """Print every job with what would happen to it, and the room on each disk; fail if a job cannot run."""
    from ..batch.batch_plan import disk_rooms
    from ..batch.job_plan import job_plans

    failures: dict[str, int] = {}
    workers = planned.workers.count or 1
    disks = [*disk_rooms(planned.planned, workers)]
    lines = [plan.to_json() for plan in job_plans(planned.planned, workers)]
    if file is not None:
        file.append("\n".join(lines))
        file.close()
    if as_json:
        put(Lines.of(lines))
    for s in planned.planned if not as_json else ():
        if not quiet or s.error is not None:
            echo(with_error(planned_job(s, len(planned.planned)), s.error, s.entry.number, failures))
    if not (as_json or quiet):
        _show_downloads(planned, echo)
        echo(announced(planned))
    for some, room in disks if not as_json else ():
        _show_room(some[0].entry.job.output.parent, room, quiet=quiet)
    if broken_jobs(planned):
        raise failure(broken_jobs(planned), len(planned.planned), "planned")


def _show_room(folder: Path, room: Room, *, quiet: bool) -> None:
    """Print the line about a disk, and a note if it has no room for the outputs."""
    from ..report import disk_rows

    rows = [line("disk", f"{folder}: {size(room.needed)} needed, {size(room.free)} free"),
            *disk_rows(room.facts, str(folder))]  # fmt: skip
    (show_remarks if quiet else show_lines)(rows)
