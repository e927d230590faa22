"""Facts about a base model, from its header: architecture, parts, blocks, storage, and what was merged into it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from ..dtypes import StoredTensor, spoken
from ..errors import MergeError
from ..files.checkpoint import Index, open_checkpoint
from ..files.file_signatures import foreign, network_for
from ..models.blocks import blocks
from ..models.names import Names
from ..planning.recipe import KEY, parsed
from ..text import plural
from .file_verdict import model_of
from .formats import formats

FORMER: Final = 20  # merges that are listed one by one, of a chain of outputs that became bases


def base_facts(index: Index, lookup: Names) -> dict[str, Any]:
    """Return what the header and the configuration of a model contain. `lookup`: the names of its weights."""
    recipe = parsed(index.metadata.get(KEY, ""))
    unknown = lookup.architecture == "unknown"
    other = foreign(index.tensors) if unknown else ""
    part = lookup.what.partition(" ")[2] if not other and lookup.what != lookup.architecture else ""
    made_for = network_for({name: info.shape for name, info in index.tensors.items()}) if other else ""
    parameters = sum(prod(t.shape) for t in index.parameters.values())
    stored = 8 * sum(t.nbytes for header in index.headers.values() for t in header.tensors.values())
    return {
        **({"looks_like": other} if other else {"component": part} if part else {}),
        **({"made_for": made_for} if made_for else {}),
        "architecture": lookup.architecture, "layout": lookup.layout, "components": _components(index, lookup),
        **({"model": model} if (model := model_of(index.config, parameters)) else {}),
        "parameters": parameters, "bits_per_weight": round(stored / parameters, 2) if parameters else 0,
        "blocks": block_sizes(index, lookup),
        **({"quantised": why} if (why := quantised(index)) else {}), **formats(index),
        **({"recipe": recipe} if recipe else {}),
        **({"merged": merged} if (merged := [*former_merges(index)]) else {}),
        **({"undo": undo} if (undo := how_to_undo(index)) else {}),
        **({"notes": [*lookup.notes]} if lookup.notes else {}),
    }  # fmt: skip


def block_sizes(index: Index, lookup: Names) -> dict[str, int]:
    """Return block → number of parameters, in the order of `--strength-for`; tensors without a block are left out."""
    model_blocks = blocks(lookup)
    counts = dict.fromkeys(model_blocks.order, 0)
    for key, info in index.parameters.items():
        if (block := model_blocks.of(key)) in counts:
            counts[block] += prod(info.shape)
    return {block: count for block, count in counts.items() if count}


def recipe_of(path: Path) -> dict[str, Any] | None:
    """Return the recipe that a model holds; None without one, or where the model cannot be read."""
    try:
        return parsed(open_checkpoint(path).metadata.get(KEY, ""))
    except MergeError:
        return None


def recipes_of(index: Index) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Yield the recipe of a checkpoint, then that of its base if a merge has written that too, and so on: each with its
    base and its adapters."""
    recipe: Any = parsed(index.metadata.get(KEY, ""))
    for _ in range(FORMER):
        base, adapters = (recipe.get(name) if isinstance(recipe, dict) else None for name in ("base", "adapters"))
        if not isinstance(base, Mapping) or not isinstance(adapters, list):
            return
        yield recipe, base, [adapter for adapter in adapters if isinstance(adapter, Mapping)]
        recipe = base.get("recipe")


def former_merges(index: Index) -> Iterator[dict[str, Any]]:
    """Yield the merges that made a checkpoint, the last first: by our recipes, or by what other programs noted."""
    text = index.metadata.get("modelspec.merged_from")
    if text and parsed(index.metadata.get(KEY, "")) is None:
        yield {"inputs": text}
    for recipe, base, adapters in recipes_of(index):
        yield {
            "base": str(base.get("name", "")), "by": f"lora-merge {recipe.get('version', '')}",
            "adapters": [{key: adapter.get(key) for key in ("name", "strength", "parts", "strengths")}
                         for adapter in adapters],
        }  # fmt: skip


def how_to_undo(index: Index) -> str:
    """Return how to get the model before the last merge, in one sentence; "" if no recipe names it."""
    recipe = parsed(index.metadata.get(KEY, ""))
    try:
        first = recipe["base"]["files"][0] if recipe else None
        base = recipe["base"]["name"] if recipe else ""
    except (LookupError, TypeError):
        return ""
    if not isinstance(first, Mapping):
        return ""
    return (
        f"use its base {base} (SHA-256 of {first.get('name')}: {first.get('sha256')}); without one of the adapters, or "
        "with another strength, merge again from that base; if it is lost, lora-merge unmerge takes the adapters out"
    )


def quantised(index: Index) -> str:
    """Return how many weights are quantised, and how, in words; "" if none are."""
    read = Counter(p.encoding.title for p in index.packed.values() if p.encoding.quantised)
    texts = [f"{plural(count, 'weight')} as {name}" for name, count in read.items()]
    return "; ".join([*texts, *([index.unread.how] if index.unread.how else [])])


def _components(index: Index, lookup: Names) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for key, info in index.parameters.items():
        counts[lookup.component(key)] += prod(info.shape)
    return dict(counts.most_common())


def dtypes(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return dtype → number of parameters, the most frequent first."""
    counts: Counter[str] = Counter()
    for info in tensors.values():
        counts[spoken(info.dtype)] += prod(info.shape)
    return dict(counts.most_common())
