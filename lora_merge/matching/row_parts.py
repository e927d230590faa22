"""Parts of a split module: which rows of the weight each part of `path/0`, `path/1`, … writes. No torch.

Trainers that split a fused layer (sd-scripts' `split_qkv`, its OFT for Flux, forks of musubi-tuner) train one adapter
for the rows of each layer that is fused in it: q, k and v, and for single blocks of Flux also the MLP. What is fused,
and in which order, is the base's to tell, because a pruned or partly trained adapter lacks some of the parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final

from ..adapters.file import Module
from ..adapters.suffixes import part
from ..models.weights import WeightView, rows_of

PARTLY: Final = "a part of a split module has no place in the weight"
ALL_PARTS: Final = (
    "merge into the model that it was trained on, in a layout that is known, or give an adapter that has all of the "
    "parts"
)
UNKNOWN: Final = (
    "the base does not tell which rows the part is for, and the parts that the adapter has do not fill the weight"
)
TURNED: Final = "the weight is stored [in, out] and cannot be cut into rows"


class NoPlace(ValueError):
    """Why a part has no place in its weight."""


def heights(modules: Iterable[Module]) -> Mapping[str, Mapping[int, int]]:
    """Module that was trained in parts → number of the part → rows that its tensors write, 0 where they do not tell."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for module in modules:
        whole, number = part(module.name)
        if number is not None and module.parameter == "weight":
            found[whole][number] = module.height
    return {name: dict(sorted(parts.items())) for name, parts in found.items()}


def place(view: WeightView, number: int, parts: Mapping[int, int], fused: Sequence[int]) -> WeightView:
    """The rows of part `number` in the weight `view`; NoPlace if it has none, or does not fill it.

    `parts`: the rows that each of the adapter's parts writes. `fused`: the rows of every layer that is fused in the
    weight, in order, as the base tells; empty where it does not.
    """
    if any(piece.transposed for piece in view.pieces):
        raise NoPlace(TURNED)
    rows, height = view.shape[0], parts.get(number, 0)
    if parts.keys() == {0} and height == rows:  # kohya's OFT numbers the parts of layers that it does not split, too
        return view
    if not fused:
        fused = [*parts.values()]
        if number not in parts or [*parts] != [*range(len(parts))] or 0 in fused or sum(fused) != rows:
            raise NoPlace(UNKNOWN)
    starts = [0, *accumulate(fused)]
    if number >= len(fused) or height not in (0, fused[number]):  # where it is not told the formula finds out
        there = f"the base has {len(fused)} of {', '.join(map(str, fused))} rows"
        raise NoPlace(f"part {number} has {height or 'untold'} rows, {there}")
    return rows_of(view, starts[number], starts[number + 1])
