"""Weights of SDNQ of convolutions and of odd bits, with a low-rank part or without, rotated or not.

They are read, never written. A weight is q · s + z, plus up · down, times H for each group of columns. Convolutions
have a scale for each place of the kernel: q is [rows, groups, columns, places], s and z are [rows, groups, 1, places].
https://github.com/Disty0/sdnq src/sdnq/dequantizer.py, quantizer.py, packed_int/unpack.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from ...disk.files import StoredTensor
from ...dtypes import ITEM_BYTES, Shape
from .base import CODES, FLOATS, ROTATIONS, Claim, Encoding, Packing, Part, Parts, claimed, finite
from .low_rank import DOWN, UP, Factors
from .scaled import SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

PACKED: Final = {2: (4, 1), 3: (8, 3), 4: (2, 1), 5: (8, 5), 6: (4, 3), 7: (8, 7)}
"""Bits of a code → numbers that are packed together, and their bytes."""


@dataclass(frozen=True, eq=False)
class Sums(Encoding):
    """q · s + z + up · down, in the basis of the model."""

    dtype: str = ""  # of codes of one byte; "" where several codes share bytes
    bits: int = 8
    lowest: int = 0  # the number of the code 0 of packed codes
    shape: tuple[int, int, int] = (1, 1, 1)  # groups, columns of a group, places of a kernel
    rank: int = 0
    rotation: int = 0
    scales: str = "F32"
    factors: str = "F32"
    name: ClassVar[str] = "sdnq"
    decode_only: ClassVar[str] = "that is done for matrices of 8, 4 and 2 bits alone"

    @property
    def cols(self) -> int:
        """Columns of the weight, as a matrix."""
        return prod(self.shape)

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return (1, self.shape[1]) if self.shape[2] == 1 else (0, 0)

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return the numbers in fp32."""
        import torch

        from . import arithmetic, few_bits

        rows, (groups, _, places), what = count // self.cols, self.shape, "a scale or a factor"
        if self.dtype == "U8":
            levels = parts[CODES].view(arithmetic.BYTE).float()
        elif self.dtype:
            levels = arithmetic.from_bytes(parts[CODES].view(arithmetic.BYTE), self.dtype)
        else:
            levels = few_bits.from_planes(parts[CODES].view(arithmetic.BYTE), self.bits).float() + self.lowest
        found: Tensor = levels.view(rows, *self.shape) * finite(parts[SCALE], what).view(rows, groups, 1, places)
        if ZERO in parts:
            found = found + finite(parts[ZERO], what).view(rows, groups, 1, places)
        found = found.view(rows, self.cols)
        if self.rank:
            found = torch.addmm(
                found, finite(parts[UP], what).view(rows, -1), finite(parts[DOWN], what).view(self.rank, -1)
            )
        return arithmetic.rotated(found, self.rotation) if self.rotation else found


class Tensors(NamedTuple):
    """The tensors of a weight, its type, and the columns that are rotated together at most (0: none)."""

    codes: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None
    factors: Factors
    kind: str
    rotation: int


def sums(of: Tensors) -> Claim | None:
    """Return the claim of a weight; None where types and shapes do not go together."""
    codes, scale, zero = of.codes, of.scale, of.zero
    signed, bits = not of.kind.startswith("u"), _bits(of.kind)
    form = _form(scale.shape)
    if form is None or scale.dtype not in FLOATS or (zero is None) != signed or not bits:
        return None
    if zero is not None and (zero.dtype, zero.shape) != (scale.dtype, scale.shape):
        return None
    (rows, groups), kernel = form, scale.shape[2 + (len(scale.shape) > 2 and scale.shape[1] > 1) :]
    numbers, size = (1, 1) if bits == 8 else PACKED[bits]
    places, total = prod(kernel), codes.nbytes // size * numbers
    channels = total // (rows * places)
    cols = channels * places
    if codes.nbytes % size or rows * cols != total or not channels or channels % groups or cols % numbers:
        return None
    shape = (rows, *((groups, channels // groups) if groups > 1 else (channels,)), *kernel)
    packed = (codes.nbytes // size, size) if size > 1 else (codes.nbytes,)
    if codes.dtype != _stored(of.kind) or codes.shape != (shape if bits == 8 else packed):
        return None
    rotation, rank = rotation_within(of.rotation, channels), of.factors.rank
    if rotation is None or (rotation and kernel) or not of.factors.fit(rows, cols):
        return None
    encoding = Sums.shared(
        (numbers, size), lcm(cols, numbers), dtype=codes.dtype if bits == 8 else "", bits=bits,
        lowest=-(2 ** (bits - 1)) if signed and bits < 8 else 0, shape=(groups, channels // groups, places), rank=rank,
        rotation=rotation, scales=scale.dtype, label=f"SDNQ {of.kind}",
        factors=of.factors.up.dtype if of.factors.up else "F32",
    )  # fmt: skip
    each = ITEM_BYTES[scale.dtype] * groups * places
    parts = {SCALE: Part(scale, cols, each)} | ({ZERO: Part(zero, cols, each)} if zero is not None else {})
    parts |= of.factors.parts(cols)
    return claimed(codes, codes.name, (rows, channels, *kernel), Packing(encoding, codes, parts))


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


def rotation_within(most: int, channels: int) -> int | None:
    """Return how many columns are rotated together, 0 for none: the largest power of two that divides the columns. None
    where the library would take a matrix of another kind."""
    if not most:
        return 0
    size = 1
    while size * 2 <= most and channels % (size * 2) == 0:
        size *= 2
    return 0 if size < ROTATIONS[0] else size if size in ROTATIONS else None
