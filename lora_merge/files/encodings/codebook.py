"""Codes that choose from tables which were fitted to each weight, or whose scales were. They are read, never written.

`Aqlm`: some values of a row are the sum of one entry of each codebook, times a scale of the row. Codes are stored in
two's complement. `GroupedCodebook` (asym_w4a8_int8): 4 or 6 bits, a level of a table times a scale of its group,
rounded to int8, times a scale of its row; rotated. `Columns` (awq_w4a16): (q − 8) · s + z with s and z for each group
of columns, stored column by column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from .base import CODES, Encoding, PartValues, finite
from .scaled_codes import SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

BOOK: Final = "book"
"""Role of the values that codes choose from."""

ROW_SCALE: Final = "row"
"""Role of the scales of rows."""

CODEBOOK_VALUES: Final = "a scale or a number of a table"
FITTED: Final = "its tables or scales were fitted to the old values"


@dataclass(frozen=True, eq=False)
class Aqlm(Encoding):
    """Sums of entries of codebooks, times a scale for each row."""

    cols: int = 0
    books: int = 1
    entries: int = 0  # of each codebook
    width: int = 8  # values of an entry
    wide: bool = False  # whether a code takes two bytes
    float_dtype: str = "F16"  # dtype of the codebooks
    scales: str = "F16"
    decode_only: ClassVar[str] = FITTED

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return Σ book[q] · s in fp32."""
        import torch

        codes = parts[CODES].view(torch.int16 if self.wide else torch.int8).view(-1, self.books).long()
        book = finite(parts[BOOK], CODEBOOK_VALUES).view(self.books, self.entries, self.width)
        values = sum(book[n][codes[:, n] % self.entries] for n in range(self.books))
        scaled: Tensor = values.view(-1, self.cols) * finite(parts[SCALE], CODEBOOK_VALUES)[:, None]  # type: ignore[union-attr]
        return scaled


@dataclass(frozen=True, eq=False)
class GroupedCodebook(Encoding):
    """Levels times a scale for each group, rounded to whole numbers, times a scale for each row; rotated."""

    cols: int = 0
    bits: int = 4
    rotation: int = 256
    kind: str = "F8_E4M3"  # dtype of the scales of groups
    decode_only: ClassVar[str] = FITTED

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return round(level · s of the group) · s of the row in fp32, in the basis of the model."""
        from . import arithmetic, bit_packing

        raw = parts[CODES].view(arithmetic.BYTE).view(count // self.cols, -1)
        codes = bit_packing.from_nibbles(raw[:, : self.cols // 2]).int()
        if self.bits == 6:
            high = bit_packing.from_stream(raw[:, self.cols // 2 :].reshape(-1), 2)
            codes = codes | high.view(codes.shape).int() << 4
        levels = finite(parts[BOOK], CODEBOOK_VALUES)[codes] if BOOK in parts else codes.float() - 2 ** (self.bits - 1)
        group = parts[SCALE] if self.kind == "F32" else arithmetic.from_bytes(parts[SCALE], "F8_E4M3")
        whole = levels.view(-1, self.size) * finite(group, CODEBOOK_VALUES).view(-1, 1)
        values = whole.clamp(-127, 127).round().view(-1, self.cols) * finite(parts[ROW_SCALE], CODEBOOK_VALUES)[:, None]
        return arithmetic.rotated(values.view(-1), self.rotation)


@dataclass(frozen=True, eq=False)
class Columns(Encoding):
    """Whole numbers of 4 bits with scales and zero points of groups, (q − 8) · s + z."""

    shape: tuple[int, int] = (0, 0)
    scales: str = "BF16"  # dtype of scales and zero points
    decode_only: ClassVar[str] = FITTED

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return (q − 8) · s + z in fp32."""
        from . import arithmetic, bit_packing

        rows, cols = self.shape
        low, high = first // cols, (first + count) // cols
        scale, zero = (
            finite(parts[role], CODEBOOK_VALUES).view(-1, rows)[:, low:high].t()[:, :, None] for role in (SCALE, ZERO)
        )
        codes = bit_packing.from_nibbles(parts[CODES].view(arithmetic.BYTE)).float()
        return (codes.view(high - low, scale.shape[1], -1) - 8) * scale + zero
