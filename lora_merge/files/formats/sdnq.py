"""Weights of SDNQ: whole numbers of 2 to 8 bits and fp8, some with a low-rank part, some rotated.

`L.weight` is [rows, columns], or [rows, groups, columns] with a scale for each group, or a flat stream of codes of few
bits. Signed codes have no zero point: W = q · s; unsigned ones have one: W = q · s + z. Convolutions have a scale for
each place of the kernel: q is [rows, groups, columns, places], s and z are [rows, groups, 1, places]. Weights with a
codebook, or in the order of a product, are not read. config.json may name another type for single layers.
https://github.com/Disty0/sdnq src/sdnq/dequantizer.py, quantizer.py, packed_int.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import lcm, prod
from typing import Any, Final, NamedTuple

from ...dtypes import ITEM_BYTES, Shape, StoredTensor
from ...safe_regex import Refused, Steps
from ..encodings.affine_codes import BIAS, affine
from ..encodings.base import ROTATION_SIZES, SCALE_DTYPES, Encoding, Packing, WeightPart, whole_bytes
from ..encodings.low_rank_sum import LowRankFactors, LowRankSums, with_factors
from ..encodings.packed_ints import PackedInts
from ..encodings.scaled_codes import SCALE, ZERO, ScaledTensors, scaled
from .base import Checkpoint, Claims, WeightClaim, claimed, positive

EXTRAS: Final = ("use_codebook", "use_codebook_scale", "use_quantized_matmul", "use_quantized_matmul_conv")
"""Entries of the configuration for what is not read."""

STREAM_BITS: Final = {"uint8": 8, "uint4": 4, "uint2": 2}
"""Unsigned types, whose codes are a stream of bits, lowest bits first."""

CODED_SCALES: Final = ("scale_2", "scale_zero_point", "zero_point_scale", "zero_point_2")
"""Tensors of scales that are codes themselves, which are not read."""

ROTATED: Final = 256
"""Columns that are rotated together at most, where the configuration does not say it."""


class SdnqTensors(NamedTuple):
    """The tensors of a weight, its type, and the columns that are rotated together at most (0: none)."""

    codes: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None
    factors: LowRankFactors
    kind: str
    rotation: int


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of SDNQ that are read."""
    config, steps = checkpoint.config, Steps()
    if config.get("quant_method") != "sdnq":
        return
    for stem in checkpoint.stems("scale"):
        settings = _settings(config, f"{stem}.weight", steps)
        if not any(settings.get(key) for key in EXTRAS):
            yield _weight(checkpoint, stem, settings)


def _settings(config: Mapping[str, Any], name: str, steps: Steps) -> Mapping[str, Any]:
    """Return the configuration with what it says of this weight."""
    kinds, layers = config.get("modules_dtype_dict"), config.get("modules_quant_config")
    for key, of_layer in layers.items() if isinstance(layers, Mapping) else ():
        if isinstance(of_layer, Mapping) and _named(name, key, steps):
            config = {**config, **of_layer}
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
    """Return the type that an entry asks for: that type, or by "6bits" one of at least so many bits."""
    least = re.fullmatch(r"(?:minimum[-_]?)?(u?int)?([1-8])[-_]?bits?|minimum[-_]?(u?int)?([1-8])", key)
    if least is None:
        return key
    sign, bits = least[1] or least[3] or "", int(least[2] or least[4])
    digits = "".join(filter(str.isdecimal, usual.partition("_")[0]))
    if not digits or int(digits) >= bits:
        return usual
    return f"uint{bits}" if sign == "uint" or bits <= 4 else f"int{bits}"


def _weight(checkpoint: Checkpoint, stem: str, config: Mapping[str, Any]) -> WeightClaim | None:
    """Return the claim of a weight with these settings."""
    codes, zero, up, down = (checkpoint.get(stem, last) for last in ("weight", "zero_point", "svd_up", "svd_down"))
    scale, kind = checkpoint.tensors[f"{stem}.scale"], str(config.get("weights_dtype", ""))
    if codes is None or checkpoint.present(stem, *CODED_SCALES) or not prod(codes.shape) or not prod(scale.shape):
        return None
    size, rotated = config.get("hadamard_group_size", ROTATED), bool(config.get("use_hadamard"))
    if rotated and not positive(size):
        return None
    factors = LowRankFactors(up, down)
    # A matrix in bytes or in a stream of bits, to which a product is added, or nothing.
    if len(scale.shape) in (2, 3) and scale.shape[-1] == 1:
        signed = zero is None and codes.dtype in ("I8", "F8_E4M3", "F8_E5M2")
        weight = _signed(codes, scale) if signed else _stream(codes, scale, zero, kind)
        if weight is not None:
            rotation = _rotation_within(size if rotated else 0, weight.weight.shape[1])
            extra = up is not None or down is not None or bool(rotation)
            if rotation is None or not extra:
                return weight if rotation is not None else None
            packing = with_factors(weight.packing, weight.weight.shape, factors._replace(rotation=rotation))
            return weight._replace(packing=packing) if packing else None
    # Convolutions, and codes of other bits.
    return _sums(SdnqTensors(codes, scale, zero, factors, kind, size if rotated else 0))


def _stream(codes: StoredTensor, scale: StoredTensor, zero: StoredTensor | None, kind: str) -> WeightClaim | None:
    """Return the claim of a weight of unsigned codes, or of signed ones of 4 bits."""
    bits = 4 if kind == "int4" else STREAM_BITS.get(kind, 0)
    if codes.dtype != "U8" or not bits or scale.dtype not in SCALE_DTYPES or (zero is None) != (kind == "int4"):
        return None
    if (len(codes.shape) == 1) != (bits < 8):
        return None
    rows, total, each = scale.shape[0], codes.nbytes * 8 // bits, ITEM_BYTES[scale.dtype]
    cols, size = total // rows, total // prod(scale.shape)
    same = zero is None or (zero.dtype, zero.shape) == (scale.dtype, scale.shape)
    if total % prod(scale.shape) or (size * bits) % 8 or not same:
        return None
    if zero is None:
        parts, label = {SCALE: WeightPart(scale, cols, cols // size * each)}, "SDNQ int4"
        encoding: Encoding = PackedInts.shared(
            (cols, cols // 2), cols, bits=4, cols=cols, size=size, scales=scale.dtype, label=label
        )
    else:
        parts = {SCALE: WeightPart(scale, size, each), BIAS: WeightPart(zero, size, each)}
        encoding = affine(size, bits=bits, float_dtype=scale.dtype, label=f"SDNQ {kind}")
    return claimed(codes, Packing(encoding, codes, parts), shape=(rows, cols))


def _signed(codes: StoredTensor, scale: StoredTensor) -> WeightClaim | None:
    """Return the claim of a weight of codes of one byte without a zero point."""
    if len(codes.shape) != len(scale.shape) or codes.shape[:-1] != scale.shape[:-1]:
        return None
    rows = codes.shape[0]
    shape = rows, prod(codes.shape) // rows
    label = f"SDNQ {'int8' if codes.dtype == 'I8' else 'fp8'}"
    of = ScaledTensors(replace(codes, shape=shape), scale, label, block=(1, codes.shape[-1]))
    packing = scaled(of)
    return claimed(codes, packing and packing._replace(codes=codes), shape=shape)


def _sums(of: SdnqTensors) -> WeightClaim | None:
    """Return the claim of a weight; None if types and shapes do not go together."""
    codes, scale, zero = of.codes, of.scale, of.zero
    signed, bits = not of.kind.startswith("u"), _bits(of.kind)
    form = _form(scale.shape)
    if form is None or scale.dtype not in SCALE_DTYPES or (zero is None) != signed or not bits:
        return None
    if zero is not None and (zero.dtype, zero.shape) != (scale.dtype, scale.shape):
        return None
    # Channels, and places of the kernel, by the number of the codes.
    (rows, groups), kernel = form, scale.shape[2 + (len(scale.shape) > 2 and scale.shape[1] > 1) :]
    elements, size = whole_bytes(bits)
    places, total = prod(kernel), codes.nbytes // size * elements
    channels = total // (rows * places)
    cols = channels * places
    if codes.nbytes % size or rows * cols != total or not channels or channels % groups or cols % elements:
        return None
    # The codes must be stored in the dtype and shape of their type.
    shape = (rows, *((groups, channels // groups) if groups > 1 else (channels,)), *kernel)
    packed = (codes.nbytes // size, size) if size > 1 else (codes.nbytes,)
    if codes.dtype != _stored(of.kind) or codes.shape != (shape if bits == 8 else packed):
        return None
    rotation, rank = _rotation_within(of.rotation, channels), of.factors.rank
    if rotation is None or (rotation and kernel) or not of.factors.fit(rows, cols):
        return None
    encoding = LowRankSums.shared(
        (elements, size), lcm(cols, elements), dtype=codes.dtype if bits == 8 else "", bits=bits,
        lowest=-(2 ** (bits - 1)) if signed and bits < 8 else 0, shape=(groups, channels // groups, places), rank=rank,
        rotation=rotation, scales=scale.dtype, label=f"SDNQ {of.kind}",
        factors=of.factors.up.dtype if of.factors.up else "F32",
    )  # fmt: skip
    each = ITEM_BYTES[scale.dtype] * groups * places
    parts = {SCALE: WeightPart(scale, cols, each)} | ({ZERO: WeightPart(zero, cols, each)} if zero is not None else {})
    parts |= of.factors.parts(cols)
    return claimed(codes, Packing(encoding, codes, parts), shape=(rows, channels, *kernel))


def _form(shape: Shape) -> tuple[int, int] | None:
    """Return (rows, groups) by the shape of the scales; None for others.

    [rows, 1] and [rows, groups, 1] are those of a matrix, [rows, 1, places …] and [rows, groups, 1, places …] of a
    convolution.
    """
    if len(shape) < 2 or not prod(shape) or (len(shape) > 2 and shape[0] == 1):
        return None
    if shape[1] == 1:
        return shape[0], 1
    return (shape[0], shape[1]) if len(shape) > 2 and shape[2] == 1 else None


def _bits(kind: str) -> int:
    """Return the bits of a type; 0 for one that is not read."""
    if kind in ("float8_e4m3fn", "float8_e5m2"):
        return 8
    number = kind.removeprefix("u").removeprefix("int")
    return int(number) if number.isdecimal() and len(number) == 1 and 1 < int(number) < 9 else 0


def _stored(kind: str) -> str:
    """Return the dtype in which codes of a type are stored."""
    return {"int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}.get(kind, "U8")


def _rotation_within(most: int, channels: int) -> int | None:
    """Return how many columns are rotated together, 0 for none: the largest power of two that divides the columns. None
    if the library would take a matrix of another kind."""
    if not most:
        return 0
    size = 1
    while size * 2 <= most and channels % (size * 2) == 0:
        size *= 2
    return 0 if size < ROTATION_SIZES[0] else size if size in ROTATION_SIZES else None
