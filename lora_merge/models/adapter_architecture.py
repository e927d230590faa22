"""The probable architecture of an adapter, from its module names and widths; for `inspect` and error texts.

Under `adapter`, an architecture file lists conditions. Each is a regular expression (`#` for a number) that has to
occur in a flattened name, optionally with the shape of that module's weight; after `no`, it may occur in no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import TypeAlias

from ..dtypes import Shape
from .architectures import Architecture, fits, shipped

FlatModules: TypeAlias = frozenset[tuple[str, Shape]]
"""(flat name, [out, in] of the weight or () if unknown) of every module; the first number of a name set to 0."""

_BLOCK = re.compile(r"_\d+_")


def modules_of(modules: Mapping[str, Shape]) -> FlatModules:
    """Return the modules of one network with flat names; blocks that differ only in their number become one."""
    return frozenset(
        (_BLOCK.sub("_0_", name.lower().replace(".", "_"), count=1), shape[:2]) for name, shape in modules.items()
    )


@lru_cache(maxsize=16)
def architectures(modules: FlatModules) -> tuple[Architecture, ...]:
    """Return all architectures that the names fit; several if the adapter has too few modules to decide."""
    return tuple(a for a in shipped() if a.adapter and all(_holds(c, modules) for c in a.adapter))


@lru_cache(maxsize=16)
def named_so(modules: FlatModules) -> tuple[Architecture, ...]:
    """Return all architectures that the names fit, whatever the shapes."""
    return tuple(
        a for a in shipped() if a.adapter and all(_holds(c, modules) for c in a.adapter if parsed(c)[2] is None)
    )


def variants(architecture: Architecture, modules: FlatModules) -> list[str]:
    """Return the variants of an architecture that the names and widths fit."""
    return [name for name, conditions in architecture.variants.items() if all(_holds(c, modules) for c in conditions)]


def described(titles: Iterable[Architecture], modules: FlatModules) -> str:
    """Return the architectures as text: "Wan 14B", "Flux.1 or HunyuanVideo", "unknown"."""
    texts = [" ".join([a.title, ", ".join(variants(a, modules))]).strip() for a in titles]
    return " or ".join(texts) or "unknown"


def _holds(condition: str, modules: FlatModules) -> bool:
    present, pattern, shape = parsed(condition)
    exists = any(
        pattern.search(name) and (shape is None or (len(have) == len(shape) and fits(shape, have)))
        for name, have in modules
    )
    return exists == present


@cache
def parsed(condition: str) -> tuple[bool, re.Pattern[str], tuple[str, ...] | None]:
    """Return (False after `no`, pattern of names, shape or None) of a condition."""
    words = condition.split(" ")
    present = words[0] != "no"
    words = words if present else words[1:]
    pattern = re.compile(words[0].replace("#", r"\d+"))
    return present, pattern, tuple(words[1].split("x")) if len(words) > 1 else None
