"""The pages about files: one file, an adapter on a base, a comparison."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ...disk.files import open_regular
from ...errors import MergeError
from ...facts import between, counts_by_kind
from ...models.blocks import in_order
from ...text import plural
from ..compare import compare_summary
from ..file_verdict import LEVELS, SIZE_TITLE, name_of, of_all, table_of_files, top
from ..hashes import hash_title
from ..inspect_rows import few, match_summary, metadata, summary, training_value
from ..training import THUMBNAIL
from .content import CLICK, COSINE, CURVE_AXES, CURVE_TITLE, Column, Metric, PageContent, Values, root

MEASURED: Final = (
    Metric("norm", "‖ΔW‖", join=root),
    Metric("stable_rank", "stable rank"),
    Metric("rank", "rank", join=max),
    Metric("largest", "largest singular value", join=max),
)

SIZE_METRICS: Final = (
    Metric("rms", "root mean square"),
    Metric("norm", "‖W‖", join=root),
    Metric("largest", "largest |W|", join=max),
)

DIFFERENT: Final = (
    Metric("relative", "difference / norm", "%"),
    Metric("difference", "norm of the difference", join=root),
    Metric("largest", "largest difference", join=max),
)

SIMILARITY_METRICS: Final = (
    Metric("cosine", "cosine", COSINE),
    Metric("overlap", "common directions", "%"),
    Metric("a", "‖ΔW‖ of A", join=root),
    Metric("b", "‖ΔW‖ of B", join=root),
)


def file_page(facts: Values) -> dict[str, Any]:
    """Return the content of the page about one file, or about an adapter on a base."""
    match = facts.get("match")
    # Step 1: the summary and the verdict.
    page = PageContent("Adapter" if facts["kind"] == "adapter" else "Model", Path(facts["path"]).name)
    if match:
        page.data["title"] += f" + {Path(match['adapter']).name}"
    if judged := facts.get("verdict"):
        page.verdict(judged["level"], judged["text"])
    page.summary((*(row for row in top(facts) if row.name != "trigger words"), *summary(facts)))  # these are chips
    page.data["notes"] += facts.get("notes", ())
    page.summary(match_summary(match) if match else ())
    page.table(
        "Parts",
        ["part", "what it does", "modules", "parameters", "layers"],
        (
            [name, part["does"], part["modules"], part["parameters"], counts_by_kind(part["layers"])]
            for name, part in facts.get("parts", {}).items()
        ),
        first=True,
    )
    # Step 2: how it was trained.
    trained = facts.get("trained") or {}
    for word in trained.get("trigger_words") or ():
        page.chip("trigger words", word)
    for name, value in (facts.get("hashes") or {}).items():
        page.chip(hash_title(name), value)
    page.data["image"] = _preview(trained.get("preview") or {}, facts.get("metadata") or {})
    lines = (
        [name.replace("_", " "), training_value(name, value)]
        for name, value in trained.items()
        if name != "trigger_words"
    )
    page.table("Training", ["fact", "value"], lines, first=True)
    page.table(
        "Layers",
        ["names", "algorithm", "modules", "ranks", "alphas"],
        (
            [name, row["algorithm"], row["modules"], few(row["ranks"]), few(row["alphas"])]
            for name, row in facts.get("patterns", {}).items()
        ),
    )
    # Step 3: its weights, its blocks, and how it fits.
    if numbers := facts.get("weights"):
        _changed(page, numbers)
    blocks = facts.get("blocks") or {}
    if facts["kind"] == "adapter":
        page.table(
            "Blocks",
            ["block", "modules", "ranks", "alphas"],
            ([name, b["modules"], between(b["ranks"]), between(b["alphas"])] for name, b in blocks.items()),
        )
    elif not match:
        if sizes := facts.get("sizes"):
            _sized(page, sizes)
        page.bars("Parameters by block", "block", blocks.items())
    if match:
        _matched(page, facts, match)
    page.table("Other metadata", ["entry", "value"], map(list, metadata(facts)))
    return page.data


def _changed(page: PageContent, numbers: Values) -> None:
    """Add pictures of how much an adapter changes, from its weights."""
    page.heat_map("What it changes, by block and layer", "At strength 1. Click a cell for its modules.", MEASURED,
                  numbers["modules"], numbers["blocks"])  # fmt: skip
    page.curve(CURVE_TITLE, CURVE_AXES, numbers.get("curve", ()), "%")
    page.bars("‖ΔW‖ by block", "block", numbers["blocks"].items())


def _sized(page: PageContent, sizes: Values) -> None:
    """Add pictures and tables of how large the weights of a model are."""
    matrices = {name: sized for name, sized in sizes["tensors"].items() if sized["dimensions"] > 1}
    page.heat_map("How large its weights are, by block and layer", CLICK, SIZE_METRICS, matrices, sizes["blocks"],
                  "W")  # fmt: skip
    for kind, of in (("components", "part"), ("kinds", "kind of layer"), ("blocks", "block")):
        columns: list[Column] = [
            of,
            "numbers",
            *({"title": m.title, "bar": m.key == "rms"} for m in SIZE_METRICS),
            "zeros",
        ]
        rows = [
            [name, row["of"], *(row[m.key] for m in SIZE_METRICS), row["zeros"]] for name, row in sizes[kind].items()
        ]
        page.table(f"Weights by {of}", columns, rows if len(rows) > 1 else [])


def _matched(page: PageContent, facts: Values, match: Values) -> None:
    """Add tables and pictures of how an adapter fits a base."""
    page.table(
        "Modules without a match",
        ["module", "why"],
        ([n, w if isinstance(w, str) else ", ".join(w)] for n, w in (match.get("unmatched") or {}).items()),
    )
    if numbers := match.get("numbers"):
        page.change(numbers, "What the merge would change, by block and layer")
    page.table("Where it fits", ["names", "modules"], ([name, n] for name, n in (match.get("patterns") or {}).items()))
    if match["fits"]:
        page.command("Merge it:", "lora-merge", facts["path"], f"{match['adapter']}:{match['strength']:g}")


def comparison_page(result: Values) -> dict[str, Any]:
    """Return the content of the page of a comparison."""
    page = PageContent("Comparison", f"{Path(result['a']).name} ↔ {Path(result['b']).name}")
    if judged := result.get("verdict"):
        page.verdict(judged["level"], judged["text"])
    page.summary(compare_summary(result))
    (_alike if result["kind"] == "adapters" else _different)(page, result)
    whole = result.get("whole", {}).get("tensors", {})
    columns = [{"title": m.title, "unit": m.unit, "bar": m.key == "relative"} for m in DIFFERENT]
    page.table("Stored whole in both", ["tensor", *columns, "values that differ", "of"],
               ([n, *(d[m.key] for m in DIFFERENT), d["changed"], d["of"]] for n, d in whole.items()))  # fmt: skip
    page.table("Not compared", ["name", "why"], map(list, result.get("not_compared", {}).items()))
    page.table("Of other shapes", ["name", "why"], ([n, why] for n, why in result.get("other_shapes", {}).items()))
    page.table(
        "Only in one",
        ["name", "in"],
        [[n, w.upper()] for w in ("a", "b") for n in sorted(result.get(f"only_{w}", ()), key=in_order)],
    )
    page.table("Equal in both", ["tensor"], ([name] for name in sorted(result.get("equal_tensors", ()), key=in_order)))
    page.table("Entries of metadata that differ", ["entry"], ([name] for name in result.get("metadata", ())))
    return page.data


def _alike(page: PageContent, result: Values) -> None:
    page.heat_map(
        "How alike they are, by block and layer",
        "Cosine 1: the same direction; 0: independent; −1: opposite directions. Click a cell for its modules.",
        SIMILARITY_METRICS,
        result["modules"],
        result["blocks"],
    )
    rows = list(result["blocks"].items())
    page.bars("Cosine by block", "block", ((name, row["cosine"]) for name, row in rows), COSINE)
    columns = [{"title": m.title, "unit": m.unit} for m in SIMILARITY_METRICS]
    page.table(
        "By block", ["block", *columns], ([name, *(row[m.key] for m in SIMILARITY_METRICS)] for name, row in rows)
    )


def _different(page: PageContent, result: Values) -> None:
    page.heat_map("Where they differ, by block and layer", "Equal tensors are left out. Click a cell for its tensors.",
                  DIFFERENT, result["tensors"], result["blocks"], "B − A")  # fmt: skip
    _blocks_that_differ(page, result["blocks"])
    page.bars(
        "Norm of the difference by block",
        "block",
        ((n, row["difference"]) for n, row in result["blocks"].items() if row["difference"]),
    )


def _blocks_that_differ(page: PageContent, blocks: Values) -> None:
    """Add a table of the blocks of two models, the equal ones too."""
    columns = [{"title": m.title, "unit": m.unit, "bar": m.key == "relative"} for m in DIFFERENT]
    rows = ([n, *(d[m.key] for m in DIFFERENT), d["changed"], d["of"]] for n, d in blocks.items())
    page.table("By block", ["block", *columns, "values that differ", "of"], rows)


def files_page(files: Sequence[Values]) -> dict[str, Any]:
    """Return the content of a page about several files, or about a base with adapters: a table of all with the verdict
    of the terminal, then what the page of each would have."""
    on_base = all("match" in facts for facts in files)
    count = plural(len(files) + on_base, "file")
    page = PageContent("Files", count)
    levels = [facts.get("verdict", {}).get("level", "good") for facts in files]
    if on_base:
        page.verdict(**of_all(files)["verdict"])
        base = {name: fact for name, fact in files[0].items() if name not in ("match", "verdict")}
        rows: list[list[Any]] = [[name_of(base), base["architecture"], None, None], *map(_match_row, files)]
        page.table("Files", FITS, rows, first=True, marks=["", *("" if level == "good" else level for level in levels)])
        parts = [(name_of(base), file_page(base)), *((Path(f["match"]["adapter"]).name, _match_page(f)) for f in files)]
    else:
        bad = max(levels, key=LEVELS.index)
        page.verdict(bad, f"{count}: {'all are sound' if bad == 'good' else 'some have warnings'}.")
        titles, *lines = table_of_files(files)
        filled = [n for n in range(len(titles)) if any(row[n] for row in lines)]
        columns: list[Column] = [{"title": titles[n], "unit": "B" * (titles[n] == SIZE_TITLE)} for n in filled]
        sized = zip(files, lines, strict=True)
        rows = [[f["bytes"] if titles[n] == SIZE_TITLE else row[n] for n in filled] for f, row in sized]
        page.table("Files", columns, rows, first=True, marks=["" if level == "good" else level for level in levels])
        parts = [(name_of(facts), file_page(facts)) for facts in files]
    for name, single in parts:
        page.table(f"{name}: summary", ["fact", "value"], single["summary"])
        for kind in ("tables", "heat_maps", "bars", "curves"):
            page.data[kind] += [{**part, "title": f"{name}: {part['title']}", "first": False} for part in single[kind]]
        for kind in ("warnings", "notes"):
            page.data[kind] += [f"{name}: {text}" for text in single[kind]]
        page.data["chips"] += [{**part, "label": f"{name}: {part['label']}"} for part in single["chips"]]
        page.data["commands"] += [{**part, "label": f"{name}: {part['label']}"} for part in single["commands"]]
    return page.data


FITS: Final = ("file", "what", "modules matched", "of")


def _match_row(facts: Values) -> list[Any]:
    """Return the row of an adapter on a base."""
    match = facts["match"]
    fit = "fits" if match["fits"] else "fits in part" if match["matched"] else "does not fit"
    return [Path(match["adapter"]).name, f"adapter: {fit}", match["matched"] or 0, match["total"]]


def _match_page(facts: Values) -> dict[str, Any]:
    """Return the content of the page about how an adapter fits a base, without the facts about the base."""
    page = PageContent("Adapter", Path(facts["match"]["adapter"]).name)
    page.summary(match_summary(facts["match"]))
    _matched(page, facts, facts["match"])
    return page.data


# The preview picture of an adapter: from its metadata, or from a file next to it.

MOST_PICTURE_BYTES: Final = 1_000_000  # bytes of a picture in a page
PICTURE_DATA: Final = re.compile(r"data:image/(?:png|jpeg|webp|gif|avif);base64,[A-Za-z0-9+/]+={0,2}")
"""A picture in the metadata. Kinds that are programs, such as SVG, are not shown."""
PICTURE_KINDS: Final = {
    "png": rb"\x89PNG\r\n\x1a\n", "jpeg": rb"\xff\xd8\xff", "webp": rb"RIFF....WEBP", "gif": rb"GIF8[79]a",
}  # fmt: skip
"""Kind of a picture → the beginning of its file. A file next to an adapter may be a link to anything: a page holds only
pictures."""


def _preview(picture: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Return a picture as an address that holds it; "" if there is none, or it is too large for a page."""
    if picture.get("in") == THUMBNAIL:
        text = metadata.get(THUMBNAIL, "")
        return text if len(text) <= MOST_PICTURE_BYTES * 4 // 3 and PICTURE_DATA.fullmatch(text) else ""
    path = Path(str(picture.get("in", "")))
    try:
        with open_regular(path) as f:
            content = f.read(MOST_PICTURE_BYTES + 1)
    except (OSError, MergeError):
        return ""
    kinds = (kind for kind, start in PICTURE_KINDS.items() if re.match(start, content, re.DOTALL))
    kind = next(kinds, "") if len(content) <= MOST_PICTURE_BYTES else ""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}" if kind else ""
