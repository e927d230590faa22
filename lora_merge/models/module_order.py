"""The order in which a model's code lists its layers. Methods with one shared vector number the layers so. No torch.

No file holds this order, because keys are sorted by name. It is the order in which each class registers its parts.
So module_orders.json has, for each type of model (transformers 5.23) and each class (diffusers 0.42), the parts below
each part of a name, in the order in which the class lists them when made on the meta device. Numbered parts are in
order of number. For a type that the file lacks, all types with the same parts must agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from ..grouping import by_key

Table: TypeAlias = Mapping[str, Sequence[str]]
"""Part of a name → lists of the parts below it, in order; each list is one string with blanks between the parts."""


@cache
def tables() -> Mapping[str, Table]:
    """Return type of model → its table."""
    rows: Mapping[str, Table] = json.loads(Path(__file__).with_name("module_orders.json").read_text(encoding="ascii"))
    return {model: table for models, table in rows.items() for model in models.split()}


def type_of(config: Mapping[str, Any]) -> str:
    """Return `model_type` (transformers) or the class (diffusers) by a config.json; "" if it states neither."""
    return str(config.get("model_type") or config.get("_class_name") or "")


def in_order(names: Sequence[str], model: str) -> list[str] | None:
    """Return the paths of modules in the order of a model's class; None if that order is unknown."""
    known = tables()
    return _ordered(list(names), 0, "", [known[model]] if model in known else list(known.values()))


def _ordered(names: list[str], depth: int, parent: str, known: Sequence[Table]) -> list[str] | None:
    """Order paths with the same first `depth` parts, as `in_order`; `parent` is the last of these but numbers."""
    parts = by_key((name.split(".")[depth] if name.count(".") >= depth else "", name) for name in names)
    first = _siblings([part for part in parts if part], parent, known)
    if first is None:
        return None
    ordered = parts.get("", [])  # the module itself comes before what is in it
    for part in first:
        inner = _ordered(parts[part], depth + 1, parent if part.isdigit() else part, known)
        if inner is None:
            return None
        ordered += inner
    return ordered


def _siblings(parts: list[str], parent: str, known: Sequence[Table]) -> list[str] | None:
    if len(parts) < 2:
        return parts
    if all(part.isdigit() for part in parts):
        return sorted(parts, key=int)
    lines = {line for table in known for line in table.get(parent) or table.get("", ())}  # a class around the model
    orders = {tuple(p for p in line.split() if p in parts) for line in lines if set(parts) <= {*line.split()}}
    return list(orders.pop()) if len(orders) == 1 else None
