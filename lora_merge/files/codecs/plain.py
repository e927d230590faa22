"""The codec of plain numbers: a dtype of the container, without small tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from ...dtypes import ITEM_BITS
from .base import CODES, Encoding, Packing, Parts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plain(Encoding):
    """Numbers of a dtype of the container."""

    dtype: str = ""
    name: ClassVar[str] = "plain"

    @property
    def title(self) -> str:
        """Return the dtype."""
        return self.dtype

    @property
    def plain(self) -> bool:
        """Whether the stored numbers are the weight."""
        return True

    def decode(self, parts: Parts, first: int, count: int) -> Tensor:
        """Return the stored numbers."""
        return parts[CODES]


@cache
def plain(dtype: str) -> Packing:
    """Return the packing of a weight of plain numbers; one object for each dtype."""
    bits = ITEM_BITS[dtype]
    shared = gcd(bits, 8)
    return Packing(Plain((8 // shared, bits // shared), dtype=dtype))
