"""Values in lists by their keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return key → the values of all pairs that have it; keys and values in their order."""
    lists: dict[Key, list[Value]] = {}
    for key, value in pairs:
        lists.setdefault(key, []).append(value)
    return lists
