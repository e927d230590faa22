"""The encoding of GGUF: blocks of 32 or 256 values with their scales inside.

What llama.cpp's converter does to values (names.py) is part of the encoding: the rows of each head of q and k in
another order, norms plus one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...dtypes import DTYPE_ROWS
from ..encodings.base import CODES, DRAW, Encoding, OutOfRange, PartValues
from .types import DECODED_ONLY_TYPES, GGML_TYPES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ggml(Encoding):
    """Values of one type, perhaps with the rows of each head in llama.cpp's order, perhaps shifted."""

    kind: str = ""
    head: int = 0
    """Rows of a head, if their two halves alternate in the file; else 0."""
    cols: int = 0
    """Values in a row; 0 without heads."""
    offset: float = 0.0
    """The number that is added to every number in the file."""
    from_zeros: ClassVar[bool] = True

    @property
    def title(self) -> str:
        """Return the name of the type."""
        return self.kind

    @property
    def quantised(self) -> bool:
        """Whether the values are blocks; F16 in another order is not quantised."""
        return self.kind not in DTYPE_ROWS

    def as_plain(self, dtype: str) -> Ggml | None:
        """Return the same with plain values of this dtype; None if these are stored as they are."""
        return self._of(dtype) if self.head or self.offset else None

    def as_type(self, kind: str) -> Ggml:
        """Return the same with new blocks of a type."""
        return self._of(kind, new_scales=True)

    def _of(self, kind: str, *, new_scales: bool = False) -> Ggml:
        return ggml(kind, head=self.head, cols=self.cols, offset=self.offset, new_scales=new_scales)

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return (1, self.unit[0]) if self.quantised else (0, 0)

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return the values, in fp32; InvalidPart for scales that are not finite values."""
        values = self._decoded(parts[CODES])
        if self.offset:
            values = values - self.offset
        if self.head:
            values = values.reshape(-1, self.head // 2, 2, self.cols).transpose(1, 2).reshape(-1)
        return values

    def encode(self, values: Tensor, parts: PartValues) -> PartValues:
        """Return the codes of new values; scales that cover them stay. OutOfRange if no scale does."""
        uniform = self._stored_order(parts[DRAW]) if DRAW in parts else None
        ordered = self._stored_order(values)
        return {CODES: self._encoded(ordered + self.offset if self.offset else ordered, parts[CODES], uniform)}

    def _stored_order(self, values: Tensor) -> Tensor:
        """Return values with the rows of each head in llama.cpp's order."""
        if not self.head:
            return values
        return values.reshape(-1, 2, self.head // 2, self.cols).transpose(1, 2).reshape(-1)

    def _decoded(self, codes: Tensor) -> Tensor:
        import torch

        if self.kind in DTYPE_ROWS:
            return codes.view(getattr(torch, DTYPE_ROWS[self.kind].library)).float()
        from .blocks import decode

        return decode(self.kind, codes)

    def _encoded(self, values: Tensor, codes: Tensor, uniform: Tensor | None) -> Tensor:
        import torch

        if self.kind in DTYPE_ROWS:
            if values.numel() and float(values.abs().max()) > DTYPE_ROWS[self.kind].room:
                raise OutOfRange
            from ..encodings.arithmetic import single
            from ..encodings.stochastic_rounding import to_floats

            values = values if self.kind == "F32" else single(values)
            if uniform is not None and self.kind != "F32":
                values = to_floats(values, self.kind, uniform)
            return values.to(getattr(torch, DTYPE_ROWS[self.kind].library)).view(torch.uint8)
        from .blocks import encode

        return encode(self.kind, values, codes, uniform)


@dataclass(frozen=True, eq=False)
class GgmlGrid(Ggml):
    """Points of a grid; read, never written."""

    from_zeros: ClassVar[bool] = False
    decode_only: ClassVar[str] = "its points were chosen with an importance matrix"

    def _decoded(self, codes: Tensor) -> Tensor:
        from .grids import decode

        return decode(self.kind, codes)


def ggml(kind: str, *, head: int = 0, cols: int = 0, offset: float = 0.0, new_scales: bool = False) -> Ggml:
    """Return the encoding of a type: one object for each, as weights that are stored alike are merged together."""
    unit = GGML_TYPES[kind].unit
    form = GgmlGrid if kind in DECODED_ONLY_TYPES else Ggml
    return form.shared(
        unit, max(unit[0], head * cols), kind=kind, head=head, cols=cols, offset=offset, new_scales=new_scales
    )
