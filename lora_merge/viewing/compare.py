"""`compare`: two models tensor by tensor, or two adapters module by module, with one tensor in memory at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..adapters.modules import is_adapter
from ..dtypes import DTYPE_ROWS, spoken
from ..errors import UsageError
from ..facts import THOUSANDS, Fact, by_block, cut_rows, line, percent, share_of, table
from ..files.checkpoint import Index, open_checkpoint
from ..paths import exists, typed
from ..planning.downloads import Announce, downloaded_paths, downloads
from ..planning.fitting_files import missing_input
from ..progress import Progress, counted, unwatched
from ..text import by_reason, is_finite, json_text, listed, plural, size
from .base import recipes_of
from .compare_verdict import adapter_verdict, model_verdict, signed
from .inspect_rows import typed_parts
from .json_schemas import schema

if TYPE_CHECKING:
    from .compare_models import DifferenceSums

SCHEMA: Final = schema("compare")

OF_TWO: Final = "give two adapters, or two models"
"""What to do instead of comparing an adapter with a file of another kind."""

BY_CHANCE: Final = 0.01
"""Share of common directions from which on a report says that independent changes have some, too."""

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
    for path, other in ((a, b), (b, a)):
        if not exists(path) and exists(other):
            raise missing_input(path, adapter=is_adapter(open_checkpoint(other)), partners=[other])
    first, second = open_checkpoint(a), open_checkpoint(b)
    kinds = [is_adapter(index) for index in (first, second)]
    if kinds[0] != kinds[1]:
        raise _of_two_kinds((b, second), a) if kinds[0] else _of_two_kinds((a, first), b)
    head = {"schema": SCHEMA, "a": str(a), "b": str(b)}
    if not all(kinds) and base is not None:
        raise UsageError("a base is given for two models", f"`--base {base}`", "leave it out")
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


def _of_two_kinds(other: tuple[Path, Index], adapter: Path) -> UsageError:
    """Return the error for an adapter and a file that is none: how it fits is shown for a model alone."""
    from ..models.names import UNKNOWN_TITLE, names

    path, index = other
    lookup = names(index)
    is_model = lookup.what in (lookup.architecture, UNKNOWN_TITLE)
    what = (
        "an adapter and a model cannot be compared" if is_model else f"an adapter and {lookup.what} cannot be compared"
    )
    look = f"use `lora-merge inspect {typed([str(path), str(adapter)])}`; or give two adapters, or two models"
    return UsageError(what, f"{adapter} and {path}", look if is_model else OF_TWO)


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

    # Step 1: the names of A, by which the tensors of B are looked up.
    lookup = names(a)
    model = groups(lookup)
    rows: dict[str, dict[bool, list[DifferenceSums]]] = {}  # block → whether changed → tensors
    tensors: dict[str, Any] = {}
    total, equal, others, only_b = DifferenceSums(), list[str](), dict[str, str](), list[str]()
    change, rounded = DifferenceSums(), Counter[str]()
    dtypes: Counter[str] = Counter()
    keys: set[str] = set()
    # Step 2: the sums of each pair, by block.
    advance = counted(progress, "look", str(b.path), sum(t.nbytes for t in b.parameters.values()))
    for pair in differences(a, b, lookup):
        advance(b.tensors[pair.name].nbytes)
        keys.update(pair.keys)
        dtypes.update({_dtypes(a, key, b, pair.name) for key in pair.keys[:1]})
        if not pair.keys:
            only_b.append(pair.name)
        elif pair.why:
            others[pair.name] = pair.why
        else:
            total.add(pair.sums)
            group = model.block(pair.keys[0])
            changed = not (pair.sums.equal or pair.sums.rounded)
            rows.setdefault(group, {}).setdefault(changed, []).append(pair.sums)
            if pair.sums.equal:
                equal.append(pair.name)
                continue
            tensors[pair.name] = {"block": group, "rounded": pair.sums.rounded, **pair.sums.to_dict()}
            if changed:
                change.add(pair.sums)
            else:
                rounded[_coarser(a, pair.keys[0], b, pair.name)] += 1
    # Step 3: the pictures, and the table of facts.
    if pictures:
        for name, charts in difference_pictures(a, b, lookup, evenly([*tensors])):
            tensors[name] |= charts
    return {
        "compared": len(equal) + len(tensors), "equal": len(equal), "rounded": dict(rounded.most_common()),
        "different": len(tensors) - rounded.total(), "other_shapes": others,
        "only_a": [key for key in a.parameters if key not in keys], "only_b": only_b,
        "dtypes": {both: n for both, n in dtypes.most_common() if both},
        "architectures": [lookup.architecture, names(b).architecture],
        "total": total.to_dict(), "change": change.to_dict(),
        "blocks": {name: _block_sums(rows[name]) for name in sorted(rows, key=model.place)},
        "tensors": tensors, "equal_tensors": equal, "merges": [_merge(a, b), _merge(b, a)],
        "metadata": sorted(k for k in {**a.metadata, **b.metadata} if a.metadata.get(k) != b.metadata.get(k)),
    }  # fmt: skip


def _block_sums(tensors: Mapping[bool, list[DifferenceSums]]) -> dict[str, Any]:
    """Return the sums over the changed tensors of a block, or over all of them if none is changed."""
    from .compare_models import DifferenceSums

    changed, total = tensors.get(True, []), DifferenceSums()
    for sums in changed or tensors[False]:
        total.add(sums)
    return {"different": len(changed), **total.to_dict()}


def _dtypes(a: Index, key: str, b: Index, name: str) -> str:
    """Return the formats of two tensors in words, if they differ."""
    first, other = _format(a, key), _format(b, name)
    return f"{first} in A, {other} in B" if first != other else ""


def _format(index: Index, name: str) -> str:
    """Return the dtype of a tensor in words, or the format of a quantised weight."""
    packing, info = index.packed.get(name), index.tensors[name]
    return packing.encoding.title if packing and packing.encoding.quantised else spoken(info.dtype)


def _coarser(a: Index, key: str, b: Index, name: str) -> str:
    """Return which of two tensors is rounded, and to what: "B is A in bf16"; "" if both have one format."""
    first, other = _format(a, key), _format(b, name)
    if first == other:
        return ""
    return f"A is B in {first}" if _precision(a, key) < _precision(b, name) else f"B is A in {other}"


def _precision(index: Index, name: str) -> tuple[bool, float]:
    """Return the order of a tensor's format among all: quantised ones by bits, then dtypes by significand."""
    info, packing = index.tensors[name], index.packed.get(name)
    if packing and packing.encoding.quantised:
        return False, info.nbytes / max(prod(info.shape), 1)
    return True, DTYPE_ROWS[info.dtype].significand if info.dtype in DTYPE_ROWS else 0


def _merge(index: Index, base: Index) -> list[str]:
    """Return the adapters that were merged into a base to get a model, in one merge or in several, each with the sum of
    its strengths: 0 for one that was taken out again. By the model's recipes; [] if none of them names this base."""
    refs = list[Mapping[str, Any]]()
    for _, named, adapters in recipes_of(index):
        refs[:0] = [a for a in adapters if is_finite(a.get("strength"))]
        if _is_of(base, named.get("files")):
            return [*_sums(refs)]
    return []


def _sums(refs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the adapters of recipes, each with the sum of its strengths, as they are typed."""
    strengths: dict[str, tuple[str, float]] = {}
    for ref in refs:
        content = json_text([ref.get("files"), ref.get("parts")])
        name, strength = strengths.get(content, (str(ref.get("name")), 0.0))
        strengths[content] = name, strength + ref["strength"]
    parts = {json_text([ref.get("files"), ref.get("parts")]): typed_parts(ref.get("parts")) for ref in refs}
    yield from (f"{name}:{round(strength, 9):g}{parts[key]}" for key, (name, strength) in strengths.items())


def _is_of(base: Index, files: object) -> bool:
    """Return whether a checkpoint has the files that a recipe states, by name and size."""
    stated = (
        {(f.get("name"), f.get("size")) for f in files if isinstance(f, Mapping)} if isinstance(files, list) else {}
    )
    folder = base.path.is_dir()
    return stated == {
        (f.relative_to(base.path).as_posix() if folder else f.name, base.headers[f].state.size) for f in base.files
    }


def compare_rows(result: Mapping[str, Any], *, pictured: bool = False) -> Iterator[Fact]:
    """Yield the comparison in words; `pictured`: without the tables whose numbers pictures show."""
    yield from cut_rows(compare_summary(result))
    others = result.get("other_shapes", {})
    yield from table(others.items() if len(others) <= MOST_SHAPES else ())
    if pictured or result["verdict"]["kind"] in ("equal", "rounding"):
        return
    if result["kind"] == "checkpoints":
        yield from by_block((name, _difference(d)) for name, d in result["blocks"].items() if d["different"])
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
    rounded = sum(result["rounded"].values())
    kinds = {"equal": result["equal"], "equal but for rounding": rounded, "changed": result["different"]}
    shares = listed(f"{n} {kind}" for kind, n in kinds.items() if n)
    yield line("tensors", f"{result['compared']}: {shares}" if shares else "no tensor is in both")
    for both, count in result["dtypes"].items():
        yield line("dtypes", f"{both}: {plural(count, 'tensor')}")
    if result["different"]:
        yield line("change", _difference(result["change"]))
    elif rounded:
        yield line("rounding", _difference(result["total"]))


def _difference(d: Mapping[str, Any]) -> str:
    share = share_of(d["relative"], "the weights") if d["relative"] is not None else "A is 0"
    changed = f"{size(d['changed'], *THOUSANDS)} of {size(d['of'], *THOUSANDS)} values differ"
    return f"{share}; {changed}, by at most {d['largest']:.3g}"


def _adapter_rows(result: Mapping[str, Any]) -> Iterator[Fact]:
    yield line("modules", f"{result['common']} in both")
    if result["common"]:
        independent = result["verdict"]["kind"] == "independent" and (result["total"]["overlap"] or 0) >= BY_CHANCE
        chance = " (independent changes share some by chance, more at high ranks)" * independent
        scale = "; a cosine of 1 is the same change, 0 an unrelated one"
        yield line("change", _similarity(result["total"]) + chance + scale)
        if result["fight"]:
            yield line("opposed", opposed_blocks(result))
    if whole := result.get("whole"):
        equal, both = whole["equal"], len(whole["tensors"])
        differ = f"; {_difference(whole['total'])}" if equal < both else ""
        stored = f"{plural(both, 'tensor')} stored whole in both"
        yield line("whole", f"{stored}: {equal} equal, {both - equal} different{differ}")
    for left, why in by_reason(result["not_compared"]):
        yield line("not compared", f"{left}: {why}")


def opposed_blocks(result: Mapping[str, Any]) -> str:
    """Return in how many blocks two adapters change the weights in opposite directions, in words."""
    fight = result["fight"]
    most = ", ".join(sorted(fight, key=lambda name: result["blocks"][name]["cosine"])[:3])
    return f"opposite directions in {len(fight)} of {plural(len(result['blocks']), 'block')}, most in {most}"


def _similarity(row: Mapping[str, Any]) -> str:
    cosine = f"cosine {'?' if row['cosine'] is None else signed(row['cosine'])}"
    overlap = "" if row.get("overlap") is None else f", {percent(row['overlap'])} of the directions in common"
    sizes = f"A is {share_of(row['a'] / row['b'], 'B')} in size" if row["b"] else f"norm {row['a']:.3g} in A, 0 in B"
    return f"{cosine}, {sizes}{overlap}"
