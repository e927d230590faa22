"""Scaled weights without any mark: files of musubi-tuner, sd-scripts and lightx2v.

musubi-tuner and sd-scripts write `l.scale_weight` in the model's dtype: one number, one for each row, or [rows, groups,
1]. lightx2v writes `l.weight_scale` [rows, 1] beside int8 or fp8.
https://github.com/kohya-ss/musubi-tuner src/musubi_tuner/modules/fp8_optimization_utils.py,
https://github.com/ModelTC/lightx2v tools/convert.
"""

from __future__ import annotations

from collections.abc import Iterator

from .base import Checkpoint, Claim, claimed
from .scaled import Stored, scaled


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of such files; none where config.json or a mark of ComfyUI says another way."""
    lasts = {name.rpartition(".")[2] for name in found.tensors}
    if found.config or lasts & {"scaled_fp8", "comfy_quant", "weight_packed"}:
        return
    for stem in found.stems("scale_weight"):
        weight, scale = found.get(stem, "weight"), found.tensors[f"{stem}.scale_weight"]
        if weight is None or weight.dtype[:2] != "F8":
            continue
        groups = scale.shape[1] if len(scale.shape) == 3 and scale.shape[2] == 1 else 0
        if groups and (len(weight.shape) != 2 or weight.shape[1] % groups):
            continue
        block = (1, weight.shape[1] // groups) if groups else None
        if packing := scaled(Stored(weight, scale, "musubi fp8", found.present(stem, "scale_input"), block=block)):
            yield claimed(weight, weight.name, weight.shape, packing)
    for stem in found.stems("weight_scale"):
        weight, scale = found.get(stem, "weight"), found.tensors[f"{stem}.weight_scale"]
        if weight is None or len(weight.shape) != 2 or scale.shape != (weight.shape[0], 1):
            continue
        if packing := scaled(Stored(weight, scale, "fp8 or int8 rows")):
            yield claimed(weight, weight.name, weight.shape, packing)
