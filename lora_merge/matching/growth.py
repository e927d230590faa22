"""Weights that an adapter makes larger: the base then stands in the low corner of zeros.

Either the file says so (`reshape_weight`; ComfyUI comfy/weight_adapter/base.py), or it is a control LoRA for Flux.1,
of Black Forest Labs (ComfyUI comfy/lora_convert.py) or by diffusers' script (examples/flux-control), whose first layer
takes twice the channels. Anything else that does not fit is refused: a wider adapter mostly is one for another model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Final

from ..adapters.file import AdapterFile, Module, Values
from ..algorithms import COUNT, Shape
from ..disk.files import StoredTensor
from ..errors import FitError, InputError
from ..models.weights import WeightView, whole

NO_BIAS: Final = "the adapter trains a bias that the model's layers do not have, so the model would ignore it"
GIVE_BIAS: Final = (
    "train without it (lora_bias), or give the base biases of zeros first, where its config.json can tell "
    "(attention_bias, mlp_bias); else it can only be applied when the model runs"
)

NEW_BIAS: Final = "{names}: the base has no such bias; a model whose layers have none ignores it"

CONTROL: Final = ("img_in.lora_A.weight", "single_blocks.0.norm.key_norm.scale")
"""Tensors that only control LoRAs of Black Forest Labs have together."""

MOST_AXES: Final = 8  # of a weight

FIRST: Final = re.compile(r"(?:.*[._])?(?:img_in|x_embedder)")
"""Flux.1's first layer, by the names of both layouts."""


def grown(module: Module, view: WeightView, adapter: AdapterFile, values: Values, model: str) -> WeightView:
    """The weight at the size that the adapter gives it; `view` itself where that is its own.

    `model` is the base's architecture. FitError if it would shrink, or if it is no whole tensor of the base.
    """
    shape = _wanted(module, view, adapter, values, model)
    if shape == view.shape:
        return view
    piece, where = view.pieces[0], f"{adapter.path}: {module.where} to {list(shape)}, the base has {list(view.shape)}"
    if len(shape) != len(view.shape):
        raise FitError(
            "the adapter gives a weight another number of axes", where, "merge into the model it was trained on"
        )
    if any(a < b for a, b in zip(shape, view.shape, strict=True)):
        raise FitError("the adapter makes a weight smaller", where, "merge into the model it was trained on")
    if len(view.pieces) > 1 or piece.transposed or piece.size != prod(view.shape):
        raise FitError("the adapter makes a part of a fused tensor larger", where, "merge into an unfused checkpoint")
    return whole(piece.key, shape)


def bias_beside(weight: WeightView, base: Mapping[str, StoredTensor]) -> str:
    """The name of the bias that a layer lacks, if the layer is one whole tensor, else ""."""
    piece = weight.pieces[0]
    whole_tensor = piece.rows == weight.shape[0] and piece.size == prod(base[piece.key].shape)
    named = len(weight.pieces) == 1 and piece.key.endswith(".weight")
    return piece.key.removesuffix("weight") + "bias" if named and whole_tensor else ""


def _wanted(module: Module, view: WeightView, adapter: AdapterFile, values: Values, model: str) -> Shape:
    if "reshape" in module.shared:
        info = module.shared["reshape"]
        sizes = [COUNT.number(n) for n in values.numbers(info)] if prod(info.shape) <= MOST_AXES else [None]
        if None in sizes:
            raise InputError("reshape_weight is no list of sizes", f"{info.file}: {info.name}", "export it again")
        return tuple(size for size in sizes if size is not None)
    first = module.parameter == "weight" and FIRST.fullmatch(module.name)
    if not first or not {"up", "down"} <= set(module.slots):
        return view.shape
    wide = module.slots["up"].shape[0], module.slots["down"].shape[-1]
    doubled = model == "Flux.1" and len(view.shape) == 2 and wide == (view.shape[0], 2 * view.shape[1])
    return wide if doubled or all(key in adapter.index.tensors for key in CONTROL) else view.shape
