"""Weights of SDNQ: whole numbers and fp8 in bytes, and whole numbers of 4 and 2 bits; with extras by `sdnq_sums.py`.

`L.weight` is [rows, columns], or [rows, groups, columns] with a scale for each group, or a flat stream of codes of few
bits. Signed codes have no zero point: W = q · s; unsigned ones have one: W = q · s + z. Weights with a
codebook, or in the order of a product, are not read. config.json may name another type for single layers.
https://github.com/Disty0/sdnq src/sdnq/dequantizer.py, packed_int.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

from ...disk.files import StoredTensor
from ...dtypes import ITEM_BYTES
from ...safe_regex import Refused, Steps
from .base import FLOATS, Checkpoint, Claim, Encoding, Packing, Part, claimed
from .low_rank import Factors, with_factors
from .mlx import BIAS, affine
from .packed_ints import Packed
from .scaled import SCALE, Stored, scaled
from .sdnq_sums import Tensors, rotation_within, sums

EXTRAS: Final = ("use_codebook", "use_codebook_scale", "use_quantized_matmul", "use_quantized_matmul_conv")
"""Entries of the configuration for what is not read."""

BITS: Final = {"uint8": 8, "uint4": 4, "uint2": 2}
"""Unsigned types, whose codes are a stream of bits, lowest bits first."""

BESIDE: Final = ("scale_2", "scale_zero_point", "zero_point_scale", "zero_point_2")
"""Tensors of scales that are codes themselves, which are not read."""

ROTATED: Final = 256
"""Columns that are rotated together at most, where the configuration does not say it."""


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of SDNQ that are read."""
    config, steps = found.config, Steps()
    if config.get("quant_method") != "sdnq":
        return
    for stem in found.stems("scale"):
        own = _settings(config, f"{stem}.weight", steps)
        if not any(own.get(key) for key in EXTRAS) and (made := _weight(found, stem, own)) is not None:
            yield made


def _settings(config: Mapping[str, Any], name: str, steps: Steps) -> Mapping[str, Any]:
    """Return the configuration with what it says of this weight."""
    kinds, layers = config.get("modules_dtype_dict"), config.get("modules_quant_config")
    for key, own in layers.items() if isinstance(layers, Mapping) else ():
        if isinstance(own, Mapping) and _named(name, key, steps):
            config = {**config, **own}
            break
    for key, names in kinds.items() if isinstance(kinds, Mapping) else ():
        if isinstance(names, list) and any(_named(name, other, steps) for other in names):
            return {**config, "weights_dtype": _kind(str(config.get("weights_dtype", "")), key.lower())}
    return config


def _named(name: str, pattern: Any, steps: Steps) -> bool:
    """Return whether an entry of the configuration names a weight: by its name, the beginning, a level, or a glob."""
    if not isinstance(pattern, str):
        return False
    if pattern.startswith("."):
        return name.startswith(pattern[1:])
    if pattern == name or pattern in name.split("."):
        return True
    try:
        glob = pattern.replace(".*", "\\.*").replace("*", ".*")
        return "*" in pattern and steps.pattern(glob).matches(name, steps)
    except Refused:
        return False


def _kind(usual: str, key: str) -> str:
    """Return the type that an entry asks for: its own, or by "6bits" one of at least so many bits."""
    least = re.fullmatch(r"(?:minimum[-_]?)?(u?int)?([1-8])[-_]?bits?|minimum[-_]?(u?int)?([1-8])", key)
    if least is None:
        return key
    sign, bits = least[1] or least[3] or "", int(least[2] or least[4])
    digits = "".join(filter(str.isdecimal, usual.partition("_")[0]))
    if not digits or int(digits) >= bits:
        return usual
    return f"uint{bits}" if sign == "uint" or bits <= 4 else f"int{bits}"


def _weight(found: Checkpoint, stem: str, config: Mapping[str, Any]) -> Claim | None:
    codes, scale, zero = found.get(stem, "weight"), found.tensors[f"{stem}.scale"], found.get(stem, "zero_point")
    up, down, kind = found.get(stem, "svd_up"), found.get(stem, "svd_down"), str(config.get("weights_dtype", ""))
    if codes is None or found.present(stem, *BESIDE) or not prod(codes.shape) or not prod(scale.shape):
        return None
    size, rotated = config.get("hadamard_group_size", ROTATED), bool(config.get("use_hadamard"))
    if rotated and not (isinstance(size, int) and size > 0):
        return None
    factors = Factors(up, down)
    if len(scale.shape) in (2, 3) and scale.shape[-1] == 1:
        signed = zero is None and codes.dtype in ("I8", "F8_E4M3", "F8_E5M2")
        made = _signed(codes, scale) if signed else _stream(codes, scale, zero, kind)
        if made is not None:
            rotation = rotation_within(size if rotated else 0, made.weight.shape[1])
            extra = up is not None or down is not None or bool(rotation)
            if rotation is None or not extra:
                return made if rotation is not None else None
            packing = with_factors(made.packing, made.weight.shape, factors._replace(rotation=rotation))
            return made._replace(packing=packing) if packing else None
    return sums(Tensors(codes, scale, zero, factors, kind, size if rotated else 0))


def _stream(codes: StoredTensor, scale: StoredTensor, zero: StoredTensor | None, kind: str) -> Claim | None:
    """Return the claim of a weight of unsigned codes, or of signed ones of 4 bits."""
    bits = 4 if kind == "int4" else BITS.get(kind, 0)
    if codes.dtype != "U8" or not bits or scale.dtype not in FLOATS or (zero is None) != (kind == "int4"):
        return None
    if (len(codes.shape) == 1) != (bits < 8):
        return None
    rows, total, each = scale.shape[0], codes.nbytes * 8 // bits, ITEM_BYTES[scale.dtype]
    cols, size = total // rows, total // prod(scale.shape)
    same = zero is None or (zero.dtype, zero.shape) == (scale.dtype, scale.shape)
    if total % prod(scale.shape) or (size * bits) % 8 or not same:
        return None
    if zero is None:
        parts, label = {SCALE: Part(scale, cols, cols // size * each)}, "SDNQ int4"
        encoding: Encoding = Packed.shared(
            (cols, cols // 2), cols, bits=4, cols=cols, size=size, scales=scale.dtype, label=label
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
    packing = scaled(of)
    return claimed(codes, codes.name, shape, packing._replace(codes=codes)) if packing else None
