"""Stored bytes → float64, and the spacing of the values that each dtype can hold, as numpy and ml_dtypes have them.

Nothing of the production code's casts is used: a wrong one must not be repeated here.
"""

from __future__ import annotations

from functools import cache
from math import log2
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...dtypes import DTYPE_ROWS, WHOLE_DTYPES

Array = NDArray[Any]

_EXPONENT: Final = np.int64(0x7FF << 52)  # the bits of a float64 that hold it
_LARGEST: Final = 2.0**971  # the step below the largest float64; infinity has none


@cache
def _kind(dtype: str) -> Any:
    """Return the numpy dtype; ml_dtypes, which adds formats to numpy, is imported when one of them is met."""
    row = DTYPE_ROWS[dtype]
    if row.code:
        return np.dtype(f"<{row.code}")
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, row.library))


@cache
def _of_bytes(dtype: str) -> Array:
    """Return the value of each of the 256 bytes in a dtype of one byte: this table takes a third of the time of a
    conversion."""
    return np.arange(256, dtype=np.uint8).view(_kind(dtype)).astype(np.float64)


def decode(raw: bytes | bytearray | memoryview, dtype: str) -> Array:
    """Return the elements as float64, integers as int64, in one dimension."""
    if dtype[:2] == "F8":
        return _of_bytes(dtype)[np.frombuffer(raw, np.uint8)]
    with np.errstate(invalid="ignore"):  # a signalling NaN is no reason to warn
        return np.frombuffer(raw, _kind(dtype)).astype(np.int64 if dtype in WHOLE_DTYPES else np.float64)


def as_dtype(values: Array, dtype: str) -> Array:
    """Return the values as a dtype holds them, in float64 for F64 and else in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values).astype(_kind(dtype)).astype(np.float64 if dtype == "F64" else np.float32)


@cache
def _precision(dtype: str) -> tuple[int, int, float]:
    """Return the bits of a significand with the leading 1, the exponent of the smallest step and the largest number."""
    import ml_dtypes

    of = ml_dtypes.finfo(_kind(dtype))  # type: ignore[no-untyped-call]
    return int(of.nmant) + 1, round(log2(float(of.smallest_subnormal))), float(of.max)


class Floats:
    """The values of a floating-point dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.digits, self._smallest, self.largest = _precision(dtype)  # bits of a significand, exponent, number

    def step(self, values: Array) -> Array:
        """Return the distance of neighbouring values around each value: one unit in the last place."""
        power = (values.view(np.int64) & _EXPONENT).view(np.float64)  # of two, below each value
        unit = power * 2.0 ** (1 - self.digits)
        smallest = 2.0**self._smallest
        return np.minimum(np.maximum(unit, smallest, out=unit), _LARGEST, out=unit)  # np.clip takes five times as long

    def rounded(self, values: Array) -> Array:
        """Return the nearest values, ties to even; nothing overflows."""
        unit = self.step(values)
        return np.rint(values / unit) * unit

    def saturated(self, values: Array) -> Array:
        """Return the values, cut to the range; infinite ones stay, except in e4m3, which has no infinity."""
        clipped = np.clip(values, -self.largest, self.largest)
        return clipped if self.dtype == "F8_E4M3" else np.where(np.isinf(values), values, clipped)

    def beyond(self, values: Array) -> Array:
        """Return which values are too large after rounding."""
        over = np.abs(self.rounded(values)) > self.largest
        return over if self.dtype == "F8_E4M3" else over & np.isfinite(values)
