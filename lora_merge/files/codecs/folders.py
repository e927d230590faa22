"""Scaled weights of folders whose config.json says how: block fp8 of transformers, FBGEMM, ModelOpt's fp8.

https://github.com/huggingface/transformers integrations/finegrained_fp8.py, integrations/fbgemm_fp8.py;
https://github.com/NVIDIA/Model-Optimizer modelopt/torch/export.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .base import Checkpoint, Claim, claimed, positive
from .scaled import Stored, scaled

SCALES: Final = {
    "_scale_inv": "", "_scales_inv": "", ".weight_scale": ".weight", ".qscale_weight": ".weight",
}  # fmt: skip
"""Ending of the name of a scale → what the name of its weight has there. They are multipliers, whatever a name says."""

POWERS: Final = {".scale": ".weight"}
"""The same for scales whose dtype is F8_E8M0."""

MIXED: Final = "MIXED_PRECISION"
"""ModelOpt's algorithm whose layers are in several formats, as their tensors show."""

ACTIVATIONS: Final = ("input_scale", "activation_scale", "qscale_act")


def blocks(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of fp8 with a scale for each block, or for the weight, by `quant_method: fp8`."""
    size, powers = found.config.get("weight_block_size"), found.config.get("scale_fmt") == "ue8m0"
    if found.config.get("quant_method") != "fp8":
        return
    if size is not None and not (isinstance(size, list) and len(size) == 2 and all(map(positive, size))):
        return
    for name, scale in found.tensors.items():
        endings = {**SCALES, **(POWERS if scale.dtype == "F8_E8M0" else {})}
        ending = next((e for e in endings if name.endswith(e)), None)
        weight = found.tensors.get(name.removesuffix(ending) + endings[ending]) if ending else None
        if weight is None or weight.dtype != "F8_E4M3":
            continue
        beside = found.present(name.rpartition(".")[0], *ACTIVATIONS)
        label, block = ("block fp8", (size[0], size[1])) if size else ("scaled fp8", None)
        of = Stored(weight, scale, label, beside, block=block, byte_powers=powers)
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
    """Yield the fp8 weights of ModelOpt: a scale for the weight, for each row, each block of 128 by 128, or a power of
    two for 32 columns."""
    algorithm = str(found.config.get("quant_algo"))
    if found.config.get("quant_method") != "modelopt" or not ("FP8" in algorithm or algorithm == MIXED):
        return
    for stem in found.stems("weight_scale"):
        weight, scale = found.get(stem, "weight"), found.tensors[f"{stem}.weight_scale"]
        beside = found.present(stem, "input_scale")
        if weight is None or weight.dtype != "F8_E4M3" or found.present(stem, "pre_quant_scale"):
            continue
        block = (1, 32) if scale.dtype == "U8" else (128, 128) if algorithm == "FP8_PB_WO" else None
        label = f"ModelOpt {'mxfp8' if scale.dtype == 'U8' else 'fp8'}"
        if packing := scaled(Stored(weight, scale, label, beside, block=block, byte_powers=True)):
            yield claimed(weight, weight.name, weight.shape, packing)
