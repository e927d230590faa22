"""The facts of `inspect` in words. Text and terminals show all rows; pages show them with tables and pictures."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from ..adapters.training_metadata import TRIGGERS
from ..facts import (
    THOUSANDS,
    VALUE_WIDTH,
    Fact,
    between,
    by_block,
    counts_by_kind,
    cut,
    cut_rows,
    line,
    percent,
    run_label,
    runs,
    section,
    share_of,
    strengths,
    table,
)
from ..report import note_row
from ..survival import judged, spoken
from ..text import by_reason, json_text, listed, plural, size
from .file_verdict import incomplete, top
from .formats import format_line, plain_line
from .hashes import hash_title
from .training import FACT_ENTRIES, dataset_line

METADATA_KEYS: Final = (
    "modelspec.title", "modelspec.architecture", "modelspec.author", "modelspec.license", "modelspec.trigger_phrase",
    "modelspec.merged_from", "ss_base_model_version", "ss_sd_model_name", "ss_network_module", "ss_network_dim",
    "ss_network_alpha", "ss_network_args", "ss_output_name", "software", "name", "version", "format",
)  # fmt: skip
"""Metadata worth a line."""

TRAINING_KEYS: Final = frozenset((*(name for names in FACT_ENTRIES.values() for name in names), *TRIGGERS))
"""Metadata that the facts of a training contain."""

TAGS: Final = 20
LISTED_VALUES: Final = 12  # values of a list

FACT_NAMES: Final = {
    "path": "file", "kind": "", "files": "", "bytes": "size", "tensors": "", "parameters": "", "dtypes": "",
    "architecture": "", "layout": "", "components": "", "bits_per_weight": "", "quantised": "",
    "algorithms": "", "dora": "DoRA", "modules": "", "trainer": "", "names": "", "made_for": "", "configuration": "",
}  # fmt: skip
"""Fact that is shown as it is → its name, if that is another one."""

BESIDE_WEIGHTS: Final = "; as a share of the weights: inspect BASE ADAPTER --weights"

FACTS_OF_MODELS: Final = frozenset(("architecture", "layout", "components", "blocks"))


def rows(facts: Mapping[str, Any], *, pictured: bool = False, verbose: bool = False) -> Iterator[Fact]:
    """Yield all facts in sections, the verdict first. `pictured`: without the tables whose numbers pictures show;
    `verbose`: with the patterns of names."""
    weights = facts.get("weights") or {}
    yield from cut_rows(top(facts))
    yield from section("File", cut_rows(summary(facts)))
    parts = (line("part", cut(_part(network, part))) for network, part in facts.get("parts", {}).items())
    yield from section("Parts", parts)
    yield from section("Training", cut_rows(_training(facts.get("trained", {}))))
    blocks = {} if pictured else weights.get("blocks", {})
    by_layer = [
        *cut_rows(_layers(facts.get("patterns", {}), verbose=verbose)),
        *(_blocks(facts.get("blocks", {})) if facts.get("kind") == "adapter" else ()),
        *by_block((name, f"{percent((n / (weights['norm'] or 1)) ** 2)} of the change") for name, n in blocks.items()),
        *_sizes(facts.get("sizes") or {}, pictured=pictured),
    ]
    yield from section("Layers", by_layer)
    hashes = facts.get("hashes", {}).items()
    yield from section("Hashes", (line("hash", f"{hash_title(name)} {value}") for name, value in hashes))
    yield from section("Metadata", (line("metadata", cut(f"{key} {value}")) for key, value in metadata(facts)))
    yield from cut_rows(line("note", note) for note in facts.get("notes", ()))
    if "match" in facts:
        yield from section("Fit", match_rows(facts["match"], pictured=pictured, verbose=verbose))


def summary(facts: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what a file is, its sizes, and how it was made."""
    if what := facts.get("looks_like"):  # neither a model nor an adapter
        facts = {"kind": what, **{name: fact for name, fact in facts.items() if name not in (*FACTS_OF_MODELS, "kind")}}
    if model := facts.get("model"):
        yield line("model", _class(model))
    for key, name in FACT_NAMES.items():
        if key in facts and (value := facts[key]) not in ({}, [], ""):
            by = f" (by {facts['made_for_by']})" if key == "made_for" and "made_for_by" in facts else ""
            yield line(name or key, _value(key, value) + by)
    for key in ("ranks", "alphas"):
        if facts.get(key):
            yield line(key, _numbers(facts[key], facts.get(f"{key[:-1]}_range", {})))
    if whole := facts.get("whole"):
        yield line("whole", f"{plural(len(whole), 'tensor replaces', 'tensors replace')} the base's: {listed(whole)}")
    yield from _stored(facts)
    if are := incomplete(facts):
        yield line("warning", f"{are}: {listed(facts['incomplete'])}")
    if (numbers := facts.get("weights")) and facts.get("modules") != 0:
        yield from _changed(numbers)
    yield from _sized(facts.get("sizes") or {})


def _class(model: Mapping[str, Any]) -> str:
    """Return the model that a config.json states: `Llama, 8 B parameters (LlamaForCausalLM, 32 layers)`."""
    words = [model["class"]]
    words += [plural(model["layers"], "layer")] if "layers" in model else []
    words += [f"hidden size {model['hidden_size']}"] if "hidden_size" in model else []
    return f"{model['name']}, {model['size']} parameters ({', '.join(words)})"


def _stored(facts: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield how a model is quantised, what it was merged from, and which blocks it has."""
    for row in facts.get("formats", ()):
        yield line("format", format_line(row))
    if plain := facts.get("not_quantised"):
        yield line("not quantised", plain_line(plain))
    for n, row in enumerate(facts.get("merged", ())):
        yield line("merged" if not n else "before that", merge_origin(row))
    if undo := facts.get("undo"):
        yield line("undo", undo)
    if (blocks := facts.get("blocks")) and facts.get("kind") != "adapter":
        names = " ".join(run_label(some) for some, _ in runs((name, "") for name in blocks))
        yield line("blocks", f"{len(blocks)}: {cut(names, 120)} (lora-merge parts lists them)")


def _sized(sizes: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield how large the weights of a model are in all."""
    if not sizes:
        return
    every = sizes["all"]
    yield line("weights", f"{size_line(every)}; {every['zeros']:,} of {every['of']:,} values are zero")
    if broken := every["broken"]:
        yield line("warning", f"{broken:,} values are NaN or infinite: a merge copies them")


def match_rows(match: Mapping[str, Any], *, pictured: bool = False, verbose: bool = False) -> Iterator[Fact]:
    """Yield how an adapter fits; `verbose`: with the patterns of names."""
    yield from cut_rows(match_summary(match))
    if match["matched"] is None:
        return
    if match["patterns"] and verbose:
        yield line("matches", plural(len(match["patterns"]), "pattern") + " of names")
        yield from table((pattern, f"× {n}") for pattern, n in match["patterns"].items())
    for left, reason in by_reason(match["unmatched"]):
        yield line("no match", f"{left}: {reason}")
    blocks = {} if pictured else match.get("numbers", {}).get("blocks", {})
    yield from by_block((name, f"{_share(n)}, {spoken(n['share'])} survives") for name, n in blocks.items())


def match_summary(match: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the same without its tables."""
    yield line("adapter", match["adapter"])
    yield line("strength", strengths(match.get("strengths", {})) or f"{match['strength']:g}")
    if match["matched"] is None:
        yield line("match", "it does not fit")
    else:
        by_part = f" ({counts_by_kind(match['components'])})" if match["components"] else ""
        yield line("match", f"{match['matched']} of {plural(match['total'], 'module')}{by_part}")
    if match["why"]:
        in_part = "the adapter matches this base only in part: " if match["matched"] else ""
        yield line("warning", f"{in_part}{match['why']}")
    if match["matched"] is None:
        return
    if match["effective"]:
        factors = "; ".join(f"{part} {between(spread)}" for part, spread in match["effective"].items())
        yield line("effective", f"{factors} (strength × scale: alpha / rank, or / √rank)")
    tensors, would = plural(match["changed_tensors"], "tensor"), size(match["output_bytes"])
    yield line("changes", f"{tensors}; the output would have {would}")
    if numbers := match.get("numbers"):
        every = numbers["all"]
        survives = f"{judged(every['share'], 'it')} survives in the base's dtype" if every["share"] is not None else ""
        yield line("change", "; ".join(filter(None, [_share(every), survives])))
        yield from (line("warning", warning) for warning in numbers["warnings"])
    elif numbers is None:
        yield line("survives", "run with --weights to see how much of the change survives in the base's dtype")
    yield from (note_row(note) for note in match["notes"])


def _share(n: Mapping[str, Any]) -> str:
    if n["change"] is None:
        return "too large for fp32"
    return "all of the weights" if n["ratio"] is None else share_of(n["ratio"], "the weights")


def merge_origin(row: Mapping[str, Any]) -> str:
    """Return one of the merges from which a model comes, in words."""
    if "inputs" in row:
        return str(row["inputs"])
    adapters = ", ".join(f"{a['name']}:{a['strength']}{typed_parts(a['parts'])}" for a in row["adapters"])
    return f"{row['base']} + {adapters} ({row['by']})"


def typed_parts(value: object) -> str:
    """Return the parts in a recipe as they are typed behind an adapter, ",te=0.0"; "" for what is no list of them."""
    pairs = [p for p in value if isinstance(p, list) and len(p) == 2] if isinstance(value, list) else []
    return "".join(f",{part}={factor}" for part, factor in pairs)


def _part(network: str, facts: Mapping[str, Any]) -> str:
    does = f" ({facts['does']})" if facts["does"] else ""
    modules, parameters = plural(facts["modules"], "module"), size(facts["parameters"], *THOUSANDS)
    return f"{network}{does}: {modules}, {parameters} parameters: {counts_by_kind(facts['layers'])}"


def _training(facts: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield what is known of the training, with few tags, and a row for each data set."""
    for name, value in facts.items():
        if name == "trigger_words":  # at the top
            continue
        if name == "tags":
            yield line("tags", _first(f"{tag} {count}" for tag, count in value.items()))
        elif name == "datasets":
            yield line("datasets", len(value))
            yield from table((d["name"], dataset_line(d)) for d in value)
        else:
            yield line(name, training_value(name, value))


def training_value(name: str, value: Any) -> str:
    """Return a fact of the training in words."""
    if name == "datasets":
        return ", ".join(f"{item['name']} ({dataset_line(item)})" for item in value)
    if name == "buckets":
        return ", ".join(f"{sides} ({n})" for sides, n in value.items())
    if name == "tags":
        return counts_by_kind(value)
    if name == "preview":
        return f"a picture in {value['in']} ({value['type']}, {size(value['bytes'])})"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _first(words: Iterable[str]) -> str:
    """Return the first of some words, at most TAGS and as many as a line holds, and how many more there are."""
    every = list(words)
    ends = [*accumulate(len(word) + 2 for word in every)]
    shown = max(1, min(TAGS, bisect_right(ends, VALUE_WIDTH + 2)))
    return cut(", ".join(every[:shown])) + (f" and {len(every) - shown} more" if len(every) > shown else "")


def _layers(patterns: Mapping[str, Any], *, verbose: bool) -> Iterator[Fact]:
    """Yield the modules of each algorithm, rank and alpha, if they are not all alike."""
    alike: dict[str, list[str]] = {}
    for pattern, row in patterns.items():
        kind = f"{row['algorithm']}{_few(' rank', row['ranks'])}{_few(' alpha', row['alphas'])}"
        alike.setdefault(kind, []).append(pattern)
    if len(alike) > 1:
        for kind, some in alike.items():
            yield line("layers", f"{kind}: {_modules(patterns, some)}" + (f", {_named(some)}" if verbose else ""))


def _named(some: Sequence[str]) -> str:
    """Return the first of some patterns of names, and how many more there are."""
    return some[0] + (f" and {len(some) - 1} more" if len(some) > 1 else "")


def _modules(patterns: Mapping[str, Any], some: Iterable[str]) -> str:
    return plural(sum(patterns[name]["modules"] for name in some), "module")


def _blocks(by_name: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the blocks of an adapter; blocks that are numbered in turn and alike have one row."""
    if len(by_name) < 2:
        return
    entries = (
        (name, f"{plural(b['modules'], 'module')}{_range(' rank', b['ranks'])}{_range(' alpha', b['alphas'])}")
        for name, b in by_name.items()
    )
    yield line("blocks", len(by_name))
    yield from table((run_label(names), value + " each" * (len(names) > 1)) for names, value in runs(entries))


def _few(name: str, values: Sequence[float]) -> str:
    """Return a few numbers with what they are, or how many there are and the range of them."""
    return f",{name} {few(values)}" if values else ""


def _range(name: str, of: Mapping[str, float]) -> str:
    return f",{name} {between(of)}" if of else ""


def few(values: Sequence[float]) -> str:
    """Return a few numbers, or how many there are and the range of them."""
    if len(values) <= LISTED_VALUES:
        return ", ".join(f"{v:g}" for v in values)
    return f"{len(values)} values, {min(values):g} to {max(values):g}"


def _numbers(values: Sequence[float], of: Mapping[str, float]) -> str:
    """Return numbers, the most frequent first, and the least, the median and the greatest if they are not equal."""
    more = f" and {len(values) - LISTED_VALUES} more" if len(values) > LISTED_VALUES else ""
    spread = " (min {min:g}, median {median:g}, max {max:g})".format(**of) if len(values) > 1 and of else ""
    return ", ".join(f"{v:g}" for v in values[:LISTED_VALUES]) + more + spread


def _changed(numbers: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield how much an adapter changes, by its weights."""
    norm = (
        f"{numbers['norm']:.4g} in {plural(numbers['measured'], 'module')}"
        if "measured" in numbers
        else f"{numbers['norm']:.4g}"
    )
    more = (
        f"; {plural(numbers['unmeasured'], 'more needs its', 'more need their')} base: inspect BASE ADAPTER --weights"
        if numbers.get("unmeasured")
        else ""
    )
    yield line("change", f"norm {norm}{more or BESIDE_WEIGHTS}")
    if numbers["stable_rank"]:
        many = between(numbers["stable_rank"])
        yield line("stable rank", f"{many}: the number of directions that carry a module's change")
    for share, rank in numbers.get("rank_for_energy", {}).items():
        most = f" (median), {rank['max']:g} at most" * (rank["max"] > rank["median"])
        yield line("needs", f"{share.replace('%', ' %')} of the change needs rank {rank['median']:g}{most}")


def _sizes(numbers: Mapping[str, Any], *, pictured: bool) -> Iterator[Fact]:
    """Yield how large the weights of a base are, by kind of layer, part and block."""
    for kind, of in (("kinds", "kind"), ("components", "part"), *([] if pictured else [("blocks", "block")])):
        if len(numbers.get(kind, ())) > 1:
            yield line(f"by {of}", len(numbers[kind]))
            yield from table((name, size_line(row)) for name, row in numbers[kind].items())


def size_line(row: Mapping[str, Any]) -> str:
    """Return how large some weights are, in words."""
    return f"norm {row['norm']:.4g}, typical {row['rms']:.3g}, largest {row['largest']:.3g}"


def metadata(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield entries of the metadata that no other fact contains, and how many are left out."""
    entries: Mapping[str, str] = facts.get("metadata", {})
    hidden = TRAINING_KEYS if "trained" in facts else frozenset[str]()
    shown = {key: entries[key] for key in METADATA_KEYS if key in entries and key not in hidden}
    yield from shown.items()
    if left := len(entries.keys() - shown.keys() - hidden):
        of = len(entries) - left
        few = f"{of} of " * bool(of) + plural(len(entries), "entry", "entries") + " shown" * bool(of)
        yield f"{few};", f"--json lists {'all' if len(entries) > 1 else 'it'}"


def _value(key: str, value: Any) -> str:
    if key in ("dtypes", "components", "algorithms"):
        return ", ".join(f"{name} {size(n, *THOUSANDS)}" for name, n in value.items())
    if isinstance(value, Mapping):
        return json_text(value)
    if isinstance(value, list):
        return ", ".join(map(str, value[:LISTED_VALUES])) + (
            f" and {len(value) - LISTED_VALUES} more" if len(value) > LISTED_VALUES else ""
        )
    return size(value, *THOUSANDS) if key == "parameters" else size(value) if key == "bytes" else str(value)
