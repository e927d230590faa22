"""The order in which a model's code lists its layers, which methods that share one vector count them in. No torch.

No file holds it: keys are sorted by name. It follows from the order in which each class registers its parts, so
module_orders.json has for each type of model (of transformers 5.23) and each class (of diffusers 0.42) the parts that
stand beside each other below a part of a name, as the classes themselves list them when made on the meta device; parts
that are numbers are in order of number. Of a type that is not there, all types that have these parts must agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

Table: TypeAlias = Mapping[str, Sequence[str]]
"""Part of a name → the parts below it that stand beside each other, in order, with blanks between; perhaps several."""


@cache
def tables() -> Mapping[str, Table]:
    """Type of model → its table."""
    found: Mapping[str, Table] = json.loads(Path(__file__).with_name("module_orders.json").read_text(encoding="ascii"))
    return {model: table for models, table in found.items() for model in models.split()}


def type_of(config: Mapping[str, Any]) -> str:
    """Return the type of a model by its config.json: `model_type` of transformers, else the class of diffusers; or
    "".
    """
    return str(config.get("model_type") or config.get("_class_name") or "")


def in_order(names: Sequence[str], model: str) -> list[str] | None:
    """Return the paths of modules in the order in which the class of a model of this type lists them; None where
    nothing tells.
    """
    known = tables()
    return _ordered(list(names), 0, "", [known[model]] if model in known else list(known.values()))


def _ordered(names: list[str], depth: int, parent: str, known: Sequence[Table]) -> list[str] | None:
    """As in_order, for paths that share their first `depth` parts, the last of which that is no number is `parent`."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.split(".")[depth] if name.count(".") >= depth else "", []).append(name)
    first = _siblings([part for part in parts if part], parent, known)
    if first is None:
        return None
    found = parts.get("", [])  # the module itself comes before what is in it
    for part in first:
        inner = _ordered(parts[part], depth + 1, parent if part.isdigit() else part, known)
        if inner is None:
            return None
        found += inner
    return found


def _siblings(parts: list[str], parent: str, known: Sequence[Table]) -> list[str] | None:
    if len(parts) < 2:
        return parts
    if all(part.isdigit() for part in parts):
        return sorted(parts, key=int)
    lines = {line for table in known for line in table.get(parent, ())}
    orders = {tuple(p for p in line.split() if p in parts) for line in lines if set(parts) <= {*line.split()}}
    return list(orders.pop()) if len(orders) == 1 else None
