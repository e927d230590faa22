"""HQQ, as transformers saves it: codes of 1, 2, 4 and 8 bits, of which far rows share bytes. Read, never written.

The weight is a matrix of groups [groups, size], with `axis` 0 [size, groups], stored in parts of equally many rows,
each part in other bits of the same bytes; W = (q − z) · s.
https://github.com/dropbox/hqq hqq/core/bitpack.py, quantize.py.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Final

from ...disk.reader import read_bytes
from ...dtypes import StoredTensor
from ..encodings.packed_ints import shared_byte_ints
from .base import Checkpoint, Claims, claimed

SETTINGS: Final = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip
"""Tensors in which HQQ stores the settings of a layer."""


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of HQQ, as transformers saves them."""
    for stem in checkpoint.stems("W_q"):
        codes, scale, zero = (checkpoint.get(stem, last) for last in ("W_q", "scale", "zero"))
        settings = {last: _numbers(checkpoint.get(stem, last)) for last in SETTINGS}
        shape, bits = settings["shape"], (settings["nbits"] or (0,))[0]
        if codes is None or scale is None or zero is None or codes.dtype != "U8" or len(codes.shape) != 2:
            continue
        odd = any(settings[last] != (0,) and settings[last] for last in ("quant_scale", "quant_zero", "view_as_float"))
        if odd or bits not in (1, 2, 4, 8) or len(shape) != 2 or min(shape) < 1 or settings["axis"] not in ((0,), (1,)):
            continue
        (stored, cols), across = codes.shape, settings["axis"] == (0,)
        rows = stored * 8 // bits
        if rows * cols != prod(shape) or zero.shape != scale.shape or prod(scale.shape) != (cols if across else rows):
            continue
        label = f"HQQ {bits} bit"
        packing = shared_byte_ints(
            codes, scale, zero, checkpoint.present(stem, *SETTINGS), group=shape[1], bits=bits, cols=cols,
            across=across, high_first=True, label=label,
        )  # fmt: skip
        yield claimed(codes, packing, f"{stem}.weight", shape)


def _numbers(info: StoredTensor | None) -> tuple[int, ...]:
    """Return the whole numbers of a small tensor; () for others."""
    code = {"I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}.get(info.dtype if info else "", "")
    if info is None or not code or not 0 < info.nbytes <= 64:
        return ()
    return struct.unpack(f"<{prod(info.shape)}{code}", read_bytes(info))
