"""Scaled weights without any mark: files of musubi-tuner, sd-scripts and lightx2v.

musubi-tuner and sd-scripts write `l.scale_weight` in the model's dtype: one number, one for each row, or [rows, groups,
1]. lightx2v writes `l.weight_scale` next to int8 or fp8: [rows, 1], or for DeepGEMM one for each block of 128 by 128.
Other files have [rows], or one number for the weight.
https://github.com/kohya-ss/musubi-tuner src/musubi_tuner/modules/fp8_optimization_utils.py,
https://github.com/ModelTC/lightx2v tools/convert.
"""

from __future__ import annotations

from math import prod
from typing import Final

from ..encodings.scaled_codes import ScaledTensors, scaled
from .base import Checkpoint, Claims, claimed
from .comfyui import LAYERS_ENTRY

BLOCK: Final = 128, 128  # rows and columns with one scale, of DeepGEMM

MARKS: Final = frozenset({"scaled_fp8", "comfy_quant", "weight_packed"})
"""Last names of tensors of other formats."""

REQUIRED_TENSORS: Final = ("weight_zero_point", "weight_scale_2", "pre_quant_scale")
"""Tensors without which such a weight would be other values."""


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of such files; none if config.json or a mark of ComfyUI states another format."""
    marks = {name.rpartition(".")[2] for name in checkpoint.tensors} & MARKS
    if checkpoint.config or marks or LAYERS_ENTRY in checkpoint.metadata:
        return
    # musubi-tuner and sd-scripts.
    for stem in checkpoint.stems("scale_weight"):
        weight, scale = checkpoint.get(stem, "weight"), checkpoint.tensors[f"{stem}.scale_weight"]
        if weight is None or weight.dtype[:2] != "F8":
            continue
        groups = scale.shape[1] if len(scale.shape) == 3 and scale.shape[2] == 1 else 0
        if groups and (len(weight.shape) != 2 or weight.shape[1] % groups):
            continue
        block = (1, weight.shape[1] // groups) if groups else None
        of = ScaledTensors(weight, scale, "musubi fp8", checkpoint.present(stem, "scale_input"), block=block)
        yield claimed(weight, scaled(of))
    # lightx2v, and files of one scale.
    for stem in checkpoint.stems("weight_scale"):
        weight, scale = checkpoint.get(stem, "weight"), checkpoint.tensors[f"{stem}.weight_scale"]
        if (
            weight is None
            or len(weight.shape) != 2
            or scale.dtype == "F8_E8M0"
            or checkpoint.present(stem, *REQUIRED_TENSORS)
        ):
            continue
        (rows, cols), others = weight.shape, checkpoint.present(stem, "input_scale")
        tiled = scale.shape not in ((rows, 1), (1, 1)) and scale.shape == (-(-rows // BLOCK[0]), -(-cols // BLOCK[1]))
        label = "fp8 blocks" if tiled else "fp8 or int8 rows" if prod(scale.shape) > 1 else "fp8 or int8"
        yield claimed(weight, scaled(ScaledTensors(weight, scale, label, others, block=BLOCK if tiled else None)))
