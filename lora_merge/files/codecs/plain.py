"""The codec of plain numbers: a dtype of the container, without small tensors."""

from __future__ import annotations

from functools import cache
from math import gcd
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ...dtypes import ITEM_BITS
from .base import Codec, Encoding, Packing, Sides

if TYPE_CHECKING:
    from torch import Tensor


def _as_they_are(numbers: Tensor, _: Sides, __: int) -> Tensor:
    return numbers


PLAIN: Final = Codec("plain", decode=_as_they_are, encode=_as_they_are)


@cache
def plain(dtype: str) -> Packing:
    """Return the packing of a weight of plain numbers; one object for each dtype."""
    bits = ITEM_BITS[dtype]
    shared = gcd(bits, 8)
    return Packing(Encoding(PLAIN, dtype, (8 // shared, bits // shared)), MappingProxyType({}))
