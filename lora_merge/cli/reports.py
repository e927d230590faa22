"""Text for people: what a job will do, its progress, what it did and what was proven.

A merge on a terminal: the plan as a table, the result as a panel.

The text of `lora-merge batch`: a line for each job and a table; what is equal is said once.

The report of a command that writes an adapter: a table and a panel on a terminal, plain lines everywhere else.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from ..dtypes import spoken
from ..errors import BatchFailed, error_dict
from ..merge_methods import SUM
from ..paths import exists, typed
from ..process import kept_objects
from ..text import (
    Lines,
    Note,
    by_component,
    by_pattern,
    by_reason,
    codes_line,
    counted,
    json_text,
    one_line,
    plural,
    shown,
    size,
    stored,
)
from ..viewing.facts import schema
from ..viewing.merge_facts import effect, matched, of_a_sample, recomputed, retained, saturated, unchanged, unused
from .progress_display import paused, watching
from .terminal import broken, columns, grid, mark, panel, show, styled, table, text

if TYPE_CHECKING:
    from ..adapters_out.report import AdapterReport
    from ..batch.planning import PlannedJob
    from ..batch.report import JobReport
    from ..batch.run import Batch
    from ..planning.plan import Plan
    from ..progress import Progress
    from ..report import Report
    from .stdio import ReportFile

COUNT: Final = (1000, ("", "K", "M", "G", "T"))
"""For `size`: things are counted in thousands."""

MOST_STRENGTHS: Final = 4
"""Strengths of one part that are named one by one; of more, the least and the largest."""


def echo(text: str, *, err: bool = False) -> None:
    """Print a text for people; on a terminal its lines are broken between words."""
    stream = sys.stderr if err else sys.stdout
    put(Lines("\n".join(broken(row, columns(stream)) for row in shown(text).split("\n"))) if stream.isatty() else text,
        err=err)  # fmt: skip


def put(text: str, *, err: bool = False) -> None:
    """Print a text as it is. Typer would go around a stream that is ASCII, and write ? for other letters."""
    stream = sys.stderr if err else sys.stdout
    stream.write(f"{shown(text)}\n")
    stream.flush()


def silent(_: str) -> None:
    """Say nothing but what `conclude` has to."""


def plan_lines(plan: Plan, say: Any, *, verbose: bool) -> None:
    """Say before the work, in a few lines, what was recognised, what matched, what will be written."""
    say(f"base     {plan.job.base.name}: {plan.architecture}, {plural(len(plan.base.tensors), 'tensor')}")
    for note in plan.base.notes:
        say(f"  note: {note}")
    for ref, m in zip(plan.job.adapters, plan.adapters, strict=True):
        what = ", ".join(m.algorithms) or "changes nothing"
        how = applied(m.strengths) or f"{ref.strength:g}×"
        say(f"adapter  {ref.path.name}: {what}, {m.modules} of {plural(m.total, 'module')} matched: {how}")
        matched = by_pattern(m.placed)
        for line in matched if verbose else ():
            say(f"  {line} × {len(matched[line])}")
        for names, why in by_reason({**m.unmatched, **m.adapter.ignored}):
            say(f"  left out: {names}: {why}")
        for note in (*m.adapter.notes, *m.notes):
            say(f"  note: {note}")
    change = plural(plan.changed, "tensor changes", "tensors change")
    say(f"output   {plan.job.output}: {size(plan.size)}, {stored(plan.job.dtype)}, {change}")
    if codes := plan.codes:
        say(f"codes    {codes_line(codes)}")
    for line in _details(plan) if verbose else ():
        say(line)


def _details(plan: Plan) -> Iterator[str]:
    """Yield a line for every file of the input folders, and one for every tensor of the output."""
    for folder in plan.folders:
        yield f"files    {folder.role} {folder.path}"
        yield from (f"  {line}" for line in folder.lines())
    for t in (t for file in plan.files for t in file.targets):
        changed = " <- " + ", ".join(u.patch.module.name for u in t.uses) if t.uses else ""
        yield f"  {t.name} {spoken(t.dtype)} {list(t.shape)}{changed}"


def applied(strengths: Mapping[str, Mapping[float, int]]) -> str:
    """Return "0.8× unet (48), te 0: 16 left out" for {"unet": {0.8: 48}, "te": {0: 16}}."""
    pieces = []
    for part, counts in strengths.items():
        used = sorted((strength for strength in counts if strength), reverse=True)
        if len(used) > MOST_STRENGTHS:
            pieces.append(f"{used[-1]:g} to {used[0]:g}× {part} ({sum(counts[s] for s in used)})")
        else:
            pieces += [f"{strength:g}× {part} ({counts[strength]})" for strength in used]
        if left := counts.get(0.0):
            pieces.append(f"{part} 0: {left} left out")
    return ", ".join(pieces)


def carry_out(plan: Plan, progress: Progress | None = None) -> Report:
    """Run a plan; `progress` is called with each of its steps."""
    with kept_objects():
        from ..engine.merge import run
    from ..engine.torch_preload import keep_freed_memory
    from ..progress import unwatched

    keep_freed_memory(plan.job.max_memory)
    return run(plan, progress or unwatched)


def remarks(coverage: Mapping[str, Any], notes: Sequence[Note]) -> Iterator[str]:
    """Return what the user should know of a merge whose lines are not shown: each note, and what was left out."""
    yield from (f"note: {note}" for note in notes)
    for name, row in coverage.items():
        if left := [*row["skipped"], *row["ignored"]]:
            yield f"{name}: left out {len(left)}: {counted(by_pattern(left))}"
        yield from (f"{name}: note: {note}" for note in row["notes"])


def report_lines(done: Report, say: Any, said: Sequence[str], *, as_json: bool, verbose: bool = False) -> None:
    """Print the report, or a few lines without the notes that were `said` before; what matters if nothing is said."""
    if as_json:
        put(done.to_json())
        return
    for remark in remarks(done.coverage, done.notes) if say is silent else ():
        echo(remark, err=True)
    rate = size(int(done.written / max(done.seconds, 1e-9)))
    say(f"wrote    {size(done.written)} in {done.seconds:.1f} s ({rate}/s) on {done.device}")
    if verbose and done.device_choice:
        say(f"device   {done.device}: {done.device_choice}")
    for note in [n for n in done.notes if n not in said]:
        say(f"note     {note}")
    if done.saturated:
        say(f"cut      {saturated(done.saturated)}")
    if done.verified is not None:
        proof_lines({**done.verified, "numbers": done.numbers, "counted": True}, say, verbose=verbose)
    elif done.numbers:
        say(f"change   {effect(done.numbers)}")


def needs(plan: Plan, disk: Mapping[str, Any]) -> str:
    """Return the line about memory and disk of a dry run."""
    from ..engine.windows import buffer_bytes

    memory = f"{size(buffer_bytes(plan))} of memory for weights in flight, of {size(plan.job.max_memory)} allowed"
    return f"needs    {memory}; {size(disk['needed'])} of disk, of {size(disk['free'])} free"


def shortage(disk: Mapping[str, Any] | None, output: str) -> list[Note]:
    """Return the note of a plan whose output has no room on its disk. `disk`: a `Room` as JSON has it."""
    if disk is None or disk["enough"]:
        return []
    missing = f"{size(disk['needed'])} needed, {size(disk['free'])} free"
    return [Note(f"the disk has no room for the output: {missing} at {output}")]


def dry(plan: Plan) -> dict[str, Any]:
    """Return what --dry-run --json prints."""
    from ..engine.admission import disk_room
    from ..engine.windows import buffer_bytes
    from ..planning.plan import coverage, files
    from ..version import __version__

    return {
        "dry_run": True, "base": str(plan.job.base), "architecture": plan.architecture, "output": str(plan.job.output),
        "bytes": plan.size, "memory": buffer_bytes(plan), "max_memory": plan.job.max_memory,
        "disk": disk_room(plan).facts, "tensors": sum(len(f.targets) for f in plan.files), "changed": plan.changed,
        "coverage": coverage(plan), "files": files(plan), "notes": list(plan.base.notes), "version": __version__,
        "schema": "lora-merge/plan/1",
    }  # fmt: skip


def proof_lines(proof: Mapping[str, Any], say: Any, *, verbose: bool = False) -> None:
    """Say what was proven, in two or three lines; warnings go to stderr."""
    say(f"verified {': '.join(recomputed(proof))}")
    if proof["untouched"]["of"]:
        say(f"         {unchanged(proof['untouched'])}")
    if proof["saturated"]:
        say(f"cut      {proof['saturated']} of the numbers compared, too large for their dtype, as it was asked for")
    shares = [(s["adapter"], s["retained"]) for s in proof["retained"] if s["retained"] is not None]
    if shares:
        say("retained " + ", ".join(f"{retained(share)} of the change that {name} makes" for name, share in shares))
    if proof["numbers"]:
        say(f"change   {effect(proof['numbers'])}{of_a_sample(proof)}")
    if (matching := proof["matching"])["alone"] or verbose:
        say(f"matching {matched(matching)}")
    if (account := proof["account"])["unused"]:
        say(f"unused   {unused(account)}")
    for warning in proof["warnings"]:
        echo(f"warning: {warning}", err=True)


class Asked:
    """How a command reports, by its options. A plain class: `--help` makes it too, and others take a thousand calls."""

    def __init__(self, *, dry_run: bool, as_json: bool, quiet: bool, verbose: bool, overwrite: bool) -> None:
        self.dry_run, self.as_json, self.quiet = dry_run, as_json, quiet
        self.verbose, self.overwrite = verbose, overwrite


def carried_out(plan_it: Callable[[], Plan], file: ReportFile | None, asked: Asked) -> tuple[Report, Plan] | None:
    """Merge and say what was done, or say what would be done; returns the report of a merge, and its plan.

    `plan_it`: makes the plan; for a dry run of an output that may exist. `file`: the file for the report.
    """
    from ..engine.torch_preload import preload

    say = silent if asked.as_json or asked.quiet else echo
    with watching(quiet=asked.quiet) as display:
        if not asked.dry_run:
            preload()
        plan = plan_it()
        if file is not None:
            file.protect(plan.inputs, [plan.job.output])
            file.begin()
        replaced = exists(plan.job.output)
        with paused(display):
            show_plan(plan, say, verbose=asked.verbose)
        done = None if asked.dry_run else carry_out(plan, display)
    if done is None:
        if replaced and not asked.overwrite:
            say("  note: the output exists: the merge will need --overwrite, or another -o")
        _conclude_dry(plan, say, file, asked)
        return None
    if file is not None:
        file.replace(done.to_json())
    show_report(done, say, plan.base.notes, as_json=asked.as_json, verbose=asked.verbose, replaced=replaced)
    return done, plan


def _conclude_dry(plan: Plan, say: Any, file: ReportFile | None, asked: Asked) -> None:
    """Say what a dry run says below the plan's own lines."""
    from ..engine.admission import require_device
    from ..planning.plan import coverage

    require_device(plan.job)
    facts = dry(plan)
    say(needs(plan, facts["disk"]))
    short = shortage(facts["disk"], facts["output"])
    for note in short:
        say(f"  note: {note}")
    for remark in remarks(coverage(plan), [*plan.base.notes, *short]) if asked.quiet else ():
        echo(remark, err=True)
    text_of_plan = json_text(facts)
    if file is not None:
        file.replace(text_of_plan)
    if asked.as_json:
        put(text_of_plan)


def show_plan(plan: Plan, say: Callable[[str], object], *, verbose: bool = False) -> None:
    """Say before the work what was recognised, what matched and what will be written; as a table on a terminal."""
    if say is silent or not styled(sys.stdout):
        plan_lines(plan, say, verbose=verbose)
        return
    job = plan.job
    rows = [
        (
            ref.path.name, ", ".join(m.algorithms) or "changes nothing",
            text(f"{m.modules} of {m.total}", "green" if m.modules == m.total else "yellow"),
            applied(m.strengths) or f"{ref.strength:g}×",
        )
        for ref, m in zip(job.adapters, plan.adapters, strict=True)
    ]  # fmt: skip
    facts = f"{plan.architecture}, {plural(len(plan.base.tensors), 'tensor')}"
    line = f"{size(plan.size)}, {stored(job.dtype)}, {plural(plan.changed, 'tensor')} to change"
    output = text(nearest(str(job.output)), "bold")
    show(grid([("base", text(job.base.name, "bold")), ("", facts), ("output", output), ("", line)]))
    show(table(("adapter", "kind", "modules matched", "strength"), rows))
    for words in _notes(plan, verbose=verbose):
        show(words)


def _notes(plan: Plan, *, verbose: bool) -> Iterator[Any]:
    for folder in plan.folders if verbose else ():
        yield text(f"{folder.role} {folder.path}", "dim")
        yield from (text(f"  {line}", "dim") for line in folder.lines())
    for note in plan.base.notes:
        yield text(f"{mark('note')} {note}", "yellow")
    for ref, m in zip(plan.job.adapters, plan.adapters, strict=True):
        matches = by_pattern(m.placed)
        for line in matches if verbose else ():
            yield text(f"  {line} × {len(matches[line])}", "dim")
        for names, why in by_reason({**m.unmatched, **m.adapter.ignored}):
            yield text(f"{mark('note')} {ref.path.name}: left out: {names}: {why}", "yellow")
        for note in (*m.adapter.notes, *m.notes):
            yield text(f"{mark('note')} {ref.path.name}: {note}", "yellow")


def show_report(
    done: Report, say: Callable[[str], object], said: Sequence[str], *, as_json: bool, verbose: bool = False,
    replaced: bool = False,
) -> None:  # fmt: skip
    """Say what was done; on a terminal a panel: what changed, where it lies, how it was proven, how to undo it.

    `replaced`: whether another output of that name was there before."""
    if as_json or say is silent or not styled(sys.stdout):
        report_lines(done, say, said, as_json=as_json, verbose=verbose)
        return
    changed = f"{done.changed} of {plural(done.tensors, 'tensor')} of {Path(done.base).name}, {done.architecture}"
    rows: list[tuple[str, Any]] = [("changed", changed)]
    for name, row in done.coverage.items():
        strengths = {part: {float(s): n for s, n in c.items()} for part, c in row["strengths"].items()}
        rows.append(("", f"{name}: {applied(strengths)}" if strengths else name))
        if left := [*row["skipped"], *row["ignored"]]:
            rows.append(("", text(f"{name}: left out {len(left)}: {counted(by_pattern(left))}", "yellow")))
    if done.method != SUM:
        rows.append(("method", done.method))
    rate = size(int(done.written / max(done.seconds, 1e-9)))
    rows.append(("lies in", text(nearest(done.output), "bold cyan")))
    rows.append(("", f"{size(done.written)}, {stored(done.dtype)}"))
    rows += [("", codes_line(done.codes))] if done.codes else []
    where = f"on {done.device}, computed in {done.compute_dtype}; {size(done.peak_memory)} of memory at most"
    rows.append(("", f"in {done.seconds:.1f} s ({rate}/s) {where}"))
    if verbose and done.device_choice:
        rows.append(("device", done.device_choice))
    rows += [("note", text(note, "yellow")) for note in done.notes if note not in said]
    if done.saturated:
        rows.append(("cut", saturated(done.saturated)))
    if done.verified is not None:
        rows += proven({**done.verified, "numbers": done.numbers, "counted": True}, verbose=verbose)
    else:
        rows.append(("proven", f"not at all (--no-verify); later: lora-merge verify {quoted(done.output)}"))
        rows += [("", f"the change: {effect(done.numbers)}")] if done.numbers else []
    rows.append(("undo", undo(done) + "; the output that was replaced is gone" * replaced))
    warned = bool(done.verified and done.verified["warnings"])
    show(panel(f"{mark('done')} merged", rows, "yellow" if warned else "green"))


def proven(proof: Mapping[str, Any], *, verbose: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the rows about a proof, in plain words."""
    how_much, *how_far = recomputed(proof)
    yield "proven", text(f"{mark('done')} {how_much}{':' if how_far else ''}", "green")
    yield from (("", line) for line in how_far)
    if proof["untouched"]["of"]:
        yield "", f"{mark('done')} {unchanged(proof['untouched'])}"
    for row in proof["retained"]:
        if (share := row["retained"]) is not None:
            sign = mark("done" if abs(share - 1) < 0.1 else "note")
            yield "", f"{sign} {retained(share)} of the change that {row['adapter']} makes is in the output"
    if proof["numbers"]:
        yield "", f"the change: {effect(proof['numbers'])}{of_a_sample(proof)}"
    if proof["saturated"]:
        yield "", f"{proof['saturated']} of the numbers compared were cut, as it was asked for"
    if (matching := proof["matching"])["alone"] or verbose:
        yield "", f"matching {matched(matching)}"
    if (account := proof["account"])["unused"]:
        yield "unused", unused(account)
    for warning in proof["warnings"]:
        yield "warning", text(warning, "bold yellow")


def show_proof(proof: Mapping[str, Any]) -> None:
    """Say what `verify` has proven; as a panel on a terminal."""
    if styled(sys.stdout):
        rows = [("output", text(nearest(proof["output"]), "bold cyan")), *proven(proof)]
        show(panel(f"{mark('done')} verified", rows, "yellow" if proof["warnings"] else "green"))
    else:
        proof_lines(proof, echo)


def undo(done: Report) -> str:
    """Return how to undo a merge: the command that removes its output, as the base is still there."""
    return f"{removal(done.output, folder=Path(done.output).is_dir())}   ({Path(done.base).name} is as it was)"


def removal(path: str, *, folder: bool) -> str:
    """Return the command that removes a file or a folder."""
    remove = ("rmdir /s" if folder else "del") if os.name == "nt" else "rm -r" if folder else "rm"
    return f"{remove} {quoted(path)}"


def nearest(path: str) -> str:
    """Return a path as it is typed in the current folder, if it lies there."""
    try:
        return one_line(str(Path(path).relative_to(Path.cwd())))
    except (ValueError, OSError):
        return one_line(path)


def quoted(path: str) -> str:
    """Return a path as a shell takes it."""
    near = nearest(path)
    return typed([f"./{near}" if near.startswith("-") else near])


def with_pictures(done: Report, plan: Plan) -> dict[str, Any]:
    """Return a report with the recipe that the output holds and the paths of its inputs, and with the spectrum and the
    histogram of each weight's change, if the inputs are still there."""
    from ..viewing.base import recipe_of
    from ..viewing.pictures import merge_pictures

    values = asdict(done)
    shown = merge_pictures(plan) if plan.job.output not in plan.inputs and values["numbers"] else {}
    for name, tensor in values["numbers"].get("tensors", {}).items():
        tensor |= shown.get(name, {})
    inputs = [str(path) for path in (plan.job.base, *(ref.path for ref in plan.job.adapters))]
    return {**values, "recipe": recipe_of(plan.job.output), "inputs": inputs}


SKIPPED = "done already"


@dataclass
class Telling:
    """Says how the jobs of a batch end. Jobs that were skipped one after the other have one line."""

    total: int
    quiet: bool
    _skipped: int = 0
    _named: dict[str, int] = field(default_factory=dict)  # error → number of the first job that has it

    def ended(self, job: JobReport) -> None:
        """Say how a job has ended."""
        if job.status == "skipped":
            self._skipped += 1
            return
        self.flush()
        notes = [] if job.report is None else [*remarks(_left_out(job), job.report.notes), *_warnings(job)]
        if self.quiet and job.ok:
            for note in notes:
                echo(f"{job.output}: {note}", err=True)
            return
        echo(self._line(job))
        for note in notes:
            echo(f"    {note}")

    def flush(self) -> None:
        """Say how many jobs were skipped since the last line."""
        if self._skipped and not self.quiet:
            echo(f"{self._skipped} skipped: {SKIPPED}; their recipes and headers are right, verify reads the weights")
        self._skipped = 0

    def _line(self, job: JobReport) -> str:
        """ "[3/9] merged  out/ink-0.5.safetensors  1.99 GiB in 3.1 s", and for a failure what, where and fix."""
        head = f"[{job.number}/{self.total}] {job.status}  {nearest(job.output)}"
        if job.report is not None:
            head += f"  {size(job.report.written)} in {job.seconds:.1f} s"
        if job.error is None:
            return head
        first = self._named.setdefault(str(job.error), job.number)
        if first != job.number:
            return f"{head}  for the same reason as [{first}]"
        return Lines(f"{one_line(head)}\n{indented(job.error)}")


def _left_out(job: JobReport) -> Mapping[str, Any]:
    """Return what a merge says of its adapters; commands that write adapters say it in their notes."""
    return job.report.coverage if job.report is not None and job.status == "merged" else {}


def _warnings(job: JobReport) -> list[str]:
    """Return the warnings of a merge's proof, such as that an adapter is smaller than the output's dtype can hold."""
    proof = job.report.verified if job.report is not None and job.status == "merged" else None
    return [f"warning: {text}" for text in proof["warnings"]] if proof else []


def indented(error: Exception) -> Lines:
    """Return an error as lines that stand below the one of its job."""
    return Lines.of(f"    {row}" for row in f"error: {error}".splitlines())


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


def job_facts(s: PlannedJob, disk: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a dry run says of a job with --json. `disk`: the room for all jobs that write to its disk."""
    from ..batch.commands import MERGE

    job = s.entry.job
    adapters = [
        {"path": str(a.path), "strength": a.strength, "strengths": by_component(strengths or {})}
        for a, strengths in zip_longest(job.adapters, s.strengths)
    ]
    return {
        "dry_run": True, "number": s.entry.number, "where": s.entry.where, "output": str(job.output),
        "command": MERGE if (request := s.entry.request) is None else request.command,
        "base": None if request is not None and request.base is None else str(job.base), "adapters": adapters,
        "status": "failed" if s.error else "done" if s.done else "to run", "bytes": s.size, "disk": disk,
        "error": None if s.error is None else error_dict(s.error), "schema": schema("job-plan"),
    }  # fmt: skip


def show_batch(planned: Batch, ended: list[JobReport], to: IO[str]) -> None:
    """Print the table; raise BatchFailed if any job has no output."""
    counts: Counter[str] = Counter(job.status for job in ended)
    not_run = len(planned.planned) - len(ended)
    written = sum(job.report.written for job in ended if job.report is not None)
    names = ["merged", *(["made"] if counts["made"] else []), "skipped", "failed"]
    row = {**{name: counts[name] for name in names}, "not run": not_run}
    bad = [job for job in ended if not job.ok]
    if styled(to):
        _panel(row, written, bad, to)
    else:
        print("\n" + " ".join(f"{name:>8}" for name in row) + f" {'written':>10}", file=to)
        print("".join(f"{n:>8} " for n in row.values()) + f"{size(written):>10}", file=to)
        for line in _failures(bad):
            print(one_line(f"  failed  {line}"), file=to)
    if bad or not_run:
        raise failure(len(bad), len(planned.planned), "run")


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
    for job in bad:
        by_reason.setdefault(job.error.what if job.error is not None else job.status, []).append(job)
    for what, some in by_reason.items():
        more = f" and {len(some) - 1} more" if len(some) > 1 else ""
        yield f"{some[0].where}  {nearest(some[0].output)}{more}: {what}"


def failure(count: int, total: int, what: str) -> BatchFailed:
    """Return the error that ends a batch in which some jobs have no output."""
    return BatchFailed(f"{count} of {plural(total, 'job')} could not be {what}", "see the lines above",
                       "correct them and start again; what is done is not done twice")  # fmt: skip


def show_adapter_report(done: AdapterReport, title: str, *, quiet: bool, verbose: bool) -> None:
    """Say what was done or would be done; `title`: what was done, such as "resized". Notes are said always."""
    if quiet or not styled(sys.stdout):
        for line in adapter_report_lines(done, verbose=verbose) if not quiet else ():
            echo(line)
        for note in (*done.notes, *shortage(done.disk, done.output)):
            echo(f"note: {note}", err=quiet)
        return
    rows = [(name, text(row["modules"]), text(row["layers"]), f"{row['strength']:g}×")
            for name, row in done.coverage.items()]  # fmt: skip
    show(table(("adapter", "modules", "layers that they change", "strength"), rows, right=(1, 2)))
    if verbose:
        layers = [(name, layer["algorithm"], layer["rank"], _number(layer, "residual"), _number(layer, "largest"))
                  for name, layer in done.layers.items()]  # fmt: skip
        show(table(("layer", "kind", "rank", "residual", "largest |ΔW|"), layers, right=(2, 3, 4)))
    if done.planned:
        show(grid([("output", text(nearest(done.output), "bold")), ("", _made(done)), *_adapter_notes(done)]))
    else:
        show(panel(f"{mark('done')} {title}", _rows(done)))


def _number(layer: Mapping[str, Any], name: str) -> str:
    """Return a number of a layer with three digits; "" where it is not known."""
    return f"{layer[name]:.3g}" if name in layer else ""


def _rows(done: AdapterReport) -> Iterator[tuple[str, Any]]:
    """Yield what the file holds, where it lies, how it was proven, and how to undo it."""
    yield "holds", done.summary
    yield "", done.change
    yield "lies in", text(nearest(done.output), "bold cyan")
    yield "", f"{_made(done)}, in {done.seconds:.1f} s"
    if done.verified is None:
        yield "proven", "not at all (--no-verify)"
    else:
        yield "proven", text(_proof(done), "green")
    yield from _adapter_notes(done)
    yield "undo", f"{removal(done.output, folder=Path(done.output).is_dir())}   (the inputs are as they were)"


def _adapter_notes(done: AdapterReport) -> Iterator[tuple[str, Any]]:
    for name, facts in done.coverage.items():
        for keys, why in by_reason(facts["ignored"]):
            yield "note", text(f"{name}: left out: {keys}: {why}", "yellow")
    for note in (*done.notes, *shortage(done.disk, done.output)):
        yield "note", text(note, "yellow")


def _made(done: AdapterReport) -> str:
    return f"{size(done.written)}, dtype {done.dtype}, {plural(len(done.layers), 'layer')}"


def _proof(done: AdapterReport) -> str:
    """Return what was proven, in plain words."""
    proof = done.verified or {}
    if not proof["recomputed"]:
        return "every tensor is in the file; what this method makes is not computed a second time"
    return (f"{mark('done')} {proof['recomputed']} of {plural(proof['layers'], 'layer')} computed again in fp64: the "
            f"file changes a model as this report says")  # fmt: skip


def adapter_report_lines(done: AdapterReport, *, verbose: bool) -> Iterator[str]:
    """Yield the plain lines of a report."""
    for name, facts in done.coverage.items():
        change, layers = plural(facts["modules"], "module changes", "modules change"), plural(facts["layers"], "layer")
        yield f"adapter  {name}: {change} {layers}, {facts['strength']:g}×"
        for keys, why in by_reason(facts["ignored"]):
            yield f"  left out: {keys}: {why}"
    for name, layer in done.layers.items() if verbose else ():
        lost = "" if done.planned else f", residual {_number(layer, 'residual')}"
        largest = f", largest |ΔW| {_number(layer, 'largest')}" if "largest" in layer else ""
        yield f"  {name}: {layer['algorithm']}, rank {layer['rank']}{lost}{largest}"
    yield f"output   {done.output}: {_made(done)}"
    yield f"  {done.summary}"
    if done.change:
        yield f"  {done.change}"
    if done.verified:
        yield (
            f"verified {done.verified['recomputed']} of {plural(done.verified['layers'], 'layer')} computed again in "
            f"fp64: worst residual {done.verified['worst_residual']:.3g}"
        )
