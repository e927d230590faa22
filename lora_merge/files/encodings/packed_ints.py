"""Whole numbers of 1 to 8 bits that share words or bytes, in three layouts.

`PackedInts`: along the rows, code + 2 ** (bits - 1) from the lowest bits on (compressed-tensors, ComfyUI, SDNQ).
`TransposedInts`: the transposed weight in words (GPTQ, AWQ); read only.
`SharedByteInts`: rows that are far apart share a byte (optimum-quanto, HQQ); read only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ...dtypes import StoredTensor
from .base import (
    ALL_ZEROS,
    CODES,
    DRAW,
    SCALE_DTYPES,
    Encoding,
    InvalidPart,
    Packing,
    PartValues,
    WeightPart,
    end_margin,
    finite,
)
from .scaled_codes import NEARLY_HALF, REFIT_BELOW, SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

ORDER: Final = "order"
"""Role of the group of each column."""

WORD: Final = 32

ACROSS: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: the nibble of its word that holds column j of eight."""


@dataclass(frozen=True, eq=False)
class PackedInts(Encoding):
    """Whole numbers packed into words: (q − z) · s."""

    bits: int = 4
    cols: int = 0
    zeros: bool = False
    dense: bool = True  # whether a code may span two words
    scales: str = "F32"  # dtype of the scales
    signed: bool = False  # whether codes are stored in two's complement, and the lowest one is not used
    rotation: int = 0  # columns that are rotated together; 0 without a rotation
    from_zeros: ClassVar[bool] = True
    fixed: ClassVar[frozenset[str]] = frozenset((ORDER,))

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
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
        ordered: Tensor = values.new_empty(values.shape)
        ordered[:, order] = values
        return ordered

    def encode(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return codes, scales and zero points."""
        import torch

        from . import arithmetic, stochastic_rounding

        # The groups of columns that share a scale, in the basis of the file.
        rows = values.numel() // self.cols
        values = arithmetic.rotated(values, self.rotation) if self.rotation else values
        order = self._order(parts)
        matrix = values.view(rows, self.cols)
        groups = self._groups(matrix if order is None else matrix[:, order])
        # Their scales and zero points: the old ones if they cover the values.
        old, zero = self._scale(parts, rows), self._zero(parts, rows)
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale, zero = self._fitted((low, high), old, zero, parts)
        # The codes, in the order of the columns.
        levels = (groups / scale.to(values.dtype).where(scale > 0, inf) + zero).view(rows, self.cols)
        if DRAW in parts:
            levels = stochastic_rounding.to_integers(levels, parts[DRAW].view(rows, self.cols))
        levels = levels.round().clamp(self._least, self._half - 1)
        if order is not None:
            ordered = torch.empty_like(levels)
            ordered[:, order] = levels
            levels = ordered
        stored = {SCALE: scale.to(parts[SCALE].dtype).reshape(-1)}
        if self.zeros:
            stored[ZERO] = self._stored_zeros(zero.view(rows, -1), parts[ZERO])
        return {CODES: self._packed(levels, parts[CODES], rows), **stored}

    def _levels(self, raw: Tensor, rows: int) -> Tensor:
        """Return the codes [rows, cols] as whole numbers."""
        from . import arithmetic, bit_packing

        codes = bit_packing.from_rows(raw.view(arithmetic.BYTE).view(rows, -1), self.bits, dense=self.dense)
        return (codes ^ self._half if self.signed else codes)[:, : self.cols].sub(self._half)

    @property
    def _half(self) -> int:
        """What is added to a code to store it."""
        return int(2 ** (self.bits - 1))

    @property
    def _least(self) -> int:
        """The lowest code that is written."""
        return self.signed - self._half

    def _packed(self, levels: Tensor, old: Tensor, rows: int) -> Tensor:
        from . import arithmetic, bit_packing

        raw = old.view(arithmetic.BYTE).view(rows, -1)
        codes = bit_packing.from_rows(raw, self.bits, dense=self.dense)
        new = (levels + self._half).to(codes.dtype)
        codes[:, : self.cols] = new ^ self._half if self.signed else new
        return bit_packing.in_rows(codes, self.bits, raw.shape[1], dense=self.dense).reshape(-1)

    def _groups(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(len(matrix), -1, self.size)

    def _scale(self, parts: PartValues, rows: int) -> Tensor:
        scale = parts[SCALE].float().view(rows, -1, 1)
        if not bool(((scale >= 0) & (scale < inf)).all()):
            raise InvalidPart("a scale is not a positive number")
        return scale

    def _zero(self, parts: PartValues, rows: int) -> Any:
        from . import bit_packing

        if not self.zeros:
            return 0.0
        zero = bit_packing.from_rows(self._by_group(parts[ZERO]), self.bits, dense=self.dense).t()[:rows]
        return zero[:, :, None].float() - self._half

    def _by_group(self, zeros: Tensor) -> Tensor:
        """Return the bytes of zero points, a row of them for each group of columns."""
        from . import arithmetic

        across = self.cols // self.size
        return zeros.view(arithmetic.BYTE).view(-1, across, 4).transpose(0, 1).reshape(across, -1)

    def _stored_zeros(self, zero: Tensor, old: Tensor) -> Tensor:
        from . import bit_packing

        raw = self._by_group(old)
        codes = bit_packing.from_rows(raw, self.bits, dense=self.dense)
        codes[:, : len(zero)] = (zero + self._half).to(codes.dtype).t()
        stored = bit_packing.in_rows(codes, self.bits, raw.shape[1], dense=self.dense)
        return stored.reshape(len(raw), -1, 4).transpose(0, 1).reshape(-1).view(old.dtype)

    def _order(self, parts: PartValues) -> Tensor | None:
        """Return the columns, group after group; InvalidPart if the groups have other sizes."""
        from . import bit_packing

        if ORDER not in parts:
            return None
        order = bit_packing.by_group(parts[ORDER], self.size)
        if order is None:
            raise InvalidPart("its weight_g_idx does not give every group as many columns")
        return order

    def _fitted(self, ends: tuple[Tensor, Tensor], old: Tensor, zero: Any, parts: PartValues) -> tuple[Tensor, Any]:
        """Return scales and zero points: the old ones if they cover the values, else the smallest that do."""
        import torch

        from . import arithmetic

        (low, high), half, least, margin = ends, self._half, self._least, end_margin(parts)
        over = (high > (half - 1 + margin - zero) * old) | (low < (least - margin - zero) * old)
        if self.zeros:
            low, high = low.clamp(max=0), high.clamp(min=0)
            over |= (high - low < REFIT_BELOW[False] * (2 * half - 1) * old) & (high > low)
            if DRAW in parts:
                reach, point = arithmetic.with_zero(low, high, (-half, half - 1))
                new = arithmetic.covering(reach, 1, 1, self.scales)
            else:
                new = arithmetic.covering(high - low, 2 * half - 1, 2 * half - 1, self.scales)  # z may take half a step
                point = (-half - (low.to(new.dtype) / new.where(new > 0, inf)).round()).clamp(-half, half - 1)
        else:
            reach = torch.maximum(high, low * ((half - 1) / least))
            over |= (torch.maximum(high, -low) < REFIT_BELOW[False] * (half - 1) * old) & (reach > 0)
            new = arithmetic.covering(reach, half - 1, half - 1 + end_margin(parts, NEARLY_HALF), self.scales)
        over &= new > 0
        scale = torch.where(over, new, old)
        return scale, torch.where(over, point, zero) if self.zeros else zero


@dataclass(frozen=True, eq=False)
class TransposedInts(Encoding):
    """Whole numbers of the transposed weight [cols, rows], with scales and zero points of groups of its rows."""

    bits: int = 4
    shape: tuple[int, int] = (0, 0)
    along_rows: bool = False  # AWQ: packed along the second axis of what is stored
    scales: str = "F16"  # dtype of the scales
    plus_one: bool = False  # whether zero points are stored less one
    decode_only: ClassVar[str] = "its grid was chosen with calibration data"

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return (q - z) · s in fp32."""
        import torch

        from . import bit_packing

        (rows, cols), bits = self.shape, self.bits
        low, high = first // cols, (first + count) // cols
        raw = parts[CODES].view(torch.int32)
        if self.along_rows:
            each, order = WORD // bits, torch.tensor(ACROSS)
            words = slice(low // each, -(-high // each))
            inside = slice(low - words.start * each, high - words.start * each)
            levels = bit_packing.from_words(raw.view(cols, -1)[:, words], bits)[:, :, order].flatten(1)[:, inside]
            zero = bit_packing.from_words(parts[ZERO].view(-1, rows // each)[:, words], bits)[:, :, order]
            zero = zero.flatten(1)[:, inside]
        else:
            columns = raw.view(-1, rows)[:, low:high].t().contiguous().view(torch.uint8)
            levels = bit_packing.from_rows(columns, bits, dense=True).t()
            whole = parts[ZERO].view(torch.uint8).view(-1, rows * bits // 8)
            zero = bit_packing.from_rows(whole, bits, dense=True)[:, low:high] + int(self.plus_one)
        scale = finite(parts[SCALE].view(-1, rows)[:, low:high], "a scale")
        group = parts[ORDER] if ORDER in parts else torch.arange(cols) // (cols // len(scale))
        if bool((group < 0).any()) or bool((group >= len(scale)).any()):
            raise InvalidPart("its g_idx names a group that is not there")
        return ((levels - zero[group]) * scale[group]).t().contiguous()


@dataclass(frozen=True, eq=False)
class SharedByteInts(Encoding):
    """Whole numbers in parts of equally many rows: q · s − z (quanto) or (q − z) · s (HQQ)."""

    bits: int = 4
    cols: int = 0  # of the matrix of groups
    across: bool = False  # whether a scale is for a column of that matrix; else for a row
    high_first: bool = False  # whether the first part is in the highest bits, and zero points are in units of codes
    scales: str = "F32"
    zeros: str = "F32"
    decode_only: ClassVar[str] = "rows that are far apart share its bytes"

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return the values in fp32."""
        import torch

        codes, number = parts[CODES].view(torch.uint8), torch.arange(first, first + count)
        row, stored_rows = number // self.cols, codes.numel() // self.cols
        part = row // stored_rows
        inside, column = row - part * stored_rows, number - row * self.cols
        shift = (8 // self.bits - 1 - part if self.high_first else part) * self.bits
        levels = (codes[inside * self.cols + column] >> shift.to(codes.dtype)).bitwise_and(2**self.bits - 1).float()
        scale, zero = (finite(parts[role], "a scale or a zero point") for role in (SCALE, ZERO))
        group = column if self.across else row
        return (levels - zero[group]) * scale[group] if self.high_first else levels * scale[group] - zero[group]


def shared_byte_ints(
    codes: StoredTensor, scale: StoredTensor, zero: StoredTensor, marks: frozenset[str], *, group: int, **settings: Any
) -> Packing | None:
    """Return how a weight of such codes is stored, `group` values in a row; None for scales of another dtype."""
    if scale.dtype not in SCALE_DTYPES or zero.dtype not in SCALE_DTYPES:
        return None
    encoding = SharedByteInts.shared((1, 0), group, scales=scale.dtype, zeros=zero.dtype, **settings)
    parts = {role: WeightPart(info) for role, info in ((CODES, codes), (SCALE, scale), (ZERO, zero))}
    return Packing(encoding, codes, parts, marks)
