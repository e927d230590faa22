"""Recognises quantised checkpoints, whose stored numbers are not the weights; plain fp8 is not one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from .header import ITEM_BYTES, TensorInfo

SIGNS: Final = (
    # a tensor's last name    what stores it so
    ("scaled_fp8",            "scaled fp8 (ComfyUI)"),
    ("scale_weight",          "scaled fp8 (ComfyUI, musubi)"),
    ("comfy_quant",           "ComfyUI's per-layer quantisation"),
    ("weight_scale_inv",      "block-scaled fp8 (DeepSeek, Qwen)"),
    ("weight_packed",         "compressed-tensors"),
    ("weight_zero_point",     "compressed-tensors"),
    ("weight_scale",          "scaled weights (compressed-tensors, FBGEMM, ModelOpt)"),
    ("SCB",                   "bitsandbytes int8"),
    ("absmax",                "bitsandbytes 4-bit"),
    ("bitsandbytes__nf4",     "bitsandbytes nf4"),
    ("bitsandbytes__fp4",     "bitsandbytes fp4"),
    ("wscales",               "SVDQuant (nunchaku)"),
    ("qweight",               "GPTQ or AWQ"),
    ("W_q",                   "HQQ"),
    ("codebooks",             "AQLM"),
    ("gate_up_proj_blocks",   "MXFP4"),
    ("weight_qdata",          "torchao"),
    ("_data",                 "optimum-quanto"),
    ("_packed_params",        "torch.ao quantised modules"),
)  # fmt: skip
"""Tensors that stand beside quantised weights. https://github.com/comfyanonymous/ComfyUI comfy/ops.py,
transformers/quantizers, musubi-tuner modules/fp8_optimization_utils.py."""

METADATA: Final = {
    "_quantization_metadata": "ComfyUI's quantisation",
    "quantization_config": "SVDQuant (nunchaku)",
}


class _Index(Protocol):
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


def quantised(index: _Index) -> str | None:
    """How the checkpoint is quantised, in words, with the tensor that shows it; None if it is not."""
    signs = dict(SIGNS)
    for name, info in index.tensors.items():
        last = name.rpartition(".")[2]
        if last in signs:
            return f"{signs[last]}, it has {name}"
        if info.dtype not in ITEM_BYTES or info.dtype == "F8_E8M0":
            return f"{info.dtype} numbers, as in {name}"
    for key, what in METADATA.items():
        if key in index.metadata:
            return f"{what}, its metadata has {key}"
    config = index.config.get("quantization_config") or index.config.get("quantization")  # of transformers, of mlx
    if isinstance(config, Mapping):
        return f"{config.get('quant_method', 'unknown')}, says its config.json"
    return None
