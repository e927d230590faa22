"""The pages about files: one file, an adapter on a base, a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ...text import size
from ..training import of_dataset
from .content import COSINE, Content, Found, Metric, root, strengths
from .heat_map import short
from .preview import preview

MEASURED: Final = (
    Metric("norm", "‖ΔW‖", join=root),
    Metric("stable_rank", "stable rank"),
    Metric("rank", "rank", join=max),
    Metric("largest", "largest singular value", join=max),
)

PLANNED: Final = (
    Metric("delta", "‖ΔW‖", join=root),
    Metric("retained", "retained", "%"),
    Metric("largest", "largest |ΔW|", join=max),
)

DIFFERENT: Final = (
    Metric("relative", "difference / norm", "%"),
    Metric("difference", "norm of the difference", join=root),
    Metric("largest", "largest difference", join=max),
)

ALIKE: Final = (
    Metric("cosine", "cosine", COSINE),
    Metric("overlap", "common directions", "%"),
    Metric("a", "‖ΔW‖ of A", join=root),
    Metric("b", "‖ΔW‖ of B", join=root),
)


def of_file(found: Found) -> dict[str, Any]:
    """Return the content of the page about one file, or about an adapter on a base."""
    match = found.get("match")
    page = Content("Adapter" if found["kind"] == "adapter" else "Model", Path(found["path"]).name)
    if match:
        page.data["title"] += f" + {Path(match['adapter']).name}"
    page.summary(
        ("file", found["path"]),
        ("size", size(found["bytes"])),
        ("tensors", found["tensors"]),
        ("parameters", f"{found['parameters']:,}" if "parameters" in found else ""),
        ("architecture", found.get("architecture")),
        ("layout", found.get("layout")),
        ("bits per weight", found.get("bits_per_weight")),
        ("algorithms", _counts(found.get("algorithms"))),
        ("ranks", _range(found.get("rank_range"))),
        ("alphas", _range(found.get("alpha_range"))),
        ("made by", found.get("trainer")),
        ("made for", found.get("made_for")),
        *((name, value) for name, value in (found.get("hashes") or {}).items() if isinstance(value, str)),
    )
    page.data["notes"] = list(found.get("notes", ()))
    trained = found.get("trained") or {}
    page.data["image"] = preview(trained.get("preview") or {}, found.get("metadata") or {})
    page.table(
        "Training", ["fact", "value"], ([name.replace("_", " "), _fact(name, value)] for name, value in trained.items())
    )
    page.table(
        "Layers",
        ["names", "algorithm", "modules", "ranks"],
        (
            [name, row["algorithm"], row["modules"], ", ".join(map(str, row["ranks"]))]
            for name, row in found.get("patterns", {}).items()
        ),
    )
    if numbers := found.get("weights"):
        page.summary(("norm of ΔW", f"{numbers['norm']:.4g}"), ("stable rank", _range(numbers["stable_rank"])))
        page.heat_map(
            "What it changes, by block and layer",
            "At strength 1. Click a cell for its modules.",
            MEASURED,
            numbers["modules"],
        )
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
        ("adapter", match["adapter"]),
        ("strength", strengths(match.get("strengths", {})) or match["strength"]),
        ("matched", f"{match.get('matched', 0)} of {match['total']} modules"),
        ("output", size(match.get("output_bytes", 0))),
    )
    if not match["fits"]:
        page.data["warnings"].append("the adapter does not fit this base whole")
    page.table(
        "Modules without a place",
        ["module", "why"],
        ([n, _plain(w)] for n, w in (match.get("unmatched") or {}).items()),
    )
    if numbers := match.get("numbers"):
        page.data["warnings"].extend(numbers["warnings"])
        page.heat_map("What the merge would change", "Click a cell for its weights.", PLANNED, numbers["tensors"])
        page.bars("‖ΔW‖ by block", "block", ((name, row["delta"]) for name, row in numbers["blocks"].items()))
    page.command("Merge it:", "lora-merge", found["path"], f"{match['adapter']}:{match['strength']:g}")


def of_comparison(found: Found) -> dict[str, Any]:
    """Return the content of the page of a comparison."""
    page = Content("Comparison", f"{Path(found['a']).name} ↔ {Path(found['b']).name}")
    page.summary(("A", found["a"]), ("B", found["b"]))
    if found["kind"] == "adapters":
        total = found["total"]
        page.summary(
            ("modules in both", found["common"]),
            ("cosine of the changes", _six(total.get("cosine"))),
            ("common directions", _six(total.get("overlap"))),
            ("‖ΔW‖ of A", _six(total.get("a"))),
            ("‖ΔW‖ of B", _six(total.get("b"))),
        )
        page.heat_map(
            "How alike they are, by block and layer",
            "Cosine 1: the same direction; −1: they fight.",
            ALIKE,
            found["modules"],
        )
        page.bars(
            "Cosine by block",
            "block",
            ((n, row["cosine"]) for n, row in zip(_short(found["blocks"]), found["blocks"].values(), strict=True)),
        )
    else:
        page.summary(
            ("equal tensors", f"{found['equal']} of {found['compared']}"),
            ("different", found["different"]),
            ("norm of the difference", _six(found["total"].get("difference"))),
            ("relative", _six(found["total"].get("relative"))),
        )
        page.heat_map(
            "Where they differ, by block and layer", "Equal tensors are left out.", DIFFERENT, found["tensors"]
        )
        page.bars(
            "Norm of the difference by block",
            "block",
            ((n, row["difference"]) for n, row in found["blocks"].items() if row["difference"]),
        )
    page.table(
        "Only in one", ["name", "where"], [[n, where] for where in ("a", "b") for n in found.get(f"only_{where}", ())]
    )
    page.data["notes"] = list(found.get("notes", ()))
    return page.data


def of_files(found: Sequence[Found]) -> dict[str, Any]:
    """Return the content of a page about several files."""
    page = Content("Files", f"{len(found)} files")
    page.table(
        "Files",
        ["file", "kind", "made for", "tensors", "bytes"],
        ([f["path"], f["kind"], f.get("architecture") or f.get("made_for"), f["tensors"], f["bytes"]] for f in found),
    )
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


def _fact(name: str, value: Any) -> str:
    """Return a fact of the training in words."""
    if name == "datasets":
        return ", ".join(f"{one['name']} ({of_dataset(one)})" for one in value)
    return f"a picture in {value['in']}" if name == "preview" else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
