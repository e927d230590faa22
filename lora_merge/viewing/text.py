"""The facts of `inspect` as lines. Long values are cut, with the number of characters left out; JSON has everything."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, groupby
from typing import Any, Final

from ..text import by_reason, json_text, plural, size
from .formats import of_format, of_plain
from .hashes import spoken
from .training import FIELDS, of_dataset

COUNT: Final = (1000, ("", "K", "M", "G", "T"))
"""For `size`: things are counted in thousands."""

SHOWN: Final = (
    "modelspec.title", "modelspec.architecture", "modelspec.author", "modelspec.license", "modelspec.trigger_phrase",
    "modelspec.merged_from", "ss_base_model_version", "ss_sd_model_name", "ss_network_module", "ss_network_dim",
    "ss_network_alpha", "ss_network_args", "ss_output_name", "software", "name", "version", "format",
)  # fmt: skip
"""Metadata worth a line."""

TOLD: Final = frozenset(name for names in FIELDS.values() for name in names)
"""Metadata that the facts of a training tell."""

WIDTH: Final = 200  # characters of a value
ROWS: Final = 40  # of a table
TAGS: Final = 20
FEW: Final = 12  # values of a list

SECTIONS: Final = frozenset({
    "schema", "match", "patterns", "blocks", "trained", "hashes", "metadata", "merged", "recipe", "rank_range",
    "undo", "formats", "not_quantised", "alpha_range", "parts", "weights", "sizes", "incomplete", "notes",
})  # fmt: skip
"""Facts that are printed below the plain ones, or only in JSON."""


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the facts as text, a line each."""
    for key, value in facts.items():
        if key not in SECTIONS and value not in ({}, [], ""):
            yield line(NAMED.get(key, key), _text(key, value))
        if key in ("ranks", "alphas") and len(value) > 1 and (found := facts.get(f"{key[:-1]}_range")):
            yield line("", "min {min:g}, median {median:g}, max {max:g}".format(**found))
    for network, part in facts.get("parts", {}).items():
        yield line("part", cut(_part(network, part)))
    yield from _incomplete(facts.get("incomplete", ()))
    yield from _training(facts.get("trained", {}))
    for name, value in facts.get("hashes", {}).items():
        yield line("hash", f"{spoken(name)} {value}")
    yield from _formats(facts)
    for n, one in enumerate(facts.get("merged", ())):
        yield line("merged" if not n else "  before that", of_merge(one))
    if undo := facts.get("undo"):
        yield line("undo", cut(undo, 3 * WIDTH))
    yield from _blocks(facts)
    yield from _weights(facts.get("weights", {}))
    yield from _sizes(facts.get("sizes", {}))
    yield from _metadata(facts.get("metadata", {}), told=TOLD if "trained" in facts else frozenset())
    for note in facts.get("notes", ()):
        yield line("note", cut(note, 2 * WIDTH))
    if "match" in facts:
        yield from match_lines(facts["match"])


def _formats(facts: Mapping[str, Any]) -> Iterator[str]:
    for one in facts.get("formats", ()):
        yield line("format", of_format(one))
    if plain := facts.get("not_quantised"):
        yield line("not quantised", cut(of_plain(plain)))


DIGITS: Final = "0123456789"
NAMED: Final = {"bytes": "size", "path": "file"}
"""Fact → its name in text, where that is another one."""

SLACK: Final = 40
"""Characters by which a text may be longer before it is cut: to say how many are left out takes as many."""


def line(name: str, value: str) -> str:
    """Return one line: a name and its value."""
    return f"{name.replace('_', ' '):<13} {value}"


def cut(text: str, width: int = WIDTH) -> str:
    """Return the beginning of a long text, and how much is left out."""
    return (
        text if len(text) <= width + SLACK else f"{text[:width]}… ({len(text) - width} more characters; --json has all)"
    )


def _part(network: str, found: Mapping[str, Any]) -> str:
    does = f" ({found['does']})" if found["does"] else ""
    layers = ", ".join(f"{kind} {n}" for kind, n in found["layers"].items())
    return f"{network}{does}: {found['modules']} modules, {size(found['parameters'], *COUNT)} parameters: {layers}"


def match_lines(match: Mapping[str, Any]) -> Iterator[str]:
    """Yield how an adapter fits."""
    yield line("adapter", f"{match['adapter']}, strength {match['strength']:g}")
    if match["matched"] is None:
        yield line("match", f"does not fit ({match['total']} modules)")
        yield line("  why", cut(match["why"], 3 * WIDTH))
        return
    parts = ", ".join(f"{name} {n}" for name, n in match["components"].items())
    yield line("match", f"{match['matched']} of {match['total']} modules" + (f" ({parts})" if parts else ""))
    if match["why"]:
        yield line("  why", match["why"])
    for part, counts in match["strengths"].items():
        yield line("  strength", f"{part}: " + ", ".join(f"{s}× ({n})" for s, n in counts.items()))
    for part, found in match["effective"].items():
        yield line("  effective", f"{part}: {_between(found)} (strength × scale: alpha / rank, or / √rank)")
    if match["patterns"]:
        yield line("  patterns", f"of names: {len(match['patterns'])}")
    yield from table((pattern, f"× {n}") for pattern, n in match["patterns"].items())
    for left, reason in by_reason(match["unmatched"]):
        yield f"  no place: {left}: {reason}"
    for note in match["notes"]:
        yield f"  note: {note}"
    yield line("  changes", f"{match['changed_tensors']} tensors; the output would have {size(match['output_bytes'])}")
    if numbers := match.get("numbers"):
        yield from number_lines(numbers)
    else:
        yield line("  kept", "--weights tells how much of the change the base's dtype can hold")


def number_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the size of a change, by part and block."""
    total = found["all"]
    yield line("  change", f"‖ΔW‖ {_norm(total['change'])}, {_share(total)} of ‖W‖ {_norm(total['weight'])}; "
                           f"{_kept(total)} of it is kept in the base's dtype")  # fmt: skip
    yield from table(
        (name, f"‖ΔW‖ {_norm(n['change'], 3)}, {_share(n)} of ‖W‖, kept {_kept(n)}")
        for name, n in found["blocks"].items()
    )
    for warning in found["warnings"]:
        yield line("warning", warning)


def proof_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a proof found."""
    yield line("proven", str(found["output"]))
    how = f"{found['tensors']} of {found['changed']} merged tensors, {found['rows']} rows"
    yield line("recomputed", f"{how}: at most {found['worst_ulp']:.2f} ulp from the exact numbers")
    yield line("unchanged", f"{size(found['untouched']['bytes'])} of {size(found['untouched']['of'])} compared")
    for row in found["retained"]:
        yield line("retained", f"{row['adapter']}: " + ("?" if row["retained"] is None else f"{row['retained']:.1%}"))
    for warning in found["warnings"]:
        yield line("warning", warning)


def proof_of_adapter(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the proof of a written adapter found."""
    yield line("proven", str(found["output"]))
    yield line("recomputed", f"{found['recomputed']} of {found['layers']} layers; its inputs give the same bytes")


def _norm(value: float | None, digits: int = 4) -> str:
    return "too large to tell" if value is None else f"{value:.{digits}g}"


def _share(n: Mapping[str, Any]) -> str:
    if n["change"] is None:
        return "?"
    return "all" if n["ratio"] is None else f"{n['ratio']:.2%}"


def _kept(n: Mapping[str, Any]) -> str:
    return "?" if n["retained"] is None else f"{n['retained']:.1%}"


def of_merge(one: Mapping[str, Any]) -> str:
    """Return one merge of those that made a model, in words."""
    if "inputs" in one:
        return cut(one["inputs"])
    adapters = ", ".join(f"{a['name']}:{a['strength']}{_parts(a['parts'])}" for a in one["adapters"])
    return cut(f"{one['base']} + {adapters} ({one['by']})")


def _parts(found: object) -> str:
    """Return the parts in a recipe as they are typed behind an adapter, ",te=0.0"; "" for what is no list of them."""
    pairs = [p for p in found if isinstance(p, list) and len(p) == 2] if isinstance(found, list) else []
    return "".join(f",{part}={factor}" for part, factor in pairs)


def _incomplete(found: Sequence[str]) -> Iterator[str]:
    if found:
        few = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        yield line("incomplete", f"{len(found)} module{'s are' if len(found) > 1 else ' is'} incomplete: {few}")


def _training(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is known of the training."""
    for name, value in found.items():
        if name == "tags":
            yield line("tags", _first(f"{tag} {count}" for tag, count in value.items()))
        elif name == "datasets":
            yield line("datasets", f"{len(value)}")
            yield from table((d["name"], of_dataset(d)) for d in value)
        elif name == "buckets":
            yield line(name, cut(", ".join(f"{sides} ({n})" for sides, n in value.items())))
        elif name == "trigger_words":
            yield line("trigger words", cut(", ".join(value)))
        elif name == "preview":
            yield line("preview", of_preview(value))
        else:
            yield line(name, cut(str(value)))


def _first(words: Iterable[str]) -> str:
    """Return the first of some words, at most TAGS and as many as a line holds, and how many there are besides."""
    every = list(words)
    ends = [*accumulate(len(word) + 2 for word in every)]
    shown = max(1, min(TAGS, bisect_right(ends, WIDTH + 2)))
    return cut(", ".join(every[:shown])) + (f" and {len(every) - shown} more" if len(every) > shown else "")


def of_preview(found: Mapping[str, Any]) -> str:
    """Return where a preview picture is, in words."""
    return f"a picture in {found['in']} ({found['type']}, {size(found['bytes'])})"


def _blocks(facts: Mapping[str, Any]) -> Iterator[str]:
    found: Mapping[str, Any] = facts.get("blocks", {})
    if facts["kind"] == "adapter":
        if len(found) > 1:
            rows = ((name, f"{b['modules']} modules{_span(' rank', b['ranks'])}{_span(' alpha', b['alphas'])}")
                    for name, b in found.items())  # fmt: skip
            yield line("blocks", f"{len(found)}")
            yield from table(rows)
    elif found:
        yield line("blocks", f"{len(found)}: {_ranges(found)} (lora-merge parts lists them)")


def _ranges(names: Iterable[str]) -> str:
    """Return the names of blocks, those that count on as one: `BASE IN00–IN11 M00 OUT00–OUT11`."""
    parted = [(name, head := name.rstrip(DIGITS), name[len(head) :]) for name in names]
    runs = groupby(enumerate(parted), lambda one: (one[1][1], one[1][2] and int(one[1][2]) - one[0]))
    found = ([name for _, (name, *_) in run] for _, run in runs)
    return cut(" ".join(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in found), 120)


def _span(name: str, of: Mapping[str, float]) -> str:
    if not of:
        return ""
    return f",{name} {_between(of)}"


def _between(of: Mapping[str, float]) -> str:
    return f"{of['min']:g}" + (f" to {of['max']:g}" if of["max"] != of["min"] else "")


def _measured(found: Mapping[str, Any]) -> str:
    """Return the size of a change, and in how many modules it is known without a base."""
    said = f"{found['norm']:.4g} in {plural(found['measured'], 'module')}"
    return said + (
        f"; {found['unmeasured']} more need their base: inspect BASE ADAPTER --weights" * bool(found["unmeasured"])
    )


def _weights(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers of an adapter."""
    if not found:
        return
    yield line("‖ΔW‖", _measured(found))
    if found["stable_rank"]:
        yield line("stable rank", "min {min:.3g}, median {median:.3g}, max {max:.3g}".format(**found["stable_rank"]))
    for share, rank in found["rank_for_energy"].items():
        yield line("energy", f"{share} is in rank {rank['median']:g} (median), {rank['max']:g} at most")
    yield from table((name, f"‖ΔW‖ {norm:.3g}") for name, norm in found["blocks"].items())


def _sizes(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield how large the weights of a base are."""
    if not found:
        return
    every = found["all"]
    yield line("weights", f"{of_size(every)}; {every['zeros']:,} of {every['of']:,} numbers are zero")
    if broken := every["broken"]:
        yield line("warning", f"{broken:,} numbers are NaN or infinite: a merge copies them")
    for kind, rows in (("kinds", "kind"), ("components", "part"), ("blocks", "block")):
        if len(found[kind]) > 1:
            yield line(f"by {rows}", f"{len(found[kind])}")
            yield from table((name, of_size(row)) for name, row in found[kind].items())


def of_size(row: Mapping[str, Any]) -> str:
    """Return how large some weights are, in words."""
    return f"‖W‖ {row['norm']:.4g}, typical {row['rms']:.3g}, largest {row['largest']:.3g}"


def table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield rows of two columns, at most ROWS, and how many are left out."""
    found = [(cut(str(a), 80), b) for a, b in rows]
    wide = max((len(a) for a, _ in found[:ROWS]), default=0)
    yield from (f"  {a:<{wide}}  {b}" for a, b in found[:ROWS])
    if len(found) > ROWS:
        yield f"  … and {len(found) - ROWS} more (--json has all)"


def _metadata(found: Mapping[str, str], told: Set[str]) -> Iterator[str]:
    shown = {key: found[key] for key in SHOWN if key in found and key not in told}
    for key, value in shown.items():
        yield line("metadata", cut(f"{key} {value}"))
    if left := len(found.keys() - shown.keys() - told):
        yield line("metadata", f"{left} of {len(found)} entries are neither here nor above (--json has all)")


def _text(key: str, value: Any) -> str:
    if isinstance(value, Mapping) and key in ("dtypes", "components", "algorithms"):
        return ", ".join(f"{name} {size(n, *COUNT)}" for name, n in value.items())
    if isinstance(value, Mapping):
        return cut(json_text(value))
    if isinstance(value, list):
        more = f" and {len(value) - FEW} more" if len(value) > FEW else ""
        return cut(", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value[:FEW])) + more
    if key == "parameters":
        return size(value, *COUNT)
    return size(value) if key == "bytes" else cut(str(value))
