"""Names, lists and sizes as text for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

NUMBER: Final = re.compile(r"(?:(?<=[._/])|^)[0-9]+(?=[._/]|$)")
"""A number that counts something in a name: the 12 of `layers.12.attn1`, not its 1."""


def size(n: int, step: int = 1024, units: Sequence[str] = ("B", "KiB", "MiB", "GiB", "TiB")) -> str:
    """ "6.46 GiB"; with COUNT "6.94 G"."""
    value, at = float(n), 0
    while value >= step and at + 1 < len(units):
        value, at = value / step, at + 1
    return f"{value:.2f} {units[at]}" if at else f"{n} {units[0]}".rstrip()


def listed(names: Iterable[str], limit: int = 5) -> str:
    """`a, b, c and 7 more`."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Pattern of names, `layers.{i}.attn1.to_q` → the names that are of it, in their order."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(NUMBER.sub("{i}", name), []).append(name)
    return found


def counted(patterns: Mapping[str, Sequence[str]], limit: int = 5) -> str:
    """`layers.{i}.attn1.to_q × 70, e.g. layers.0.attn1.to_q; proj_out and 7 more`, of what `by_pattern` gives."""
    every = [f"{p} × {len(of)}, e.g. {of[0]}" if len(of) > 1 else of[0] for p, of in patterns.items()]
    several = any(len(of) > 1 for of in patterns.values())
    left = sum(map(len, [*patterns.values()][limit:]))
    return ("; " if several else ", ").join(every[:limit]) + (f" and {left} more" if left else "")


def by_reason(left: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(names of one pattern, why) for every pattern of names that have this reason, of name → why."""
    for why in dict.fromkeys(left.values()):
        for pattern, names in by_pattern(name for name in left if left[name] == why).items():
            yield counted({pattern: names}), why


def quoted(name: str) -> str:
    """Return a name out of a file, safe to print: quoted, control characters escaped, cut to 120."""
    return ascii(name) if len(name) <= 120 else ascii(name[:120]) + "…"
