"""Parts and blocks of a base, as the options that take parts name them, and the presets of block weights for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..adapters.modules import is_adapter
from ..errors import UsageError
from ..models.blocks import CURVES, FLUX_ALL, PRESETS, blocks
from ..paths import typed
from ..planning.checkpoint_cache import CheckpointCache
from .json_schemas import schema


def parts_of(path: Path, opened: CheckpointCache | None = None) -> dict[str, Any]:
    """Return the parts of a base and their tensors, the blocks in order, and how each list of block weights is read.

    `opened`: the checkpoints that are open already. Raises UsageError for an adapter.
    """
    opened = opened or CheckpointCache()
    index = opened.index(path, adapter=False)
    if is_adapter(index):
        fix = f"name the base; `lora-merge inspect {typed([path.name])}` shows what the adapter changes"
        raise UsageError("an adapter, and parts are those of a base", str(path), fix)
    lookup = opened.names(path)
    model_blocks = blocks(lookup)
    tensors: dict[str, list[str]] = {name: [] for name in model_blocks.order}
    for key in index.tensors:
        if block := model_blocks.of(key):
            tensors[block].append(key)
    return {
        "base": path.name,
        "architecture": lookup.architecture,
        "parts": dict(Counter(map(lookup.component, index.tensors))),
        "blocks": {name: {"tensors": len(keys), "first": next(iter(keys), None)} for name, keys in tensors.items()},
        "lists": {len(order): list(order) for order in (model_blocks.order, model_blocks.few) if order},
        "schema": schema("parts"),
    }


def presets_of(path: Path, opened: CheckpointCache) -> dict[str, Mapping[str, float]]:
    """Return the presets of block weights that a base has the blocks for: name → block → factor."""
    of_base, presets = blocks(opened.names(path)), {}
    for name in (*of_base.user_presets, *PRESETS, FLUX_ALL, *CURVES):
        with suppress(UsageError):  # the preset is for other models
            presets[name] = of_base.weights(name, name)
    return presets
