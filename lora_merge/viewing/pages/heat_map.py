"""The place of a weight in a picture of a model: its block is the row, its kind of layer the column."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from ...models.blocks import in_order
from ...models.prefixes import innermost

BLOCK_PATH: Final = re.compile(
    r".*?(?:^|[._])(?:mid(?:dle)?_block|(?:blocks?|layers?|h|resblocks)[._][0-9]+)(?=[._]|$)"
)
"""The path of a block at the beginning of a module's name: `lora_unet_down_blocks_1`, `model.layers.3`."""
NUMBERED_LEVELS: Final = re.compile(
    r"^(?:[._]*(?:transformer_blocks|blocks?|layers?|resnets|attentions)?[._]*[0-9]+)+(?=[._]|$)"
)
"""Numbers, and the levels that they count, at the beginning of the rest of a name behind its block."""
DROPPED_ENDINGS: Final = (".weight", ".bias")
REST_ROW: Final = "(the rest)"  # the row of what is in no part that is known
NAME_NUMBERS: Final = re.compile(r"(?:(?<=[._])|^)[0-9]+(?=[._]|$)")


def grid_places(blocks: Mapping[str, str], order: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
    """Return name → (block, kind of layer), in the order of the blocks, and of the names. `blocks`: name → block."""
    place = {block: number for number, block in enumerate(dict.fromkeys((*order, *blocks.values())))}
    names = sorted(blocks, key=lambda name: (place[blocks[name]], in_order(name)))
    return {name: (blocks[name] or REST_ROW, _kind(name)) for name in names}


def _kind(name: str) -> str:
    """Return the kind of layer of one weight or module: its name behind the path of its block."""
    stem = next((name.removesuffix(end) for end in DROPPED_ENDINGS if name.endswith(end)), name)
    block = BLOCK_PATH.match(stem)
    kind = NUMBERED_LEVELS.sub("", stem[block.end() :] if block else innermost(stem)[1]).strip("._")
    return (NAME_NUMBERS.sub("#", kind) if kind else "whole block") + (".bias" if name.endswith(".bias") else "")
