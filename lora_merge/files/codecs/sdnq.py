"""Weights of SDNQ without its extras: whole numbers and fp8 in bytes, and whole numbers of 4 and 2 bits.

`L.weight` is [rows, columns], or [rows, groups, columns] with a scale for each group, or a flat stream of codes of few
bits. Signed codes have no zero point: W = q · s; unsigned ones have one: W = q · s + z. Weights with a low-rank part, a
rotation, a codebook, or in the order of a product are not read.
https://github.com/Disty0/sdnq src/sdnq/dequantizer.py, packed_int.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Final

from ...disk.files import StoredTensor
from ...dtypes import ITEM_BYTES
from .base import Checkpoint, Claim, Encoding, Packing, Part, claimed
from .mlx import BIAS, DTYPES, affine
from .packed_ints import packed
from .scaled import SCALE, Stored, scaled

EXTRAS: Final = ("use_svd", "use_hadamard", "use_codebook", "use_codebook_scale", "use_quantized_matmul")
"""Entries of the configuration for what is not read."""

BY_LAYER: Final = ("use_dynamic_quantization", "modules_dtype_dict", "modules_quant_config")
"""Entries by which layers may have other types; those of few bits do not show theirs."""

BITS: Final = {"uint8": 8, "uint4": 4, "uint2": 2}
"""Unsigned types, whose codes are a stream of bits, lowest bits first."""

BESIDE: Final = ("svd_up", "svd_down", "scale_2", "scale_zero_point", "zero_point_scale", "zero_point_2")


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of SDNQ that are read."""
    config = found.config
    if config.get("quant_method") != "sdnq" or any(config.get(key) for key in EXTRAS):
        return
    kind = "" if any(config.get(key) for key in BY_LAYER) else str(config.get("weights_dtype", ""))
    for stem in found.stems("scale"):
        made = _weight(found, stem, kind)
        if made is not None:
            yield made


def _weight(found: Checkpoint, stem: str, kind: str) -> Claim | None:
    codes, scale, zero = found.get(stem, "weight"), found.tensors[f"{stem}.scale"], found.get(stem, "zero_point")
    if codes is None or len(scale.shape) not in (2, 3) or scale.shape[-1] != 1 or found.present(stem, *BESIDE):
        return None
    if not prod(codes.shape) or not prod(scale.shape):
        return None
    if zero is None and codes.dtype in ("I8", "F8_E4M3", "F8_E5M2"):
        return _signed(codes, scale)
    return _stream(codes, scale, zero, "uint8" if len(codes.shape) > 1 else kind)  # codes of few bits are flat


def _stream(codes: StoredTensor, scale: StoredTensor, zero: StoredTensor | None, kind: str) -> Claim | None:
    """Return the claim of a weight of unsigned codes, or of signed ones of 4 bits."""
    bits = 4 if kind == "int4" else BITS.get(kind, 0)
    if codes.dtype != "U8" or not bits or scale.dtype not in DTYPES or (zero is None) != (kind == "int4"):
        return None
    rows, total, each = scale.shape[0], codes.nbytes * 8 // bits, ITEM_BYTES[scale.dtype]
    cols, size = total // rows, total // prod(scale.shape)
    same = zero is None or (zero.dtype, zero.shape) == (scale.dtype, scale.shape)
    if total % prod(scale.shape) or (size * bits) % 8 or not same:
        return None
    if zero is None:
        parts, label = {SCALE: Part(scale, cols, cols // size * each)}, "SDNQ int4"
        encoding: Encoding = packed(
            (cols, cols // 2), cols, bits=4, cols=cols, size=size, scales=scale.dtype, zero_groups=True, label=label
        )
    else:
        parts = {SCALE: Part(scale, size, each), BIAS: Part(zero, size, each)}
        encoding = affine(size, bits=bits, numbers=scale.dtype, label=f"SDNQ {kind}")
    return claimed(codes, codes.name, (rows, cols), Packing(encoding, codes, parts))


def _signed(codes: StoredTensor, scale: StoredTensor) -> Claim | None:
    """Return the claim of a weight of codes of one byte without a zero point."""
    if len(codes.shape) != len(scale.shape) or codes.shape[:-1] != scale.shape[:-1]:
        return None
    rows = codes.shape[0]
    shape = rows, prod(codes.shape) // rows
    label = f"SDNQ {'int8' if codes.dtype == 'I8' else 'fp8'}"
    of = Stored(replace(codes, shape=shape), scale, label, block=(1, codes.shape[-1]))
    packing = scaled(of, zero_rows=True)
    return claimed(codes, codes.name, shape, packing._replace(codes=codes)) if packing else None
