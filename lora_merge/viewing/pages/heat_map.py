"""The place of a weight in a picture of a model: its block is the row, its kind of layer the column."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from ...models.module_blocks import block_name, in_order

LEVELS: Final = re.compile(
    r"^(?:[._]*(?:transformer_blocks|blocks?|layers?|resnets|attentions)?[._]*[0-9]+)+(?=[._]|$)"
)
"""Numbers, and the levels that they count, at the beginning of what stands behind a block's name."""
ENDS: Final = (".weight", ".bias")
NUMBERS: Final = re.compile(r"(?:(?<=[._])|^)[0-9]+(?=[._]|$)")


def places(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return name → (block, kind of layer), the blocks in the order of their numbers."""
    found = {name: _split(name) for name in names}
    return dict(sorted(found.items(), key=lambda item: in_order(item[1][0])))


def short(blocks: Iterable[str]) -> dict[str, str]:
    """Return name → the name without the levels before its own that all blocks have in common."""
    every = list(dict.fromkeys(blocks))
    levels = [re.split("(?<=[._])", name) for name in every]
    before = [set(column) for column in zip(*(parts[:-2] for parts in levels), strict=False)]
    cut = next((n for n, column in enumerate(before) if len(column) > 1), len(before)) if len(every) > 1 else 0
    return {name: "".join(parts[cut:]) or name for name, parts in zip(every, levels, strict=True)}


def _split(name: str) -> tuple[str, str]:
    """Return (block, kind of layer) of one weight or module."""
    stem = next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name)
    block = block_name(stem)
    rest = stem[len(block) :] if stem.startswith(block) else stem.removeprefix(block.removesuffix("…"))
    kind = LEVELS.sub("", rest).strip("._")
    return block, (NUMBERS.sub("#", kind) if kind else "whole block") + (".bias" if name.endswith(".bias") else "")
