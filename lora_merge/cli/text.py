"""Text for people: what a job will do, its progress, what it did and what was proven."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..dtypes import spoken
from ..process import kept_objects
from ..text import Lines, Note, by_pattern, by_reason, codes_line, counted, plural, shown, size, stored
from ..viewing.words.merges import effect, matched, of_a_sample, recomputed, retained, saturated, unchanged, unused
from .look import broken, columns

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..progress import Progress
    from ..report import Report


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


def describe(plan: Plan, say: Any, *, verbose: bool) -> None:
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
    found = []
    for part, counts in strengths.items():
        used = sorted((strength for strength in counts if strength), reverse=True)
        if len(used) > MOST_STRENGTHS:
            found.append(f"{used[-1]:g} to {used[0]:g}× {part} ({sum(counts[s] for s in used)})")
        else:
            found += [f"{strength:g}× {part} ({counts[strength]})" for strength in used]
        if left := counts.get(0.0):
            found.append(f"{part} 0: {left} left out")
    return ", ".join(found)


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
    for name, found in coverage.items():
        if left := [*found["skipped"], *found["ignored"]]:
            yield f"{name}: left out {len(left)}: {counted(by_pattern(left))}"
        yield from (f"{name}: note: {note}" for note in found["notes"])


def conclude(done: Report, say: Any, said: Sequence[str], *, as_json: bool, verbose: bool = False) -> None:
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
        show_proof({**done.verified, "numbers": done.numbers, "counted": True}, say, verbose=verbose)
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


def show_proof(proof: Mapping[str, Any], say: Any, *, verbose: bool = False) -> None:
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
