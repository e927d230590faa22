"""The text of `lora-merge batch`: a line for each job and a table; what is equal is said once."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import IO, TYPE_CHECKING, Any

from ..errors import BatchFailed, error_dict
from ..text import Lines, by_component, one_line, plural, size
from ..viewing.facts import schema
from .look import mark, panel, show, styled, text
from .merge_look import nearest
from .text import applied, echo, remarks

if TYPE_CHECKING:
    from ..batch.report import JobReport
    from ..batch.run import Batch
    from ..batch.survey import PlannedJob

SKIPPED = "done already"


@dataclass
class Telling:
    """Says how the jobs of a batch end. Jobs that were skipped one after the other have one line."""

    total: int
    quiet: bool
    _skipped: int = 0
    _named: dict[str, int] = field(default_factory=dict)  # error → number of the first job that has it

    def ended(self, one: JobReport) -> None:
        """Say how a job has ended."""
        if one.status == "skipped":
            self._skipped += 1
            return
        self.flush()
        found = [] if one.report is None else [*remarks(_left_out(one), one.report.notes), *_warnings(one)]
        if self.quiet and one.ok:
            for note in found:
                echo(f"{one.output}: {note}", err=True)
            return
        echo(self._line(one))
        for note in found:
            echo(f"    {note}")

    def flush(self) -> None:
        """Say how many jobs were skipped since the last line."""
        if self._skipped and not self.quiet:
            echo(f"{self._skipped} skipped: {SKIPPED}; their recipes and headers are right, verify reads the weights")
        self._skipped = 0

    def _line(self, one: JobReport) -> str:
        """ "[3/9] merged  out/ink-0.5.safetensors  1.99 GiB in 3.1 s", and for a failure what, where and fix."""
        head = f"[{one.number}/{self.total}] {one.status}  {nearest(one.output)}"
        if one.report is not None:
            head += f"  {size(one.report.written)} in {one.seconds:.1f} s"
        if one.error is None:
            return head
        first = self._named.setdefault(str(one.error), one.number)
        if first != one.number:
            return f"{head}  for the same reason as [{first}]"
        return Lines(f"{one_line(head)}\n{indented(one.error)}")


def _left_out(one: JobReport) -> Mapping[str, Any]:
    """Return what a merge says of its adapters; commands that write adapters say it in their notes."""
    return one.report.coverage if one.report is not None and one.status == "merged" else {}


def _warnings(one: JobReport) -> list[str]:
    """Return the warnings of a merge's proof, such as that an adapter is smaller than the output's dtype can hold."""
    proof = one.report.verified if one.report is not None and one.status == "merged" else None
    return [f"warning: {text}" for text in proof["warnings"]] if proof else []


def indented(error: Exception) -> Lines:
    """Return an error as lines that stand below the one of its job."""
    return Lines.of(f"    {row}" for row in f"error: {error}".splitlines())


def announced(made: Batch) -> str:
    """Return the line about a batch before it runs: how many jobs of each kind."""
    runs = [s for s in made.planned if s.runs]
    return (
        f"{plural(len(made.planned), 'job')}: {len(runs)} to run ({size(made.size)} to write), "
        f"{sum(s.done for s in made.planned)} done already, {broken(made)} that cannot run"
    )


def broken(made: Batch) -> int:
    """Return the number of jobs that cannot run."""
    return sum(s.error is not None for s in made.planned)


def planned(s: PlannedJob, total: int) -> str:
    """Return the line of a job in a dry run: what would become of it, and what it merges with which strengths."""
    fate = "cannot run" if s.error is not None else SKIPPED if s.done else f"would write {size(s.size)}"
    job = s.entry.job
    request = s.entry.request
    base = [job.base.name] if request is None or request.base is not None else []
    what = "" if request is None else f"{request.command} "
    return f"[{s.entry.number}/{total}] {fate}  {nearest(str(job.output))}  {what}" + " + ".join([*base, *_adapters(s)])


def _adapters(s: PlannedJob) -> Iterator[str]:
    """Yield "ink.safetensors (0.5× unet (48))"; "0.5 × ink.safetensors" where it is not known what it changes."""
    for adapter, strengths in zip_longest(s.entry.job.adapters, s.strengths):
        if strengths:
            yield f"{adapter.path.name} ({applied(strengths)})"
        else:
            yield f"{adapter.strength:g} × {adapter.path.name}"


def facts(s: PlannedJob, disk: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a dry run says of a job with --json. `disk`: the room for all jobs that write to its disk."""
    from ..batch.commands import MERGE

    job = s.entry.job
    adapters = [
        {"path": str(a.path), "strength": a.strength, "strengths": by_component(found or {})}
        for a, found in zip_longest(job.adapters, s.strengths)
    ]
    return {
        "dry_run": True, "number": s.entry.number, "where": s.entry.where, "output": str(job.output),
        "command": MERGE if (request := s.entry.request) is None else request.command,
        "base": None if request is not None and request.base is None else str(job.base), "adapters": adapters,
        "status": "failed" if s.error else "done" if s.done else "to run", "bytes": s.size, "disk": disk,
        "error": None if s.error is None else error_dict(s.error), "schema": schema("job-plan"),
    }  # fmt: skip


def conclude(made: Batch, ended: list[JobReport], to: IO[str]) -> None:
    """Print the table; raise BatchFailed if any job has no output."""
    counts: Counter[str] = Counter(one.status for one in ended)
    not_run = len(made.planned) - len(ended)
    written = sum(one.report.written for one in ended if one.report is not None)
    names = ["merged", *(["made"] if counts["made"] else []), "skipped", "failed"]
    row = {**{name: counts[name] for name in names}, "not run": not_run}
    bad = [one for one in ended if not one.ok]
    if styled(to):
        _panel(row, written, bad, to)
    else:
        print("\n" + " ".join(f"{name:>8}" for name in row) + f" {'written':>10}", file=to)
        print("".join(f"{n:>8} " for n in row.values()) + f"{size(written):>10}", file=to)
        for line in _failures(bad):
            print(one_line(f"  failed  {line}"), file=to)
    if bad or not_run:
        raise failure(len(bad), len(made.planned), "run")


def _panel(row: Mapping[str, int], written: int, bad: list[JobReport], to: IO[str]) -> None:
    """Print the same as a panel on a terminal."""
    styles = {"merged": "bold green", "made": "bold green", "failed": "bold red", "not run": "bold yellow"}
    rows: list[tuple[str, Any]] = []
    for name, n in row.items():
        rows += [(name, text(n, styles.get(name, "")))] if n else []
        rows += [("", text(line, "red")) for line in _failures(bad)] if name == "failed" else []
    rows.append(("written", size(written)))
    whole = not (bad or row["not run"])
    title = f"{mark('done' if whole else 'failed', to)} {'all jobs are done' if whole else 'some jobs have no output'}"
    show(panel(title, rows, "green" if whole else "red"), err=to is sys.stderr)


def _failures(bad: list[JobReport]) -> Iterator[str]:
    """Yield a line for each different reason, with the first job that failed for it."""
    by_reason: dict[str, list[JobReport]] = {}
    for one in bad:
        by_reason.setdefault(one.error.what if one.error is not None else one.status, []).append(one)
    for what, some in by_reason.items():
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        yield f"{some[0].where}  {nearest(some[0].output)}{more}: {what}"


def failure(count: int, total: int, what: str) -> BatchFailed:
    """Return the error that ends a batch in which some jobs have no output."""
    return BatchFailed(f"{count} of {plural(total, 'job')} could not be {what}", "see the lines above",
                       "correct them and start again; what is done is not done twice")  # fmt: skip
