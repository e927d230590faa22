"""Tables of names that options take: parts and blocks of a base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files.checkpoint import open_checkpoint
from ..models.blocks import blocks
from ..models.names import names


def parts_of(path: Path) -> dict[str, Any]:
    """Return the parts of a base and their tensors, the blocks in order, and how each list of block weights is read."""
    index = open_checkpoint(path)
    lookup = names(index)
    found = blocks(lookup)
    tensors: dict[str, list[str]] = {name: [] for name in found.order}
    for key in index.tensors:
        if block := found.of(key):
            tensors[block].append(key)
    return {
        "base": path.name,
        "architecture": lookup.architecture,
        "parts": dict(Counter(map(lookup.component, index.tensors))),
        "blocks": {name: {"tensors": len(keys), "first": next(iter(keys), None)} for name, keys in tensors.items()},
        "lists": {len(order): list(order) for order in (found.order, found.few) if order},
    }


def text_of_parts(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that a person reads."""
    yield f"{found['base']}: {found['architecture']}"
    yield ""
    yield "parts (--strength-for NAME=FLOAT)"
    for name, count in found["parts"].items():
        yield f"  {name:<14}{count:>6} tensors"
    yield ""
    yield "blocks (--strength-for NAME=FLOAT, FIRST-LAST=FLOAT)"
    for name, facts in found["blocks"].items():
        yield f"  {name:<14}{facts['tensors']:>6} tensors" + (f"  {facts['first']} …" if facts["first"] else "")
    yield ""
    yield "lists of block weights (--strength-for lbw=NUMBER,NUMBER,…)"
    for count, order in found["lists"].items():
        yield f"  {count} numbers: {' '.join(order)}"
