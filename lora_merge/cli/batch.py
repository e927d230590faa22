"""The command `lora-merge batch`: runs a jobs file, prints a line for each job and a table. It decides nothing."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BatchFailed, UsageError, error_dict
from ..lines import Lines, one_line, shown
from ..process import check_room
from ..text import size as _size
from .text import bar, echo, leave_lost_folder, remarks
from .values import whole_number

if TYPE_CHECKING:
    from ..batch.report import JobReport
    from ..batch.run import Batch
    from ..batch.survey import PlannedJob
    from .streams import ReportFile


def batch(
    jobs: Annotated[str | None, typer.Argument(metavar="JOBS.yaml", help="The jobs file.")] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="<int>", help="Processes here, or tasks at a time on the cluster.")
    ] = None,
    executor: Annotated[str, typer.Option(help="local or ray.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster; default: a local one, with a token.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan only; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Redo outputs that other recipes made.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")] = False,
    report: Annotated[str | None, typer.Option(help="Append a JSON line per job to this file, as each ends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per job on stdout.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of jobs files.")] = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="No progress, no lines for jobs that went well.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks.")] = False,  # main() reads it
) -> None:
    """Run all merges of a jobs file: planned first, made together where they share a base, resumed where left."""
    if schema:
        from ..batch.schema import JobsFile

        echo(Lines.of(json.dumps(JobsFile.model_json_schema(), indent=2).splitlines()))
        return
    if jobs is None:
        raise UsageError("no jobs file was given", "lora-merge batch", "lora-merge batch JOBS.yaml")
    from ..batch.executors import Workers
    from ..batch.executors import executor as find
    from ..batch.run import make_batch
    from .streams import ReportFile

    find(executor)
    number = None if workers is None else whole_number(workers, "--workers")
    made = make_batch(jobs, workers=number, executor=executor, overwrite=overwrite)
    if not dry_run:
        _announce(made, quiet=quiet or as_json)
    told = None if report is None else ReportFile(report)
    if told is not None:
        told.protect(*_files(made, jobs))
    if dry_run:
        _dry_run(made, number or 1, told, as_json=as_json, quiet=quiet)
        return
    check_room()  # once, as it holds for every worker
    leave_lost_folder()
    ended: list[JobReport] = []
    with ExitStack() as stack:
        progress = stack.enter_context(bar(made.size, "batch", quiet=quiet))
        run = made.run(Workers(number, ray_address), name=executor, fail_fast=fail_fast, progress=progress)
        for one in stack.enter_context(closing(run)):  # where a signal stops it, what is unfinished is removed
            ended.append(one)
            if told is not None:
                told.append(one.to_json())
            if as_json:
                echo(one.to_json())
            elif not quiet or not one.ok:
                _write(_line(one, len(made.planned)), *_remarks(one))
            else:
                _write(*(f"{one.output}: {remark.strip()}" for remark in _remarks(one)), to=sys.stderr)
    _conclude(made, ended, sys.stderr if as_json else sys.stdout)


def _files(made: Batch, jobs: str) -> tuple[set[Path], set[Path]]:
    """Return the paths that are read, and those that are made."""
    from ..paths import expand
    from ..planning.plan import sources

    asked = [s.entry.job for s in made.planned]
    return {expand(jobs), *(p for j in asked for p in sources(j))}, {j.output for j in asked}


def _announce(made: Batch, *, quiet: bool) -> None:
    if not quiet:
        runs = [s for s in made.planned if s.runs]
        echo(f"{len(made.planned)} jobs: {len(runs)} to run ({_size(made.size)} to write), "
                   f"{sum(s.done for s in made.planned)} done already, {_broken(made)} that cannot run")  # fmt: skip


def _dry_run(made: Batch, workers: int, told: ReportFile | None, *, as_json: bool, quiet: bool) -> None:
    """Print every job with what would happen to it; fail as the run would, where a job or the disk cannot do it."""
    from ..batch.survey import check_space, disk_needs
    from ..disk.volumes import free_bytes

    for s in made.planned:
        line = json.dumps(_facts(s), ensure_ascii=False)
        if told is not None:
            told.append(line)
        if as_json:
            echo(line)
        elif not quiet or s.error is not None:
            echo(f"[{s.entry.number}/{len(made.planned)}] {_fate(s)}  {s.entry.job.output}  {_recipe(s)}")
            if s.error is not None:
                echo(_indented(s.error))
    if not (as_json or quiet):
        _announce(made, quiet=False)
        for path, size in disk_needs(made.planned, workers):
            echo(f"disk     {path.parent}: {_size(size)} needed, {_size(free_bytes(path))} free")
    if _broken(made):
        raise _failure(_broken(made), len(made.planned), "planned")
    check_space(made.planned, workers)


def _recipe(s: PlannedJob) -> str:
    job = s.entry.job
    return " + ".join([job.base.name, *(f"{a.strength:g} × {a.path.name}" for a in job.adapters)])


def _fate(s: PlannedJob) -> str:
    if s.error is not None:
        return "cannot run"
    return "done already" if s.done else f"would write {_size(s.size)}"


def _facts(s: PlannedJob) -> dict[str, Any]:
    job = s.entry.job
    return {
        "dry_run": True, "number": s.entry.number, "where": s.entry.where, "output": str(job.output),
        "base": str(job.base), "adapters": [{"path": str(a.path), "strength": a.strength} for a in job.adapters],
        "status": "failed" if s.error else "done" if s.done else "to run", "bytes": s.size,
        "error": None if s.error is None else error_dict(s.error),
    }  # fmt: skip


def _line(one: JobReport, total: int) -> str:
    """ "[3/9] merged  out/ink-0.5.safetensors  1.99 GiB in 3.1 s", and for a failure what, where and fix."""
    head = f"[{one.number}/{total}] {one.status}  {one.output}"
    if one.report is not None:
        head += f"  {_size(one.report.written)} in {one.seconds:.1f} s"
    return head if one.error is None else Lines(f"{one_line(head)}\n{_indented(one.error)}")


def _remarks(one: JobReport) -> list[str]:
    """Return what was left out, and what else the user should know."""
    return [] if one.report is None else [f"    {r}" for r in remarks(one.report.coverage, one.report.notes)]


def _indented(error: Exception) -> Lines:
    return Lines.of(f"    {row}" for row in f"error: {error}".splitlines())


def _conclude(made: Batch, ended: list[JobReport], to: IO[str]) -> None:
    """Print the table; raise BatchFailed if any job has no output."""
    counts = Counter(one.status for one in ended)
    not_run = len(made.planned) - len(ended)
    written = sum(one.report.written for one in ended if one.report is not None)
    print(f"\n{'merged':>8} {'skipped':>8} {'failed':>8} {'not run':>8} {'written':>10}", file=to)
    print(
        f"{counts['merged']:>8} {counts['skipped']:>8} {counts['failed']:>8} {not_run:>8} {_size(written):>10}", file=to
    )
    bad = [one for one in ended if not one.ok]
    for one in bad:
        what = one.error.what if one.error is not None else one.status
        print(one_line(f"  failed  {one.where}  {one.output}: {what}"), file=to)
    if bad or not_run:
        raise _failure(len(bad), len(made.planned), "run")


def _broken(made: Batch) -> int:
    return sum(s.error is not None for s in made.planned)


def _failure(count: int, total: int, what: str) -> BatchFailed:
    return BatchFailed(f"{count} of {total} jobs could not be {what}", "see the lines above",
                       "correct them and start again; what is done is not done twice")  # fmt: skip


def _write(*lines: str, to: IO[str] | None = None) -> None:
    """Print lines above the bar, where there is one."""
    from tqdm import tqdm

    for line in lines:
        tqdm.write(shown(line), file=to or sys.stdout)
    sys.stdout.flush()
