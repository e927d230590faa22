"""Levels that training and PEFT leave in a base's names (wrappers), and the names without them. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from ..files.layouts import PEFT
from ..text import listed
from .prefixes import TRAINING

LEVELS: Final = ("_wrapped_module.", "_orig_mod.", "_forward_module.", "module.", "base_layer.", PEFT)
"""Texts of which every name with a wrapper contains one: a fast first test."""

_LEVEL: Final = re.compile(rf"^{re.escape(PEFT)}|(?:(?<=\.)|^)(?:{TRAINING}|module|base_layer)\.")

KEPT: Final = (
    "its names contain levels that training leaves ({levels}): modules are found without them, and they stay; a "
    "program that cannot load the base for its names (from_pretrained) cannot load the result either"
)
ATTACHED: Final = (
    "it was saved with an adapter attached: {count} tensors of that adapter ({names}) are copied and not merged; a "
    "program that loads them adds their effect"
)


def unwrapped(keys: Iterable[str]) -> dict[str, str]:
    """Return name without wrappers → key; empty if no key has a wrapper, or if two keys would get the same name."""
    every = list(keys)
    text = "\n".join(every)
    if not any(level in text for level in LEVELS):
        return {}
    inner = {_LEVEL.sub("", key): key for key in every}
    return inner if len(inner) == len(every) and any(name != key for name, key in inner.items()) else {}


def wrapper_notes(stored: Mapping[str, str]) -> Sequence[str]:
    """Return notes for the user on a base with wrappers. `stored`: name without wrappers → key."""
    levels = {level.rstrip(".") for key in stored.values() for level in _LEVEL.findall(key)}
    notes = [KEPT.format(levels=listed(sorted(levels)))]
    if "base_layer" in levels:
        layers = {key.partition(".base_layer.")[0] for key in stored.values() if ".base_layer." in key}
        left = [key for key in stored.values() if _is_attached(key, layers)]
        if left:
            notes.append(ATTACHED.format(count=len(left), names=listed(left, 2)))
    return notes


def _is_attached(key: str, layers: Collection[str]) -> bool:
    """Return whether a tensor lies in a wrapped layer beside the layer itself, as an attached adapter does."""
    parts = key.split(".")
    inside = any(".".join(parts[:i]) in layers for i in range(1, len(parts)))
    return inside and ".base_layer." not in key
