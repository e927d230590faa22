"""A merge on a terminal: the plan as a table, the result as a panel."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..methods import SUM
from ..paths import exists, typed
from ..text import by_pattern, by_reason, codes_line, counted, json_text, one_line, plural, size, stored
from ..viewing.words.merges import effect, matched, of_a_sample, recomputed, retained, saturated, unchanged, unused
from . import text as plain
from .look import grid, mark, panel, show, styled, table, text
from .stages import paused, watching
from .text import applied, silent

if TYPE_CHECKING:
    from ..planning.plan import Plan
    from ..report import Report
    from .streams import ReportFile


class Asked:
    """How a command reports, by its options. A plain class: `--help` makes it too, and others take a thousand calls."""

    def __init__(self, *, dry_run: bool, as_json: bool, quiet: bool, verbose: bool, overwrite: bool) -> None:
        self.dry_run, self.as_json, self.quiet = dry_run, as_json, quiet
        self.verbose, self.overwrite = verbose, overwrite


def carried_out(plan_it: Callable[[], Plan], told: ReportFile | None, asked: Asked) -> tuple[Report, Plan] | None:
    """Merge and say what was done, or say what would be done; returns the report of a merge, and its plan.

    `plan_it`: makes the plan; for a dry run of an output that may exist. `told`: the file for the report.
    """
    from ..engine.torch_preload import preload

    say = silent if asked.as_json or asked.quiet else plain.echo
    with watching(quiet=asked.quiet) as display:
        if not asked.dry_run:
            preload()
        plan = plan_it()
        if told is not None:
            told.protect(plan.inputs, [plan.job.output])
            told.begin()
        replaced = exists(plan.job.output)
        with paused(display):
            describe(plan, say, verbose=asked.verbose)
        done = None if asked.dry_run else plain.carry_out(plan, display)
    if done is None:
        if replaced and not asked.overwrite:
            say("  note: the output exists: the merge will need --overwrite, or another -o")
        _conclude_dry(plan, say, told, asked)
        return None
    if told is not None:
        told.replace(done.to_json())
    conclude(done, say, plan.base.notes, as_json=asked.as_json, verbose=asked.verbose, replaced=replaced)
    return done, plan


def _conclude_dry(plan: Plan, say: Any, told: ReportFile | None, asked: Asked) -> None:
    """Say what a dry run says below the plan's own lines."""
    from ..engine.admission import require_device
    from ..planning.plan import coverage

    require_device(plan.job)
    facts = plain.dry(plan)
    say(plain.needs(plan, facts["disk"]))
    short = plain.shortage(facts["disk"], facts["output"])
    for note in short:
        say(f"  note: {note}")
    for remark in plain.remarks(coverage(plan), [*plan.base.notes, *short]) if asked.quiet else ():
        plain.echo(remark, err=True)
    found = json_text(facts)
    if told is not None:
        told.replace(found)
    if asked.as_json:
        plain.put(found)


def describe(plan: Plan, say: Callable[[str], object], *, verbose: bool = False) -> None:
    """Say before the work what was recognised, what matched and what will be written; as a table on a terminal."""
    if say is silent or not styled(sys.stdout):
        plain.describe(plan, say, verbose=verbose)
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
    made = f"{size(plan.size)}, {stored(job.dtype)}, {plural(plan.changed, 'tensor')} to change"
    output = text(nearest(str(job.output)), "bold")
    show(grid([("base", text(job.base.name, "bold")), ("", facts), ("output", output), ("", made)]))
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


def conclude(
    done: Report, say: Callable[[str], object], said: Sequence[str], *, as_json: bool, verbose: bool = False,
    replaced: bool = False,
) -> None:  # fmt: skip
    """Say what was done; on a terminal a panel: what changed, where it lies, how it was proven, how to undo it.

    `replaced`: whether another output of that name was there before."""
    if as_json or say is silent or not styled(sys.stdout):
        plain.conclude(done, say, said, as_json=as_json, verbose=verbose)
        return
    changed = f"{done.changed} of {plural(done.tensors, 'tensor')} of {Path(done.base).name}, {done.architecture}"
    rows: list[tuple[str, Any]] = [("changed", changed)]
    for name, found in done.coverage.items():
        strengths = {part: {float(s): n for s, n in c.items()} for part, c in found["strengths"].items()}
        rows.append(("", f"{name}: {applied(strengths)}" if strengths else name))
        if left := [*found["skipped"], *found["ignored"]]:
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
    for found in proof["retained"]:
        if (share := found["retained"]) is not None:
            sign = mark("done" if abs(share - 1) < 0.1 else "note")
            yield "", f"{sign} {retained(share)} of the change that {found['adapter']} makes is in the output"
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
        plain.show_proof(proof, plain.echo)


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

    found = asdict(done)
    shown = merge_pictures(plan) if plan.job.output not in plan.inputs and found["numbers"] else {}
    for name, one in found["numbers"].get("tensors", {}).items():
        one |= shown.get(name, {})
    inputs = [str(path) for path in (plan.job.base, *(ref.path for ref in plan.job.adapters))]
    return {**found, "recipe": recipe_of(plan.job.output), "inputs": inputs}
