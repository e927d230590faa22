"""Whole numbers of 4 or 8 bits, packed into words along the rows: `pack-quantized` of compressed-tensors.

A code is stored as code + 2 ** (bits - 1), from the lowest bits on. A row begins a word. Zero points are packed in the
same way along the rows. With `weight_g_idx`, column j belongs to the group of that number.
https://github.com/vllm-project/compressed-tensors compressors/pack_quantized.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, lcm, prod
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from ...disk.files import StoredTensor
from ...disk.reader import read_bytes
from ...dtypes import ITEM_BYTES
from .base import CODES, DRAW, Claim, Encoding, InvalidPart, Packing, Part, Parts, claimed
from .scaled import COARSE, SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

ORDER: Final = "order"
"""Role of the group of each column."""

WORD: Final = 32


@dataclass(frozen=True, eq=False)
class Packed(Encoding):
    """Whole numbers packed into words: (q − z) · s."""

    bits: int = 4
    cols: int = 0
    size: int = 0  # columns with one scale
    zeros: bool = False
    scales: str = "F32"  # dtype of the scales
    zero_groups: bool = False  # whether a group of zeros has the scale 0
    name: ClassVar[str] = "packed_ints"
    stochastic: ClassVar[bool] = True

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return (q − z) · s in fp32."""
        rows = count // self.cols
        levels = self._levels(parts[CODES], rows).float()
        order = self._order(parts)
        groups = self._groups(levels if order is None else levels[:, order])
        values: Tensor = (groups - self._zero(parts, rows)).mul_(self._scale(parts, rows)).view(rows, self.cols)
        if order is None:
            return values
        found: Tensor = values.new_empty(values.shape)
        found[:, order] = values
        return found

    def encode(self, values: Tensor, parts: Parts, first: int) -> Parts | None:
        """Return codes, scales and zero points."""
        import torch

        from . import draws

        rows = values.numel() // self.cols
        order = self._order(parts)
        matrix = values.view(rows, self.cols)
        groups = self._groups(matrix if order is None else matrix[:, order])
        old, zero = self._scale(parts, rows), self._zero(parts, rows)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale, zero = self._fitted(low, high, old, zero)
        half = 2 ** (self.bits - 1)
        levels = (groups / scale.to(values.dtype).where(scale > 0, inf) + zero).view(rows, self.cols)
        if DRAW in parts:
            levels = draws.to_integers(levels, parts[DRAW].view(rows, self.cols))
        levels = levels.round().clamp(-half, half - 1)
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
        from . import arithmetic

        found = arithmetic.from_bits(raw.view(rows, -1), self.bits)
        return found[:, : self.cols].sub(2 ** (self.bits - 1))

    def _packed(self, levels: Tensor, old: Tensor, rows: int) -> Tensor:
        from . import arithmetic

        found = arithmetic.from_bits(old.view(rows, -1), self.bits)
        found[:, : self.cols] = (levels + 2 ** (self.bits - 1)).to(found.dtype)
        return arithmetic.in_bits(found, self.bits).reshape(-1)

    def _groups(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(len(matrix), -1, self.size)

    def _scale(self, parts: Parts, rows: int) -> Tensor:
        found = parts[SCALE].float().view(rows, -1, 1)
        if not bool((((found > 0) | ((found == 0) & self.zero_groups)) & (found < inf)).all()):
            raise InvalidPart("a scale is not a positive number")
        return found

    def _zero(self, parts: Parts, rows: int) -> Any:
        from . import arithmetic

        if not self.zeros:
            return 0.0
        across = self.cols // self.size  # one row of words holds the zero points of 32 / bits rows
        words = parts[ZERO].view(arithmetic.BYTE).view(-1, across, 4)
        found = arithmetic.from_bits(words, self.bits).transpose(1, 2).reshape(-1, across)[:rows]
        return found[:, :, None].float() - 2 ** (self.bits - 1)

    def _stored_zeros(self, zero: Tensor, old: Tensor) -> Tensor:
        from . import arithmetic

        across, each = self.cols // self.size, WORD // self.bits
        words = old.view(arithmetic.BYTE).view(-1, across, 4)
        found = arithmetic.from_bits(words, self.bits).transpose(1, 2).reshape(-1, across)
        found[: len(zero)] = (zero + 2 ** (self.bits - 1)).to(found.dtype)
        packed = arithmetic.in_bits(found.view(-1, each, across).transpose(1, 2).contiguous(), self.bits)
        return packed.reshape(-1).view(old.dtype)

    def _order(self, parts: Parts) -> Tensor | None:
        """Return the columns, group after group; InvalidPart where the groups have other sizes."""
        from . import arithmetic

        if ORDER not in parts:
            return None
        order = arithmetic.by_group(parts[ORDER], self.size)
        if order is None:
            raise InvalidPart("its weight_g_idx does not give every group as many columns")
        return order

    def _fitted(self, low: Tensor, high: Tensor, old: Tensor, zero: Any) -> tuple[Tensor, Any]:
        """Return scales and zero points: the old ones where they cover the numbers, else the smallest that do."""
        import torch

        half = 2 ** (self.bits - 1)
        over = (high > (half - 0.5 - zero) * old) | (low < (-half - 0.5 - zero) * old)
        if self.zeros:
            low, high = low.clamp(max=0), high.clamp(min=0)
            over |= (high - low < COARSE[False] * (2 * half - 1) * old) & (high > low)
            new = ((high - low) / (2 * half - 1)).to(old.dtype)
        else:
            over |= (torch.maximum(high, -low) < COARSE[False] * (half - 1) * old) & (torch.maximum(high, -low) > 0)
            new = torch.maximum(high / (half - 1), -low / half).to(old.dtype)
        new = self._rounded(new)
        over &= (new > 0) & (new < inf)
        scale = torch.where(over, new, old)
        if not self.zeros:
            return scale, zero
        return scale, torch.where(over, (-half - (low.to(scale.dtype) / scale).round()).clamp(-half, half - 1), zero)

    def _rounded(self, scale: Tensor) -> Tensor:
        from . import arithmetic

        return scale.to(arithmetic.FLOAT_DTYPES[self.scales]).float()


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
    if bits not in (4, 8) or codes.dtype != "I32" or len(shape) != 2 or not prod(shape):
        return None
    if (of.zero is None) != bool(of.args.get("symmetric", True)) or of.scale.dtype not in ("F32", "F16", "BF16"):
        return None
    rows, cols = shape
    size = size if isinstance(size, int) and size > 0 else cols
    words, across, each = -(-cols * bits // WORD), cols // size, WORD // bits
    up = -(-rows // each)
    if cols % size or codes.shape != (rows, words) or of.scale.shape != (rows, across):
        return None
    if of.zero is not None and (of.zero.dtype, of.zero.shape) != ("I32", (up, across)):
        return None
    if of.order is not None and (of.order.dtype != "I32" or of.order.shape != (cols,)):
        return None
    parts = {SCALE: Part(of.scale, cols, across * ITEM_BYTES[of.scale.dtype])}
    parts |= {ZERO: Part(of.zero, each * cols, across * 4)} if of.zero is not None else {}
    parts |= {ORDER: Part(of.order)} if of.order is not None else {}
    found = packed(
        (cols, words * 4), lcm(cols, each * cols if of.zero is not None else 1), bits=bits, cols=cols, size=size,
        zeros=of.zero is not None, scales=of.scale.dtype, label=f"compressed-tensors int{bits}",
    )  # fmt: skip
    return claimed(codes, name, (rows, cols), Packing(found, codes, parts, of.beside))


def _shape(info: StoredTensor | None) -> tuple[int, ...]:
    """Return the shape of a weight, as the tensor `weight_shape` holds it; () where there is none."""
    if info is None or info.dtype not in ("I64", "I32") or info.shape != (2,):
        return ()
    return struct.unpack("<2q" if info.dtype == "I64" else "<2i", read_bytes(info))


@cache
def packed(unit: tuple[int, int], group: int, **settings: Any) -> Packed:
    """Return the encoding of rows of codes that take so many bytes."""
    return Packed(unit, group, **settings)
