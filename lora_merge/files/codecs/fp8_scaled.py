"""The codec of fp8 with one scale for a weight, W = q · s, in the two styles of ComfyUI.

Old: `l.weight` and `l.scale_weight`, under a prefix with a tensor `scaled_fp8`. New: `l.weight` and `l.weight_scale`,
and for each layer a JSON, in a tensor `l.comfy_quant` or in the metadata entry `_quantization_metadata`.
https://github.com/comfyanonymous/ComfyUI comfy/ops.py, comfy/utils.py (convert_old_quants).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final

from ...disk.reader import read_bytes
from ...dtypes import TABLE
from ...json_text import from_json
from .base import Codec, Encoding, Packing, Sides, Tensors

if TYPE_CHECKING:
    from torch import Tensor

FORMATS: Final = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""Name of a format in the JSON of a layer → dtype."""

ENTRY: Final = "_quantization_metadata"
PREFIX: Final = "model.diffusion_model."
"""Prefix of layers that some converters omit in the metadata."""

NOTE_LIMIT: Final = 4096  # bytes of the JSON of one layer; writers need about fifty
SCALE: Final = "scale"


def decode(numbers: Tensor, sides: Sides, _: int) -> Tensor:
    """Return q · s in fp32."""
    import torch

    values = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
    return values.copy_(numbers).mul_(float(sides[SCALE]))


def encode(values: Tensor, sides: Sides, _: int) -> Tensor:
    """Return W / s, in the dtype of the arithmetic."""
    return values / float(sides[SCALE])


def fault(_: str, numbers: Sequence[float]) -> str:
    """Return the reason why a scale is invalid; "" if it is valid."""
    return "" if all(0 < n < inf for n in numbers) else f"its scale is no positive number: {numbers[0]:g}"


def refit(encoding: Encoding, largest: float) -> Mapping[str, bytes]:
    """Return the scale at which the largest magnitude becomes the largest number of the dtype, as in ComfyUI."""
    return {SCALE: struct.pack("<f", largest / TABLE[encoding.dtype].largest)}


def claim(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[tuple[str, Packing]]:
    """Yield name and packing of every weight that is stored in one of the two styles."""
    marks = [name.removesuffix("scaled_fp8") for name in tensors if name.rpartition(".")[2] == "scaled_fp8"]
    for name in tensors if marks else ():
        stem, _, last = name.rpartition(".")
        mark = next((m for m in marks if name.startswith(m)), None)
        if last == "scale_weight" and mark is not None:
            more = (f"{mark}scaled_fp8", f"{stem}.scale_input")
            yield from _packed(tensors, stem, "scale_weight", more)
    for stem, dtype in _layers(tensors, metadata):
        if dtype == getattr(tensors.get(f"{stem}.weight"), "dtype", None):
            yield from _packed(tensors, stem, "weight_scale", (f"{stem}.comfy_quant", f"{stem}.input_scale"))


def _packed(tensors: Tensors, stem: str, scale: str, more: tuple[str, ...]) -> Iterator[tuple[str, Packing]]:
    """Yield name and packing of the weight of a layer, if this codec can read its dtype and scale."""
    weight, side = tensors.get(f"{stem}.weight"), tensors.get(f"{stem}.{scale}")
    if weight is None or side is None or weight.dtype not in FORMATS.values():
        return
    if side.dtype == "F32" and prod(side.shape) == 1 and len(side.shape) < 2:
        beside = frozenset(name for name in more if name in tensors)
        yield weight.name, Packing(_encoding(weight.dtype), {SCALE: side}, beside)


def _layers(tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and dtype of the layers that a new-style file marks as fp8."""
    try:
        entry = from_json(metadata[ENTRY].encode()) if ENTRY in metadata else {}
    except ValueError:
        entry = {}
    layers = entry.get("layers") if isinstance(entry, dict) else None
    found: dict[str, Any] = dict(layers) if isinstance(layers, dict) else {}
    for name, info in tensors.items():
        if name.endswith(".comfy_quant") and info.dtype == "U8" and info.nbytes <= NOTE_LIMIT:
            try:
                found[name.removesuffix(".comfy_quant")] = from_json(read_bytes(info))
            except ValueError:
                continue  # not a layer of this codec: `quantised` then refuses it by its mark
    for name, layer in found.items():
        form = layer.get("format") if isinstance(layer, dict) else layer
        if isinstance(form, str) and form in FORMATS:
            yield (name if f"{name}.weight" in tensors else PREFIX + name), FORMATS[form]


FP8_SCALED: Final = Codec("fp8_scaled", decode, encode, claim, fault, refit)


@cache
def _encoding(dtype: str) -> Encoding:
    return Encoding(FP8_SCALED, dtype, (1, 1))
