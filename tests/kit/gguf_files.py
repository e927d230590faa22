"""GGUF files for tests, written by the `gguf` library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from numpy.typing import NDArray

Array = NDArray[Any]

SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "NVFP4": (),
    "Q8_1": (0,),
}
"""Type that the library does not write → the places of its f16 scales."""


def encoded(values: Array, kind: str) -> Array:
    """The bytes of numbers in a type; random blocks of about their size where the library cannot encode it."""
    number = GGMLQuantizationType[kind]
    if kind in ("F32", "F16"):
        return values.astype({"F32": np.float32, "F16": np.float16}[kind])
    if kind not in SCALES:
        return quants.quantize(values.astype(np.float32), number)
    shape = quants.quant_shape_to_byte_shape(values.shape, number)
    raw = np.random.default_rng(values.size).integers(0, 256, shape, dtype=np.uint8)
    blocks = raw.reshape(-1, quants.GGML_QUANT_SIZES[number][1])
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 2e-4, np.float16).view(np.uint8)
    if kind == "NVFP4":
        blocks[:, :4] %= 32  # scales up to 2⁻⁴
    if kind == "IQ1_M":  # the f16 scale 2e-4 = 0x0A8E, four bits in each of four words
        blocks[:, 49:56:2] = blocks[:, 49:56:2] & 15 | np.array([0xE0, 0x80, 0xA0, 0x00], np.uint8)
    return raw


def write(path: Path, arch: str, tensors: Mapping[str, tuple[Array, str]], entries: Mapping[str, Any] = {}) -> Path:
    """Write tensors, name → (numbers, type), and entries; a list becomes an array."""
    writer = GGUFWriter(path, arch)
    for key, value in entries.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, (values, kind) in tensors.items():
        raw = encoded(values, kind)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> dict[str, tuple[Array, str]]:
    """Every tensor as numbers and type, as the library reads them."""
    tensors = {}
    for t in GGUFReader(path).tensors:
        shape = tuple(reversed([int(n) for n in t.shape]))
        tensors[t.name] = (quants.dequantize(t.data, t.tensor_type).reshape(shape), t.tensor_type.name)
    return tensors


def fields(path: Path) -> dict[str, Any]:
    """Every entry as the library reads it."""
    return {key: field.contents() for key, field in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
