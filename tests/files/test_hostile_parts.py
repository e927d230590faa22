"""Tensors beside codes that are much larger than they can be: refused from the header alone."""

from __future__ import annotations

import json
import struct
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest

import lora_merge
from lora_merge.errors import MergeError
from tests.kit.files import save
from tests.kit.tensors import rand

LAYER = "model.layers.0.self_attn.q_proj"
HUGE = 2**31
SIZES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "F32": 4, "I32": 4, "I64": 8}
PACKED = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}}}}
TORCHAO = {
    "tensor_names": "[]",
    f"{LAYER}.weight": json.dumps({"_type": "Int8Tensor", "_data": {"block_size": [1, 64]}}),
}

CASES: dict[str, tuple[dict[str, tuple[str, list[int]]], dict[str, Any], dict[str, str]]] = {
    "the JSON of ComfyUI": ({
        "comfy_quant": ("U8", [HUGE]), "weight": ("F8_E4M3", [64, 64]), "weight_scale": ("F32", []),
    }, {}, {}),
    "the JSON of bitsandbytes": ({
        "weight": ("U8", [2048, 1]), "weight.absmax": ("F32", [64]), "weight.quant_map": ("F32", [16]),
        "weight.quant_state.bitsandbytes__nf4": ("U8", [HUGE]),
    }, {"quant_method": "bitsandbytes"}, {}),
    "torchao's zero points": ({
        "_weight_qdata": ("I8", [64, 64]), "_weight_scale": ("F32", [64, 1]), "_weight_zero_point": ("I8", [HUGE]),
    }, {"quant_method": "torchao"}, TORCHAO),
    "the shape of HQQ": ({
        "W_q": ("U8", [32, 64]), "scale": ("F16", [64, 1]), "zero": ("F16", [64, 1]), "shape": ("I64", [HUGE // 8]),
        "nbits": ("I64", [1]), "axis": ("I64", [1]),
    }, {"quant_method": "hqq"}, {}),
    "a shape of compressed-tensors": ({
        "weight_packed": ("I32", [64, 8]), "weight_scale": ("F32", [64, 1]), "weight_shape": ("I64", [HUGE // 8]),
    }, {"quant_method": "compressed-tensors", "format": "pack-quantized", **PACKED}, {}),
    "the groups of GPTQ": ({
        "qweight": ("I32", [8, 64]), "qzeros": ("I32", [1, 8]), "scales": ("F16", [1, 64]), "g_idx": ("I32", [HUGE // 4]),
    }, {"quant_method": "gptq", "bits": 4}, {}),
    "the codebooks of AQLM": ({
        "codes": ("I8", [64, 8, 16384]), "codebooks": ("F16", [16384, 256, 1, 8]), "scales": ("F16", [64, 1, 1, 1]),
    }, {"quant_method": "aqlm"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_that_are_too_large_are_not_read(name: str, tmp_path: Path) -> None:
    rows, config, metadata = CASES[name]
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for last, (dtype, shape) in rows.items():
        end = at + SIZES[dtype] * prod(shape)
        header[f"{LAYER}.{last}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    (tmp_path / "base").mkdir()
    with (tmp_path / "base" / "model.safetensors").open("wb") as file:  # without blocks on the disk
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))
    lora = {f"{LAYER}.lora_A.weight": rand(4, 64), f"{LAYER}.lora_B.weight": rand(64, 4)}
    start = time.process_time()
    base = tmp_path / "base" if config else tmp_path / "base" / "model.safetensors"
    with pytest.raises(MergeError, match="quantised") as caught:
        lora_merge.plan(base, save(lora, tmp_path / "lora.safetensors"), tmp_path / "out", dtype="bf16")
    assert caught.value.exit_code == 3
    assert time.process_time() - start < 2
