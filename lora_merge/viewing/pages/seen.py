"""The pages about files: one file, an adapter on a base, a comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ...models.module_blocks import in_order
from ...text import listed, size
from ..compare import of_fight
from ..formats import of_format, of_plain
from ..hashes import spoken
from ..text import COUNT, FEW, of_merge, of_preview, of_size
from ..training import of_dataset
from .content import CLICK, COSINE, Column, Content, Found, Metric, root, strengths
from .heat_map import short
from .preview import preview

MEASURED: Final = (
    Metric("norm", "‖ΔW‖", join=root),
    Metric("stable_rank", "stable rank"),
    Metric("rank", "rank", join=max),
    Metric("largest", "largest singular value", join=max),
)

SIZES: Final = (
    Metric("rms", "root mean square"),
    Metric("norm", "‖W‖", join=root),
    Metric("largest", "largest |W|", join=max),
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
    _summary(page, found)
    page.data["notes"] = list(found.get("notes", ()))
    if incomplete := found.get("incomplete"):
        page.data["warnings"].append(f"{len(incomplete)} modules lack a tensor: {listed(incomplete)}")
    page.table(
        "Parts",
        ["part", "what it does", "modules", "parameters", "layers"],
        (
            [name, part["does"], part["modules"], part["parameters"], _counts(part["layers"])]
            for name, part in found.get("parts", {}).items()
        ),
        first=True,
    )
    _trained(page, found.get("trained") or {}, found.get("metadata") or {})
    hashes = (found.get("hashes") or {}).items()
    page.table("Hashes, by which model sites find it", ["hash", "value"], ([spoken(n), value] for n, value in hashes))
    page.table(
        "Layers",
        ["names", "algorithm", "modules", "ranks", "alphas"],
        (
            [name, row["algorithm"], row["modules"], _few(row["ranks"]), _few(row["alphas"])]
            for name, row in found.get("patterns", {}).items()
        ),
    )
    if numbers := found.get("weights"):
        _changed(page, numbers)
    blocks = found.get("blocks") or {}
    if found["kind"] == "adapter":
        page.table(
            "Blocks",
            ["block", "modules", "ranks", "alphas"],
            ([name, b["modules"], _range(b["ranks"]), _range(b["alphas"])] for name, b in blocks.items()),
        )
    elif not match:
        if sizes := found.get("sizes"):
            _sized(page, sizes)
        page.bars("Parameters by block", "block", blocks.items())
    if match:
        _matched(page, found, match)
    return page.data


def _summary(page: Content, found: Found) -> None:
    page.summary(
        ("file", found["path"]),
        ("size", size(found["bytes"])),
        ("tensors", found["tensors"]),
        ("parameters", f"{found['parameters']:,}" if "parameters" in found else ""),
        ("dtypes", _sizes(found.get("dtypes"))),
        ("looks like", found.get("looks_like")),
        ("architecture", found.get("architecture")),
        ("layout", found.get("layout")),
        ("parts", _sizes(found.get("components"))),
        ("bits per weight", found.get("bits_per_weight")),
        ("quantised", found.get("quantised")),
        *(("format", of_format(one)) for one in found.get("formats", ())),
        ("not quantised", of_plain(found.get("not_quantised", {}))),
        *(("merged" if not n else "before that", of_merge(one)) for n, one in enumerate(found.get("merged", ()))),
        ("undo", found.get("undo")),
        ("algorithms", _counts(found.get("algorithms"))),
        ("ranks", _range(found.get("rank_range"))),
        ("alphas", _range(found.get("alpha_range"))),
        ("made by", found.get("trainer")),
        ("names", _plain(found.get("names", []))),
        ("made for", found.get("made_for")),
    )


def _trained(page: Content, trained: Found, metadata: Found) -> None:
    """Add what the trainer noted, and the picture that shows what the adapter does."""
    page.data["image"] = preview(trained.get("preview") or {}, metadata)
    page.table(
        "Training",
        ["fact", "value"],
        ([name.replace("_", " "), _fact(name, value)] for name, value in trained.items()),
        first=True,
    )


def _changed(page: Content, numbers: Found) -> None:
    """Add how much an adapter changes, from its weights."""
    page.summary(
        ("norm of ΔW", f"{numbers['norm']:.4g}"),
        ("stable rank", _range(numbers["stable_rank"])),
        *(
            (f"{share} of the energy", f"is in rank {rank['median']:g} (median), {rank['max']:g} at most")
            for share, rank in numbers.get("rank_for_energy", {}).items()
        ),
    )
    page.heat_map("What it changes, by block and layer", "At strength 1. Click a cell for its modules.", MEASURED,
                  numbers["modules"])  # fmt: skip
    page.bars("‖ΔW‖ by block", "block", _labelled(numbers["blocks"]))


def _sized(page: Content, sizes: Found) -> None:
    """Add how large the weights of a model are."""
    every = sizes["all"]
    page.summary(("the weights", of_size(every)), ("zeros", f"{every['zeros']:,} of {every['of']:,} numbers"))
    if every["broken"]:
        page.data["warnings"].append(f"{every['broken']:,} numbers are NaN or infinite: a merge copies them")
    matrices = {name: one for name, one in sizes["tensors"].items() if one["dimensions"] > 1}
    page.heat_map("How large its weights are, by block and layer", CLICK, SIZES, matrices, "W")
    for kind, of in (("components", "part"), ("kinds", "kind of layer"), ("blocks", "block")):
        columns: list[Column] = [of, "numbers", *({"title": m.title, "bar": m.key == "rms"} for m in SIZES), "zeros"]
        rows = [[name, row["of"], *(row[m.key] for m in SIZES), row["zeros"]] for name, row in sizes[kind].items()]
        page.table(f"Weights by {of}", columns, rows if len(rows) > 1 else [])


def _matched(page: Content, found: Found, match: Found) -> None:
    """Add how an adapter fits a base."""
    page.summary(
        ("adapter", match["adapter"]),
        ("strength", strengths(match.get("strengths", {})) or match["strength"]),
        ("strength × scale", _counts({part: _range(f) for part, f in match.get("effective", {}).items()})),
        ("matched", f"{match['matched'] or 0} of {match['total']} modules"),
        ("matched by part", _counts(match.get("components"))),
        ("would change", f"{match['changed_tensors']} tensors" if "changed_tensors" in match else ""),
        ("expected size", size(match["output_bytes"]) if "output_bytes" in match else ""),
    )
    if not match["fits"]:
        page.data["warnings"].append(f"the adapter does not fit this base whole: {match['why']}")
    page.data["notes"] += match.get("notes", ())
    page.table(
        "Modules without a place",
        ["module", "why"],
        ([n, _plain(w)] for n, w in (match.get("unmatched") or {}).items()),
    )
    if numbers := match.get("numbers"):
        page.data["warnings"].extend(numbers["warnings"])
        page.change(numbers, "kept in the base's dtype", "What the merge would change, by block and layer")
    page.table("Where it fits", ["names", "modules"], ([name, n] for name, n in (match.get("patterns") or {}).items()))
    if match["fits"]:
        page.command("Merge it:", "lora-merge", found["path"], f"{match['adapter']}:{match['strength']:g}")


def of_comparison(found: Found) -> dict[str, Any]:
    """Return the content of the page of a comparison."""
    page = Content("Comparison", f"{Path(found['a']).name} ↔ {Path(found['b']).name}")
    page.summary(("A", found["a"]), ("B", found["b"]))
    (_alike if found["kind"] == "adapters" else _different)(page, found)
    page.table("Of other shapes", ["name", "why"], ([n, why] for n, why in found.get("other_shapes", {}).items()))
    page.table(
        "Only in one",
        ["name", "in"],
        [[n, w.upper()] for w in ("a", "b") for n in sorted(found.get(f"only_{w}", ()), key=in_order)],
    )
    page.data["notes"] = list(found.get("notes", ()))
    return page.data


def _alike(page: Content, found: Found) -> None:
    total = found["total"]
    page.summary(
        ("modules in both", found["common"]),
        ("cosine of the changes", _six(total.get("cosine"))),
        ("they fight", of_fight(found)),
        ("common directions", _percent(total.get("overlap"))),
        ("‖ΔW‖ of A", _six(total.get("a"))),
        ("‖ΔW‖ of B", _six(total.get("b"))),
    )
    page.heat_map(
        "How alike they are, by block and layer",
        "Cosine 1: the same direction; 0: independent; −1: they fight. Click a cell for its modules.",
        ALIKE,
        found["modules"],
    )
    rows = list(_labelled(found["blocks"]))
    page.bars("Cosine by block", "block", ((name, row["cosine"]) for name, row in rows))
    columns = [{"title": m.title, "unit": m.unit} for m in ALIKE]
    page.table("By block", ["block", *columns], ([name, *(row[m.key] for m in ALIKE)] for name, row in rows))


def _different(page: Content, found: Found) -> None:
    page.summary(
        ("equal tensors", f"{found['equal']} of {found['compared']}"),
        ("different", found["different"]),
        *(("dtypes", f"{both}: {n} tensors") for both, n in found.get("dtypes", {}).items()),
        ("norm of the difference", _six(found["total"].get("difference"))),
        ("of the norm of A", _percent(found["total"].get("relative"))),
        ("largest difference", _six(found["total"].get("largest"))),
        ("numbers that differ", _of(found["total"].get("changed"), found["total"].get("of"))),
        ("entries of metadata that differ", len(found.get("metadata", ())) or ""),
    )
    page.heat_map("Where they differ, by block and layer", "Equal tensors are left out. Click a cell for its tensors.",
                  DIFFERENT, found["tensors"], "B − A")  # fmt: skip
    _blocks_that_differ(page, found["blocks"])
    page.bars(
        "Norm of the difference by block",
        "block",
        ((n, row["difference"]) for n, row in found["blocks"].items() if row["difference"]),
    )


def _blocks_that_differ(page: Content, blocks: Found) -> None:
    """Add a table of the blocks of two models, the equal ones too."""
    columns = [{"title": m.title, "unit": m.unit, "bar": m.key == "relative"} for m in DIFFERENT]
    rows = ([n, *(d[m.key] for m in DIFFERENT), d["changed"], d["of"]] for n, d in blocks.items())
    page.table("By block", ["block", *columns, "numbers that differ", "of"], rows)


def of_files(found: Sequence[Found]) -> dict[str, Any]:
    """Return the content of a page about several files: a table of all, then what the page of each would have."""
    page = Content("Files", f"{len(found)} files")
    page.table(
        "Files",
        [
            "file",
            "kind",
            "made for",
            "adapter on it",
            "modules matched",
            "of",
            "tensors",
            {"title": "size", "unit": "B"},
        ],
        (_of_several(f) for f in found),
        first=True,
    )
    for name, one in zip(map(_of_pair, found), map(of_file, found), strict=True):
        page.table(f"{name}: summary", ["fact", "value"], one["summary"])
        for kind in ("tables", "heat_maps", "bars"):
            page.data[kind] += [{**part, "title": f"{name}: {part['title']}", "first": False} for part in one[kind]]
        for kind in ("warnings", "notes"):
            page.data[kind] += [f"{name}: {text}" for text in one[kind]]
        page.data["commands"] += [{**part, "label": f"{name}: {part['label']}"} for part in one["commands"]]
    return page.data


def _of_pair(found: Found) -> str:
    """Return the name of a file, or of a base and the adapter that was looked at with it."""
    adapter = (found.get("match") or {}).get("adapter")
    return Path(found["path"]).name + (f" + {Path(adapter).name}" if adapter else "")


def _of_several(found: Found) -> list[Any]:
    match = found.get("match") or {}
    made_for = found.get("architecture") or found.get("made_for")
    return [found["path"], found["kind"], made_for, match.get("adapter"), match.get("matched"), match.get("total"),
            found["tensors"], found["bytes"]]  # fmt: skip


def _short(names: Mapping[str, Any]) -> list[str]:
    labels = short(names)
    return [labels[name] for name in names]


def _labelled(found: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return zip(_short(found), found.values(), strict=True)


def _counts(found: Any) -> str:
    return ", ".join(f"{name} ({n})" for name, n in found.items()) if isinstance(found, Mapping) else ""


def _range(found: Any) -> str:
    """Return `4 to 32, median 16`; one number where all are equal."""
    if not found:
        return ""
    low, high = found["min"], found["max"]
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}, median {found['median']:.4g}"


def _few(values: Sequence[float]) -> str:
    """Return a few numbers, or how many there are and between which they lie."""
    if len(values) <= FEW:
        return ", ".join(f"{v:g}" for v in values)
    return f"{len(values)} values, {min(values):g} to {max(values):g}"


def _of(some: int | None, every: int | None) -> str:
    return "" if some is None or every is None else f"{some:,} of {every:,}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"


def _sizes(found: Any) -> str:
    return ", ".join(f"{name} {size(n, *COUNT)}" for name, n in (found or {}).items())


def _six(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _fact(name: str, value: Any) -> str:
    """Return a fact of the training in words."""
    if name == "datasets":
        return ", ".join(f"{one['name']} ({of_dataset(one)})" for one in value)
    return of_preview(value) if name == "preview" else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
