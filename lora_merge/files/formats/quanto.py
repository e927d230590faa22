"""optimum-quanto: codes of one byte with a scale for each row; codes of 2 and 4 bits of which far rows share bytes.

The weight is a matrix of groups [groups, size], stored in parts of equally many rows, each part in other bits of the
same bytes; W = q · s − z. https://github.com/huggingface/optimum-quanto optimum/quanto/tensor/packed.py, qbits.py.
"""

from __future__ import annotations

from math import prod
from typing import Final

from ...dtypes import DTYPE_ROWS, StoredTensor
from ..encodings.packed_ints import shared_byte_ints
from ..encodings.scaled_codes import ScaledTensors, scaled
from .base import Checkpoint, Claims, WeightClaim, claimed

ACTIVATION_SCALES: Final = ("input_scale", "output_scale")


def claim(checkpoint: Checkpoint) -> Claims:
    """Yield the weights of optimum-quanto: codes of one byte with a scale for each row, and codes of 2 and 4 bits.

    The shape of the latter is stored nowhere: it follows from the bias; without one, they are not read.
    """
    for name in checkpoint.stems("_scale"):
        stem, scale = name.rpartition(".")[0], checkpoint.tensors[f"{name}._scale"]
        codes = checkpoint.get(name, "_data")
        marks = checkpoint.present(stem, *ACTIVATION_SCALES)
        if codes is None:
            yield _few_bits(checkpoint, name, scale, marks)
        else:
            packing = scaled(ScaledTensors(codes, scale, f"quanto {DTYPE_ROWS[codes.dtype].library}", marks))
            yield claimed(codes, packing, name)


def _few_bits(checkpoint: Checkpoint, name: str, scale: StoredTensor, marks: frozenset[str]) -> WeightClaim | None:
    """Return the claim of a weight of 2 or 4 bits, whose rows its bias shows."""
    codes, zero = checkpoint.get(name, "_data._data"), checkpoint.get(name, "_shift")
    bias = checkpoint.get(name.rpartition(".")[0], "bias")
    if codes is None or zero is None or bias is None or len(codes.shape) != 2 or codes.dtype != "U8":
        return None
    (stored, cols), groups, rows = codes.shape, prod(scale.shape), prod(bias.shape)
    bits = next((b for b in (2, 4) if stored and stored == -(-groups // (8 // b))), 0)
    if not bits or not rows or not cols or zero.shape != scale.shape or groups * cols % rows:
        return None
    shape = rows, groups * cols // rows
    label = f"quanto int{bits}"
    packing = shared_byte_ints(codes, scale, zero, marks, group=shape[1], bits=bits, cols=cols, label=label)
    return claimed(codes, packing, name, shape)
