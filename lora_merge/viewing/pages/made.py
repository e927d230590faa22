"""The pages about what was written: a merge, an adapter, a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ...text import size
from .content import CLICK, Content, Found, Metric, root, strengths
from .heat_map import short

MADE: Final = (
    Metric("norm", "‖ΔW‖", join=root),
    Metric("residual", "what is lost", "%"),
    Metric("rank", "rank", join=max),
    Metric("rank_before", "rank before", join=max),
)


def of_merge(found: Found) -> dict[str, Any]:
    """Return the content of the page of a merge."""
    page = Content("Merge", Path(found["output"]).name)
    proof = found["verified"] or {}
    page.summary(
        ("output", f"{found['output']} ({size(found['written'])})"),
        ("base", f"{found['base']} ({found['architecture']})"),
        ("changed", f"{found['changed']} of {found['tensors']} tensors"),
        ("dtype", found["dtype"]),
        ("method", found["method"]),
        ("device", f"{found['device']}, computed in {found['compute_dtype']}"),
        ("time", f"{found['seconds']:.1f} s"),
        ("peak memory", size(found["peak_memory"])),
        ("proof", _proof(proof)),
    )
    page.data["warnings"] = list(proof.get("warnings", ()))
    page.data["notes"] = [
        *found["notes"],
        *(f"{name}: {note}" for name, c in found["coverage"].items() for note in c["notes"]),
    ]
    shares = {row["adapter"]: row["retained"] for row in proof.get("retained", ())}
    page.table(
        "Adapters",
        ["adapter", "modules matched", "of", {"title": "retained", "unit": "%", "bar": True}, "strength"],
        (
            [name, c["matched"], c["total"], shares.get(name), strengths(c["strengths"])]
            for name, c in found["coverage"].items()
        ),
    )
    page.change(found["numbers"], "retained", "What changed, by block and layer")
    page.table(
        "Not merged",
        ["adapter", "module", "why"],
        (
            [name, module, why]
            for name, c in found["coverage"].items()
            for module, why in {**c["skipped"], **c["ignored"]}.items()
        ),
    )
    page.data["stages"] = _stages(found["stages"])
    page.command("Repeat the merge, with the same bytes as the outcome:", "lora-merge", "replay", found["output"])
    page.command("Prove every byte of it:", "lora-merge", "verify", found["output"], "--full")
    page.command(
        "Undo it (the base is unchanged):", "rm", *(["-r"] if not Path(found["output"]).suffix else []), found["output"]
    )
    return page.data


def _proof(proof: Found) -> str:
    if not proof:
        return "not proven (--no-verify)"
    how = "every row" if proof["full"] else f"{proof['rows']} rows"
    return (
        f"{proof['tensors']} of {proof['changed']} merged tensors computed again in fp64, {how}: at most "
        f"{proof['worst_ulp']:.2f} ulp from the exact numbers"
    )


def _stages(found: Found) -> list[dict[str, Any]]:
    rows = [[name, seconds] for name, seconds in found.items() if name != "wait" and seconds >= 0.005]
    return [{"title": "Time of the stages, which run side by side", "rows": rows}] if rows else []


def of_adapter_made(found: Found) -> dict[str, Any]:
    """Return the content of the page of an adapter that was combined, resized, converted, averaged or extracted."""
    page = Content("Adapter", Path(found["output"]).name)
    page.summary(
        ("output", f"{found['output']} ({size(found['written'])})"),
        ("format", found["format"]),
        ("dtype", found["dtype"]),
        ("layers", len(found["layers"])),
        ("what is lost", f"{found['residual']:.3g} of the norm"),
        ("energy kept", f"{found['energy']:.2%}"),
        ("time", f"{found['seconds']:.1f} s"),
    )
    page.data["notes"] = list(found["notes"])
    page.table(
        "Adapters",
        ["adapter", "strength", "modules", "layers"],
        ([name, c.get("strength"), c.get("modules"), c.get("layers")] for name, c in found["coverage"].items()),
    )
    page.heat_map(
        "Layers of the output",
        CLICK,
        MADE,
        found["layers"],
    )
    _by_block(page, found["numbers"])
    page.table(
        "Layers",
        ["layer", "algorithm", *({"title": m.title, "unit": m.unit} for m in MADE)],
        ([name, layer.get("algorithm"), *(layer.get(m.key) for m in MADE)] for name, layer in found["layers"].items()),
    )
    page.command("Prove it again:", "lora-merge", "verify", found["output"])
    page.command("Repeat it:", "lora-merge", "replay", found["output"])
    return page.data


def _by_block(page: Content, numbers: Found) -> None:
    """Add how large the change of each network and block is, and how much of it is kept."""
    for kind, of in (("components", "network"), ("blocks", "block")):
        found = numbers.get(kind, {})
        labels = short(found)
        page.bars(f"‖ΔW‖ by {of}", of, ((labels[name], one["norm"]) for name, one in found.items()))
        if len(found) > 1:
            energy = {"title": "energy kept", "unit": "%", "bar": True}
            rows = [[labels[name], one["layers"], one["norm"], one["energy"]] for name, one in found.items()]
            page.table(f"By {of}", [of, "layers", {"title": "‖ΔW‖", "bar": True}, energy], rows)


def of_jobs(found: Sequence[Found]) -> dict[str, Any]:
    """Return the content of the page of a batch."""
    page = Content("Batch", f"{len(found)} jobs")
    counts: dict[str, int] = {}
    for job in found:
        counts[job["status"]] = counts.get(job["status"], 0) + 1
    reports = [job.get("report") or {} for job in found]
    page.summary(*counts.items(), ("time of all jobs", f"{sum(r.get('seconds', 0) for r in reports):.1f} s"))
    page.data["warnings"] = [f"{job['output']}: {job['error']['what']}" for job in found if job.get("error")]
    rows = []
    for job, report in sorted(zip(found, reports, strict=True), key=lambda pair: pair[0]["number"]):
        every = (report.get("numbers") or {}).get("all") or {}
        link = {"text": Path(job["output"]).name, "href": Path(job["output"]).absolute().as_uri()}
        rows.append(
            [
                job["number"],
                link,
                job["status"],
                report.get("written"),
                report.get("seconds"),
                every.get("ratio"),
                every.get("retained"),
            ]
        )
    page.table(
        "Jobs",
        [
            "job",
            "output",
            "status",
            "bytes",
            {"title": "time", "unit": "s", "bar": True},
            {"title": "‖ΔW‖ / ‖W‖", "unit": "%"},
            {"title": "retained", "unit": "%"},
        ],
        rows,
    )
    return page.data
