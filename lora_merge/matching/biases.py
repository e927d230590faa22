"""Biases that a formula changes with its weight, or that an adapter trains for a layer without one. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

from ..disk.files import StoredTensor
from ..models.weights import WeightView
from ..text import Note

TUNED_BIAS: Final = Note("torchtune's forward pass of DoRA scales the bias too, its merge does not; nor does this one")
TURNED_BIAS: Final = Note("trained in bypass mode, so its bias is changed with it; other programs leave the bias")

NO_BIAS: Final = "the adapter trains a bias that the model's layers do not have, so the model would ignore it"
GIVE_BIAS: Final = (
    "train without it (lora_bias), or give the base biases of zeros first, if its config.json has an entry for them "
    "(attention_bias, mlp_bias); else it can only be applied when the model runs"
)

NEW_BIAS: Final = "{names}: the base has no such bias; a model whose layers have none ignores it"


def bias_beside(weight: WeightView, base: Mapping[str, StoredTensor]) -> str:
    """Return the name of the bias that a layer lacks, if the layer is one whole tensor, else ""."""
    piece = weight.row_slices[0]
    whole_tensor = weight.shape[:1] == (piece.rows,) and piece.size == prod(base[piece.key].shape)
    named = len(weight.row_slices) == 1 and piece.key.endswith(".weight")
    return piece.key.removesuffix("weight") + "bias" if named and whole_tensor else ""
