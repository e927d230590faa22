"""What was an adapter made for? From its module names and widths alone, for `inspect` and error texts.

An architecture file lists regular expressions, `#` for a number, of which each has to be found in some
flattened name, with a weight of the given shape if it gives one, or, after `no`, in none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from ..algorithms import Shape
from .architectures import Architecture, fits, shipped

Seen: TypeAlias = frozenset[tuple[str, Shape]]
"""(flat name, [out, in] of the weight or () where unknown) of every module; first numbers set to 0."""

_BLOCK = re.compile(r"_\d+_")


def seen(modules: Mapping[str, Shape]) -> Seen:
    """Return the modules of one network, flat; blocks that differ in nothing but their number become one."""
    return frozenset(
        (_BLOCK.sub("_0_", name.lower().replace(".", "_"), count=1), shape[:2]) for name, shape in modules.items()
    )


def architectures(modules: Seen) -> list[Architecture]:
    """Return all architectures that the names fit; more than one where too little is there to tell."""
    return [a for a in shipped() if a.adapter and all(_holds(c, modules) for c in a.adapter)]


def variants(architecture: Architecture, modules: Seen) -> list[str]:
    """Return which of the variants that an architecture file tells apart the names and widths are of."""
    return [name for name, conditions in architecture.variants.items() if all(_holds(c, modules) for c in conditions)]


def described(titles: Iterable[Architecture], modules: Seen) -> str:
    """ "Wan 14B", "Flux.1 or HunyuanVideo", "unknown"."""
    texts = [" ".join([a.title, ", ".join(variants(a, modules))]).strip() for a in titles]
    return " or ".join(texts) or "unknown"


def _holds(condition: str, modules: Seen) -> bool:
    wanted, pattern, shape = parsed(condition)
    found = any(
        pattern.search(name) and (shape is None or (len(have) == len(shape) and fits(shape, have)))
        for name, have in modules
    )
    return found == wanted


def parsed(condition: str) -> tuple[bool, re.Pattern[str], tuple[str, ...] | None]:
    """(whether it has to be there, in which names, with which shape)."""
    words = condition.split(" ")
    wanted = words[0] != "no"
    words = words if wanted else words[1:]
    pattern = re.compile(words[0].replace("#", r"\d+"))
    return wanted, pattern, tuple(words[1].split("x")) if len(words) > 1 else None
