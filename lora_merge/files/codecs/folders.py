"""Scaled weights of folders whose config.json says how: block fp8 of transformers, FBGEMM, ModelOpt's fp8.

https://github.com/huggingface/transformers integrations/finegrained_fp8.py, integrations/fbgemm_fp8.py;
https://github.com/NVIDIA/Model-Optimizer modelopt/torch/export.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .base import Checkpoint, Claim, claimed
from .scaled import Stored, scaled

INVERSE: Final = ("_scale_inv", "_scales_inv")
"""Endings of the scales of blocks. They are multipliers, whatever the name says."""


def blocks(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of fp8 with a scale for each block, by `quant_method: fp8`."""
    size = found.config.get("weight_block_size")
    if found.config.get("quant_method") != "fp8" or not isinstance(size, list) or len(size) != 2:
        return
    if not all(isinstance(n, int) and n > 0 for n in size):
        return
    powers = found.config.get("scale_fmt") == "ue8m0"
    for name, scale in found.tensors.items():
        ending = next((e for e in INVERSE if name.endswith(e)), ".scale" if scale.dtype == "F8_E8M0" else "")
        codes = name.removesuffix(ending) + (".weight" if ending == ".scale" else "")
        weight = found.tensors.get(codes) if ending and name.endswith(ending) else None
        if weight is None or weight.dtype != "F8_E4M3":
            continue
        beside = found.present(name.rpartition(".")[0], "input_scale", "activation_scale")
        of = Stored(weight, scale, "block fp8", beside, block=(size[0], size[1]))
        if packing := scaled(of, powers=powers):
            yield claimed(weight, weight.name, weight.shape, packing)


def fbgemm(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of FBGEMM: a scale for each row, or for each column of stacked experts."""
    if found.config.get("quant_method") != "fbgemm_fp8":
        return
    for name, scale in found.tensors.items():
        weight = found.tensors.get(name.removesuffix("_scale")) if name.endswith("_scale") else None
        if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) < 2:
            continue
        rows, cols = weight.shape[-2:]
        stacked = len(weight.shape) == 3 and scale.shape[-2:] == (1, cols)
        beside = found.present(name.rpartition(".")[0], "input_scale_ub", "input_scale")
        of = Stored(weight, scale, "FBGEMM fp8", beside, block=(rows, 1) if stacked else None)
        if packing := scaled(of):
            yield claimed(weight, weight.name, weight.shape, packing)


def modelopt(found: Checkpoint) -> Iterator[Claim]:
    """Yield the fp8 weights of ModelOpt: a scale for the weight, for each row, or for each block of 128 by 128."""
    if found.config.get("quant_method") != "modelopt" or "FP8" not in str(found.config.get("quant_algo")):
        return
    for stem in found.stems("weight_scale"):
        weight, scale = found.get(stem, "weight"), found.tensors[f"{stem}.weight_scale"]
        beside = found.present(stem, "input_scale")
        if weight is None or weight.dtype != "F8_E4M3" or found.present(stem, "pre_quant_scale"):
            continue
        block = (128, 128) if found.config.get("quant_algo") == "FP8_PB_WO" else None
        if packing := scaled(Stored(weight, scale, "ModelOpt fp8", beside, block=block)):
            yield claimed(weight, weight.name, weight.shape, packing)
