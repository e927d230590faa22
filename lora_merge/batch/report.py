"""The report of one job of a batch: what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from ..adapters_out.report import AdapterReport
from ..errors import MergeError, as_merge_error, error_dict
from ..facts import Fact, line
from ..option_texts import in_jobs_file
from ..process import here
from ..report import DONE, Report, without_tensors
from ..survival import ENOUGH, grade, judged, worst
from ..text import Shown, html_table, json_text, plural, size
from .jobs_file import BatchJob

Status: TypeAlias = Literal["merged", "made", "skipped", "failed", "taken"]
"""`made`: an adapter was written. `skipped`: the output is there already, by the same recipe and with its header as
it was written; the weights of a merge are not read again. `taken`: another process is at it."""


@dataclass(frozen=True, repr=False)
class JobReport(Shown):
    """The outcome of one job; `to_json()` is a line of `--report`.

    Attributes:
        number: From 1, in the order of the file.
        where: The line that asked for it.
        output: The file or folder.
        status: "merged", "made" (an adapter was written), "skipped" (it is there already), "failed" or "taken".
        seconds: Of its own: its share of the pass in which its base was read, and its proof.
        tries: How often it was begun.
        report: That of the merge or other command, if there is one.
        error: Why it failed.
        worker: Host and process.
        base: Name of the base; "" without one.
        adapters: Name and strength of each adapter, as the job states them.

    Examples:
        >>> [job.output for job in lora_merge.run_batch("jobs.yaml") if not job.ok]
        []
    """

    number: int
    where: str
    output: str
    status: Status
    seconds: float = 0.0
    tries: int = 1
    report: Report | AdapterReport | None = None
    error: MergeError | None = None
    worker: str = ""
    base: str = ""
    adapters: tuple[tuple[str, float], ...] = ()

    def _heading(self) -> str:
        return f"Job {self.number}"

    def _facts(self) -> Iterator[Fact]:
        why = f": {self.error.what}" if self.error is not None else f" in {self.seconds:.1f} s" * bool(self.report)
        yield line(f"{self.number} {self.status}", f"{self.output}{why}")

    @property
    def ok(self) -> bool:
        """Return whether the output is there."""
        return self.status in DONE

    def to_dict(self, *, tensors: bool = True) -> dict[str, Any]:
        """Return the report as plain data, for JSON.

        Parameters:
            tensors: Whether `numbers` of the merge has the values of every tensor.

        Returns:
            A table of names and values.
        """
        values = self.outcome()
        if self.report is None:
            return values
        merged = asdict(self.report)
        return {**values, "report": merged if tensors else without_tensors(merged)}

    @property
    def survives(self) -> float | None:
        """The share of the change that survives, the worst one of several adapters; None if it is not known."""
        if isinstance(self.report, AdapterReport):
            return self.report.energy
        shares = () if self.report is None else (row["share"] for row in self.report.survival)
        return worst(share for share in shares if share is not None)

    def outcome(self) -> dict[str, Any]:
        """Return the same with nothing of the job's own report but the bytes that were written and the share of the
        change that survives.

        Returns:
            A table of names and values.
        """
        return {
            "number": self.number, "where": self.where, "output": self.output, "status": self.status,
            "seconds": round(self.seconds, 3), "tries": self.tries, "worker": self.worker,
            "base": self.base, "adapters": [{"name": name, "strength": strength} for name, strength in self.adapters],
            "error": None if self.error is None else error_dict(self.error),
            "report": None if self.report is None else {"written": self.report.written, "survives": self.survives},
            "schema": "lora-merge/job-report/1",
        }  # fmt: skip

    def to_json(self, *, tensors: bool = True) -> str:
        """Return the report as one JSON object on one line.

        Parameters:
            tensors: As for `to_dict`.

        Returns:
            A line of `--report`, as `lora-merge schema job-report` describes it.
        """
        return json_text(self.to_dict(tensors=tensors))


class Reports(list[JobReport]):
    """The reports of a batch, a list in the order in which the jobs ended.

    Examples:
        >>> reports = lora_merge.run_batch("jobs.yaml")
        >>> reports[0].status, all(job.ok for job in reports)
        ('merged', True)
    """

    def __repr__(self) -> str:
        counts = Counter(report.status for report in self)
        head = ", ".join(f"{n} {status}" for status, n in counts.items()) or "no jobs"
        return "\n".join([f"Reports: {head}", *(f"  {report!r}" for report in self)])

    def _repr_html_(self) -> str:
        return html_table(plural(len(self), "job"), [row for report in self for row in report._facts()])


STATUSES: Final = ("merged", "made", "skipped", "failed")
"""Status of jobs that ended, in the order in which a batch reports them."""


def batch_rows(jobs: Sequence[Mapping[str, Any]], total: int) -> Iterator[Fact]:
    """Yield how many jobs of a batch ended how, from their outcomes; `total`: with the jobs that were not run."""
    for status in STATUSES:
        if count := sum(job["status"] == status for job in jobs):
            yield line(status, count)
    if total > len(jobs):
        yield line("not run", total - len(jobs))
    yield line("wrote", f"{size(sum(job['report']['written'] for job in jobs if job['report']))} in "
                        f"{sum(job['seconds'] for job in jobs):.1f} s")  # fmt: skip


def loss_rows(jobs: Iterable[Mapping[str, Any]]) -> Iterator[Fact]:
    """Yield a row about the jobs of whose change too little survives, from their outcomes."""
    shares = {
        job["output"]: share for job in jobs if job["report"] and (share := job["report"]["survives"]) is not None
    }
    bad = [output for output, share in shares.items() if grade(share).least < ENOUGH]
    if bad and (least := worst(shares[output] for output in bad)) is not None:
        name = next(output for output in bad if shares[output] == least)
        words = f"in {plural(len(bad), 'output')}, the least in {name}: {judged(least, 'the change')}"
        yield Fact("survives", words, style=grade(least).style)


def failure_rows(jobs: Iterable[Mapping[str, Any]]) -> Iterator[Fact]:
    """Yield a row for each reason for which jobs have no output, with the first of them."""
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for job in jobs:
        if job["status"] not in DONE:
            reasons.setdefault(job["error"]["what"] if job["error"] else job["status"], []).append(job)
    for reason, (first, *others) in reasons.items():
        more = f" and {len(others)} more" if others else ""
        yield line("error", f"{first['where']}  {first['output']}{more}: {reason}")


def ended(entry: BatchJob, status: Status, **more: Any) -> JobReport:
    """Return the report of a job that ended, with what the job states."""
    if entry.command.merges:
        more |= {
            "base": entry.job.base.name,
            "adapters": tuple((a.path.name, a.strength) for a in entry.job.adapters),
        }
    return JobReport(entry.number, entry.where, entry.job.output_name, status, **more)


def failed(entry: BatchJob, error: BaseException, *, seconds: float = 0.0, tries: int = 1) -> JobReport:
    """Return the report of a job that failed; other failures than ours are reported with their traceback."""
    error = as_merge_error(error, entry.where)
    error = error.reword(in_jobs_file)
    return ended(entry, "failed", seconds=seconds, tries=tries, error=error, worker=here())
