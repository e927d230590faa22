"""Names, lists and sizes as text for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def quoted(name: str) -> str:
    """A name out of a file, safe to print: quoted, control characters escaped, cut to 120."""
    return ascii(name) if len(name) <= 120 else ascii(name[:120]) + "…"
