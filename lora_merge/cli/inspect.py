"""Says what a file is, from headers alone; no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

from ..adapters.file import AdapterFile, FileValues, group, looks_like_adapter, weight_shapes
from ..adapters.suffixes import split_row_part
from ..algorithms import ALGORITHMS
from ..errors import FitError
from ..files.checkpoint import Index, open_checkpoint
from ..files.lookalikes import foreign
from ..json_text import from_json
from ..models.names import Names, guess, names
from ..models.prefixes import PREFIXES
from ..options import is_finite
from ..planning.recipe import KEY
from ..text import by_reason, listed, size
from .text import COUNT

RANK_SLOTS: Final = ("down", "w1_b", "w2_b", "a2", "q")
"""Slots whose stored axis 0 is the rank, the first that a module has."""

SHOWN: Final = (
    "modelspec.title", "modelspec.architecture", "modelspec.author", "modelspec.license", "modelspec.trigger_phrase",
    "modelspec.merged_from", "ss_base_model_version", "ss_sd_model_name", "ss_network_module", "ss_network_dim",
    "ss_network_alpha", "ss_network_args", "ss_output_name", "software", "name", "version", "format",
)  # fmt: skip
"""Metadata worth showing."""

TRAINERS: Final = (
    # metadata key             trainer
    ("lora_adapter_metadata",  "diffusers"),
    ("lycoris_config",         "SimpleTuner"),
    ("ss_network_module",      "kohya sd-scripts or musubi-tuner"),
    ("training_info",          "ai-toolkit"),
    ("ot_config",              "OneTrainer"),
)  # fmt: skip


def inspect(path: Path, adapter: Path | None = None) -> dict[str, Any]:
    """Return a table of facts about a checkpoint or an adapter; with an adapter, how it fits the base `path`."""
    index = open_checkpoint(path)
    facts: dict[str, Any] = {
        "path": str(path), "kind": "checkpoint", "files": len(index.files),
        "bytes": sum(f.stat().st_size for f in index.files), "tensors": len(index.tensors), "dtypes": _dtypes(index),
    }  # fmt: skip
    if adapter is not None:
        return facts | _base(index) | {"match": fit(path, index, adapter)}
    facts |= _adapter(group(index)) if _is_adapter(index) else _base(index)
    notes = [*index.notes, *facts.get("notes", ()), *_changed(index)]
    return facts | {"metadata": _metadata(index), "notes": notes}


def fit(path: Path, base: Index, adapter: Path) -> dict[str, Any]:
    """Return how many modules of the adapter find their place in the base, by component, which do not, and why."""
    from ..job import make_job
    from ..matching.diagnosis import explain
    from ..planning.make_plan import Inputs, match

    job = make_job(path, [adapter], path, unmatched="skip")
    file = group(open_checkpoint(adapter))
    lookup = names(base)
    try:
        (matched,) = match(Inputs(job, base, lookup, (file,))).adapters
    except FitError as e:
        return {"adapter": str(adapter), "matched": 0, "total": len(file.modules), "why": str(e)}
    why = explain(lookup, list(matched.unmatched), weight_shapes(file.modules)) if matched.unmatched else ""
    return {
        "adapter": str(adapter), "algorithms": list(matched.algorithms), "matched": matched.modules,
        "total": matched.total, "components": dict(matched.components), "unmatched": dict(matched.unmatched),
        "why": why,
    }  # fmt: skip


def _changed(index: Index) -> Iterator[str]:
    """Return a note on a header that is not as its merge wrote it."""
    from ..proof.header_changes import changed_files

    if files := changed_files(index):
        names = listed(path.name for path in files)
        yield f"the header was edited or written anew after the merge ({names}); lora-merge verify tells what differs"


def _is_adapter(index: Index) -> bool:
    return "peft_type" in index.config or looks_like_adapter(index)


def _base(index: Index) -> dict[str, Any]:
    lookup = names(index)
    recipe = _json(index, KEY)
    other = foreign(index.tensors) if lookup.architecture == "unknown" else None
    return {
        **({"looks_like": other[0]} if other else {}),
        "architecture": lookup.architecture, "layout": lookup.layout, "components": _components(index, lookup),
        "parameters": sum(prod(t.shape) for t in index.tensors.values()),
        **({"quantised": why} if (why := _quantised(index)) else {}), **({"recipe": recipe} if recipe else {}),
        **({"notes": [*lookup.notes]} if lookup.notes else {}),
    }  # fmt: skip


def _quantised(index: Index) -> str:
    """Return what of it is stored otherwise than as plain numbers, in words; "" for nothing."""
    read = Counter(packing.encoding.title for packing in index.packed.values())
    told = [f"{count} weights as {name}" for name, count in read.items()]
    return "; ".join([*told, *([index.quantised.how] if index.quantised.how else [])])


def _adapter(file: AdapterFile) -> dict[str, Any]:
    found: Counter[str] = Counter()
    ranks: Counter[int] = Counter()
    alphas: Counter[float] = Counter()
    incomplete = []
    for module in file.modules:
        complete = module.complete
        found[complete[0] if complete else "incomplete"] += 1
        incomplete += [] if complete else [module.where]
        slot = next((s for s in RANK_SLOTS if s in module.slots), None)
        if slot is not None and (shape := module.slots[slot].shape):
            stack = len(shape) == 3 and any(ALGORITHMS[name].stacked for name in complete)
            ranks[shape[1 if stack else -1 if any(ALGORITHMS[name].in_out for name in complete) else 0]] += 1
        if "alpha" in module.shared:
            alphas.update(FileValues().numbers(module.shared["alpha"])[:1])
    for table in (file.index.config, *(_json(file.index, entry) for entry in ("lora_adapter_metadata", "lora_config"))):
        alphas.update(_alphas(table) if isinstance(table, Mapping) else ())
    dora = sum("magnitude" in m.shared for m in file.modules)
    return {
        "kind": "adapter", "algorithms": dict(found), **({"dora": dora} if dora else {}),
        "modules": len(file.modules), "ranks": _range(ranks), "alphas": _range(alphas),
        "trainer": _trainer(file.index), "names": _dialect(file),
        "made_for": guess({split_row_part(name)[0]: shape for name, shape in weight_shapes(file.modules).items()}),
        "parameters": sum(prod(t.shape) for t in file.index.tensors.values()),
        "configuration": {k: v for k, v in file.index.config.items() if v not in (None, False, [], {})},
        "incomplete": incomplete, "ignored": dict(file.ignored),
    }  # fmt: skip


def _components(index: Index, lookup: Names) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for key, info in index.tensors.items():
        counts[lookup.component(key)] += prod(info.shape)
    return dict(counts.most_common())


def _dtypes(index: Index) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for info in index.tensors.values():
        counts[info.dtype] += prod(info.shape)
    return dict(counts.most_common())


def _range(counts: Counter[Any]) -> list[Any]:
    """Return the values that occur, the most frequent first."""
    return [value for value, _ in counts.most_common()]


def _trainer(index: Index) -> str:
    if "lora_parameters" in index.config:
        return "mlx-lm"
    if index.config:
        return f"PEFT {index.config.get('peft_version', '')}".strip()
    return next((name for key, name in TRAINERS if key in index.metadata), "unknown")


def _json(index: Index, entry: str) -> Any:
    """Return what an entry of the metadata holds; None without."""
    try:
        return from_json(index.metadata.get(entry, "null"))
    except ValueError:
        return "unreadable"


def _alphas(configuration: Mapping[str, Any]) -> Iterator[float]:
    """Return the α that a PEFT configuration gives, for all modules or some; diffusers has one per component."""
    for key, value in configuration.items():
        if key.rpartition(".")[2] == "lora_alpha" and is_finite(value):
            yield float(value)
        if key.rpartition(".")[2] == "alpha_pattern" and isinstance(value, Mapping):
            yield from (float(v) for v in value.values() if is_finite(v))


def _dialect(file: AdapterFile) -> list[str]:
    """Return the prefixes of module names, the most frequent first."""
    prefixes = sorted((p for p, _ in PREFIXES), key=len, reverse=True)
    counts = Counter(next((p for p in prefixes if m.name.startswith(p)), "(none)") for m in file.modules)
    return [prefix for prefix, _ in counts.most_common()]


def _metadata(index: Index) -> dict[str, str]:
    return {key: index.metadata[key] for key in SHOWN if key in index.metadata}


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Return the facts as text, a line each."""
    for key, value in facts.items():
        if key == "match":
            yield from _match_lines(value)
        elif value not in ({}, [], ""):
            yield f"{key.replace('_', ' '):<13} {_text(key, value)}"


def _match_lines(match: Mapping[str, Any]) -> Iterator[str]:
    parts = ", ".join(f"{name} {n}" for name, n in match.get("components", {}).items())
    yield f"{'match':<13} {match['matched']} of {match['total']} modules" + (f" ({parts})" if parts else "")
    for left, reason in by_reason(match.get("unmatched", {})):
        yield f"  no place: {left}: {reason}"
    if match["why"]:
        yield f"  why: {match['why']}"


def _text(key: str, value: Any) -> str:
    if isinstance(value, Mapping) and key in ("dtypes", "components", "algorithms"):
        return ", ".join(f"{name} {size(n, *COUNT)}" for name, n in value.items())
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    if key == "parameters":
        return size(value, *COUNT)
    return size(value) if key == "bytes" else str(value)
