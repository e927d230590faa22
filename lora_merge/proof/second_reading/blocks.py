"""Blocks that strengths are stated for, for the second reading: IN04, D00-D05, lbw=LIST.

The plan's own tables are not used here. Sources: the lists of blocks and the presets in the README of
hako-mikan/sd-webui-lora-block-weight (BLOCKID26, BLOCKID17, BLOCKIDXLL, BLOCKIDFLUX), the order of input and output
blocks in openaimodel.py of Stable Diffusion, and the modules of Flux.1. Blocks of models with several stacks of other
names are not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import isfinite
from typing import Final

BASE_BLOCK: Final = "BASE"
LIST: Final = "lbw:"  # begins a part that is a list of block weights or a preset

SHORT_LISTS: Final = {
    26: "BASE IN01 IN02 IN04 IN05 IN07 IN08 M00 OUT03 OUT04 OUT05 OUT06 OUT07 OUT08 OUT09 OUT10 OUT11",
    20: "BASE IN04 IN05 IN07 IN08 M00 OUT00 OUT01 OUT02 OUT03 OUT04 OUT05",
}
"""Number of blocks of a U-Net → those of its short list."""

PRESETS: Final = {
    "NONE": "0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0",
    "INS": "1,1,1,1,0,0,0,0,0,0,0,0,0,0,0,0,0",
    "IND": "1,0,0,0,1,1,1,0,0,0,0,0,0,0,0,0,0",
    "MIDD": "1,0,0,0,1,1,1,1,1,1,1,1,0,0,0,0,0",
    "OUTD": "1,0,0,0,0,0,0,0,1,1,1,1,0,0,0,0,0",
    "OUTS": "1,0,0,0,0,0,0,0,0,0,0,0,1,1,1,1,1",
}
"""Preset → its short list for Stable Diffusion 1."""

WHOLE_STACKS: Final = {"INALL": "IN", "OUTALL": "OUT"}
"""Preset → the stack that it has whole, in addition to BASE."""

ITEM: Final = re.compile(r"([A-Z]+)([0-9]*)(?:-([A-Z]*)([0-9]+))?")
DIFFUSERS: Final = re.compile(r"(down|up)_blocks\.([0-9])\.(resnets|attentions|downsamplers|upsamplers)\.([0-9])\.")
NATIVE: Final = re.compile(r"(input|output)_blocks\.([0-9]+)\.")
LAYER_NUMBER: Final = re.compile(r"(?:^|(?<=\.))([0-9]{1,4})(?=\.[^.]+\.)")  # two more levels follow

_NAME: Final = "(?:[A-Z]+|[A-Za-z]+[0-9]+)"
_ITEM: Final = f"{_NAME}(?:-[A-Za-z]*[0-9]+)?"
BLOCK_NAMES: Final = re.compile(rf"{_ITEM}(?:\+{_ITEM})*")
"""Blocks as a strength names them: a stack in capitals, a block, a range, several with +."""

BLOCK_NAME: Final = re.compile(r"([A-Z]+|#)([0-9]*)")

LEVEL_LAYERS: Final = 2
"""Layers of a level of the down path in the U-Nets of Stable Diffusion; one more in the up path."""

STACKS: Final = {
    "double_blocks": "D",
    "single_blocks": "S",
    "transformer_blocks": "D",
    "single_transformer_blocks": "S",
}
"""Stack of a model with double and single blocks → its letter."""

FLUX_TENSORS: Final = (
    ("double_blocks.0.img_mod.lin.weight", "vector_in.in_layer.weight", "single_blocks.0.modulation.lin.weight"),
    ("transformer_blocks.0.norm1_context.linear.weight", "single_transformer_blocks.0.proj_mlp.weight",
     "time_text_embed.text_embedder.linear_1.weight"),
)  # fmt: skip
"""Names of tensors that show Flux.1: both text encoders and both ends are blocks of their own there."""

OF_FLUX: Final = {"te1": "CLIP", "te2": "T5"}
"""Network.label of a text encoder of Flux.1 → its block."""

FLUX_ENDS: Final = ("final_layer.", "norm_out.", "proj_out.")
LAST_BLOCK_PREFIXES: Final = ("out.", "conv_norm_out.", "conv_out.")  # of a U-Net: they count as the last block


class BlockNames:
    """The blocks of a base. `names`: those of the network whose blocks are meant, without their prefix."""

    def __init__(self, prefix: str, names: Iterable[str]) -> None:
        self._prefix, self._names = prefix, frozenset(names)

    def factor(self, part: str, value: float, key: str, network: str) -> float | None:
        """Return the factor of a list or of BLOCK_NAMES for a tensor; None if it or the tensor's block is not read.
        `network`: Network.label."""
        block = self._block(key, network)
        if part.startswith(LIST):
            weights = self._weights(part.removeprefix(LIST))
            return None if weights is None or block is None else value * weights.get(block, 1.0)
        covers = [None if block is None else self._holds(item, block) for item in part.upper().split("+")]
        return None if None in covers else value if any(covers) else 1.0

    def is_of_denoiser(self, key: str) -> bool:
        """Return whether a tensor of the base is of the network whose blocks are meant."""
        return key.startswith(self._prefix) and key[len(self._prefix) :] in self._names

    def is_outside_stacks(self, key: str) -> bool:
        """Return whether a tensor of a denoiser of stacked layers is outside of them, such as one of its ends."""
        stacked = self.is_denoiser and not self.is_unet
        return stacked and self.is_of_denoiser(key) and LAYER_NUMBER.search(key[len(self._prefix) :]) is None

    @cached_property
    def is_denoiser(self) -> bool:
        """Whether the names of the network show that it is a denoiser, and no language model."""
        return self.is_unet or not STACKS.keys().isdisjoint(self._stacks)

    @cached_property
    def is_unet(self) -> bool:
        """Whether the network is a U-Net whose blocks are known."""
        first = any(name.startswith(("input_blocks.", "down_blocks.")) for name in self._names)
        levels = [m for m in map(DIFFUSERS.match, self._names) if m and m[1] == "down" and m[3][0] in "ra"]
        known = max((int(m[4]) for m in levels), default=LEVEL_LAYERS - 1) == LEVEL_LAYERS - 1
        return first and known and any(name.startswith(("middle_block.", "mid_block.")) for name in self._names)

    @cached_property
    def _is_flux(self) -> bool:
        return any(self._names.issuperset(signs) for signs in FLUX_TENSORS)

    @cached_property
    def _stacks(self) -> Mapping[str, frozenset[int]]:
        """Path of a stack of two or more layers → their numbers."""
        numbers_of: dict[str, set[int]] = {}
        for name in self._names:
            if (layer := LAYER_NUMBER.search(name)) is not None:
                numbers_of.setdefault(name[: layer.start()].rstrip("."), set()).add(int(layer[1]))
        return {path: frozenset(numbers) for path, numbers in numbers_of.items() if len(numbers) > 1}

    @cached_property
    def _order(self) -> Sequence[str]:
        """All blocks in the order of a full list; () if it is not known."""
        if self.is_unet:
            names = {block for name in self._names if (block := self._of_unet(name)) not in (BASE_BLOCK, "END")}
            ends = (sorted(b for b in names if b.startswith(letters)) for letters in ("IN", "OUT"))
            first, last = ends
            return (BASE_BLOCK, *first, "M00", *last)
        if self._is_flux:
            pairs = sorted((STACKS.get(path, ""), n) for path, numbers in self._stacks.items() for n in numbers)
            return ("CLIP", "T5", "IN", *(f"{letter}{n:02d}" for letter, n in pairs if letter), "OUT")
        if len(self._stacks) == 1:
            return (BASE_BLOCK, *(f"#{n:02d}" for numbers in self._stacks.values() for n in sorted(numbers)))
        return ()

    def _block(self, key: str, network: str) -> str | None:
        """Return the block of a tensor, `#NN` for a layer of the only stack, "" for none; None if it is unknown."""
        name = key.removeprefix(self._prefix)
        if network.startswith("te") or network == "vae":
            if self._is_flux:
                return {"vae": "", **OF_FLUX}.get(network)
            return "" if network == "vae" else BASE_BLOCK
        if not key.startswith(self._prefix) or name not in self._names:
            return None
        if self.is_unet:
            block = self._of_unet(name)
            return self._order[-1] if block == "END" else block
        return self._of_stacks(name)

    def _of_stacks(self, name: str) -> str | None:
        """Return the block of a tensor of a model of stacked layers."""
        layer = LAYER_NUMBER.search(name)
        path = name[: layer.start()].rstrip(".") if layer else ""
        if any(name_of.startswith(("input_blocks.", "down_blocks.")) for name_of in self._names):
            return None  # a U-Net of another kind
        if layer is None or path not in self._stacks:
            ends = "OUT" if name.startswith(FLUX_ENDS) else "IN"
            return ends if self._is_flux else BASE_BLOCK
        if "S" in {STACKS.get(name_of) for name_of in self._stacks}:
            return f"{STACKS[path]}{int(layer[1]):02d}" if path in STACKS else None
        return f"#{int(layer[1]):02d}" if len(self._stacks) == 1 else None

    def _of_unet(self, name: str) -> str:
        """Return the block of a tensor of a U-Net, END for one of its end."""
        if (match := NATIVE.match(name)) is not None:
            return f"{'IN' if match[1] == 'input' else 'OUT'}{int(match[2]):02d}"
        if name.startswith(("middle_block.", "mid_block.")):
            return "M00"
        if name.startswith("conv_in."):
            return "IN00"
        match = DIFFUSERS.match(name)
        if match is None:
            return "END" if name.startswith(LAST_BLOCK_PREFIXES) else BASE_BLOCK
        level, layer, sampler = int(match[2]), int(match[4]), match[3].endswith("samplers")
        if match[1] == "down":
            return f"IN{(LEVEL_LAYERS + 1) * level + (LEVEL_LAYERS + 1 if sampler else layer + 1):02d}"
        return f"OUT{(LEVEL_LAYERS + 1) * level + (LEVEL_LAYERS if sampler else layer):02d}"

    def _holds(self, item: str, block: str) -> bool | None:
        """Return whether a block or a range of blocks has one; None for a range across stacks of no known order."""
        if item == block or (item, block) == ("MID", "M00"):
            return True
        match, block_match = ITEM.fullmatch(item), BLOCK_NAME.fullmatch(block)
        assert match is not None, "the caller has looked"
        letters, first, other, last = match.groups()
        stack, number = block_match.groups() if block_match is not None else (block, "")
        if other and other != letters:
            ends = [f"{letters}{int(first or 0):02d}", f"{other}{int(last):02d}"]
            if not {*ends, block} <= {*self._order}:
                return None
            low, at, high = map(self._order.index, (ends[0], block, ends[1]))
            return low <= at <= high
        same = stack == letters or (stack == "#" and letters != BASE_BLOCK)
        if not first:
            return same and not last
        return same and number != "" and int(first) <= int(number) <= int(last or first)

    def _weights(self, value: str) -> Mapping[str, float] | None:
        """Return block → factor of a list or a preset; None for one that is not read here."""
        order = self._order
        if not order:
            return None
        constant = re.fullmatch(r"ALL([0-9.]*)", value)
        if constant or value == "FLUXALL":
            return dict.fromkeys(order, float(constant[1] or 1) if constant else 1.0)
        if value in WHOLE_STACKS and self.is_unet:
            stack = WHOLE_STACKS[value]
            return {b: float(b == BASE_BLOCK or b.startswith(stack)) for b in order}
        preset = value in PRESETS and self.is_unet
        try:
            numbers = [float(n) for n in PRESETS.get(value, value).split(",")]
        except ValueError:
            return None
        if not all(map(isfinite, numbers)):
            return None
        few = SHORT_LISTS.get(26 if preset else len(order), "").split() if self.is_unet else []
        named = few if preset else next((names for names in (order, few) if len(names) == len(numbers)), ())
        return {**dict.fromkeys(order, 0.0), **dict(zip(named, numbers, strict=True))} if named else None
