"""Weights by torchao itself: how it makes them, what it stores, what it reads.

`python -m tests.files.torchao_layers` makes `torchao.safetensors.xz` again, with torchao 0.18.0.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save
from torch import Tensor

from tests.kit.tensors import Tensors, rand

FILE = Path(__file__).with_name("torchao.safetensors.xz")


def _int8(w: Tensor, **options: Any) -> Any:
    from torchao.quantization import Int8Tensor, PerRow

    return Int8Tensor.from_hp(w, PerRow(), **options)


def _float8(w: Tensor, granularity: str) -> Any:
    from torchao import quantization

    return quantization.Float8Tensor.from_hp(w, granularity=getattr(quantization, granularity)())


def _few_bits(w: Tensor, bits: int, *, zeros: bool = False) -> Any:
    from torchao.quantization import IntxUnpackedToInt8Tensor
    from torchao.quantization.quant_primitives import MappingType

    mapping = MappingType.ASYMMETRIC if zeros else MappingType.SYMMETRIC
    return IntxUnpackedToInt8Tensor.from_hp(w, (1, 32), getattr(torch, f"int{bits}"), mapping_type=mapping)


def _mx(w: Tensor, kind: torch.dtype, *, tiles: bool = False) -> Any:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(w, kind, 32, is_swizzled_scales=tiles)


def _nvfp4(w: Tensor, *, whole: bool = False, tiles: bool = False) -> Any:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    scale = per_tensor_amax_to_scale(w.abs().max()) if whole else None
    return NVFP4Tensor.to_nvfp4(w, per_tensor_scale=scale, is_swizzled_scales=tiles)


LAYERS: Mapping[str, Callable[[Tensor], Any]] = {
    "Int8Tensor": _int8,
    "Float8Tensor": lambda w: _float8(w, "PerRow"),
    "Float8Tensor of one scale": lambda w: _float8(w, "PerTensor"),
    "IntxUnpackedToInt8Tensor int4": lambda w: _few_bits(w, 4),
    "IntxUnpackedToInt8Tensor int4 with zero points": lambda w: _few_bits(w, 4, zeros=True),
    "IntxUnpackedToInt8Tensor int2": lambda w: _few_bits(w, 2),
    "IntxUnpackedToInt8Tensor int8 with zero points": lambda w: _few_bits(w, 8, zeros=True),
    "MXTensor e4m3": lambda w: _mx(w, torch.float8_e4m3fn),
    "MXTensor e4m3 in tiles": lambda w: _mx(w, torch.float8_e4m3fn, tiles=True),
    "MXTensor e2m1": lambda w: _mx(w, torch.float4_e2m1fn_x2),
    "NVFP4Tensor": _nvfp4,
    "NVFP4Tensor with a scale of the weight": lambda w: _nvfp4(w, whole=True),
    "NVFP4Tensor in tiles": lambda w: _nvfp4(w, whole=True, tiles=True),
}
"""Name → the weight that torchao makes of numbers."""


def flat(name: str, weights: Mapping[str, Any]) -> tuple[Tensors, dict[str, str]]:
    """Return tensors and metadata of a file, as transformers saves them; `name` is that of a form in LAYERS."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    return flatten_tensor_state_dict({key: LAYERS[name](value) for key, value in weights.items()})


def read(tensors: Tensors, metadata: Mapping[str, str]) -> Tensors:
    """Return the numbers of all weights, as torchao reads them."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    found, left = unflatten_tensor_state_dict(dict(tensors), dict(metadata))
    assert not left
    return {key: value.dequantize() if hasattr(value, "dequantize") else value for key, value in found.items()}


def stored() -> dict[str, tuple[Tensors, str]]:
    """Name → the tensors of a layer of 40 rows as torchao stores it, with what it reads back in `want`, and its
    entry of the metadata. A part of one row is zeros."""
    raw = lzma.decompress(FILE.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    metadata = json.loads(raw[8 : 8 + size])["__metadata__"]
    found: dict[str, Tensors] = {name: {} for name in metadata}
    for key, value in load_bytes(raw).items():
        name, _, last = key.partition("/")
        powers = last == "_weight_scale" and value.dtype == torch.uint8
        found[name][last] = value.view(torch.float8_e8m0fnu) if powers else value
    return {name: (tensors, metadata[name]) for name, tensors in found.items()}


def main() -> None:
    """Write the file of layers."""
    made: Tensors = {}
    told = {}
    for number, name in enumerate(LAYERS):
        w = rand(40, 64, seed=number, scale=0.02)
        w[3, :32] = 0
        tensors, metadata = flat(name, {"l.weight": w})
        for key, value in tensors.items():
            powers = value.dtype == torch.float8_e8m0fnu  # the library of safetensors reads none from memory
            made[f"{name}/{key.removeprefix('l.')}"] = value.view(torch.uint8).clone() if powers else value.contiguous()
        made[f"{name}/want"] = read(tensors, metadata)["l.weight"].float().contiguous()
        told[name] = metadata["l.weight"]
        print(f"{name}: {(made[f'{name}/want'] - w).norm() / w.norm():.4f} from the weight")
    FILE.write_bytes(lzma.compress(save(made, told), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
