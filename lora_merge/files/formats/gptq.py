"""GPTQ and AWQ: whole numbers packed into words, the weight stored as its transpose. They are read, never written.

auto-round writes GPTQ's tensors too. Codes of 3 bits are a stream: three words hold 32 of them.
Both chose their grids with calibration data; new values would need them again.
https://github.com/ModelCloud/GPTQModel, https://github.com/casper-hansen/AutoAWQ awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...dtypes import StoredTensor
from ..encodings.base import CODES, SCALE_DTYPES, Packing, WeightPart
from ..encodings.packed_ints import ORDER, WORD, TransposedInts
from ..encodings.scaled_codes import SCALE, ZERO
from .base import Checkpoint, Claims, WeightClaim, claimed


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of GPTQ and AWQ folders; but none whose values are in the order of a kernel."""
    config = checkpoint.config
    method = config.get("quant_method")
    if (method, config.get("packing_format")) == ("auto-round", "auto_round:auto_gptq"):
        method = "gptq"
    if method not in ("gptq", "awq") or (method == "awq" and str(config.get("version", "gemm")).lower() != "gemm"):
        return
    if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2", "", None):
        return
    for stem in checkpoint.stems("qweight"):
        yield _weight(checkpoint, stem, config.get("bits"), awq=method == "awq")


def _weight(checkpoint: Checkpoint, stem: str, bits: Any, *, awq: bool) -> WeightClaim | None:
    codes = checkpoint.tensors[f"{stem}.qweight"]
    zero, scale, order = (checkpoint.get(stem, last) for last in ("qzeros", "scales", "g_idx"))
    if bits not in ((4,) if awq else (2, 3, 4, 8)) or zero is None or scale is None or len(scale.shape) != 2:
        return None
    if {codes.dtype, zero.dtype} != {"I32"} or len(codes.shape) != 2:
        return None
    # Codes are packed along the first axis, those of AWQ along the second.
    first, second = codes.shape
    cols, rows = (first, second * WORD // bits) if awq else (first * WORD // bits, second)
    groups = scale.shape[0]
    whole = rows * cols and groups and not cols * bits % WORD and not rows * bits % WORD
    if not whole or zero.shape != (groups, rows * bits // WORD) or scale.shape[1] != rows:
        return None
    if scale.dtype not in SCALE_DTYPES or (order is None and cols % groups):
        return None
    if order is not None and (order.dtype != "I32" or order.shape != (cols,)):
        return None
    # All tensors belong to the whole weight: the rows of a window are columns of what is stored.
    stored: dict[str, StoredTensor] = {CODES: codes, ZERO: zero, SCALE: scale}
    stored |= {ORDER: order} if order is not None else {}
    plus_one = not awq and checkpoint.config.get("checkpoint_format") != "gptq_v2"
    label = "AWQ" if awq else "GPTQ"
    encoding = TransposedInts.shared(
        (1, 0), cols, bits=bits, shape=(rows, cols), along_rows=awq, scales=scale.dtype, plus_one=plus_one, label=label
    )
    parts = {role: WeightPart(info) for role, info in stored.items()}
    return claimed(codes, Packing(encoding, codes, parts), f"{stem}.weight", (rows, cols))


def gptq_section(settings: Mapping[str, Any], tensors: Iterable[str]) -> Mapping[str, Any]:
    """Return the section on quantisation by AutoGPTQ's quantize_config.json; {} without one, or without its tensors."""
    return {"quant_method": "gptq", **settings} if isinstance(settings.get("bits"), int) and _are_ours(tensors) else {}


def awq_section(settings: Mapping[str, Any], tensors: Iterable[str]) -> Mapping[str, Any]:
    """Return the section on quantisation by AutoAWQ's quant_config.json; {} without one, or without its tensors."""
    bits = settings.get("w_bit")
    return {"quant_method": "awq", "bits": bits, **settings} if isinstance(bits, int) and _are_ours(tensors) else {}


def _are_ours(tensors: Iterable[str]) -> bool:
    return any(name.endswith(".qweight") for name in tensors)
