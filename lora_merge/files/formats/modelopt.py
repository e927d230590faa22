"""ModelOpt's folders: fp8, mxfp8 and nvfp4, by `quant_method: modelopt` or the file hf_quant_config.json.

A file without any mark is read as its nvfp4 if its scales cannot be ComfyUI's.
https://github.com/NVIDIA/Model-Optimizer modelopt/torch/export, modelopt/torch/quantization/qtensor/nvfp4_tensor.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..encodings.fp4 import Fp4Tensors, fp4
from ..encodings.scaled_codes import MX_COLUMNS, ScaledTensors, scaled, tiled_shape
from .base import Checkpoint, Claims, claimed
from .comfyui import LAYERS_ENTRY

FP8_ALGORITHMS: Final = ("FP8", "MIXED_PRECISION")
"""Parts of the names of ModelOpt's algorithms some layers of which, or all, are fp8."""

NVFP4: Final = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")
"""Algorithms some layers of which, or all, are nvfp4."""


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of ModelOpt that are read."""
    config = checkpoint.config
    algorithm = str(config.get("quant_algo")) if config.get("quant_method") == "modelopt" else ""
    if any(name in algorithm for name in FP8_ALGORITHMS):
        yield from _fp8(checkpoint, algorithm)
    if algorithm in NVFP4 or _row_after_row(checkpoint):
        yield from _nvfp4(checkpoint)


def side_section(settings: Mapping[str, Any], _: Iterable[str]) -> Mapping[str, Any]:
    """Return the section on quantisation by hf_quant_config.json; {} without one."""
    inner = settings.get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, Mapping) and inner.get("quant_algo") else {}


def _fp8(checkpoint: Checkpoint, algorithm: str) -> Claims:
    """Yield the weights of fp8: a scale for the weight, for each row, each block of 128 by 128, or a power of two for
    32 columns."""
    for stem in checkpoint.stems("weight_scale"):
        weight, scale = checkpoint.get(stem, "weight"), checkpoint.tensors[f"{stem}.weight_scale"]
        marks = checkpoint.present(stem, "input_scale")
        if weight is None or weight.dtype != "F8_E4M3" or checkpoint.present(stem, "pre_quant_scale"):
            continue
        block = (1, MX_COLUMNS) if scale.dtype == "U8" else (128, 128) if algorithm == "FP8_PB_WO" else None
        label = f"ModelOpt {'mxfp8' if scale.dtype == 'U8' else 'fp8'}"
        yield claimed(weight, scaled(ScaledTensors(weight, scale, label, marks, block=block, byte_powers=True)))


def _nvfp4(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of nvfp4: scales row after row, even columns in the low half."""
    for stem in checkpoint.stems("weight_scale_2"):
        codes, scale = checkpoint.get(stem, "weight"), checkpoint.get(stem, "weight_scale")
        if codes is None or scale is None:
            continue
        whole, pre = checkpoint.get(stem, "weight_scale_2"), checkpoint.get(stem, "pre_quant_scale")
        of = Fp4Tensors(codes, scale, "ModelOpt nvfp4", whole, checkpoint.present(stem, "input_scale"), pre=pre)
        yield claimed(codes, fp4(of), shape=of.shape)


def _row_after_row(checkpoint: Checkpoint) -> bool:
    """Return whether a file without any mark holds scales row after row: in tiles, those of some weight would be filled
    up."""
    if checkpoint.config or LAYERS_ENTRY in checkpoint.metadata or any(True for _ in checkpoint.stems("comfy_quant")):
        return False
    scales = [checkpoint.get(stem, "weight_scale") for stem in checkpoint.stems("weight_scale_2")]
    shapes = [s.shape for s in scales if s is not None and s.dtype == "F8_E4M3" and len(s.shape) == 2]
    return any(shape != tiled_shape(*shape) for shape in shapes)
