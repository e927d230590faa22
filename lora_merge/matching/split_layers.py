"""Fused layers that a trainer split: parts of one module (`path/0`, `path/1`, …), and LoRAs stored as one. No torch.

Trainers that split a fused layer (sd-scripts' `split_qkv`, its OFT for Flux, forks of musubi-tuner) train one adapter
for the rows of each layer in it: q, k and v, and for single blocks of Flux also the MLP.

**Parts** (`rows_of_part`) change only the rows of their layer. The base decides which layers are fused, and in which
order, because a pruned or partly trained adapter lacks some of the parts.

**LoRAs stored as one** (`as_trained`). With `split_qkv` sd-scripts trains n LoRAs of rank r, one for each fused layer,
at scale α / r. It saves them as one LoRA of rank n · r with the same α and a block-diagonal `up`. Programs that read
only the tensors, sd-scripts' own inference among them, apply α / (n · r): a third or a quarter of what was trained.
Source: sd-scripts 48d368f, networks/{lora_flux,lora_sd3,lora_lumina,lora_hunyuan_image}.py, state_dict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Final

from ..adapters.kohya_args import DYLORA, SPLIT
from ..adapters.modules import Module
from ..adapters.suffixes import split_row_part
from ..adapters.tensor_values import FileValues
from ..algorithms import ALGORITHMS
from ..dtypes import StoredTensor
from ..models.fused_weights import Split, agreed
from ..models.weights import WeightView, rows_of
from ..text import Note
from .formula import AdapterContext
from .patch import Patch

PARTLY: Final = "a part of a split module matches no rows of the weight"
ALL_PARTS: Final = (
    "put the base's config.json next to it, merge into the model that the adapter was trained on in a layout that is "
    "known, or give an adapter that has all of the parts"
)
UNKNOWN_ROWS: Final = (
    "the base does not show which rows the part is for, and the parts that the adapter has do not fill the weight"
)
TURNED: Final = "the weight is stored [in, out] and cannot be cut into rows"

LIKE_DYLORA: Final = Note(
    "an up factor of its file has no axes of a kernel, as LyCORIS' DyLoRA saves it, and no metadata says so: scaled by "
    "alpha / rank, as LyCORIS loads DyLoRA; it trains its last block with alpha / number of blocks"
)

FEWEST: Final = 3  # layers that the trainers split: q, k and v

AS_TRAINED: Final = (
    "trained with split_qkv, {n} LoRAs of rank {r} that are stored as one: scaled by alpha / {r}, as it was trained; "
    "programs that look at the tensors alone apply 1/{n} of that"
)

SPLIT_LIKELY: Final = (
    "its factors look like {n} LoRAs of rank {r} that are stored as one (split_qkv of sd-scripts), and no metadata "
    "says so: scaled by alpha / {rank}, as other programs do; with split_qkv it was trained {n} times as strong"
)

NOT_SPLIT: Final = (
    "its metadata says split_qkv, but its factors are not {n} LoRAs side by side: scaled by alpha / {rank}, as they are"
)


class NoMatch(ValueError):
    """A part has no rows in its weight."""


@dataclass(frozen=True)
class RowParts:
    """The parts of one split module that an adapter has."""

    heights: Mapping[int, int]
    """Number of a part, in order → the rows that it changes; 0 if its tensors do not show them."""

    @cached_property
    def starts(self) -> Sequence[int]:
        """The first row of every part, and the end of the last, if the parts follow each other; empty if not."""
        rows = self.heights.values()
        together = [*self.heights] == [*range(len(rows))] and 0 not in rows
        return [0, *accumulate(rows)] if together else []


NO_PARTS: Final = RowParts({})


def heights(modules: Iterable[Module]) -> Mapping[str, RowParts]:
    """Return split module → its parts."""
    parts_of: dict[str, dict[int, int]] = defaultdict(dict)
    for module in modules:
        whole, number = split_row_part(module.name)
        if number is not None and module.parameter == "weight":
            parts_of[whole][number] = module.height
    return {name: RowParts(dict(sorted(parts.items()))) for name, parts in parts_of.items()}


def rows_of_part(view: WeightView, number: int, parts: RowParts, splits: Mapping[str, Split]) -> WeightView:
    """Return the rows of part `number` in the weight `view`; NoMatch if it has none, or if its rows do not fit.

    `splits`: source in the base → rows of every fused layer, in order. Without a source, the parts follow each
    other and must fill the weight.
    """
    if any(piece.transposed for piece in view.row_slices):
        raise NoMatch(TURNED)
    rows, height = view.shape[0], parts.heights.get(number, 0)
    if parts.heights.keys() == {0} and height == rows:  # kohya's OFT also numbers layers that it does not split
        return view
    fused = agreed(splits)
    if splits and not fused:
        raise NoMatch("; ".join(f"by {source} {_layers(split)}" for source, split in splits.items()))
    if not fused:
        starts = parts.starts
        if number not in parts.heights or rows != next(reversed(starts), None):
            raise NoMatch(UNKNOWN_ROWS)
        return rows_of(view, starts[number], starts[number + 1])
    starts = [0, *accumulate(fused)]
    if number >= len(fused) or height not in (0, fused[number]):  # the formula checks an unknown height
        has = f"part {number} has {height} rows" if height else f"there is no layer for part {number}"
        raise NoMatch(f"{has}; by {next(iter(splits))} {_layers(fused)}")
    return rows_of(view, starts[number], starts[number + 1])


def _layers(split: Split) -> str:
    """Return a text such as `the weight holds 3 layers, of 8, 4 and 4 rows`."""
    *most, last = map(str, split)
    return f"the weight holds {len(split)} layers, of {', '.join(most)} and {last} rows"


def as_trained(
    patch: Patch, fused_in: Callable[[WeightView], Mapping[str, Split]], context: AdapterContext
) -> tuple[Patch, tuple[Note, ...]]:
    """Return (the patch with the scale of the training, remarks).

    `fused_in`: weight → source in the base → the rows of every fused layer, in order.
    """
    words, arguments = ALGORITHMS[patch.algorithm].scale_words, context.arguments(patch.algorithm)
    like_dylora = DYLORA in words and context.dylora and not arguments.has_arguments
    dylora = (LIKE_DYLORA,) if like_dylora else ()
    # Only factors of a kind that trainers split, with α, in a file without a configuration.
    up, alpha = patch.module.slots.get("up"), patch.module.shared.get("alpha")
    if SPLIT not in words or up is None or alpha is None or context.rules.of(patch.module.name).kind:
        return patch, dylora
    # Only on a weight that fuses enough layers.
    evidence = fused_in(patch.view)
    fused = agreed(evidence) if evidence else ()
    n = len(fused)
    if n < FEWEST:
        return patch, dylora
    rank, said = prod(up.shape[1:]), arguments.split
    # Decide by the metadata and by the zeros of `up`.
    if not said and not _looks_split(up, fused, context.values):
        return patch, dylora
    split = rank % n == 0 and _is_split(up, fused, context.values)
    text = (AS_TRAINED if split else NOT_SPLIT) if said else SPLIT_LIKELY
    remarks = (*dylora, *([Note(text.format(n=n, r=rank // n, rank=rank))] if said or split else []))
    if not (said and split) or context.values.elements(alpha)[0] == 0 or "scale_override" in patch.module.shared:
        return patch, remarks
    return replace(patch, scalars={**patch.scalars, "scale": patch.scalars["scale"] * n}), remarks


def _looks_split(up: StoredTensor, fused: Sequence[int], values: FileValues) -> bool:
    """Return whether the first and the last row are zero outside their own layer's columns; a cheap test."""
    rows, rank = up.shape[0], prod(up.shape[1:])
    r = rank // len(fused)
    ends = ((0, (0, r)), (rows - 1, (rank - r, rank)))
    return r > 0 and rank % len(fused) == 0 and all(
        values.zero_outside(up, (row, row + 1), columns) and not values.zero_outside(up, (row, row + 1), (0, 0))
        for row, columns in ends
    )  # fmt: skip


def _is_split(up: StoredTensor, fused: Sequence[int], values: FileValues) -> bool:
    """Return whether the rows of every layer are zero outside its own columns."""
    r = prod(up.shape[1:]) // len(fused)
    bounds = pairwise([0, *accumulate(fused)])
    return all(values.zero_outside(up, rows, (k * r, (k + 1) * r)) for k, rows in enumerate(bounds))
