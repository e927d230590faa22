"""Codes plus a product of two factors, perhaps rotated: W = (decoded + up · down) · H.

`LowRank` adds the product to another encoding: the factors stay as they are, and what they leave of new values is
encoded. `LowRankSums` holds codes of other bits and of convolutions; it is read, never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm, prod
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from ...dtypes import ITEM_BYTES, Shape, StoredTensor
from .base import CODES, SCALE_DTYPES, Encoding, Packing, PartValues, WeightPart, finite
from .scaled_codes import SCALE, ZERO

if TYPE_CHECKING:
    from torch import Tensor

UP: Final = "up"
DOWN: Final = "down"


@dataclass(frozen=True, eq=False)
class LowRank(Encoding):
    """The values of another encoding, plus a product, in a rotated basis or not."""

    inner: Encoding = field(default_factory=lambda: Encoding((1, 1)))
    cols: int = 0
    rank: int = 0  # 0 without a product
    rotation: int = 0  # columns that are rotated together; 0 without a rotation
    factors: str = "F32"  # dtype of the factors
    from_zeros: ClassVar[bool] = True
    fixed: ClassVar[frozenset[str]] = frozenset((UP, DOWN))

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return self.inner.block_of_scale

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return (decoded + up · down) · H in fp32."""
        from . import arithmetic

        values = self.inner.decode(parts, first, count).reshape(-1, self.cols)
        values = values + self._product(parts) if self.rank else values
        return arithmetic.rotated(values, self.rotation) if self.rotation else values

    def encode(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return codes and scales of what the product leaves."""
        from . import arithmetic

        values = arithmetic.rotated(values, self.rotation) if self.rotation else values
        if self.rank:
            values = (values.view(-1, self.cols) - self._product(parts)).view(-1)
        return self.inner.encode(values, parts)

    def _product(self, parts: PartValues) -> Tensor:
        """Return up · down in fp32; InvalidPart if a factor is not finite."""
        up, down = (finite(parts[role], "a factor") for role in (UP, DOWN))
        return up.view(-1, self.rank) @ down.view(self.rank, -1)


@dataclass(frozen=True, eq=False)
class LowRankSums(Encoding):
    """q · s + z + up · down, in the basis of the model."""

    dtype: str = ""  # of codes of one byte; "" if several codes share bytes
    bits: int = 8
    lowest: int = 0  # the number of the code 0 of packed codes
    shape: tuple[int, int, int] = (1, 1, 1)  # groups, columns of a group, places of a kernel
    rank: int = 0
    rotation: int = 0
    scales: str = "F32"
    factors: str = "F32"
    decode_only: ClassVar[str] = "that is done for matrices of 8, 4 and 2 bits alone"

    @property
    def cols(self) -> int:
        """Columns of the weight, as a matrix."""
        return prod(self.shape)

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale."""
        return (1, self.shape[1]) if self.shape[2] == 1 else (0, 0)

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return the values in fp32."""
        import torch

        from . import arithmetic, bit_packing

        rows, (groups, _, places), what = count // self.cols, self.shape, "a scale or a factor"
        if self.dtype == "U8":
            levels = parts[CODES].view(arithmetic.BYTE).float()
        elif self.dtype:
            levels = arithmetic.from_bytes(parts[CODES].view(arithmetic.BYTE), self.dtype)
        else:
            levels = bit_packing.from_planes(parts[CODES].view(arithmetic.BYTE), self.bits).float() + self.lowest
        values: Tensor = levels.view(rows, *self.shape) * finite(parts[SCALE], what).view(rows, groups, 1, places)
        if ZERO in parts:
            values = values + finite(parts[ZERO], what).view(rows, groups, 1, places)
        values = values.view(rows, self.cols)
        if self.rank:
            values = torch.addmm(
                values, finite(parts[UP], what).view(rows, -1), finite(parts[DOWN], what).view(self.rank, -1)
            )
        return arithmetic.rotated(values, self.rotation) if self.rotation else values


class LowRankFactors(NamedTuple):
    """The factors of a weight, if it has them, and the columns that are rotated together, 0 for none."""

    up: StoredTensor | None
    down: StoredTensor | None
    rotation: int = 0

    def fit(self, rows: int, cols: int) -> bool:
        """Return whether both factors are there, and fit a matrix; or whether none is there."""
        up, down = self.up, self.down
        if up is None or down is None:
            return up is down
        same = up.dtype == down.dtype and up.dtype in SCALE_DTYPES and self.rank > 0
        return same and (up.shape, down.shape) == ((rows, self.rank), (self.rank, cols))

    @property
    def rank(self) -> int:
        """Columns of the first factor."""
        return self.up.shape[-1] if self.up is not None and self.up.shape else 0

    def parts(self, cols: int) -> Mapping[str, WeightPart]:
        """Return the parts that hold the factors."""
        if self.up is None or self.down is None:
            return {}
        return {UP: WeightPart(self.up, cols, self.rank * ITEM_BYTES[self.up.dtype]), DOWN: WeightPart(self.down)}


def with_factors(packing: Packing, shape: Shape, of: LowRankFactors) -> Packing | None:
    """Return how a matrix is stored with a low-rank part, or rotated; None if the factors do not fit it."""
    rows, cols = shape
    if not of.fit(rows, cols) or (of.rotation and cols % of.rotation):
        return None
    inner = packing.encoding
    encoding = LowRank.shared(
        inner.unit, lcm(inner.group, cols), label=inner.label, inner=inner, cols=cols, rank=of.rank,
        rotation=of.rotation, factors=of.up.dtype if of.up else "F32",
    )  # fmt: skip
    parts = {**packing.parts, **of.parts(cols)}
    return Packing(encoding, packing.codes, parts, packing.marks)
