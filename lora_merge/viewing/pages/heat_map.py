"""The place of a weight in a picture of a model: its block is the row, its kind of layer the column."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from ...models.blocks import block_name, in_order

LEVELS: Final = re.compile(
    r"^(?:[._]*(?:transformer_blocks|blocks?|layers?|resnets|attentions)?[._]*[0-9]+)+(?=[._]|$)"
)
"""Numbers, and the levels that they count, at the beginning of the rest of a name behind its block."""
ENDS: Final = (".weight", ".bias")
REST: Final = "…"  # ends the name of what is in no block
NUMBERS: Final = re.compile(r"(?:(?<=[._])|^)[0-9]+(?=[._]|$)")


def grid_places(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return name → (block, kind of layer), in the order of the blocks' numbers, and of the names."""
    cells = {name: _split(name) for name in names}
    return dict(sorted(cells.items(), key=lambda item: (in_order(item[1][0]), in_order(item[0]))))


def block_labels(blocks: Iterable[str]) -> dict[str, str]:
    """Return name → its last levels, and as many before them as distinguish its stack: `layers.3` of
    `model.layers.3`; of many, only the first: `te1…layers_3`. What is in no block is called the rest."""
    every = {name: _levels(name) for name in blocks}
    stacks: dict[str, list[list[str]]] = {}
    for name, (head, _) in every.items():
        stacks.setdefault(_word(name), []).append(head)
    shared = {word: _shared(heads) for word, heads in stacks.items()}
    labels = {}
    for name, (head, tail) in every.items():
        more = head[shared[_word(name)] :]
        if len(more) > (2 if "." in name else 3) and not any(level[0].isdigit() for level in (*more[1:], tail)):
            more = [f"{more[0].strip('._')}…"]
        label = "".join(more) + tail
        labels[name] = f"{label[:-1].strip('._')} (the rest)".strip() if label.endswith(REST) else label
    return labels if len({*labels.values()}) == len(every) > 1 else {name: name for name in every}


def _shared(heads: list[list[str]]) -> int:
    """Return how many levels all begin with."""
    columns = enumerate(zip(*heads, strict=False))
    return next((n for n, column in columns if len({*column}) > 1), min(map(len, heads)))


def _levels(name: str) -> tuple[list[str], str]:
    """Return the levels before the last two, and these: between dots, or underscores where there are no dots."""
    levels = re.split(r"(?<=\.)" if "." in name else "(?<=_)", name)
    return levels[:-2], "".join(levels[-2:])


def _word(name: str) -> str:
    """Return what the blocks of a stack have in common at their ends; names without dots count as one stack."""
    return _levels(name)[1].rstrip("0123456789") if "." in name else ""


def _split(name: str) -> tuple[str, str]:
    """Return (block, kind of layer) of one weight or module."""
    stem = next((name.removesuffix(end) for end in ENDS if name.endswith(end)), name)
    block = block_name(stem)
    rest = stem[len(block) :] if stem.startswith(block) else stem.removeprefix(block.removesuffix("…"))
    kind = LEVELS.sub("", rest).strip("._")
    return block, (NUMBERS.sub("#", kind) if kind else "whole block") + (".bias" if name.endswith(".bias") else "")
