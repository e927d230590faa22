"""`compare`: two models tensor by tensor, or two adapters module by module, with one tensor in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..disk.files import StoredTensor
from ..dtypes import spoken
from ..errors import UsageError
from ..facts import THOUSANDS, Fact, by_block, cut_rows, line, table
from ..files.checkpoint import Index, open_checkpoint
from ..planning.downloads import Announce, downloaded_paths, downloads
from ..progress import Progress, counted, unwatched
from ..text import by_reason, listed, plural, size
from .compare_verdict import adapter_verdict, model_verdict, signed
from .inspect import is_adapter
from .json_schemas import schema

if TYPE_CHECKING:
    from .compare_models import DifferenceSums

SCHEMA: Final = schema("compare")

MOST_SHAPES: Final = 12
"""Tensors of other shapes that have a row each; of more, the first have their names in one row."""


def compare(  # noqa: PLR0913  # two for pages and progress
    a: Path, b: Path, base: Path | None = None, *, pictures: bool = False, progress: Progress = unwatched,
    announce: Announce | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return where two checkpoints differ and by how much, or how alike the changes of two adapters are.

    `base`: for two adapters that spell the names of modules in other words, or whose formulas read the weights.
    `pictures`: with spectra and histograms, which pages show.
    """
    first, second = open_checkpoint(a), open_checkpoint(b)
    kinds = [is_adapter(index) for index in (first, second)]
    if kinds[0] != kinds[1]:
        raise UsageError("an adapter and a model cannot be compared", f"{a} and {b}",
                         "use lora-merge inspect BASE ADAPTER; or give two adapters, or two models")  # fmt: skip
    head = {"schema": SCHEMA, "a": str(a), "b": str(b)}
    if not all(kinds) and base is not None:
        raise UsageError("a base is given for two models", f"--base {base}", "leave it out")
    bases = [] if base is None else [base]
    if downloads([a, b, *bases], []) and (all(kinds) or _share_tensors(first, second)):
        places = downloaded_paths([a, b, *bases], progress=progress, announce=announce)
        first, second, base = open_checkpoint(places[a]), open_checkpoint(places[b]), base and places[base]
    if all(kinds):
        from .compare_adapters import adapter_similarity

        alike = adapter_similarity(first, second, base, pictures=pictures)
        return {**head, "kind": "adapters", "verdict": adapter_verdict(alike), **alike}
    apart = _checkpoints(first, second, pictures=pictures, progress=progress)
    return {**head, "kind": "checkpoints", "verdict": model_verdict(apart), **apart}


def _share_tensors(a: Index, b: Index) -> bool:
    from ..models.names import names
    from .compare_models import comparable

    return comparable(a, b, names(a))


def _checkpoints(a: Index, b: Index, *, pictures: bool, progress: Progress) -> dict[str, Any]:
    """Return the differences of two models: in all, by part and block, by tensor."""
    from ..models.blocks import groups
    from ..models.names import names
    from .compare_models import DifferenceSums, difference_pictures, differences
    from .pictures import evenly

    lookup = names(a)
    model = groups(lookup)
    rows: dict[str, DifferenceSums] = {}
    tensors: dict[str, Any] = {}
    total, equal, others, only_b = DifferenceSums(), list[str](), dict[str, str](), list[str]()
    dtypes: Counter[str] = Counter()
    keys: set[str] = set()
    advance = counted(progress, "look", str(b.path), sum(t.nbytes for t in b.parameters.values()))
    for pair in differences(a, b, lookup):
        advance(b.tensors[pair.name].nbytes)
        keys.update(pair.keys)
        dtypes.update({_dtypes(a.tensors[key], b.tensors[pair.name]) for key in pair.keys[:1]})
        if not pair.keys:
            only_b.append(pair.name)
        elif pair.why:
            others[pair.name] = pair.why
        else:
            total.add(pair.sums)
            group = model.block(pair.keys[0])
            rows.setdefault(group, DifferenceSums()).add(pair.sums)
            if pair.sums.equal:
                equal.append(pair.name)
            else:
                tensors[pair.name] = {"block": group, **pair.sums.to_dict()}
    if pictures:
        for name, charts in difference_pictures(a, b, lookup, evenly([*tensors])):
            tensors[name] |= charts
    return {
        "compared": len(equal) + len(tensors), "equal": len(equal), "different": len(tensors), "other_shapes": others,
        "only_a": [key for key in a.parameters if key not in keys], "only_b": only_b,
        "dtypes": {both: n for both, n in dtypes.most_common() if both}, "rounding": not total.beyond_rounding,
        "architectures": [lookup.architecture, names(b).architecture],
        "total": total.to_dict(), "blocks": {name: rows[name].to_dict() for name in sorted(rows, key=model.place)},
        "tensors": tensors, "equal_tensors": equal,
        "metadata": sorted(k for k in {**a.metadata, **b.metadata} if a.metadata.get(k) != b.metadata.get(k)),
    }  # fmt: skip


def _dtypes(a: StoredTensor, b: StoredTensor) -> str:
    """Return the dtypes of two tensors in words, where they differ."""
    return f"{spoken(a.dtype)} in A, {spoken(b.dtype)} in B" if a.dtype != b.dtype else ""


def compare_rows(result: Mapping[str, Any], *, pictured: bool = False) -> Iterator[Fact]:
    """Yield the comparison in words; `pictured`: without the tables whose numbers pictures show."""
    yield from cut_rows(compare_summary(result))
    others = result.get("other_shapes", {})
    yield from table(others.items() if len(others) <= MOST_SHAPES else ())
    if pictured:
        return
    if result["kind"] == "checkpoints":
        yield from by_block((name, _difference(d)) for name, d in result["blocks"].items() if d["difference"] != 0)
    else:
        yield from by_block((name, _similarity(row)) for name, row in result["blocks"].items())


def compare_summary(result: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the same without its tables."""
    if judged := result.get("verdict"):
        yield line("verdict", judged["text"])
    yield line("A", result["a"])
    yield line("B", result["b"])
    yield from (_model_rows if result["kind"] == "checkpoints" else _adapter_rows)(result)
    if others := result.get("other_shapes"):
        yield line("other shapes", f"{len(others)}: {listed(others, 3)}" if len(others) > MOST_SHAPES else len(others))
    for name in ("A", "B"):
        if names := result[f"only_{name.lower()}"]:
            yield line(f"only in {name}", f"{len(names)}: {listed(names, 3)}")
    if names := result.get("metadata"):
        yield line("metadata", f"{plural(len(names), 'entry differs', 'entries differ')}: {listed(names)}")
    yield from (line("note", note) for note in result.get("notes", ()))


def _model_rows(result: Mapping[str, Any]) -> Iterator[Fact]:
    yield line("tensors", f"{result['compared']} compared: {result['equal']} equal, {result['different']} different")
    for both, count in result["dtypes"].items():
        yield line("dtypes", f"{both}: {plural(count, 'tensor')}")
    if result["different"]:
        yield line("difference", _difference(result["total"]))


def _difference(d: Mapping[str, Any]) -> str:
    share = f"{100 * d['relative']:.3g} % of A" if d["relative"] is not None else "A is 0"
    changed = f"{size(d['changed'], *THOUSANDS)} of {size(d['of'], *THOUSANDS)} values differ"
    return f"{share}; at most {d['largest']:.3g}; {changed}"


def _adapter_rows(result: Mapping[str, Any]) -> Iterator[Fact]:
    yield line("modules", f"{result['common']} in both")
    if result["common"]:
        yield line("alike", _similarity(result["total"]))
        yield line("fight", opposed_blocks(result))
    if whole := result.get("whole"):
        equal, both = whole["equal"], len(whole["tensors"])
        differ = f"; {_difference(whole['total'])}" if equal < both else ""
        stored = f"{plural(both, 'tensor')} that both store whole"
        yield line("whole", f"{stored}: {equal} equal, {both - equal} different{differ}")
    for left, why in by_reason(result["not_compared"]):
        yield line("not compared", f"{left}: {why}")


def opposed_blocks(result: Mapping[str, Any]) -> str:
    """Return in how many blocks the changes of two adapters point against each other, in words."""
    fight = result["fight"]
    most = ", ".join(sorted(fight, key=lambda name: result["blocks"][name]["cosine"])[:3])
    return f"in {len(fight)} of {plural(len(result['blocks']), 'block')}" + (f", most in {most}" if fight else "")


def _similarity(row: Mapping[str, Any]) -> str:
    cosine = f"cosine {'?' if row['cosine'] is None else signed(row['cosine'])}"
    overlap = "" if row.get("overlap") is None else f", common directions {row['overlap']:.1%}"
    return f"{cosine}, size {row['a']:.3g} and {row['b']:.3g}{overlap}"
