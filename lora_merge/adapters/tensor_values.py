"""Comparisons of stored tensors, a few rows at a time, and numbers of fp8. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ldexp, nan, prod
from typing import Final

from ..disk.files import StoredTensor
from ..disk.reader import read_bytes
from ..dtypes import ITEM_BYTES, TABLE

ELEMENTS: Final = 2**20
"""Numbers of either tensor that are compared at once."""


READ_AS: Final = {**{name: f"<{TABLE[name].code}" for name in ("F64", "F32", "F16")}, "BF16": "<u2"}
"""Dtypes that models are trained in, as numpy reads them."""

UPPER_HALF: Final = {"BF16": "F32", "F8_E5M2": "F16"}
"""Dtype → the dtype whose upper half it is."""


def differing(copy: StoredTensor, own: StoredTensor) -> int:
    """Return how many rows of two tensors of one shape differ by more than the rounding to the copy's dtype.

    Rows of codes of one dtype are compared as bytes, of which they take as many as the file has.
    """
    import numpy as np

    cols, rows = prod(own.shape[1:]), own.shape[0]
    same = copy.dtype == own.dtype and copy.nbytes == own.nbytes and not own.nbytes % max(rows, 1)
    if not same and not {copy.dtype, own.dtype} <= READ_AS.keys():
        return rows
    step, found = max(1, ELEMENTS // max(cols, 1)), 0
    for low in range(0, rows, step):
        count = min(step, rows - low)
        expected, found_bytes = (_read(t, low, count) for t in (own, copy))
        if copy.dtype != own.dtype:
            expected = _cast(expected, own.dtype, copy.dtype)
        if expected != found_bytes:
            a, b = (np.frombuffer(raw, np.uint8).reshape(count, -1) for raw in (expected, found_bytes))
            found += int((a != b).any(axis=1).sum())
    return found


def zero_outside(
    info: StoredTensor, rows: tuple[int, int], columns: tuple[int, int],
    read: Callable[[StoredTensor, int, int], bytes | bytearray],
) -> bool:  # fmt: skip
    """Return whether rows [a, b) of a tensor, seen as a matrix, hold only zeros outside columns [c, d).

    `read(tensor, first, count)` returns bytes of a tensor.
    """
    import numpy as np

    size, cols = ITEM_BYTES[info.dtype], prod(info.shape[1:])
    step = max(1, ELEMENTS // max(cols, 1))
    for low in range(*rows, step):
        count = min(step, rows[1] - low)
        raw = read(info, low * cols * size, count * cols * size)
        bits = np.frombuffer(raw, f"<u{size}").reshape(count, cols) << 1  # without the sign: -0 is 0
        if bits[:, : columns[0]].any() or bits[:, columns[1] :].any():
            return False
    return True


def _cast(raw: bytes, dtype: str, other: str) -> bytes:
    """Return the bytes of the same numbers in another dtype, rounded to nearest even."""
    import numpy as np

    values = np.frombuffer(raw, READ_AS[dtype])
    if dtype == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    if other == "BF16":
        bits = values.astype("<f4").view("<u4")
        values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    with np.errstate(over="ignore", invalid="ignore"):
        found: bytes = values.astype(READ_AS[other], copy=False).tobytes()
    return found


def _read(info: StoredTensor, first: int, count: int) -> bytes:
    """Return the bytes of rows."""
    size = info.nbytes // info.shape[0]
    return read_bytes(info, first * size, count * size)


@lru_cache(maxsize=256)
def e4m3(byte: int) -> float:
    """Return the number that a byte encodes in F8_E4M3 (no infinities, one NaN); arXiv:2209.05433, table 1."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = nan if byte & 127 == 127 else ldexp(mantissa + 8 * (exponent > 0), max(exponent, 1) - 10)
    return -size if byte >> 7 else size
