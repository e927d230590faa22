"""The JSON of a report, of inspect, of compare or of jobs → the content of a page: plain values that JSON can hold."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from ...text import size
from .heat_map import places, short

Found: TypeAlias = Mapping[str, Any]
Row: TypeAlias = list[Any]


def _root(values: Sequence[float]) -> float:
    return sqrt(sum(v * v for v in values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Metric(NamedTuple):
    """A number of each weight: its entry in the JSON, its title, its unit, and how those of several weights join."""

    key: str
    title: str
    unit: str = ""
    join: Callable[[Sequence[float]], float] = _mean


MERGED: Final = (
    Metric("ratio", "‖ΔW‖ / ‖W‖", "%"), Metric("change", "‖ΔW‖", join=_root), Metric("retained", "retained", "%"),
    Metric("changed", "numbers that differ", "%"), Metric("noise", "noise / change", "%"),
    Metric("largest", "largest |ΔW|", join=max),
)  # fmt: skip
MEASURED: Final = (
    Metric("norm", "‖ΔW‖", join=_root), Metric("stable_rank", "stable rank"), Metric("rank", "rank", join=max),
    Metric("largest", "largest singular value", join=max),
)  # fmt: skip
PLANNED: Final = (
    Metric("delta", "‖ΔW‖", join=_root), Metric("retained", "retained", "%"), Metric("largest", "largest |ΔW|", join=max)
)
DIFFERENT: Final = (
    Metric("relative", "difference / norm", "%"), Metric("difference", "norm of the difference", join=_root),
    Metric("largest", "largest difference", join=max),
)  # fmt: skip
ALIKE: Final = (
    Metric("cosine", "cosine"), Metric("overlap", "common directions", "%"), Metric("a", "‖ΔW‖ of A", join=_root),
    Metric("b", "‖ΔW‖ of B", join=_root),
)  # fmt: skip
MADE: Final = (
    Metric("rank", "rank", join=max), Metric("rank_before", "rank before", join=max), Metric("residual", "what is lost", "%"),
    Metric("norm", "‖ΔW‖", join=_root),
)  # fmt: skip


class Content:
    """The sections of one page. `data` is what the page's script reads."""

    def __init__(self, kind: str, title: str) -> None:
        self.data: dict[str, Any] = {
            "kind": kind, "title": title, "summary": [], "warnings": [], "notes": [], "tables": [], "heat_maps": [],
            "bars": [], "stages": [], "commands": [], "footer": "Made by lora-merge. This page makes no request.",
        }  # fmt: skip

    def summary(self, *rows: tuple[str, Any]) -> None:
        """Add rows of the summary; those without a value are left out."""
        self.data["summary"] += [[name, str(value)] for name, value in rows if value not in (None, "", [], {}, ())]

    def table(self, title: str, columns: Sequence[str | Mapping[str, Any]], rows: Iterable[Row], caption: str = "") -> None:
        """Add a sortable table, if it has rows. A column may have a unit, and `bar` for bars below its numbers."""
        named = [{"title": c} if isinstance(c, str) else dict(c) for c in columns]
        if found := list(rows):
            self.data["tables"].append({"title": title, "columns": named, "rows": found, "caption": caption})

    def bars(self, title: str, of: str, rows: Iterable[tuple[str, float | None]], unit: str = "") -> None:
        """Add a picture of bars, if there are at least two."""
        found = [[name, value] for name, value in rows if value is not None]
        if len(found) > 1:
            self.data["bars"].append({"title": title, "of": of, "unit": unit, "rows": found})

    def heat_map(self, title: str, text: str, metrics: Sequence[Metric], weights: Mapping[str, Found]) -> None:
        """Add a heat map of weights, if there are several: block × kind of layer."""
        known = [m for m in metrics if any(found.get(m.key) is not None for found in weights.values())]
        if len(weights) < 2 or not known:
            return
        at = places(weights)
        rows, columns = list(dict.fromkeys(b for b, _ in at.values())), list(dict.fromkeys(k for _, k in at.values()))
        cells: dict[tuple[int, int], list[str]] = {}
        for name, (block, kind) in at.items():
            cells.setdefault((rows.index(block), columns.index(kind)), []).append(name)
        labels = short(rows)
        self.data["heat_maps"].append({
            "title": title, "help": text, "rows": [labels[row] for row in rows], "columns": columns,
            "metrics": [{"key": m.key, "title": m.title, "unit": m.unit} for m in known],
            "cells": [
                {"row": row, "column": column, "names": names, "values": {
                    m.key: m.join(values) if (values := _numbers(weights, names, m.key)) else None for m in known
                }} for (row, column), names in cells.items()
            ],
            "weights": {name: _of_one(weights[name], known) for name in at},
        })  # fmt: skip

    def command(self, label: str, *words: str) -> None:
        """Add a command with a button to copy it."""
        self.data["commands"].append({"label": label, "text": shlex.join(words)})


def _numbers(weights: Mapping[str, Found], names: Sequence[str], key: str) -> list[float]:
    return [found for name in names if (found := weights[name].get(key)) is not None]


def _of_one(found: Found, metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return the numbers of one weight that the page shows."""
    pictures = {key: found[key] for key in ("spectrum", "histogram") if found.get(key)}
    return {m.key: found.get(m.key) for m in metrics} | pictures


def content(found: Found | Sequence[Found]) -> dict[str, Any]:
    """Return the content of the page about JSON that a command printed; of a batch, the list of its lines."""
    if not isinstance(found, Mapping):
        return _of_jobs(found) if found and "number" in found[0] else _of_files(found)
    if "verified" in found and "method" in found:
        return _of_merge(found)
    if "layers" in found:
        return _of_adapter_made(found)
    return _of_comparison(found) if "a" in found and "b" in found else _of_file(found)


def _of_merge(found: Found) -> dict[str, Any]:
    """Return the content of the page of a merge."""
    page = Content("Merge", Path(found["output"]).name)
    proof = found["verified"] or {}
    numbers = proof.get("numbers") or {}
    every = numbers.get("all") or {}
    page.summary(
        ("output", f"{found['output']} ({size(found['written'])})"), ("base", f"{found['base']} ({found['architecture']})"),
        ("changed", f"{found['changed']} of {found['tensors']} tensors"), ("dtype", found["dtype"]),
        ("method", found["method"]), ("device", f"{found['device']}, computed in {found['compute_dtype']}"),
        ("time", f"{found['seconds']:.1f} s"), ("peak memory", size(found["peak_memory"])),
        ("the change", f"{every['ratio']:.2%} of the weights (‖ΔW‖ / ‖W‖)" if every.get("ratio") else ""),
        ("retained", f"{every['retained']:.1%} of the change is in the output" if every.get("retained") else ""),
        ("proof", _proof(proof)),
    )  # fmt: skip
    page.data["warnings"] = list(proof.get("warnings", ()))
    page.data["notes"] = [*found["notes"], *(f"{name}: {note}" for name, c in found["coverage"].items() for note in c["notes"])]
    shares = {row["adapter"]: row["retained"] for row in proof.get("retained", ())}
    page.table(
        "Adapters", ["adapter", "modules matched", "of", {"title": "retained", "unit": "%", "bar": True}, "strength"],
        ([name, c["matched"], c["total"], shares.get(name), _strengths(c["strengths"])] for name, c in found["coverage"].items()),
    )  # fmt: skip
    _merged_numbers(page, numbers)
    page.table("Not merged", ["adapter", "module", "why"], (
        [name, module, why] for name, c in found["coverage"].items() for module, why in {**c["skipped"], **c["ignored"]}.items()
    ))  # fmt: skip
    page.data["stages"] = _stages(found["stages"])
    page.command("Repeat the merge, with the same bytes as the outcome:", "lora-merge", "replay", found["output"])
    page.command("Prove every byte of it:", "lora-merge", "verify", found["output"], "--full")
    page.command("Undo it (the base is unchanged):", "rm", *(["-r"] if not Path(found["output"]).suffix else []), found["output"])
    return page.data


def _merged_numbers(page: Content, numbers: Found) -> None:
    """Add what a merge did to the weights."""
    if not numbers:
        return
    page.heat_map(
        "What changed, by block and layer", "The stronger the colour, the larger. Click a cell for its weights.", MERGED, numbers["tensors"]
    )  # fmt: skip
    for kind, of in (("components", "part"), ("blocks", "block")):
        rows = numbers[kind].items()
        page.bars(f"‖ΔW‖ / ‖W‖ by {of}", of, ((name, row["ratio"]) for name, row in rows), "%")
        columns = [{"title": m.title, "unit": m.unit, "bar": m.key in ("ratio", "retained")} for m in MERGED]
        if len(rows) > 1:
            page.table(f"By {of}", [of, *columns], ([name, *(row[m.key] for m in MERGED)] for name, row in rows))


def _proof(proof: Found) -> str:
    if not proof:
        return "not proven (--no-verify)"
    how = "every row" if proof["full"] else f"{proof['rows']} rows"
    return (
        f"{proof['tensors']} of {proof['changed']} merged tensors computed again in fp64, {how}: at most "
        f"{proof['worst_ulp']:.2f} ulp from the exact numbers"
    )


def _strengths(found: Found) -> str:
    """Return strengths by part: `unet 0.8× (48), te 0× (16)`."""
    return ", ".join(f"{part} {s}× ({n})" for part, counts in found.items() for s, n in counts.items())


def _stages(found: Found) -> list[dict[str, Any]]:
    rows = [[name, seconds] for name, seconds in found.items() if name != "wait" and seconds >= 0.005]
    return [{"title": "Time of the stages, which run side by side", "rows": rows}] if rows else []


def _of_adapter_made(found: Found) -> dict[str, Any]:
    """Return the content of the page of an adapter that was combined, resized, converted, averaged or extracted."""
    page = Content("Adapter", Path(found["output"]).name)
    page.summary(
        ("output", f"{found['output']} ({size(found['written'])})"), ("format", found["format"]), ("dtype", found["dtype"]),
        ("layers", len(found["layers"])), ("what is lost", f"{found['residual']:.3g} of the norm"),
        ("energy kept", f"{found['energy']:.2%}"), ("time", f"{found['seconds']:.1f} s"),
    )  # fmt: skip
    page.data["notes"] = list(found["notes"])
    page.table("Adapters", ["adapter", "strength", "modules", "layers"], (
        [name, c.get("strength"), c.get("modules"), c.get("layers")] for name, c in found["coverage"].items()
    ))  # fmt: skip
    page.heat_map("Layers of the output", "The stronger the colour, the larger. Click a cell for its layers.", MADE, found["layers"])
    page.table("Layers", ["layer", "algorithm", *({"title": m.title, "unit": m.unit} for m in MADE)], (
        [name, layer.get("algorithm"), *(layer.get(m.key) for m in MADE)] for name, layer in found["layers"].items()
    ))  # fmt: skip
    page.command("Prove it again:", "lora-merge", "verify", found["output"])
    page.command("Repeat it:", "lora-merge", "replay", found["output"])
    return page.data


def _of_file(found: Found) -> dict[str, Any]:
    """Return the content of the page about one file, or about an adapter on a base."""
    match = found.get("match")
    page = Content("Adapter" if found["kind"] == "adapter" else "Model", Path(found["path"]).name)
    if match:
        page.data["title"] += f" + {Path(match['adapter']).name}"
    page.summary(
        ("file", found["path"]), ("size", size(found["bytes"])), ("tensors", found["tensors"]),
        ("parameters", f"{found['parameters']:,}" if "parameters" in found else ""), ("architecture", found.get("architecture")),
        ("layout", found.get("layout")), ("bits per weight", found.get("bits_per_weight")),
        ("algorithms", _counts(found.get("algorithms"))), ("ranks", _range(found.get("rank_range"))),
        ("alphas", _range(found.get("alpha_range"))), ("made by", found.get("trainer")), ("made for", found.get("made_for")),
        *((name, value) for name, value in (found.get("hashes") or {}).items() if isinstance(value, str)),
    )  # fmt: skip
    page.data["notes"] = list(found.get("notes", ()))
    trained = found.get("trained") or {}
    page.table("Training", ["fact", "value"], ([name, _plain(value)] for name, value in trained.items()))
    page.table("Layers", ["names", "algorithm", "modules", "ranks"], (
        [name, row["algorithm"], row["modules"], ", ".join(map(str, row["ranks"]))] for name, row in found.get("patterns", {}).items()
    ))  # fmt: skip
    if numbers := found.get("weights"):
        page.summary(("norm of ΔW", f"{numbers['norm']:.4g}"), ("stable rank", _range(numbers["stable_rank"])))
        page.heat_map("What it changes, by block and layer", "At strength 1. Click a cell for its modules.", MEASURED, numbers["modules"])
        page.bars("‖ΔW‖ by block", "block", _labelled(numbers["blocks"]))
    blocks = found.get("blocks") or {}
    if all(isinstance(v, int) for v in blocks.values()):
        page.bars("Parameters by block", "block", blocks.items())
    if match:
        _matched(page, found, match)
    return page.data


def _matched(page: Content, found: Found, match: Found) -> None:
    """Add how an adapter fits a base."""
    page.summary(
        ("adapter", match["adapter"]), ("strength", _strengths(match.get("strengths", {})) or match["strength"]),
        ("matched", f"{match.get('matched', 0)} of {match['total']} modules"), ("output", size(match.get("output_bytes", 0))),
    )
    if not match["fits"]:
        page.data["warnings"].append("the adapter does not fit this base whole")
    page.table("Modules without a place", ["module", "why"], ([n, _plain(w)] for n, w in (match.get("unmatched") or {}).items()))
    if numbers := match.get("numbers"):
        page.heat_map("What the merge would change", "Click a cell for its weights.", PLANNED, numbers["tensors"])
        page.bars("‖ΔW‖ by block", "block", ((name, row["delta"]) for name, row in numbers["blocks"].items()))
    page.command("Merge it:", "lora-merge", found["path"], f"{match['adapter']}:{match['strength']:g}")


def _of_comparison(found: Found) -> dict[str, Any]:
    """Return the content of the page of a comparison."""
    page = Content("Comparison", f"{Path(found['a']).name} ↔ {Path(found['b']).name}")
    page.summary(("A", found["a"]), ("B", found["b"]))
    if found["kind"] == "adapters":
        total = found["total"]
        page.summary(
            ("modules in both", found["common"]), ("cosine of the changes", _six(total.get("cosine"))),
            ("common directions", _six(total.get("overlap"))), ("‖ΔW‖ of A", _six(total.get("a"))), ("‖ΔW‖ of B", _six(total.get("b"))),
        )  # fmt: skip
        page.heat_map("How alike they are, by block and layer", "Cosine 1: the same direction; −1: they fight.", ALIKE, found["modules"])
        page.bars("Cosine by block", "block", ((n, row["cosine"]) for n, row in zip(_short(found["blocks"]), found["blocks"].values(), strict=True)))
    else:
        page.summary(
            ("equal tensors", f"{found['equal']} of {found['compared']}"), ("different", found["different"]),
            ("norm of the difference", _six(found["total"].get("difference"))), ("relative", _six(found["total"].get("relative"))),
        )  # fmt: skip
        page.heat_map("Where they differ, by block and layer", "Equal tensors are left out.", DIFFERENT, found["tensors"])
        page.bars("Norm of the difference by block", "block", ((n, row["difference"]) for n, row in found["blocks"].items() if row["difference"]))
    page.table("Only in one", ["name", "where"], [[n, where] for where in ("a", "b") for n in found.get(f"only_{where}", ())])
    page.data["notes"] = list(found.get("notes", ()))
    return page.data


def _of_files(found: Sequence[Found]) -> dict[str, Any]:
    """Return the content of a page about several files."""
    page = Content("Files", f"{len(found)} files")
    page.table("Files", ["file", "kind", "made for", "tensors", "bytes"], (
        [f["path"], f["kind"], f.get("architecture") or f.get("made_for"), f["tensors"], f["bytes"]] for f in found
    ))  # fmt: skip
    return page.data


def _of_jobs(found: Sequence[Found]) -> dict[str, Any]:
    """Return the content of the page of a batch."""
    page = Content("Batch", f"{len(found)} jobs")
    counts: dict[str, int] = {}
    for job in found:
        counts[job["status"]] = counts.get(job["status"], 0) + 1
    reports = [job.get("report") or {} for job in found]
    page.summary(*counts.items(), ("time of all jobs", f"{sum(r.get('seconds', 0) for r in reports):.1f} s"))
    page.data["warnings"] = [f"{job['output']}: {job['error']['what']}" for job in found if job.get("error")]
    rows = []
    for job, report in zip(found, reports, strict=True):
        every = ((report.get("verified") or {}).get("numbers") or {}).get("all") or {}
        link = {"text": Path(job["output"]).name, "href": Path(job["output"]).absolute().as_uri()}
        rows.append([job["number"], link, job["status"], report.get("written"), report.get("seconds"), every.get("ratio"), every.get("retained")])
    page.table("Jobs", ["job", "output", "status", "bytes", {"title": "time", "unit": "s", "bar": True},
                        {"title": "‖ΔW‖ / ‖W‖", "unit": "%"}, {"title": "retained", "unit": "%"}], rows)  # fmt: skip
    return page.data


def _short(names: Mapping[str, Any]) -> list[str]:
    labels = short(names)
    return [labels[name] for name in names]


def _labelled(found: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    return zip(_short(found), found.values(), strict=True)


def _counts(found: Any) -> str:
    return ", ".join(f"{name} ({n})" for name, n in found.items()) if isinstance(found, Mapping) else ""


def _range(found: Any) -> str:
    """Return `4 to 32, median 16`; one number where all are equal."""
    if not found:
        return ""
    low, high = found["min"], found["max"]
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}, median {found['median']:.4g}"


def _six(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
