"""Stored bytes → float64, and the spacing of the numbers that each dtype can hold. numpy only, bit by bit.

Written anew on purpose: a wrong cast of the production code must not be repeated here.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PRECISION: Final = {  # dtype → bits of a significand with the leading one, exponent of the smallest step, largest
    "F64": (53, -1074, float(np.finfo(np.float64).max)),
    "F32": (24, -149, float(np.finfo(np.float32).max)),
    "F16": (11, -24, 65504.0),
    "BF16": (8, -133, 3.3895313892515355e38),
    "F8_E4M3": (4, -9, 448.0),
    "F8_E5M2": (3, -16, 57344.0),
}

_PLAIN: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
                 "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "<u1"}  # fmt: skip


_EXPONENT: Final = np.int64(0x7FF << 52)  # the bits of a float64 that hold it
_LARGEST: Final = 2.0**971  # the step below the largest float64; infinity has none


def _e4m3() -> Array:
    """The value of each of the 256 bytes; 0x7F and 0xFF are NaN, there is no infinity."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, (byte & 7) / 8
    value = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    value[[0x7F, 0xFF]] = np.nan
    return np.where(byte & 128, -value, value)


_E4M3: Final = _e4m3()


def decode(raw: bytes | bytearray | memoryview, dtype: str) -> Array:
    """The elements as float64, integers as int64, in one dimension."""
    if dtype == "BF16":
        wide = np.frombuffer(raw, "<u2").astype(np.uint32) << 16
        with np.errstate(invalid="ignore"):  # a signalling NaN is no reason to warn
            return wide.view(np.float32).astype(np.float64)
    if dtype == "F8_E4M3":
        return _E4M3[np.frombuffer(raw, np.uint8)]
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (np.frombuffer(raw, np.uint8).astype(np.uint16) << 8).view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return np.frombuffer(raw, _PLAIN[dtype]).astype(np.float64 if dtype[0] == "F" else np.int64)


def step(values: Array, dtype: str) -> Array:
    """The distance of neighbouring numbers of the dtype around each value: one unit in the last place."""
    bits, smallest, _ = PRECISION[dtype]
    power = (values.view(np.int64) & _EXPONENT).view(np.float64)  # of two, below each value
    return np.clip(power * 2.0 ** (1 - bits), 2.0**smallest, _LARGEST)


def rounded(values: Array, dtype: str) -> Array:
    """The nearest numbers of the dtype, ties to even; nothing overflows."""
    unit = step(values, dtype)
    return np.rint(values / unit) * unit


def saturated(values: Array, dtype: str) -> Array:
    """Cut to the range of the dtype; what is infinite stays so, but in e4m3, which has no infinity."""
    largest = PRECISION[dtype][2]
    held = np.clip(values, -largest, largest)
    return held if dtype == "F8_E4M3" else np.where(np.isinf(values), values, held)


def beyond(values: Array, dtype: str) -> Array:
    """Which numbers the dtype has no room for: rounded, they are larger than its largest."""
    over = np.abs(rounded(values, dtype)) > PRECISION[dtype][2]
    return over if dtype == "F8_E4M3" else over & np.isfinite(values)
