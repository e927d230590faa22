"""Numbers of files in fp32, and back in 16 bits, by numpy. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite
from types import MappingProxyType
from typing import Final, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ...disk.files import StoredTensor
from ...disk.reader import Reader
from ..truncation.effect import LARGE, SMALL

Matrix = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Raw: TypeAlias = bytearray | Bits | Bytes

OF_HALF: Final = np.int32(-0x70002000)
"""The bits of fp32 that an exponent of five bits, ten bits of a significand and a sign take."""

CANCELS: Final = 1e-2
"""The share of the squares of all columns from which on the square of their sum has digits enough."""

ROOM: Final = 8.0
"""By how much numbers of usual size are inside the range of a dtype, so that most of a column is."""

TINY: Final = MappingProxyType({"F16": 2.0**-14})
"""dtype of less range than fp32 → the smallest number that it holds with all its digits."""

PRODUCTS: Final = 32
"""Tables of products that are kept, of 128 KiB each: most layers have the same α / rank."""

PATTERNS: Final = MappingProxyType({"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000})
"""dtype → the bits of infinity; those of NaN are larger."""


class Distinct:
    """Finds equal arrays in a time that grows with their number: by a checksum, then byte by byte."""

    def __init__(self) -> None:
        self._by_sum: dict[tuple[object, int], list[tuple[int, Bytes]]] = {}

    def first(self, number: int, raw: memoryview, kind: object = None) -> int:
        """Return the number of the first array with these bytes, this one's own if it is new. `kind`: what has to be
        equal too, such as the shape."""
        bits, alike = np.frombuffer(raw, np.uint8), self._by_sum.setdefault((kind, crc32(raw)), [])
        for other, there in alike:
            if np.array_equal(bits, there):
                return other
        alike.append((number, bits))
        return number


def _of_half(raw: Raw) -> Matrix:
    """Return numbers of fp16 in fp32, in a seventh of numpy's time: the bits are moved, and the exponent is corrected
    by a product, which is exact for subnormals too. They have to be finite."""
    bits = np.frombuffer(raw, np.int16).astype(np.int32)
    bits <<= 13
    bits &= OF_HALF  # without the copies of the sign
    numbers: Matrix = bits.view(np.float32)
    numbers *= np.float32(2.0**112)
    return numbers


def _of_bfloat(raw: Raw) -> Matrix:
    bits = np.frombuffer(raw, np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _of_single(raw: Raw) -> Matrix:
    return np.frombuffer(raw, np.float32)


WIDEN: Final[Mapping[str, Callable[[Raw], Matrix]]] = MappingProxyType(
    {"F16": _of_half, "BF16": _of_bfloat, "F32": _of_single}
)
"""dtype → function that returns stored numbers in fp32."""


def narrowed(numbers: Matrix, dtype: str) -> Bits:
    """Return the bits of the nearest numbers of a dtype of 16 bits, ties to even; infinity for those too large."""
    with np.errstate(all="ignore"):
        if dtype == "F16":
            return numbers.astype(np.float16).view(np.uint16)
        wide = numbers.view(np.uint32)
        return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)


@lru_cache(maxsize=PRODUCTS)
def products(dtype: str, weight: float) -> Bits:
    """Return the products of all numbers of a dtype of 16 bits and a weight, rounded once, in the order of the numbers'
    bits; those of infinity and NaN have no meaning. To look one up takes a quarter of the time of numpy's rounding to
    fp16."""
    every = WIDEN[dtype](np.arange(2**16, dtype=np.uint16))
    with np.errstate(all="ignore"):
        return narrowed((every.astype(np.float64) * weight).astype(np.float32), dtype)


def is_finite(raw: Raw, dtype: str) -> bool:
    """Return whether all stored numbers are finite: their bits without the sign are smaller than those of infinity."""
    kind = np.uint32 if dtype == "F32" else np.uint16
    bits = np.frombuffer(raw, kind)
    return int((bits & (np.iinfo(kind).max >> 1)).max(initial=0)) < PATTERNS[dtype]


def stored(reader: Reader, info: StoredTensor) -> Bytes:
    """Return the bytes of a tensor, in memory that was not zeroed first."""
    raw = np.empty(info.nbytes, np.uint8)
    reader.read_into(raw.data, info.source, info.offset)
    return raw


def product(columns: Matrix, rows: Matrix) -> float | None:
    """Return ‖L R‖² from LᵀL and R Rᵀ in fp32; None where fp32 does not tell it."""
    alone = float(np.vdot(columns.diagonal().astype(np.float64), rows.diagonal()))
    found = float(np.einsum("ij,ij->", columns, rows, dtype=np.float64))
    return found if is_told(found, alone) else None


def is_below(products: Matrix, largest: float | npt.NDArray[np.float64]) -> bool:
    """Return whether all numbers of columns are surely below a limit, from the products of the columns: none is larger
    than the norm of its column. Infinity and NaN are not below a limit that their dtype holds."""
    return bool((products.diagonal() < np.square(largest)).all())


def is_told(squares: float, alone: float) -> bool:
    """Return whether fp32 tells a sum of squares: it is finite, of its range, and no difference of larger numbers.
    `alone`: the sum of the squares of its terms."""
    return isfinite(alone) and SMALL < squares < LARGE and squares > CANCELS * alone
