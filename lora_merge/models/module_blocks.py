"""The network and the block of a module, found from its name alone, as adapters spell it."""

from __future__ import annotations

import re
from typing import Final

from .prefixes import PREFIXES, innermost

BLOCK: Final = re.compile(r"(.*?(?:^|[._])(?:mid(?:dle)?_block|(?:blocks?|layers?|h|resblocks)[._][0-9]+))(?:[._]|$)")
"""The path of a block at the beginning of a module's name: `lora_unet_down_blocks_1`, `model.layers.3`."""

_LONGEST_FIRST: Final = tuple(sorted((prefix for prefix, _ in PREFIXES), key=len, reverse=True))


def network_of(name: str, denoiser: str = "denoiser") -> str:
    """Return the network that the prefixes of a module's name mean; "model" where they mean none.

    `denoiser`: what the denoiser is called, whose prefixes are the same for many models.
    """
    hint, _ = innermost(name)
    return {"any": "model", "denoiser": denoiser}.get(hint, hint.removeprefix("="))


def block_name(name: str) -> str:
    """Return the path of the block that a module of an adapter belongs to; its prefix where it is in none."""
    found = BLOCK.match(name)
    if found:
        return found[1]
    prefix = next((p for p in _LONGEST_FIRST if name.startswith(p)), "")
    return f"{prefix}…" if prefix else "…"


def in_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts the names of blocks, and numbers inside them by their size."""
    parts = re.split("([0-9]+)", name)
    return tuple((1, int(p), "") if p.isdecimal() else (0, 0, p) for p in parts)
