"""Whole numbers of 2 to 8 bits, packed into words along the rows: `pack-quantized` of compressed-tensors.

A code is stored as code + 2 ** (bits - 1), from the lowest bits on. A row begins a word, and is a stream of bits; older
releases began a word for every code that would lie in two. Zero points are packed in the same way along the rows. With
`weight_g_idx`, column j belongs to the group of that number.
https://github.com/vllm-project/compressed-tensors compressors/pack_quantized.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, lcm, prod
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from ...disk.files import StoredTensor
from ...disk.reader import read_bytes
from ...dtypes import ITEM_BYTES
from .base import ALL_ZEROS, CODES, DRAW, Claim, Encoding, InvalidPart, Packing, Part, Parts, beyond, claimed
from .scaled import COARSE, NEARLY_HALF, SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

ORDER: Final = "order"
"""Role of the group of each column."""

WORD: Final = 32
BITS: Final = (2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True, eq=False)
class Packed(Encoding):
    """Whole numbers packed into words: (q − z) · s."""

    bits: int = 4
    cols: int = 0
    size: int = 0  # columns with one scale
    zeros: bool = False
    dense: bool = True  # whether a code may lie in two words
    scales: str = "F32"  # dtype of the scales
    signed: bool = False  # whether codes are stored in two's complement, and the lowest one is not used
    rotation: int = 0  # columns that are rotated together; 0 without a rotation
    name: ClassVar[str] = "packed_ints"
    stochastic: ClassVar[bool] = True
    afresh: ClassVar[bool] = True
    fixed: ClassVar[frozenset[str]] = frozenset((ORDER,))

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return 1, self.size

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return (q − z) · s in fp32."""
        from . import arithmetic

        rows = count // self.cols
        levels = self._levels(parts[CODES], rows).float()
        order = self._order(parts)
        groups = self._groups(levels if order is None else levels[:, order])
        steps, scale = groups - self._zero(parts, rows), self._scale(parts, rows)
        if not float(scale.min()) and bool((steps * (scale == 0)).any()):
            raise InvalidPart(ALL_ZEROS)
        values: Tensor = steps.mul_(scale).view(rows, self.cols)
        if order is None:
            return arithmetic.rotated(values, self.rotation) if self.rotation else values
        found: Tensor = values.new_empty(values.shape)
        found[:, order] = values
        return found

    def encode(self, values: Tensor, parts: Parts, first: int) -> Parts | None:
        """Return codes, scales and zero points."""
        import torch

        from . import arithmetic, draws

        rows = values.numel() // self.cols
        values = arithmetic.rotated(values, self.rotation) if self.rotation else values
        order = self._order(parts)
        matrix = values.view(rows, self.cols)
        groups = self._groups(matrix if order is None else matrix[:, order])
        old, zero = self._scale(parts, rows), self._zero(parts, rows)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale, zero = self._fitted((low, high), old, zero, parts)
        half = 2 ** (self.bits - 1)
        levels = (groups / scale.to(values.dtype).where(scale > 0, inf) + zero).view(rows, self.cols)
        if DRAW in parts:
            levels = draws.to_integers(levels, parts[DRAW].view(rows, self.cols))
        levels = levels.round().clamp(self._least, half - 1)
        if order is not None:
            ordered = torch.empty_like(levels)
            ordered[:, order] = levels
            levels = ordered
        made = {SCALE: scale.to(parts[SCALE].dtype).reshape(-1)}
        if self.zeros:
            made[ZERO] = self._stored_zeros(zero.view(rows, -1), parts[ZERO])
        return {CODES: self._packed(levels, parts[CODES], rows), **made}

    def _levels(self, raw: Tensor, rows: int) -> Tensor:
        """Return the codes [rows, cols] as whole numbers."""
        from . import arithmetic, few_bits

        found = few_bits.from_rows(raw.view(arithmetic.BYTE).view(rows, -1), self.bits, dense=self.dense)
        half = 2 ** (self.bits - 1)
        return (found ^ half if self.signed else found)[:, : self.cols].sub(half)

    @property
    def _least(self) -> int:
        """The lowest code that is written."""
        return int(self.signed - 2 ** (self.bits - 1))

    def _packed(self, levels: Tensor, old: Tensor, rows: int) -> Tensor:
        from . import arithmetic, few_bits

        raw = old.view(arithmetic.BYTE).view(rows, -1)
        found = few_bits.from_rows(raw, self.bits, dense=self.dense)
        half = 2 ** (self.bits - 1)
        made = (levels + half).to(found.dtype)
        found[:, : self.cols] = made ^ half if self.signed else made
        return few_bits.in_rows(found, self.bits, raw.shape[1], dense=self.dense).reshape(-1)

    def _groups(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(len(matrix), -1, self.size)

    def _scale(self, parts: Parts, rows: int) -> Tensor:
        found = parts[SCALE].float().view(rows, -1, 1)
        if not bool(((found >= 0) & (found < inf)).all()):
            raise InvalidPart("a scale is not a positive number")
        return found

    def _zero(self, parts: Parts, rows: int) -> Any:
        from . import few_bits

        if not self.zeros:
            return 0.0
        found = few_bits.from_rows(self._by_group(parts[ZERO]), self.bits, dense=self.dense).t()[:rows]
        return found[:, :, None].float() - 2 ** (self.bits - 1)

    def _by_group(self, zeros: Tensor) -> Tensor:
        """Return the bytes of zero points, a row of them for each group of columns."""
        from . import arithmetic

        across = self.cols // self.size
        return zeros.view(arithmetic.BYTE).view(-1, across, 4).transpose(0, 1).reshape(across, -1)

    def _stored_zeros(self, zero: Tensor, old: Tensor) -> Tensor:
        from . import few_bits

        raw = self._by_group(old)
        found = few_bits.from_rows(raw, self.bits, dense=self.dense)
        found[:, : len(zero)] = (zero + 2 ** (self.bits - 1)).to(found.dtype).t()
        made = few_bits.in_rows(found, self.bits, raw.shape[1], dense=self.dense)
        return made.reshape(len(raw), -1, 4).transpose(0, 1).reshape(-1).view(old.dtype)

    def _order(self, parts: Parts) -> Tensor | None:
        """Return the columns, group after group; InvalidPart where the groups have other sizes."""
        from . import few_bits

        if ORDER not in parts:
            return None
        order = few_bits.by_group(parts[ORDER], self.size)
        if order is None:
            raise InvalidPart("its weight_g_idx does not give every group as many columns")
        return order

    def _fitted(self, ends: tuple[Tensor, Tensor], old: Tensor, zero: Any, parts: Parts) -> tuple[Tensor, Any]:
        """Return scales and zero points: the old ones where they cover the numbers, else the smallest that do."""
        import torch

        from . import arithmetic

        (low, high), half, least, margin = ends, 2 ** (self.bits - 1), self._least, beyond(parts)
        over = (high > (half - 1 + margin - zero) * old) | (low < (least - margin - zero) * old)
        if self.zeros:
            low, high = low.clamp(max=0), high.clamp(min=0)
            over |= (high - low < COARSE[False] * (2 * half - 1) * old) & (high > low)
            if DRAW in parts:
                reach, point = arithmetic.with_zero(low, high, (-half, half - 1))
                new = arithmetic.covering(reach, 1, 1, self.scales)
            else:
                new = arithmetic.covering(high - low, 2 * half - 1, 2 * half - 1, self.scales)  # z may take half a step
                point = (-half - (low.to(new.dtype) / new.where(new > 0, inf)).round()).clamp(-half, half - 1)
        else:
            reach = torch.maximum(high, low * ((half - 1) / least))
            over |= (torch.maximum(high, -low) < COARSE[False] * (half - 1) * old) & (reach > 0)
            new = arithmetic.covering(reach, half - 1, half - 1 + beyond(parts, NEARLY_HALF), self.scales)
        over &= new > 0
        scale = torch.where(over, new, old)
        return scale, torch.where(over, point, zero) if self.zeros else zero


class PackedInts(NamedTuple):
    """The tensors of a weight of packed whole numbers."""

    codes: StoredTensor
    scale: StoredTensor
    args: Mapping[str, Any]
    shape: StoredTensor | None
    zero: StoredTensor | None
    order: StoredTensor | None
    beside: frozenset[str]


def packed_ints(of: PackedInts, name: str) -> Claim | None:
    """Return the claim of a weight of packed whole numbers; None where dtypes and shapes do not go together."""
    bits, size, codes = of.args.get("num_bits"), of.args.get("group_size"), of.codes
    shape = _shape(of.shape)
    if bits not in BITS or codes.dtype != "I32" or len(shape) != 2 or not prod(shape):
        return None
    if (of.zero is None) != bool(of.args.get("symmetric", True)) or of.scale.dtype not in ("F32", "F16", "BF16"):
        return None
    rows, cols = shape
    size = size if isinstance(size, int) and size > 0 else cols
    across = cols // size
    dense = codes.shape == (rows, _words(cols, bits, dense=True))
    words = _words(cols, bits, dense=dense)
    unclear = dense and words > 1 and WORD % bits and words == _words(cols, bits, dense=False)
    if cols % size or codes.shape != (rows, words) or unclear or of.scale.shape != (rows, across):
        return None
    if of.zero is not None and (of.zero.dtype, of.zero.shape) != ("I32", (_words(rows, bits, dense=dense), across)):
        return None
    if of.order is not None and (of.order.dtype != "I32" or of.order.shape != (cols,)):
        return None
    each, size_of_each = (WORD, bits * 4) if dense and WORD % bits else (WORD // bits, 4)
    parts = {SCALE: Part(of.scale, cols, across * ITEM_BYTES[of.scale.dtype])}
    parts |= {ZERO: Part(of.zero, each * cols, across * size_of_each)} if of.zero is not None else {}
    parts |= {ORDER: Part(of.order)} if of.order is not None else {}
    found = Packed.shared(
        (cols, words * 4), lcm(cols, each * cols if of.zero is not None else 1), bits=bits, cols=cols, size=size,
        zeros=of.zero is not None, dense=dense, scales=of.scale.dtype, label=f"compressed-tensors int{bits}",
    )  # fmt: skip
    return claimed(codes, name, (rows, cols), Packing(found, codes, parts, of.beside))


def _words(numbers: int, bits: int, *, dense: bool) -> int:
    """Return how many words hold so many codes."""
    return -(-numbers * bits // WORD) if dense else -(-numbers // (WORD // bits))


def _shape(info: StoredTensor | None) -> tuple[int, ...]:
    """Return the shape of a weight, as the tensor `weight_shape` holds it; () where there is none."""
    if info is None or info.dtype not in ("I64", "I32") or info.shape != (2,):
        return ()
    return struct.unpack("<2q" if info.dtype == "I64" else "<2i", read_bytes(info))
