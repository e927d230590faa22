"""The pages about what was written: a merge, an adapter, a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from ...command import MERGE
from ...facts import line, strengths, times
from ...grouping import by_key
from ...paths import removal
from ...report import DONE, NOT_VERIFIED, layers_recomputed, merge_rows, of_change, trigger_words
from ...survival import ENOUGH, grade, judged, worst
from ...text import listed, plural
from ..json_schemas import kind_of
from .content import (
    CLICK,
    CURVE_AXES,
    CURVE_TITLE,
    LEAST_LOSS,
    SHARE_COLUMN,
    SURVIVES,
    Column,
    Metric,
    PageContent,
    Values,
    root,
)

LAYER_METRICS: Final = (
    Metric("ratio", "‖ΔW‖ / ‖W‖", "%"),
    Metric("norm", "‖ΔW‖", join=root),
    Metric("energy", SURVIVES, "%"),
    Metric("changed", "values that are not zero", "%"),
    Metric("largest", "largest |ΔW|", join=max),
    Metric("rank", "rank", join=max),
    Metric("rank_before", "rank before", join=max),
)


BLOCK_METRICS: Final = tuple(m for m in LAYER_METRICS if m.key in ("ratio", "norm", "changed", "largest"))
"""Those of them that several layers have together."""


def merge_page(facts: Values) -> dict[str, Any]:
    """Return the content of the page of a merge, or of one that is taken back."""
    from ...recipes.commands import COMMANDS

    command = facts.get("command", MERGE)
    page = PageContent(command.capitalize(), Path(facts["output"]).name)
    page.summary(merge_rows(facts, verbose=True))
    level, text = _merged(facts, page.data["warnings"])
    page.verdict(level, f"{COMMANDS[command].done.capitalize()}{text}")
    for word in trigger_words(facts["coverage"]):
        page.chip("trigger words", word)
    _adapters(page, facts)
    page.change(facts["numbers"], "What changed, by block and layer")
    page.table(
        "Not merged",
        ["adapter", "module", "why"],
        (
            [name, module, why]
            for name, c in facts["coverage"].items()
            for module, why in {**c["skipped"], **c["ignored"]}.items()
        ),
    )
    page.data["stages"] = _stages(facts)
    _commands(page, facts, "--full")
    if command == MERGE:
        page.command("Take the adapters out of it, if the base is lost:", "lora-merge", "unmerge", facts["output"],
                     "-o", _beside(facts["output"], "without"), *_searched(facts))  # fmt: skip
    page.recipe(facts.get("recipe"))
    return page.data


def _merged(facts: Values, warnings: Sequence[str]) -> tuple[str, str]:
    """Return the verdict about a merge: its level, and the sentence after "Merged"."""
    if warnings:
        return "warning", f", but: {warnings[0]}"
    changed = f"{facts['changed']} of {facts['tensors']} tensors changed"
    if not facts["verified"]:
        return "warning", f", and not verified: {changed}."
    known = [row["share"] for row in facts["survival"] if row["share"] is not None]
    if (least := worst(known)) is not None:
        changed += f"; {judged(least, of_change(facts['method'], 'the change'))} survives"
    return "good", f" and verified: {changed}."


def _adapters(page: PageContent, facts: Values) -> None:
    """Add a table of the adapters of a merge: how much of each fits, how large its change is, and what is kept."""
    rows = [*facts["coverage"].items()]
    measured = (facts["numbers"] or {}).get("all", {}).get("adapters", [])
    page.table(
        "Adapters",
        ["adapter", "strength", "modules matched", "of", "‖ΔW‖", {"title": SURVIVES, **SHARE_COLUMN}],
        (
            [
                name,
                strengths(c["strengths"]),
                c["matched"],
                c["total"],
                (measures or {}).get("change"),
                (survives or {}).get("share"),
            ]
            for (name, c), measures, survives in zip_longest(rows, measured, facts["survival"])
        ),
        first=True,
    )


STAGES: Final = {
    "start": "loading torch",
    "read": "reading",
    "hash": "hashing",
    "fold": "computing",
    "write": "writing",
    "load": "opening the inputs",
    "make": "computing",
    "flush": "writing",
    "prove": "proving",
}
"""Stage of the pipeline of a merge, which run side by side, or of a run that writes an adapter → what it does."""


def _stages(facts: Values) -> list[dict[str, Any]]:
    """Return the picture of the time of the stages, which the line of the whole run does not add up to."""
    times = facts["stages"].items()
    rows = [[STAGES.get(name, name), seconds] for name, seconds in times if name != "wait" and seconds >= 0.005]
    how = ", which run side by side" if "fold" in facts["stages"] else ""
    title = f"Time of the stages{how}; {facts['seconds']:.1f} s in all"
    return [{"title": title, "rows": rows}] if rows else []


def adapter_page(facts: Values) -> dict[str, Any]:
    """Return the content of the page of an adapter that was combined, resized, converted, averaged or extracted."""
    from ...adapters_out.report import adapter_rows  # numpy
    from ...recipes.commands import COMMANDS

    # Step 1: the summary and the verdict.
    command = COMMANDS.get((facts.get("recipe") or {}).get("command", ""))
    kind = f"{command.done.capitalize()} adapter" if command else "Adapter"
    page, every = PageContent(kind, Path(facts["output"]).name), facts["numbers"].get("all", {})
    rows = [row for row in adapter_rows(facts, verbose=True) if row.name not in ("", "residual", "verified")]
    if proof := facts["verified"]:  # without the residual, another measure of what survives
        rows.append(line("verified", layers_recomputed(proof)))
    page.summary([*rows, *([] if proof else [NOT_VERIFIED])])
    page.verdict(*_written(facts, page.data["warnings"]))
    # Step 2: the inputs.
    norms = every.get("adapters") or [{"change": every.get("norm")}]  # of extract and convert, which have one input
    page.table(
        "Inputs",
        ["input", "strength", "modules", "layers that they change", "‖ΔW‖"],
        (
            [name, c.get("strength"), c.get("modules"), c.get("layers"), (row or {}).get("change")]
            for (name, c), row in zip_longest(facts["coverage"].items(), norms)
        ),
        first=True,
    )
    # Step 3: what it changes, in all, by block and by layer.
    before = {name: {**row, "rank_before": row.get("rank_before") or None} for name, row in facts["layers"].items()}
    known = _informative(LAYER_METRICS, before)
    page.heat_map("What it changes, by block and layer", CLICK, known, before,
                  facts["numbers"].get("blocks", ()))  # fmt: skip
    page.curve(CURVE_TITLE, CURVE_AXES, facts["numbers"].get("curve", ()), "%")
    _by_block(page, facts["numbers"])
    page.data["stages"] = _stages(facts)
    page.table(
        "Layers",
        ["layer", "algorithm", *({"title": m.title, "unit": m.unit} for m in known)],
        ([name, layer.get("algorithm"), *(layer.get(m.key) for m in known)] for name, layer in before.items()),
    )
    # Step 4: what can be done next.
    _commands(page, facts)
    page.recipe(facts.get("recipe"))
    return page.data


def _written(facts: Values, warnings: Sequence[str]) -> tuple[str, str]:
    """Return the verdict about an adapter that was written: its level, and the sentence."""
    if warnings:
        return "warning", f"Written, but: {warnings[0]}"
    checked = "Written and verified" if facts["verified"] else "Written, and not verified"
    sound = facts["verified"] and grade(facts["energy"]).least >= ENOUGH
    return "good" if sound else "warning", f"{checked}: {judged(facts['energy'], 'the change')} survives."


def _informative(metrics: Sequence[Metric], rows: Values) -> list[Metric]:
    """Return the numbers that are known and differ: sums of factors change every number."""
    values = {m: [row[m.key] for row in rows.values() if row.get(m.key) is not None] for m in metrics}
    return [m for m, numbers in values.items() if numbers and (m.key != "changed" or min(numbers) < 1)]


def _commands(page: PageContent, facts: Values, *options: str) -> None:
    """Add the commands that repeat, prove and undo what a page is about. `options`: of `verify`."""
    output, searched = facts["output"], [*_searched(facts)]
    page.command("Repeat it, with the same bytes as the outcome:", "lora-merge", "replay", output,
                 "-o", _beside(output, "again"), *searched)  # fmt: skip
    page.command("Prove it again:", "lora-merge", "verify", output, *options, *searched)
    page.command("Undo it (the inputs are unchanged):", *removal(output, folder=Path(output).is_dir()))


def _searched(facts: Values) -> Iterator[str]:
    """Yield the options for the folders of the inputs, except that of the output."""
    folders = (Path(path).absolute().parent for path in facts.get("inputs", ()))
    for folder in dict.fromkeys(f for f in folders if f != Path(facts["output"]).absolute().parent):
        yield from ("--search", str(folder))


def _beside(output: str, word: str) -> str:
    """Return the path of another output in the same folder."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}-{word}{path.suffix}"))


def _by_block(page: PageContent, numbers: Values) -> None:
    """Add how large the change of each part and block is, and how much of it is kept."""
    for kind, of in (("components", "part"), ("blocks", "block")):
        blocks = numbers.get(kind, {})
        known = _informative(BLOCK_METRICS, blocks)
        lost = [(name, 1 - row["energy"]) for name, row in blocks.items()]
        if any(share > LEAST_LOSS for _, share in lost):
            page.bars(f"Lost by {of}", of, lost, "%")
        for m in known[:1]:
            page.bars(f"{m.title} by {of}", of, ((name, row.get(m.key)) for name, row in blocks.items()), m.unit)
        if len(blocks) > 1:
            columns = [{"title": m.title, "unit": m.unit, "bar": m in known[:1]} for m in known]
            rows = [[name, row["layers"], *(row.get(m.key) for m in known), row["energy"]]
                    for name, row in blocks.items()]  # fmt: skip
            page.table(f"By {of}", [of, "layers", *columns, {"title": SURVIVES, **SHARE_COLUMN}], rows)


def batch_page(ended: Sequence[Values]) -> dict[str, Any]:
    """Return the content of the page of a batch."""
    from ...batch.report import batch_rows

    page = PageContent("Batch", plural(len(ended), "job"))
    page.summary(batch_rows(ended, len(ended)))
    jobs = sorted(ended, key=lambda job: int(job["number"]))
    reasons = _grouped(jobs)
    page.data["warnings"] = [
        f"{listed(dict.fromkeys(names), NAMED_OUTPUTS)}: {text}" for text, names in reasons.items()
    ]
    levels = [*map(_level, jobs)]
    failed, sound = levels.count("bad"), plural(len(jobs), "job")
    if failed:
        page.verdict("bad", f"{failed} of {sound} failed: {next(iter(reasons), 'another process is at it')}")
    elif reasons:
        page.verdict("warning", f"All of {sound} are done, but: {next(iter(reasons))}")
    else:
        page.verdict("good", f"All of {sound} are done.")
    page.table(*_grid(jobs), first=True)
    page.table("Jobs", JOB_COLUMNS, map(_job, jobs), details=[*map(_opened, jobs)],
               marks=["" if level == "good" else level for level in levels])  # fmt: skip
    return page.data


def _level(job: Values) -> str:
    """Return the level of a job: bad without an output, warning if its report has warnings."""
    if job["status"] not in DONE:
        return "bad"
    return "warning" if [*_warnings(job)] else "good"


NAMED_OUTPUTS: Final = 3  # outputs that a reason of several jobs names


def _grouped(jobs: Sequence[Values]) -> dict[str, list[str]]:
    """Return why jobs failed, and their warnings: text → the outputs that it is about, failures first."""
    ordered = sorted(jobs, key=lambda job: job["status"] in DONE)
    return by_key((text, Path(job["output"]).name) for job in ordered for text in _warnings(job))


def _grid(jobs: Sequence[Values]) -> tuple[str, Sequence[Column], list[list[Any]]]:
    """Return title, columns and rows of a table adapter × strength; without rows if no jobs are such a matrix.

    Its jobs have one adapter, which other jobs have at other strengths; a job without either is left out.
    """
    cells: dict[str, dict[str, Values]] = {}
    for job in jobs:
        if len(adapters := job.get("adapters") or []) == 1:
            row, strength = cells.setdefault(adapters[0]["name"], {}), f"{times(adapters[0]['strength'])}×"
            if strength in row:  # on two bases, with two dtypes
                return "", (), []
            row[strength] = job
    matrix = {name: row for name, row in cells.items() if len(row) >= MATRIX}
    strengths_of = list(dict.fromkeys(strength for row in matrix.values() for strength in row))
    if len(matrix) < MATRIX:
        return "", (), []
    rows = [[name, *(_cell(row[s]) if s in row else "–" for s in strengths_of)] for name, row in matrix.items()]
    return "Adapters and strengths", ("adapter", *strengths_of), rows


MATRIX: Final = 2  # rows and columns from which jobs are a matrix


def _cell(job: Values) -> dict[str, str]:
    """Return the cell of a job: a link to its output, or why it failed."""
    if error := job.get("error"):
        return {"text": f"✗ {error['what']}", "level": "bad"}
    if job["status"] not in DONE:
        return {"text": f"✗ {job['status']}", "level": "bad"}
    sound = "" if _level(job) == "good" else "warning"
    return {"text": f"✓ {job['status']}", "href": Path(job["output"]).absolute().as_uri(), "level": sound}


def _opened(job: Values) -> dict[str, Any]:
    """Return what the row of a job opens to: the numbers of its own page without those of each weight, or its error."""
    if error := job.get("error"):
        return {"summary": [[name, error.get(name, "")] for name in ("what", "where", "fix")], "tables": []}
    report = job.get("report")
    if not report:
        return {"summary": [["output", job["output"]]], "tables": []}
    page = (merge_page if kind_of(report) == "report" else adapter_page)(report)
    notes = [["note", text] for text in (*page["warnings"], *page["notes"])]
    return {
        "summary": [*page["summary"], *notes],
        "tables": [part for part in page["tables"] if part["title"] != "Layers"],
    }


def _warnings(job: Values) -> Iterator[str]:
    """Yield why a job failed, and the warnings of its report."""
    if error := job.get("error"):
        yield error["what"]
    if (report := job.get("report")) and kind_of(report) == "report":
        yield from (row.value for row in merge_rows(report) if row.name in ("warning", "cut"))
    elif report and (warning := (report.get("survival") or {}).get("warning")):
        yield warning


JOB_COLUMNS: Final[Sequence[Column]] = (
    "job", "output", "status", "adapters", {"title": "size", "unit": "B"}, {"title": "time", "unit": "s", "bar": True},
    {"title": "‖ΔW‖ / ‖W‖", "unit": "%"}, {"title": SURVIVES, "unit": "%"},
)  # fmt: skip


def _job(job: Values) -> list[Any]:
    """Return the row of a job. An output that is there is a link."""
    report = job.get("report") or {}
    every, path = (report.get("numbers") or {}).get("all") or {}, Path(job["output"])
    written = job["status"] in DONE
    output = {"text": path.name, "href": path.absolute().as_uri()} if written else path.name
    adapters = ", ".join(f"{name} {_times(c)}".strip() for name, c in report.get("coverage", {}).items())
    adapters = adapters or ", ".join(f"{a['name']} {times(a['strength'])}×" for a in job.get("adapters") or ())
    why = f"{job['status']}: {job['error']['what']}" if job.get("error") else job["status"]
    return [job["number"], output, why, adapters, report.get("written"), job.get("seconds") or None,
            every.get("ratio"), every.get("share")]  # fmt: skip


def _times(adapter: Values) -> str:
    """Return the strengths of an adapter, whatever its parts: `0.5×`, `0.5× 0×`."""
    if "strengths" not in adapter:
        return f"{times(adapter['strength'])}×" if "strength" in adapter else ""
    return " ".join(
        f"{times(s)}×" for s in dict.fromkeys(s for counts in adapter["strengths"].values() for s in counts)
    )
