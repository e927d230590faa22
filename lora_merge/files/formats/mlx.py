"""Quantised weights of mlx: whole numbers of few bits in a bit stream, and codes of its floating-point modes.

A row of `L.weight` is a stream of words: element i of the row begins at bit i · bits. `L.scales` and `L.biases` have
one number for each group of columns. A config.json states `bits`, `group_size` and `mode`, also for single layers. In
the modes mxfp4, mxfp8 and nvfp4 codes are floating-point numbers, scales are bytes, and there are no biases.
https://github.com/ml-explore/mlx mlx/backend/cpu/quantized.cpp; mlx-lm mlx_lm/utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ...dtypes import ITEM_BYTES, StoredTensor
from ..encodings.affine_codes import BIAS, affine
from ..encodings.base import SCALE_DTYPES, Packing, WeightPart
from ..encodings.fp4 import NVFP4_COLUMNS, Fp4Tensors, fp4
from ..encodings.packed_ints import WORD
from ..encodings.scaled_codes import E8M0, MX_COLUMNS, SCALE, ScaledTensors, scaled
from .base import Checkpoint, Claims, WeightClaim, claimed

BITS: Final = (1, 2, 3, 4, 5, 6, 8)

GROUP_SIZES: Final = (16, 32, 64, 128)
"""Columns of a group."""


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of mlx folders."""
    config = checkpoint.config
    if "quant_method" in config or not isinstance(config.get("group_size"), int):
        return
    for stem in checkpoint.stems("scales"):
        of_layer = config.get(stem)
        yield _weight(checkpoint, stem, {**config, **(of_layer if isinstance(of_layer, Mapping) else {})})


def _weight(checkpoint: Checkpoint, stem: str, config: Mapping[str, Any]) -> WeightClaim | None:
    codes, bias = checkpoint.get(stem, "weight"), checkpoint.get(stem, "biases")
    scale = checkpoint.tensors[f"{stem}.scales"]
    bits, size, mode = config.get("bits"), config.get("group_size"), config.get("mode", "affine")
    if codes is None or bits not in BITS or size not in GROUP_SIZES:
        return None
    # The shape follows from that of the scales.
    shape = (*scale.shape[:-1], scale.shape[-1] * size) if scale.shape else ()
    if codes.dtype != "U32" or len(shape) < 2 or codes.shape != (*shape[:-1], shape[-1] * bits // WORD):
        return None
    if mode != "affine":
        return _floats(codes, scale, shape, (str(mode), size, bits)) if bias is None else None
    if bias is None or (scale.dtype, scale.shape) != (bias.dtype, bias.shape) or scale.dtype not in SCALE_DTYPES:
        return None
    each = ITEM_BYTES[scale.dtype]
    parts = {role: WeightPart(info, size, each) for role, info in ((SCALE, scale), (BIAS, bias))}
    encoding = affine(size, bits=bits, float_dtype=scale.dtype, label=f"mlx {bits} bit")
    return claimed(codes, Packing(encoding, codes, parts), shape=shape)


def _floats(
    codes: StoredTensor, scale: StoredTensor, shape: tuple[int, ...], settings: tuple[str, int, int]
) -> WeightClaim | None:
    """Return the claim of a weight of floating-point codes, in one of mlx's other modes."""
    mode, size, bits = settings
    packing, label = None, f"mlx {mode}"
    if settings == ("mxfp8", MX_COLUMNS, 8):
        of = ScaledTensors.mx(replace(codes, dtype="F8_E4M3", shape=shape), scale, label)
        packing = scaled(of) if of.kind == E8M0 else None
    elif bits == 4 and {"mxfp4": MX_COLUMNS, "nvfp4": NVFP4_COLUMNS}.get(mode) == size:
        halves = replace(codes, dtype="U8", shape=(*shape[:-1], shape[-1] // 2))
        packing = fp4(Fp4Tensors(halves, scale, label, None, fp8_scales=mode == "nvfp4"))
    return claimed(codes, packing and packing._replace(codes=codes), shape=shape)
