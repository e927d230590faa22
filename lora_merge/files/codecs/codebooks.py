"""Codes that choose from tables which were fitted to each weight: AQLM, and ComfyUI's asym_w4a8_int8 and awq_w4a16.

They are read, never written: tables, or scales beside them, were fitted to the old numbers.

AQLM: eight numbers of a row are the sum of one entry of each codebook, times a scale of the row. Codes are stored in
two's complement. asym_w4a8_int8: 4 or 6 bits, a level of a table times a scale of its group, rounded to int8, times a
scale of its row; rotated. awq_w4a16: (q − 8) · s + z with s and z for each group of columns, stored column by column.
https://github.com/Vahe1994/AQLM inference_lib/src/aqlm/utils.py; https://github.com/comfyanonymous/ComfyUI
comfy/quant_ops.py; comfy-kitchen tensor/w4a8_int8.py, tensor/awq_w4a16.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, Final

from ...dtypes import ITEM_BYTES
from .base import CODES, FLOATS, Checkpoint, Claim, Encoding, Packing, Part, Parts, claimed, finite
from .comfy import Layer, layers
from .fp8_scaled import rotation_of
from .scaled import SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

BOOK: Final = "book"
"""Role of the numbers that codes choose from."""

ROW: Final = "row"
"""Role of the scales of rows."""

BOOKS: Final = 1 << 24
"""Numbers of all codebooks of a weight; released models have at most half a million."""

NUMBERS: Final = "a scale or a number of a table"
FITTED: Final = "its tables or scales were fitted to the old numbers"


@dataclass(frozen=True, eq=False)
class Aqlm(Encoding):
    """Sums of entries of codebooks, times a scale for each row."""

    cols: int = 0
    books: int = 1
    entries: int = 0  # of each codebook
    width: int = 8  # numbers of an entry
    wide: bool = False  # whether a code takes two bytes
    numbers: str = "F16"  # dtype of the codebooks
    scales: str = "F16"
    name: ClassVar[str] = "aqlm"
    decode_only: ClassVar[str] = FITTED

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return Σ book[q] · s in fp32."""
        import torch

        codes = parts[CODES].view(torch.int16 if self.wide else torch.int8).view(-1, self.books).long()
        book = finite(parts[BOOK], NUMBERS).view(self.books, self.entries, self.width)
        values = sum(book[n][codes[:, n] % self.entries] for n in range(self.books))
        found: Tensor = values.view(-1, self.cols) * finite(parts[SCALE], NUMBERS)[:, None]  # type: ignore[union-attr]
        return found


@dataclass(frozen=True, eq=False)
class Grouped(Encoding):
    """Levels times a scale for each group, rounded to whole numbers, times a scale for each row; rotated."""

    cols: int = 0
    size: int = 16  # columns of a group
    bits: int = 4
    rotation: int = 256
    kind: str = "F8_E4M3"  # dtype of the scales of groups
    name: ClassVar[str] = "asym_w4a8_int8"
    decode_only: ClassVar[str] = FITTED

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return 1, self.size

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return round(level · s of the group) · s of the row in fp32, in the basis of the model."""
        from . import arithmetic, few_bits

        raw = parts[CODES].view(arithmetic.BYTE).view(count // self.cols, -1)
        codes = few_bits.from_bits(raw[:, : self.cols // 2], 4).int()
        if self.bits == 6:
            high = few_bits.from_stream(raw[:, self.cols // 2 :].reshape(-1), 2)
            codes = codes | high.view(codes.shape).int() << 4
        levels = finite(parts[BOOK], NUMBERS)[codes] if BOOK in parts else codes.float() - 2 ** (self.bits - 1)
        group = parts[SCALE] if self.kind == "F32" else arithmetic.from_bytes(parts[SCALE], "F8_E4M3")
        whole = levels.view(-1, self.size) * finite(group, NUMBERS).view(-1, 1)
        values = whole.clamp(-127, 127).round().view(-1, self.cols) * finite(parts[ROW], NUMBERS)[:, None]
        return arithmetic.rotated(values.view(-1), self.rotation)


@dataclass(frozen=True, eq=False)
class Columns(Encoding):
    """Whole numbers of 4 bits with scales and zero points of groups, (q − 8) · s + z."""

    shape: tuple[int, int] = (0, 0)
    scales: str = "BF16"  # dtype of scales and zero points
    name: ClassVar[str] = "awq_w4a16"
    decode_only: ClassVar[str] = FITTED

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return (q − 8) · s + z in fp32."""
        from . import arithmetic, few_bits

        rows, cols = self.shape
        low, high = first // cols, (first + count) // cols
        scale, zero = (
            finite(parts[role], NUMBERS).view(-1, rows)[:, low:high].t()[:, :, None] for role in (SCALE, ZERO)
        )
        codes = few_bits.from_bits(parts[CODES].view(arithmetic.BYTE), 4).float()
        return (codes.view(high - low, scale.shape[1], -1) - 8) * scale + zero


def aqlm(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of AQLM whose entries stand for numbers of one row."""
    for stem in found.stems("codebooks") if found.config.get("quant_method") == "aqlm" else ():
        codes, book, scale = found.get(stem, "codes"), found.tensors[f"{stem}.codebooks"], found.get(stem, "scales")
        if codes is None or scale is None or len(codes.shape) != 3 or len(book.shape) != 4 or not codes.nbytes:
            continue
        (rows, across, books), (_, entries, height, width) = codes.shape, book.shape
        if codes.dtype not in ("I8", "I16") or (book.shape[0], height) != (books, 1) or not width or not entries:
            continue
        if (
            prod(book.shape) > BOOKS
            or entries > 2 ** (8 * ITEM_BYTES[codes.dtype])
            or entries & (entries - 1)
            or prod(scale.shape) != rows
        ):
            continue
        if not {book.dtype, scale.dtype} <= {*FLOATS}:
            continue
        cols, size = across * width, books * ITEM_BYTES[codes.dtype]
        encoding = Aqlm.shared((width, size), cols, cols=cols, books=books, entries=entries, width=width,
                         wide=codes.dtype == "I16", numbers=book.dtype, scales=scale.dtype, label="AQLM")  # fmt: skip
        parts = {BOOK: Part(book), SCALE: Part(scale, cols, ITEM_BYTES[scale.dtype])}
        yield claimed(codes, f"{stem}.weight", (rows, cols), Packing(encoding, codes, parts))


def comfy(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of ComfyUI's files in these formats."""
    for stem, layer in layers(found):
        make = {"asym_w4a8_int8": _grouped, "awq_w4a16": _columns}.get(layer.form)
        if make is not None and (made := make(found, stem, layer)) is not None:
            yield made


def _grouped(found: Checkpoint, stem: str, layer: Layer) -> Claim | None:
    codes, group, row = (found.get(stem, last) for last in ("weight", "weight_s_rel", "weight_s_channel"))
    book, size, rotation = found.get(stem, "weight_codebook"), layer.options.get("group_size", 16), rotation_of(layer)
    if codes is None or group is None or row is None or found.present(stem, "weight_correction"):
        return None
    if codes.dtype not in ("I8", "U8") or len(codes.shape) != 2 or len(group.shape) != 2 or not codes.nbytes:
        return None
    rows, across = group.shape
    cols = across * size if isinstance(size, int) and size > 0 else 0
    bits = codes.shape[1] * 8 // cols if cols else 0
    if bits not in (4, 6) or codes.shape != (rows, cols * bits // 8) or cols % 16 or not rotation or cols % rotation:
        return None
    if group.dtype not in ("F8_E4M3", "U8", "F32") or (row.dtype, prod(row.shape)) != ("F32", rows):
        return None
    if book is not None and ((book.dtype, book.shape) != ("F32", (16,)) or bits == 6):
        return None
    kind = "F32" if group.dtype == "F32" else "F8_E4M3"
    encoding = Grouped.shared((cols, codes.shape[1]), cols, cols=cols, size=size, bits=bits, rotation=rotation,
                               kind=kind, label=layer.form)  # fmt: skip
    parts = {SCALE: Part(group, size, ITEM_BYTES[group.dtype]), ROW: Part(row, cols, 4)}
    parts |= {BOOK: Part(book)} if book is not None else {}
    return claimed(codes, codes.name, (rows, cols),
                   Packing(encoding, codes, parts, found.present(stem, "comfy_quant", "input_scale")))  # fmt: skip


def _columns(found: Checkpoint, stem: str, layer: Layer) -> Claim | None:
    codes, scale, zero = (found.get(stem, last) for last in ("weight", "weight_scale", "weight_zeros"))
    size = layer.options.get("group_size", 64)
    if codes is None or scale is None or zero is None or codes.dtype not in ("I8", "U8") or len(codes.shape) != 2:
        return None
    rows, cols = codes.shape[0], codes.shape[1] * 2
    if not rows or not isinstance(size, int) or size < 1 or cols % size or scale.dtype not in FLOATS:
        return None
    if scale.shape != (cols // size, rows) or (zero.dtype, zero.shape) != (scale.dtype, scale.shape) or not cols:
        return None
    encoding = Columns.shared((2, 1), cols, shape=(rows, cols), scales=scale.dtype, label=layer.form)
    parts = {SCALE: Part(scale), ZERO: Part(zero)}
    return claimed(codes, codes.name, (rows, cols),
                   Packing(encoding, codes, parts, found.present(stem, "comfy_quant", "input_scale")))  # fmt: skip
