"""LoRAs of q, k and v (and of a single block's MLP) that a trainer saved as one LoRA. No torch.

With `split_qkv` sd-scripts trains n LoRAs of rank r, one for each fused layer, at scale α / r. It saves them as one
LoRA of rank n · r with the same α and a block-diagonal `up`. Programs that read only the tensors, sd-scripts' own
inference among them, apply α / (n · r): a third or a quarter of what was trained. Source: sd-scripts 48d368f,
networks/{lora_flux,lora_sd3,lora_lumina,lora_hunyuan_image}.py, state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Final

from ..adapters.kohya_args import DYLORA, SPLIT
from ..adapters.tensor_values import Values
from ..algorithms import ALGORITHMS
from ..dtypes import StoredTensor
from ..models.fused_weights import Split, agreed
from ..models.weights import WeightView
from ..text import Note
from .formula import AdapterContext
from .patch import Patch

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
    if not (said and split) or context.values.numbers(alpha)[0] == 0 or "scale_override" in patch.module.shared:
        return patch, remarks
    return replace(patch, numbers={**patch.numbers, "scale": patch.numbers["scale"] * n}), remarks


def _looks_split(up: StoredTensor, fused: Sequence[int], values: Values) -> bool:
    """Return whether the first and the last row are zero outside their own layer's columns; a cheap test."""
    rows, rank = up.shape[0], prod(up.shape[1:])
    r = rank // len(fused)
    ends = ((0, (0, r)), (rows - 1, (rank - r, rank)))
    return r > 0 and rank % len(fused) == 0 and all(
        values.zero_outside(up, (row, row + 1), columns) and not values.zero_outside(up, (row, row + 1), (0, 0))
        for row, columns in ends
    )  # fmt: skip


def _is_split(up: StoredTensor, fused: Sequence[int], values: Values) -> bool:
    """Return whether the rows of every layer are zero outside its own columns."""
    r = prod(up.shape[1:]) // len(fused)
    bounds = pairwise([0, *accumulate(fused)])
    return all(values.zero_outside(up, rows, (k * r, (k + 1) * r)) for k, rows in enumerate(bounds))
