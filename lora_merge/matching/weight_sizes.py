"""Weights that an adapter makes larger.

A larger weight holds the base in its first rows and columns and zeros elsewhere. The size is in the file
(`reshape_weight`; ComfyUI comfy/weight_adapter/base.py), or the file is a control LoRA for Flux.1, by Black Forest
Labs (ComfyUI comfy/lora_convert.py) or diffusers (examples/flux-control), whose first layer has twice the channels.
Any other adapter that does not fit is refused, because a wider one is mostly for another model. Parameters that are
replaced as a whole may have more or fewer rows, as embeddings and heads do. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Final

from ..adapters.modules import AdapterFile, Module
from ..adapters.tensor_values import Values
from ..algorithms import COUNT
from ..dtypes import Shape, StoredTensor
from ..errors import FitError, InputError, MergeError, ShapeMismatch
from ..models.weights import WeightView, whole
from ..text import Note

CONTROL: Final = ("img_in.lora_A.weight", "single_blocks.0.norm.key_norm.scale")
"""Tensors that only control LoRAs of Black Forest Labs have together."""

WEIGHT_AXES: Final = 8  # of a weight

FLUX_FIRST_LAYER: Final = re.compile(r"(?:.*[._])?(?:img_in|x_embedder)")
"""Flux.1's first layer, by the names of both layouts."""


def grown(module: Module, view: WeightView, adapter: AdapterFile, values: Values, model: str) -> WeightView:
    """Return the weight at the adapter's size; `view` itself where the size stays.

    `model` is the base's architecture. FitError if the weight would shrink, or is only a part of a tensor of the base.
    """
    shape = _adapters_size(module, view, adapter, values, model)
    if shape == view.shape:
        return view
    piece, where = (
        view.row_slices[0],
        f"{adapter.path}: {module.where} to {list(shape)}, the base has {list(view.shape)}",
    )
    if len(shape) != len(view.shape):
        raise FitError(
            "the adapter gives a weight another number of axes", where, "merge into the model it was trained on"
        )
    if any(a < b for a, b in zip(shape, view.shape, strict=True)):
        raise FitError("the adapter makes a weight smaller", where, "merge into the model it was trained on")
    if len(view.row_slices) > 1 or piece.transposed or piece.size != prod(view.shape):
        raise FitError("the adapter makes a part of a fused tensor larger", where, "merge into an unfused checkpoint")
    return whole(piece.key, shape)


def _adapters_size(module: Module, view: WeightView, adapter: AdapterFile, values: Values, model: str) -> Shape:
    if "reshape" in module.shared:
        info = module.shared["reshape"]
        sizes = [COUNT.number(n) for n in values.numbers(info)] if prod(info.shape) <= WEIGHT_AXES else [None]
        if None in sizes:
            raise InputError("reshape_weight is not a list of sizes", f"{info.file}: {info.name}", "export it again")
        return tuple(size for size in sizes if size is not None)
    first = module.parameter == "weight" and FLUX_FIRST_LAYER.fullmatch(module.name)
    if not first or not {"up", "down"} <= set(module.slots):
        return view.shape
    wide = module.slots["up"].shape[0], module.slots["down"].shape[-1]
    doubled = model == "Flux.1" and len(view.shape) == 2 and wide == (view.shape[0], 2 * view.shape[1])
    return wide if doubled or all(key in adapter.index.tensors for key in CONTROL) else view.shape


def sizes(
    replaced: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor], path: Path
) -> tuple[list[MergeError], list[Note]]:
    """Return the errors and the notes on replaced parameters. A value, with its bias, may have more or fewer rows, as
    embeddings and heads do."""
    unfit: list[MergeError] = []
    notes = []
    for key, info in replaced.items():
        old, weight = base[key].shape, replaced.get(key.removesuffix("bias") + "weight")
        if info.shape == old:
            continue
        if len(old) == 1 and (weight is None or weight.shape[0] != info.shape[0]):
            where = f"{path}: {info.name} is {list(info.shape)}, the base has {list(old)}"
            fix = "merge into the checkpoint that the adapter was trained on"
            unfit.append(ShapeMismatch("adapter tensors do not fit the base", where, fix))
        else:
            notes.append(Note(f"{key}: {old[0]} rows become {info.shape[0]}"))
    return unfit, notes
