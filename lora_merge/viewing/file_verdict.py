"""What a file is, in a few rows on top of a report: what, for which model, trained how, does it fit, trigger words.

The model of an adapter is that of its names and shapes, or where these show none, or several, that of its metadata.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..algorithms import ALGORITHMS
from ..facts import THOUSANDS, Fact, counts_by_kind, line
from ..files.file_signatures import instead
from ..models.components import stated_class
from ..models.names import CLASS_ENDS
from ..paths import input_name, typed
from ..text import listed, plural, size, with_article

NETWORK_TITLES: Final = {
    "te": "text encoder",
    "te1": "text encoder 1",
    "te2": "text encoder 2",
    "te3": "text encoder 3",
    "unet": "U-Net",
    "vae": "VAE",
}
WHOLE_MODELS: Final = ("model", "transformer")
"""Networks that are all of a model, whose names say nothing."""

BILLION: Final = 10**9

INCOMPLETE: Final = "incomplete"
"""The algorithm of a module that lacks a tensor."""


def model_of(config: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """Return the model that a config.json states: class, name, size, layers, hidden size; {} if it states no class."""
    if not (name := stated_class(config)):
        return {}
    inner = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else {}
    numbers = {
        key: value
        for key, entry in (("layers", "num_hidden_layers"), ("hidden_size", "hidden_size"))
        if isinstance(value := config.get(entry, (inner or {}).get(entry)), int)
    }
    return {"class": name, "name": CLASS_ENDS.sub("", name) or name, "size": _billions(parameters), **numbers}


def _billions(count: int) -> str:
    """Return a number of parameters as people name the size of a model: `8 B`, `0.6 B`, `135 M`."""
    if count >= BILLION:
        return f"{count / BILLION:.0f} B" if count >= 7.5 * BILLION else f"{count / BILLION:.2g} B"
    return f"{count / 10**6:.0f} M" if count >= 10**6 else size(count, *THOUSANDS)


def verdict(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return what a file is, in one sentence, and whether something is wrong with it, or with how it fits."""
    what = _adapter(facts) if facts["kind"] == "adapter" else _model(facts)
    level, match = "good", facts.get("match")
    if match:
        fits = match["fits"]
        level = "good" if fits and not (match.get("numbers") or {}).get("warnings") else "warning" if fits else "bad"
        return {"level": level, "text": f"{what} {_fit(match)}"}
    if facts.get("incomplete") or facts.get("looks_like"):
        level = "warning"
    return {"level": level, "text": what}


def of_all(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of a base with the first of several adapters, and with the verdict on each of them."""
    first, *others = files
    levels, fits = [facts["verdict"]["level"] for facts in files], [_fit(facts["match"]) for facts in others]
    text = " ".join([first["verdict"]["text"], *fits])
    return {**first, "verdict": {"level": max(levels, key=LEVELS.index), "text": text}}


LEVELS: Final = ("good", "warning", "bad")
"""Levels of verdicts, the worst last."""


def _fit(match: Mapping[str, Any]) -> str:
    modules, adapter = plural(match["total"], "module"), input_name(Path(match["adapter"]))
    if match["fits"]:
        return f"{adapter} fits: all {modules} match."
    if match["matched"]:
        return f"{adapter} fits in part: {match['matched']} of {modules} match."
    why = match["error"]["what"] if match.get("error") else f"no match among {modules}"
    return f"{adapter} does not fit: {re.sub('^the adapter', 'it', why)}."


def _adapter(facts: Mapping[str, Any]) -> str:
    kinds = listed(_title(name) for name in facts["algorithms"] if name != INCOMPLETE) or "Adapter without modules"
    ranks = facts["ranks"]
    rank = f", rank {ranks[0]}" if len(ranks) == 1 else f", ranks {min(ranks)} to {max(ranks)}" if ranks else ""
    parts = listed(NETWORK_TITLES.get(name, name) for name in facts["parts"] if name not in WHOLE_MODELS)
    model = _base_of(facts)
    made_for = with_article("unknown model" if model == "unknown" else model) if model[:1].islower() else model
    lacking = f" {are}." if (are := incomplete(facts)) else ""
    return f"{kinds}{rank}, for {made_for}{f' ({parts})' if parts else ''}, {size(facts['bytes'])}.{lacking}"


def incomplete(facts: Mapping[str, Any]) -> str:
    """Return how many modules of an adapter lack a tensor, in words; "" if none does."""
    some = facts.get("incomplete", ())
    return plural(len(some), "module is", "modules are") + " incomplete" if some else ""


def _base_of(facts: Mapping[str, Any]) -> str:
    """Return the model that an adapter is for; of a kind of model, such as transformers language model, the base that
    its training names; "unknown" if nothing shows it."""
    model, trained = facts["made_for"], facts.get("trained") or {}
    return str(trained.get("base_model") or model) if model[:1].islower() else str(model)


def _title(name: str) -> str:
    """Return what people call an algorithm, the first words of its module: `LoRA`; its name if these are many."""
    row = ALGORITHMS.get(name)
    first = re.match("[^,:.]+", (row and sys.modules[row.module].__doc__) or "")
    return first[0] if first and first[0].count(" ") < MOST_WORDS else name


MOST_WORDS: Final = 2  # of a title


def _model(facts: Mapping[str, Any]) -> str:
    name = _name(facts)
    networks = [NETWORK_TITLES.get(part, part) for part in facts["components"] if part not in WHOLE_MODELS]
    if name == "unknown":
        name = _unknown(facts)
        networks = [] if _other_kind(facts) else networks
    elif len(networks) == 1 and ONE_COMPONENT.search(name):
        networks = []
    dtype = next(iter(facts["dtypes"]), "")
    stored = facts.get("quantised") or dtype
    text = f"{name}{f' ({listed(networks)})' if networks else ''}, {stored}, {size(facts['bytes'])}."
    return f"{text} {_capital(instead(what))}." if (what := facts.get("looks_like")) else text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


ONE_COMPONENT: Final = re.compile("encoder|module|VAE")
"""Words of an architecture's title that name a component of a pipeline."""


def _other_kind(facts: Mapping[str, Any]) -> str:
    """Return what a file is that is neither a model nor an adapter: an embedding, a component of a pipeline."""
    return facts.get("looks_like", "").removeprefix("an ").removeprefix("a ") or str(facts.get("component", ""))


def _name(facts: Mapping[str, Any]) -> str:
    """Return the name of a model: by its configuration with its size, or its architecture."""
    model = facts.get("model")
    return f"{model['name']}, {model['size']} parameters" if model else str(facts["architecture"])


def _unknown(facts: Mapping[str, Any]) -> str:
    """Return what a file of no known architecture is, by its names, and for which model."""
    what = _other_kind(facts)
    made_for = f" for {facts['made_for']}" if "made_for" in facts else ""
    return f"{_capital(what)}{made_for}" if what else "Model of an unknown architecture"


def top(facts: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the rows that a report begins with."""
    if judged := facts.get("verdict"):
        yield line("verdict", judged["text"])
    trained = facts.get("trained") or {}
    if words := trained.get("trigger_words"):
        yield line("trigger words", ", ".join(words))
    if facts.get("kind") == "adapter" and (how := [*_training(facts, trained)]):
        yield line("trained", ", ".join(how))


def _training(facts: Mapping[str, Any], trained: Mapping[str, Any]) -> Iterator[str]:
    if facts.get("trainer", "unknown") != "unknown":
        yield f"with {facts['trainer']}"
    if base := trained.get("base_model"):
        yield f"on {base}"
    if steps := trained.get("steps"):
        yield f"{steps} steps"
    if images := trained.get("images"):
        yield plural(images, "image")
    if date := trained.get("date"):
        yield str(date)[:10]


def misplaced(files: Sequence[Mapping[str, Any]], words: Sequence[str]) -> tuple[list[str], bool]:
    """Return why files are not shown as a base with its adapters, and whether what follows the base cannot fit it.

    `words`: the files as they are typed.
    """
    kinds = ["other" if _other_kind(facts) else facts["kind"] for facts in files]
    if kinds.count("checkpoint") != 1:
        return [], False
    by_kind = {kind: [word for word, k in zip(words, kinds, strict=True) if k == kind] for kind in kinds}
    named = {name_of(facts): _other_kind(facts) for facts in files if kinds[0] == "checkpoint" and _other_kind(facts)}
    reasons = [f"{name} is no adapter: it is {with_article(what)}" for name, what in named.items()]
    if "adapter" in by_kind:
        right = typed(["lora-merge", "inspect", *by_kind["checkpoint"], *by_kind["adapter"]])
        reasons.append(f"to see whether adapters fit, name the base first, and adapters alone after it: {right}")
    return reasons, bool(named) and "adapter" not in by_kind


SIZE_TITLE: Final = "size"


def name_of(facts: Mapping[str, Any]) -> str:
    """Return the name of a file, without its folder."""
    return str(facts["path"]).replace("\\", "/").rpartition("/")[2]


def table_of_files(files: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each file: name, what it is, rank, size, trigger words."""
    yield "file", "what", "for", "rank", SIZE_TITLE, "trigger words"
    for facts in files:
        adapter, other = facts["kind"] == "adapter", _other_kind(facts)
        kinds = counts_by_kind(facts["algorithms"]) if adapter else other or facts["kind"]
        named = _base_of(facts) if adapter else facts.get("made_for", "") if other else _name(facts)
        every = list(facts.get("ranks", ()))
        ranks = f"{every[0]:g}" if len(every) == 1 else f"{min(every):g} to {max(every):g}" if every else ""
        words = (facts.get("trained") or {}).get("trigger_words") or ()
        yield (name_of(facts), kinds, named, ranks,
               size(facts["bytes"]), ", ".join(words))  # fmt: skip
