"""The numbers themselves, in a dtype of the container, with nothing beside them."""

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
    """Return how a weight is stored that is nothing but numbers of a dtype; the same object every time."""
    bits = ITEM_BITS[dtype]
    shared = gcd(bits, 8)
    return Packing(Encoding(PLAIN, dtype, (8 // shared, bits // shared)), MappingProxyType({}))
