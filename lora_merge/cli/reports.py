"""Reports on the command line: rows of facts as text or as tables and panels of a terminal, values as JSON, pages as
files. A plan, a merge, a written adapter, a proof, a batch, a file and a comparison are shown in the same way."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..addresses import output_address, with_addresses
from ..errors import BatchFailed, MergeError, UsageError, cause
from ..facts import STYLES, Fact, aligned, line, strengths, times
from ..paths import input_name, nearest, removal, typed
from ..process import kept_objects
from ..progress import unwatched
from ..text import Lines, escaped, json_text, one_line, plural, size
from ..viewing.json_schemas import schema
from .progress_display import Display, paused, watching
from .stdio import ReportFile
from .terminal import (
    COLUMN_GAP,
    INSET,
    broken,
    colored,
    columns,
    console,
    grid,
    has,
    mark,
    panel,
    show,
    show_whole,
    styled,
    text,
)
from .terminal import PANEL_COLUMNS as PANEL

if TYPE_CHECKING:
    from rich.text import Text

    from ..adapters_out.report import AdapterReport
    from ..batch.batch_plan import PlannedJob
    from ..batch.report import JobReport
    from ..batch.run import Batch
    from ..planning.plan import Plan
    from ..progress import Progress
    from ..report import Report

NAME_COLUMNS: Final = 8
"""Columns of the names of facts in a pipe."""

REMARKS: Final = ("note", "warning")
"""Names of facts that are shown with --quiet too, on stderr."""

COPIED_FACTS: Final = frozenset({"file", "adapter", "hash", "undo", "A", "B"})
"""Names of facts whose words are copied: they stay whole where others are broken."""

BETWEEN: Final = 4  # columns before and between the cells of a table
WIDEST_REPORT: Final = 200


# Text and rows of facts, in a pipe and on a terminal.


def echo(text: str, *, err: bool = False) -> None:
    """Print a text for people; on a terminal its lines are broken between words."""
    stream = sys.stderr if err else sys.stdout
    broken_lines = (broken(row, columns(stream)) for row in escaped(text).split("\n"))
    put(Lines("\n".join(broken_lines)) if stream.isatty() else text, err=err)


def put(text: str, *, err: bool = False) -> None:
    """Print a text as it is. Typer would go around a stream that is ASCII, and write ? for other letters."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{escaped(with_addresses(text))}\n")
    stream.flush()


def plain_lines(rows: Iterable[Fact]) -> Iterator[str]:
    """Yield rows as lines of text; a name that is that of the row above is left out."""
    before = ""
    for row in rows:
        name = "" if row.name == before else row.name
        yield remark(row) if row.name in REMARKS else f"{name:<{NAME_COLUMNS}} {row.value}" if row.name else str(row)
        before = row.name


def show_lines(rows: Iterable[Fact], *, err: bool = False) -> None:
    """Print rows as lines of text; warnings go to stderr."""
    facts = [*rows]
    for row, words in zip(facts, plain_lines(facts), strict=True):
        echo(words, err=err or row.name == "warning")


def remark(row: Fact) -> str:
    """Return a note or a warning as a line."""
    return f"{row.name}: {row.value}"


def show_remarks(rows: Iterable[Fact]) -> None:
    """Print what --quiet prints: notes and warnings, to stderr."""
    for row in rows:
        if row.name in REMARKS:
            echo(remark(row), err=True)


def show_rows(rows: Iterable[Fact]) -> None:
    """Print rows as plain lines, or as a table of names and values on a terminal."""
    if styled(sys.stdout):
        show_table([*rows])
    else:
        show_lines(rows)


PANEL_LINES: Final = 8
"""Lines of a panel at most, with its title, on a terminal of `NARROW_COLUMNS` columns or more."""

NARROW_COLUMNS: Final = 80

SPARE: Final = ("format", "change", "input", "note", "undo", "triggers", "layers", "matching", "cut")
"""Names of the rows of a panel in the order in which they are left out of one that is too long: -v and --json have
them."""

ROW_LINES: Final = {"warning": 2, "error": 2, "verified": 2}
"""Name of a row of a panel → lines of its value, where that is more than one."""


def show_closing(
    title: str, rows: Sequence[Fact], *, failed: bool = False, err: bool = False, whole: bool = False
) -> None:
    """Print the rows of a closing report: as plain lines, or as a panel on a terminal. Its colour is that of the worst:
    of a failure, a warning or none.

    `whole`: with all rows, however many lines they take.
    """
    from ..survival import ENOUGH, GRADES

    stream = sys.stderr if err else sys.stdout
    if not styled(stream):
        show_lines(rows, err=err)
        return
    warnings = {grade.style for grade in GRADES if grade.least < ENOUGH}
    warned = any(row.name == "warning" or row.style in warnings for row in rows)
    style = "red" if failed else "yellow" if warned else "green"
    rows = rows if whole else fitted(rows, max(NARROW_COLUMNS, min(PANEL, columns(stream))))
    sign = mark("failed" if failed else "note" if warned else "done", stream)
    show(panel(f"{sign} {title}", terminal_rows(rows), style), err=err)


def fitted(rows: Sequence[Fact], width: int) -> Sequence[Fact]:
    """Return as many rows as a panel of this width has lines for, the most important ones; long values are cut, except
    those that are copied."""
    room = width - INSET - max((len(row.name) for row in rows), default=0) - COLUMN_GAP
    whole = (*COPIED_FACTS, "output")
    fit = [row if row.name in whole else row._replace(value=shortened(row, room)) for row in rows]
    # Step 1: rows are left out by their names.
    for name in SPARE:
        while _lines(fit, room) >= PANEL_LINES and any(row.name == name for row in fit):
            del fit[max(n for n, row in enumerate(fit) if row.name == name)]
    # Step 2: several rows of one name have one line each, and the last ones are counted.
    if _lines(fit, room) >= PANEL_LINES:
        fit = [row if row.name in whole else row._replace(value=shortened(row, room, 1)) for row in fit]
    for name in dict.fromkeys(row.name for row in fit):
        places, more = [n for n, row in enumerate(fit) if row.name == name], 0
        while _lines(fit, room) >= PANEL_LINES and len(places) > 2:
            del fit[places.pop()]
            more += 1
            fit[places[-1]] = Fact(name, f"and {more + 1} more (--json names all)")
    return fit


def shortened(row: Fact, room: int, most: int = 0) -> str:
    """Return the value of a row in so many lines; without a number, in as many as it may have."""
    most = most or ROW_LINES.get(row.name, 1)
    lines = textwrap.wrap(row.value, max(room - 2, 1), break_on_hyphens=False)  # a mark is before some
    if len(lines) <= most:
        return row.value
    *first, last = lines[:most]
    return " ".join([*first, last if len(last) <= room - 4 else last[: room - 4]]) + " …"


def _lines(rows: Iterable[Fact], room: int) -> int:
    """Return how many lines rows of a panel have."""
    target = console(sys.stdout)
    return sum(len(cell.wrap(target, room, overflow="fold")) for _, cell in terminal_rows([*rows]))


def terminal_rows(rows: Sequence[Fact], room: int | None = None) -> list[tuple[Text, Text]]:
    """Return names and values for a table; a name that is that of the row above is left out. `room`: columns of a
    value, to which rows without a name are shortened."""
    cells, before = list[tuple["Text", "Text"]](), ""
    for row in rows:
        value = nearest(row.value) if row.name == "output" else row.value
        if row.name == "verified" and not row.style:
            value = f"{mark('done')} {value}"
        if row.name:
            cell = text(value, row.style or STYLES.get(row.name, ""))
        else:
            cell = text(str(row), "dim") if room is None else table_row(row, room)
        cells.append((text("" if row.name == before else row.name), cell))
        before = row.name or before
    return cells


def show_table(rows: Sequence[Fact]) -> None:
    """Print rows as a table of names and values; words that are copied stay whole."""
    width = min(console(sys.stdout).width, WIDEST_REPORT)
    room = width - max((len(row.name) for row in rows), default=0) - COLUMN_GAP
    cells = terminal_rows(rows, room)
    longest = (max(map(len, value.plain.split()), default=0) for _, value in cells)
    whole = (row.name in COPIED_FACTS and length > room for row, length in zip(rows, longest, strict=True))
    for is_whole, some in groupby(zip(whole, cells, strict=True), lambda pair: pair[0]):
        lines = [cell for _, cell in some]
        if is_whole:
            show_whole(lines, width, width - room)
        else:
            show(grid(lines, width - room - COLUMN_GAP))


def table_row(row: Fact, width: int) -> Text:
    """Return a row of a table. Where it is too long, its first cell is shortened, and if that is not enough the second
    one goes on below itself."""
    from .charts import end_of

    left, name = width - len(row.right) - BETWEEN, row.value
    if not row.right or len(name) <= left:
        return text(f"  {name}  {row.right}".rstrip(), "dim")
    left = max(left, min(len(name), width // 3))
    name = end_of(name.strip(), left).ljust(left)
    first, *rest = textwrap.wrap(row.right, max(width - left - BETWEEN, 1), break_on_hyphens=False)
    lines = [f"  {name}  {first}", *(" " * (left + BETWEEN) + words for words in rest)]
    return text("").append("\n").join(text(line, "dim") for line in lines)


# Paths and commands, as a person types them here.


def undo(output: str, inputs: str, *, replaced: bool = False) -> Iterator[Fact]:
    """Yield how to undo a command: the command that removes its output, if it is on this machine. `inputs`: that they
    are as they were."""
    if ":" in output and output_address(output) is not None:
        return
    command = typed(removal(nearest(output), folder=Path(output).is_dir()))
    yield line("undo", f"{command}   ({inputs})" + "; the output that was replaced is gone" * replaced)


# Plans and merges.


AFTER: Final = frozenset({"formula", "output", "changes", "format"})
"""Names of the rows of a plan that are not shown before a merge: its closing report has them, or -v."""


class ReportOptions:
    """How a command reports. A plain class: building a dataclass would slow down `--help` by 1 ms."""

    def __init__(
        self, *, dry_run: bool = False, as_json: bool = False, quiet: bool = False, verbose: bool = False,
        overwrite: bool = False, done: str = "merged", tensors: bool = False,
    ) -> None:  # fmt: skip
        self.dry_run, self.as_json, self.quiet = dry_run, as_json, quiet
        self.verbose, self.overwrite, self.done, self.tensors = verbose, overwrite, done, tensors


def merge_and_report(
    make_plan: Callable[[Display | None], Plan], file: ReportFile | None, options: ReportOptions
) -> tuple[Report, Plan] | None:
    """Merge and report it, or report the plan of a dry run; returns the report of a merge, and its plan.

    `make_plan`: for a dry run of an output that may exist. `file`: the file for the report.
    """
    from ..engine.admission import require_device
    from ..engine.torch_preload import preload

    with watching(quiet=options.quiet) as display:
        if not options.dry_run:
            preload()
        plan = make_plan(display)
        if file is not None:
            file.protect(plan.inputs, [plan.job.output])
            file.begin()
        require_device(plan.job)
        with paused(display):
            show_plan(plan, options)
        report = None if options.dry_run else carry_out(plan, display)
    if report is None:
        _show_dry_run(plan, file, options)
        return None
    if file is not None:
        file.replace(report.to_json(tensors=options.tensors))
    show_merge(report, plan, options)
    return report, plan


def announcing(display: Display | None, *, quiet: bool) -> Callable[[str], None] | None:
    """Return a function that prints what is downloaded, on stderr; None for a quiet run."""

    def announce(text: str) -> None:
        with paused(display):
            echo(text, err=True)

    return None if quiet else announce


def carry_out(plan: Plan, progress: Progress | None = None) -> Report:
    """Run a plan; `progress` is called with each of its steps."""
    with kept_objects():
        from ..engine.merge import run
    from ..engine.torch_preload import keep_freed_memory

    keep_freed_memory(plan.job.max_memory)
    return run(plan, progress or unwatched)


def show_plan(plan: Plan, options: ReportOptions) -> None:
    """Print before the work what was recognised, what matched and what will be written."""
    from ..planning.plan import plan_rows

    if not (options.as_json or options.quiet):
        rows = plan_rows(plan, verbose=options.verbose)
        show_rows(row for row in rows if options.dry_run or options.verbose or row.name not in AFTER)


def _show_dry_run(plan: Plan, file: ReportFile | None, options: ReportOptions) -> None:
    """Print what a dry run reports below its plan: memory, disk, and whether the output exists."""
    from ..planning.plan import plan_rows
    from ..report import disk_rows

    values = dry(plan)
    rows = [line("needs", _needs(values)), *disk_rows(values["disk"], values["output"])]
    if options.quiet:
        show_remarks([*plan_rows(plan), *rows])
    elif not options.as_json:
        if plan.replaces and not options.overwrite:
            rows.insert(0, line("note", "the output exists: the merge will need --overwrite, or another -o"))
        show_rows(rows)
    plan_text = json_text(values)
    if file is not None:
        file.replace(plan_text)
    if options.as_json:
        put(plan_text)


def _needs(values: Mapping[str, Any]) -> str:
    """Return the memory and the disk that a merge needs, from the values of its plan."""
    disk = values["disk"]
    memory = f"{size(values['memory'])} of memory for the weights ({size(values['max_memory'])} allowed)"
    return f"{memory}; {size(disk['needed'])} of disk ({size(disk['free'])} free)"


def dry(plan: Plan) -> dict[str, Any]:
    """Return what --dry-run --json prints."""
    from ..engine.admission import disk_room
    from ..engine.windows import buffer_bytes
    from ..planning.plan import coverage, files
    from ..version import __version__

    return {
        "dry_run": True, "base": str(plan.job.base), "architecture": plan.architecture, "output": plan.job.output_name,
        "bytes": plan.size, "memory": buffer_bytes(plan), "max_memory": plan.job.max_memory,
        "disk": disk_room(plan).facts, "tensors": sum(len(f.targets) for f in plan.files), "changed": plan.changed,
        "coverage": coverage(plan), "files": files(plan), "notes": list(plan.base.notes), "version": __version__,
        "schema": schema("plan"),
    }  # fmt: skip


def show_merge(report: Report, plan: Plan, options: ReportOptions) -> None:
    """Print what was merged; plain lines leave out those of the plan."""
    from ..planning.plan import plan_rows
    from ..report import merge_rows

    rows = [*merge_rows(vars(report), verbose=options.verbose)]
    if options.as_json:
        put(report.to_json(tensors=options.tensors))
    elif options.quiet:
        show_remarks(rows)
    else:
        rows += undo(report.output, f"{Path(report.base).name} is as it was", replaced=plan.replaces)
        known = {*plan_rows(plan, verbose=options.verbose)}  # what was shown above
        rows = [row for row in rows if row not in known and (row.name or not styled(sys.stdout))]
        show_closing(options.done, rows, whole=options.verbose)


def pictured(report: Report, plan: Plan) -> dict[str, Any]:
    """Return a report with its pictures, for a page."""
    from ..viewing.pictures import pictured_merge  # torch

    return pictured_merge(report, plan)


# Written adapters.


def show_adapter_report(report: AdapterReport, options: ReportOptions) -> None:
    """Print what was written or would be written."""
    from ..adapters_out.report import adapter_rows

    rows = [*adapter_rows(vars(report), verbose=options.verbose)]
    if options.as_json:
        put(report.to_json(tensors=options.tensors))
    elif options.quiet:
        show_remarks(rows)
    elif report.planned:
        show_rows(rows)
    else:
        rows += undo(report.output, "the inputs are as they were")
        show_closing(options.done, rows, whole=options.verbose)


# Batches.


SKIPPED = "done already"


@dataclass
class BatchDisplay:
    """Prints how the jobs of a batch end. Jobs that were skipped one after the other have one line."""

    total: int
    quiet: bool
    _skipped: int = 0
    _failures: dict[str, int] = field(default_factory=dict)  # see `with_error`

    def end(self, job: JobReport) -> None:
        """Print how a job has ended."""
        if job.status == "skipped":
            self._skipped += 1
            return
        self.flush()
        remarks = [remark(row) for row in _rows(job) if row.name in REMARKS]
        if self.quiet and job.ok:
            for words in remarks:
                echo(f"{job.output}: {words}", err=True)
            return
        echo(self._line(job))
        for words in remarks:
            echo(f"    {words}")

    def flush(self) -> None:
        """Print how many jobs were skipped since the last line."""
        if self._skipped and not self.quiet:
            echo(f"{self._skipped} skipped: {SKIPPED}, by recipes and headers; lora-merge verify checks the weights")
        self._skipped = 0

    def _line(self, job: JobReport) -> str:
        """ "[3/9] merged  out/ink-0.5.safetensors  1.99 GiB in 3.1 s", and for a failure what, where and fix."""
        head = f"[{job.number}/{self.total}] {job.status}  {nearest(job.output)}"
        if job.report is not None:
            head += f"  {size(job.report.written)} in {job.seconds:.1f} s"
        return with_error(head, job.error, job.number, self._failures)


def _rows(job: JobReport) -> Iterator[Fact]:
    """Yield the rows of the report of a job that ran."""
    from ..adapters_out.report import adapter_rows
    from ..report import Report, merge_rows

    if isinstance(job.report, Report):
        yield from merge_rows(vars(job.report))
    elif job.report is not None:
        yield from adapter_rows(vars(job.report))


def with_error(head: str, error: Exception | None, number: int, failures: dict[str, int]) -> str:
    """Return the line of a job, with its error below it unless a job before it has the same. `failures`: error →
    number of the first job that has it."""
    if error is None:
        return head
    if (first := failures.setdefault(str(error), number)) != number:
        return f"{head}  for the same reason as [{first}]"
    return Lines.of([head, *(f"    {row}" for row in f"error: {error}".splitlines())])


def announced(planned: Batch) -> str:
    """Return the line about a batch before it runs: how many jobs of each kind."""
    runs = [s for s in planned.planned if s.runs]
    return (
        f"{plural(len(planned.planned), 'job')}: {len(runs)} to run ({size(planned.size)} to write), "
        f"{sum(s.done for s in planned.planned)} done already, {broken_jobs(planned)} that cannot run"
    )


def broken_jobs(planned: Batch) -> int:
    """Return the number of jobs that cannot run."""
    return sum(s.error is not None for s in planned.planned)


def planned_job(s: PlannedJob, total: int) -> str:
    """Return the line of a job in a dry run: what would become of it, and what it merges with which strengths."""
    fate = "cannot run" if s.error is not None else SKIPPED if s.done else f"would write {size(s.size)}"
    job, command = s.entry.job, s.entry.command
    base = [] if s.entry.base is None else [input_name(s.entry.base)]
    what = f"{command.typed} ".lstrip()
    return f"[{s.entry.number}/{total}] {fate}  {nearest(job.output_name)}  {what}" + " + ".join([*base, *_adapters(s)])


def _adapters(s: PlannedJob) -> Iterator[str]:
    """Yield "ink.safetensors (0.5× unet (48))"; "0.5 × ink.safetensors" where it is not known what it changes."""
    for adapter, applied in zip_longest(s.entry.job.adapters, s.strengths):
        if applied:
            yield f"{input_name(adapter.path)} ({strengths(applied)})"
        else:
            yield f"{times(adapter.strength)} × {input_name(adapter.path)}"


def show_batch(planned: Batch, ended: Sequence[JobReport], *, err: bool) -> None:
    """Print what became of the jobs; BatchFailed if any job has no output."""
    from ..batch.report import batch_rows, failure_rows, loss_rows

    total = len(planned.planned)
    jobs = [{**job.outcome(), "output": nearest(job.output)} for job in ended]
    rows = [*batch_rows(jobs, total), *loss_rows(jobs), *failure_rows(jobs)]
    bad = sum(not job.ok for job in ended)
    failed = bool(bad or total > len(ended))
    if not styled(sys.stderr if err else sys.stdout):
        echo("", err=err)
    show_closing("some jobs have no output" if failed else "all jobs are done", rows, failed=failed, err=err)
    if failed:
        raise failure(bad, total, "run")


def failure(count: int, total: int, what: str) -> BatchFailed:
    """Return the error that ends a batch in which some jobs have no output."""
    return BatchFailed(f"{count} of {plural(total, 'job')} could not be {what}", "see the lines above",
                       "correct them and start again; what is done is not done twice")  # fmt: skip


# Files and comparisons.


def show_file(facts: Mapping[str, Any], *, again: bool = False, verbose: bool) -> None:
    """Print what a file is; `again`: only how its adapter fits, as the base was described before; `verbose`: with
    patterns of names."""
    from ..viewing.inspect_rows import match_rows
    from ..viewing.inspect_rows import rows as file_rows

    match, pictured = facts.get("match"), styled(sys.stdout)
    rows = match_rows(match, pictured=pictured, verbose=verbose) if again and match else None
    _show(rows or file_rows(facts, pictured=pictured, verbose=verbose), facts)


def show_facts(files: Sequence[Mapping[str, Any]], unread: Mapping[str, str], *, verbose: bool) -> None:
    """Print what files are: one, or a base and how adapters fit it, in full; of several, a table unless `verbose`."""
    if len(files) + len(unread) > 1 and not verbose and not any("match" in facts for facts in files):
        _show_files(files, unread)
        return
    from ..viewing.file_verdict import of_all

    fits = len(files) > 1 and all("match" in facts for facts in files)
    for n, facts in enumerate(files):
        if n:
            echo("")
        show_file(of_all(files) if fits and not n else facts, again=bool(n), verbose=verbose)
    for path, why in unread.items():
        echo(f"{path}: {why}")


def _show_files(files: Sequence[Mapping[str, Any]], unread: Mapping[str, str]) -> None:
    """Print a table of several files, a row each. `unread`: path → why it cannot be read."""
    from ..viewing.file_verdict import table_of_files

    titles, *rows = table_of_files(files)
    filled = [n for n in range(len(titles)) if any(row[n] for row in rows)]
    cells = [[row[n] for n in filled] for row in (titles, *rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(filled))]
    for row in cells:
        echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for path, why in unread.items():
        echo(f"{Path(path).name}: {why}")
    echo("")
    echo("for all that is known of a file, name it alone, or use -v")


def show_comparison(comparison: Mapping[str, Any]) -> None:
    """Print where two files differ."""
    from ..viewing.compare import compare_rows

    _show(compare_rows(comparison, pictured=styled(sys.stdout)), comparison)


def _show(rows: Iterable[Fact], values: Mapping[str, Any]) -> None:
    """Print rows, on a terminal with the pictures of the page below them."""
    if not styled(sys.stdout):
        put(Lines.of(aligned(rows)))
        return
    show_table([*rows])
    _show_charts(values)


def _show_charts(values: Mapping[str, Any]) -> None:
    """Draw the pictures of a page."""
    from ..viewing.pages.page import content
    from .charts import SHADES, bars, heat_map

    width = min(console(sys.stdout).width, WIDEST_REPORT)
    page = content(dict(values))
    shades = "" if colored() else next(s for s in SHADES if has(sys.stdout, s))
    for chart in page["heat_maps"]:
        show("", *heat_map(chart, width, shades))
    for chart in page["bars"]:
        show("", *bars(chart, width, shades))


# Pages and plots.


class PageFiles:
    """The files of `--html` and `--plot`. What can be checked before the work begins is checked then."""

    def __init__(self, html: str | None, plot: str | None, *, quiet: bool, dry_run: bool = False) -> None:
        """Raise UsageError if one cannot be written there, or cannot be made here."""
        self._quiet = quiet
        self._files: list[tuple[ReportFile, Callable[[Any], bytes]]] = []
        if dry_run and (html or plot):
            raise UsageError("a dry run has nothing to show", "--html" if html else "--plot", "leave one of them out")
        if html is not None:
            from ..viewing.pages.page import library, page

            library()
            self._files.append((ReportFile(html, "--html"), lambda result: page(result).encode(errors="replace")))
        if plot is not None:
            from ..viewing.pages.plot import drawable
            from ..viewing.pages.plot import plot as draw

            file = ReportFile(plot, "--plot")
            drawable(file.path)
            self._files.append((file, lambda result: draw(result, file.path)))

    def protect(self, inputs: Iterable[Path], outputs: Iterable[Path] = ()) -> None:
        """Raise UsageError if a picture would be written over one of these."""
        inputs, outputs = list(inputs), list(outputs)
        for file, _ in self._files:
            file.protect(inputs, outputs)

    def write(self, result: Callable[[], Any]) -> None:
        """Write all of them about what `result` returns, the JSON that the command prints; warn where that fails."""
        if not self._files:
            return
        with watching(quiet=self._quiet, doing="drawing"):
            failed = [*self._failed(result)]
        for path, error in failed:
            _unwritten(path, error)

    def _failed(self, result: Callable[[], Any]) -> Iterator[tuple[Path, Exception]]:
        """Write all of them; yield the path of each that failed, with the error."""
        try:
            facts = result()
        except (OSError, MergeError) as e:  # the output itself is written and proven
            yield self._files[0][0].path, e
            return
        for file, make in self._files:
            try:
                file.put(make(facts))
            except (OSError, MergeError) as e:
                yield file.path, e
            file.close()


def _unwritten(path: Path, error: Exception) -> None:
    """Warn that a picture could not be written."""
    where = one_line(str(path))
    print(f"warning: the picture could not be written: {cause(error)} ({where})", file=sys.stderr)  # noqa: T201
