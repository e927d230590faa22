"""Whole numbers of which far rows share a byte: 2 and 4 bits of optimum-quanto; 1, 2, 4 and 8 bits of HQQ.

Both see the weight as a matrix of groups [groups, size] (HQQ with `axis` 0: [size, groups]), and store it in parts of
equally many rows, each part in other bits of the same bytes. They are read, never written: a window of the weight
would be two ranges of rows.
https://github.com/huggingface/optimum-quanto optimum/quanto/tensor/packed.py, qbits.py;
https://github.com/dropbox/hqq hqq/core/bitpack.py, quantize.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ...disk.files import StoredTensor
from ...disk.reader import read_bytes
from .base import CODES, FLOATS, Checkpoint, Claim, Encoding, Packing, Part, Parts, claimed, finite
from .scaled import SCALE, ZERO, Stored, scaled

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS: Final = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip
"""Tensors in which HQQ stores the settings of a layer."""

ACTIVATIONS: Final = ("input_scale", "output_scale")


@dataclass(frozen=True, eq=False)
class Halves(Encoding):
    """Whole numbers in parts of equally many rows: q · s − z (quanto) or (q − z) · s (HQQ)."""

    bits: int = 4
    cols: int = 0  # of the matrix of groups
    across: bool = False  # whether a scale is for a column of that matrix; else for a row
    hqq: bool = False  # whether the first part is in the highest bits, and zero points are whole numbers of codes
    scales: str = "F32"
    zeros: str = "F32"
    name: ClassVar[str] = "halves"
    decode_only: ClassVar[str] = "rows that are far apart share its bytes"

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return the numbers in fp32."""
        from . import arithmetic, few_bits

        codes = parts[CODES].view(arithmetic.BYTE)
        row, column = few_bits.divided(first, count, self.cols)
        part, inside = few_bits.parted(row, codes.numel() // self.cols)
        shift = (8 // self.bits - 1 - part if self.hqq else part) * self.bits
        levels = (codes[inside * self.cols + column] >> shift.to(codes.dtype)).bitwise_and(2**self.bits - 1).float()
        scale, zero = (finite(parts[role], "a scale or a zero point") for role in (SCALE, ZERO))
        group = column if self.across else row
        return (levels - zero[group]) * scale[group] if self.hqq else levels * scale[group] - zero[group]


def quanto(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of optimum-quanto: codes of one byte with a scale for each row, and codes of 2 and 4 bits.

    The shape of the latter is stored nowhere: it follows from the bias; without one, they are not read.
    """
    for name in found.stems("_scale"):
        stem, codes, scale = name.rpartition(".")[0], found.get(name, "_data"), found.tensors[f"{name}._scale"]
        beside = found.present(stem, *ACTIVATIONS)
        if codes is None:
            made = _quanto_bits(found, name, scale, beside)
        else:
            packing = scaled(Stored(codes, scale, f"quanto {_KIND.get(codes.dtype, '')}", beside))
            made = claimed(codes, name, codes.shape, packing) if packing else None
        if made is not None:
            yield made


_KIND: Final = {"I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def _quanto_bits(found: Checkpoint, name: str, scale: StoredTensor, beside: frozenset[str]) -> Claim | None:
    codes, zero, bias = (
        found.get(name, "_data._data"), found.get(name, "_shift"), found.get(name.rpartition(".")[0], "bias")
    )  # fmt: skip
    if codes is None or zero is None or bias is None or len(codes.shape) != 2 or codes.dtype != "U8":
        return None
    (stored, cols), groups, rows = codes.shape, prod(scale.shape), prod(bias.shape)
    bits = next((b for b in (2, 4) if stored and stored == -(-groups // (8 // b))), 0)
    if not bits or not rows or not cols or zero.shape != scale.shape or groups * cols % rows:
        return None
    shape = rows, groups * cols // rows
    packing = shared_bytes(codes, scale, zero, shape[1], bits=bits, cols=cols, label=f"quanto int{bits}")
    return claimed(codes, name, shape, packing._replace(beside=beside)) if packing else None


def hqq(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of HQQ, as transformers saves them."""
    for stem in found.stems("W_q"):
        codes, scale, zero = (found.get(stem, last) for last in ("W_q", "scale", "zero"))
        told = {last: _numbers(found.get(stem, last)) for last in SETTINGS}
        shape, bits = told["shape"], (told["nbits"] or (0,))[0]
        if codes is None or scale is None or zero is None or codes.dtype != "U8" or len(codes.shape) != 2:
            continue
        odd = any(told[last] != (0,) and told[last] for last in ("quant_scale", "quant_zero", "view_as_float"))
        if odd or bits not in (1, 2, 4, 8) or len(shape) != 2 or min(shape) < 1 or told["axis"] not in ((0,), (1,)):
            continue
        (stored, cols), across = codes.shape, told["axis"] == (0,)
        rows = stored * 8 // bits
        if rows * cols != prod(shape) or zero.shape != scale.shape or prod(scale.shape) != (cols if across else rows):
            continue
        label = f"HQQ {bits} bit"
        if packing := shared_bytes(
            codes, scale, zero, shape[1], bits=bits, cols=cols, across=across, hqq=True, label=label
        ):
            packing = packing._replace(beside=found.present(stem, *SETTINGS))
            yield claimed(codes, f"{stem}.weight", shape, packing)


def shared_bytes(
    codes: StoredTensor, scale: StoredTensor, zero: StoredTensor, group: int, **settings: Any
) -> Packing | None:
    """Return how a weight of such codes is stored, `group` numbers in a row; None for scales of another dtype."""
    if scale.dtype not in FLOATS or zero.dtype not in FLOATS:
        return None
    encoding = Halves.shared((1, 0), group, scales=scale.dtype, zeros=zero.dtype, **settings)
    return Packing(encoding, codes, {CODES: Part(codes), SCALE: Part(scale), ZERO: Part(zero)})


def _numbers(info: StoredTensor | None) -> tuple[int, ...]:
    """Return the whole numbers of a small tensor; () for others."""
    code = {"I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}.get(info.dtype if info else "", "")
    if info is None or not code or not 0 < info.nbytes <= 64:
        return ()
    return struct.unpack(f"<{prod(info.shape)}{code}", read_bytes(info))
