"""Adds to lora_merge/models/module_orders.json the orders in which the installed classes list their parts.

    python -m tests.models.module_orders [TYPE or CLASS …]

Without names, of every type of transformers and every class of diffusers that the file has. A class that lists parts
for some of its options alone is in OPTIONS. Nothing is taken out: an older version may list other parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from lora_merge.models import module_order as beside

FILE: Final = Path(beside.__file__).with_name("module_orders.json")
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "FluxTransformer2DModel": {"guidance_embeds": True},
    "WanTransformer3DModel": {"image_dim": 1280, "added_kv_proj_dim": 5120},
}
"""Class of diffusers → options that add parts."""

Lines = dict[str, list[str]]
"""Part of a name → the parts below it, one text for each order."""


def lines(model: torch.nn.Module) -> Lines:
    """The parts below each part of a model that hold matrices, as the class lists them."""
    found: Lines = {}
    holding = {name for name, m in model.named_modules() if any(p.ndim > 1 for p in m.parameters())}
    for name, module in model.named_modules():
        inner = [part for part, _ in module.named_children() if f"{name}.{part}".strip(".") in holding]
        parts = [part for part in inner if not part.isdigit()]
        words = [word for word in name.split(".") if not word.isdigit()]
        if len(parts) > 1:
            found.setdefault(words[-1] if words else "", []).append(" ".join(parts))
    return found


def joined(tables: Iterable[Mapping[str, Iterable[str]]]) -> Lines:
    """One table of several, without orders that are a part of another."""
    every: dict[str, dict[str, None]] = {}
    for table in tables:
        for part, orders in table.items():
            every.setdefault(part, {}).update(dict.fromkeys(orders))
    return {part: [o for o in orders if not any(o != other and _within(o, other) for other in orders)]
            for part, orders in sorted(every.items())}  # fmt: skip


def _within(order: str, other: str) -> bool:
    rest = iter(other.split())
    return all(part in rest for part in order.split())


def models(name: str) -> Iterator[torch.nn.Module]:
    """Every model of a type of transformers, or of a class of diffusers, on the meta device."""
    if name[:1].isupper():
        import diffusers

        with torch.device("meta"):
            yield getattr(diffusers, name)(**OPTIONS.get(name, {}))
        return
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    heads = [table for key, table in vars(modeling_auto).items() if key.startswith("MODEL") and key.endswith("NAMES")]
    classes = [found for table in heads if (found := table.get(name))]
    config = configuration_auto.CONFIG_MAPPING[name]()
    for one in dict.fromkeys(c for some in classes for c in ([some] if isinstance(some, str) else some)):
        with torch.device("meta"):
            yield getattr(transformers, one)(config)


def added(table: Mapping[str, Lines], name: str) -> Lines:
    """The table of a type with what the installed classes list."""
    return joined([table.get(name, {}), *map(lines, models(name))])


if __name__ == "__main__":
    known: dict[str, Lines] = {key: {part: [*orders] for part, orders in table.items()}
                               for key, table in beside.tables().items()}  # fmt: skip
    known |= {name: added(known, name) for name in (sys.argv[1:] or known)}
    together: dict[str, list[str]] = {}
    for key, table in known.items():
        together.setdefault(json.dumps(table), []).append(key)
    text = ",\n".join(f" {json.dumps(' '.join(keys))}: {text}" for text, keys in together.items())
    FILE.write_text(f"{{\n{text}\n}}\n", encoding="ascii")
