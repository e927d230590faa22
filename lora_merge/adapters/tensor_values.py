"""The values of stored tensors, read a few rows at a time: single ones, and for comparisons. No torch."""

from __future__ import annotations

import struct
from functools import lru_cache
from math import ldexp, nan, prod
from typing import Final

from ..disk.reader import Reader, read_bytes
from ..dtypes import DTYPE_ROWS, ITEM_BYTES, StoredTensor

COMPARED_VALUES: Final = 2**20
"""Values of either tensor that are compared at once."""

COMPARED_BYTES: Final = 4 << 20  # bytes of each of two tensors that are compared at once

READ_AS: Final = {**{name: f"<{DTYPE_ROWS[name].code}" for name in ("F64", "F32", "F16")}, "BF16": "<u2"}
"""Dtypes that models are trained in, as numpy reads them."""

UPPER_HALF: Final = {"BF16": "F32", "F8_E5M2": "F16"}
"""Dtype → the dtype whose upper half it is."""


class FileValues:
    """The values of stored tensors. A reader keeps the files open: an alpha per module makes thousands of reads."""

    def __init__(self, reader: Reader | None = None) -> None:
        self._reader = reader

    def elements(self, info: StoredTensor) -> tuple[float, ...]:
        """Return all elements of a small tensor of any stored dtype."""
        if not info.nbytes:
            return ()
        raw, dtype = bytes(self._bytes(info, 0, info.nbytes)), info.dtype
        if dtype == "F8_E4M3":
            return tuple(map(e4m3, raw))
        if dtype in UPPER_HALF:
            half, dtype = ITEM_BYTES[dtype], UPPER_HALF[dtype]
            raw = b"".join(bytes(half) + raw[i : i + half] for i in range(0, len(raw), half))
        return struct.unpack(f"<{len(raw) // ITEM_BYTES[dtype]}{DTYPE_ROWS[dtype].code}", raw)

    def same(self, a: StoredTensor, b: StoredTensor) -> bool:
        """Return whether two tensors are equal, byte for byte."""
        sizes = ((at, min(COMPARED_BYTES, a.nbytes - at)) for at in range(0, a.nbytes, COMPARED_BYTES))
        return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
            self._bytes(a, at, size) == self._bytes(b, at, size) for at, size in sizes
        )

    def differing(self, copy: StoredTensor, base: StoredTensor) -> int:
        """Return how many rows of two tensors of one shape differ by more than the rounding to the copy's dtype. Rows
        of codes of one dtype are compared as bytes."""
        import numpy as np

        cols, rows = prod(base.shape[1:]), base.shape[0]
        same = copy.dtype == base.dtype and copy.nbytes == base.nbytes and not base.nbytes % max(rows, 1)
        if not same and not {copy.dtype, base.dtype} <= READ_AS.keys():
            return rows
        step, count = max(1, COMPARED_VALUES // max(cols, 1)), 0
        for low in range(0, rows, step):
            height = min(step, rows - low)
            expected, stored = (_rows(info, low, height) for info in (base, copy))
            if copy.dtype != base.dtype:
                expected = _cast(expected, base.dtype, copy.dtype)
            if expected != stored:
                a, b = (np.frombuffer(raw, np.uint8).reshape(height, -1) for raw in (expected, stored))
                count += int((a != b).any(axis=1).sum())
        return count

    def zero_outside(self, info: StoredTensor, rows: tuple[int, int], columns: tuple[int, int]) -> bool:
        """Return whether these rows of a tensor, seen as a matrix, hold only zeros outside these columns."""
        import numpy as np

        size, cols = ITEM_BYTES[info.dtype], prod(info.shape[1:])
        step = max(1, COMPARED_VALUES // max(cols, 1))
        for low in range(*rows, step):
            count = min(step, rows[1] - low)
            raw = self._bytes(info, low * cols * size, count * cols * size)
            bits = np.frombuffer(raw, f"<u{size}").reshape(count, cols) << 1  # without the sign: -0 is 0
            if bits[:, : columns[0]].any() or bits[:, columns[1] :].any():
                return False
        return True

    def _bytes(self, info: StoredTensor, first: int, count: int) -> bytes | bytearray:
        return (self._reader.read if self._reader else read_bytes)(info, first, count)


def is_all_zeros(info: StoredTensor, values: FileValues) -> bool:
    """Return whether all values of a tensor are zeros."""
    return values.zero_outside(info, (0, info.shape[0] if info.shape else 1), (0, 0))


def _rows(info: StoredTensor, first: int, count: int) -> bytes:
    """Return the bytes of rows, of which codes take as many as the file has. A reader has not opened the base."""
    size = info.nbytes // info.shape[0]
    return read_bytes(info, first * size, count * size)


def _cast(raw: bytes, dtype: str, other: str) -> bytes:
    """Return the bytes of the same values in another dtype, rounded to nearest even."""
    import numpy as np

    values = np.frombuffer(raw, READ_AS[dtype])
    if dtype == "BF16":
        values = (values.astype("<u4") << 16).view("<f4")
    if other == "BF16":
        bits = values.astype("<f4").view("<u4")
        values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    with np.errstate(over="ignore", invalid="ignore"):
        rounded: bytes = values.astype(READ_AS[other], copy=False).tobytes()
    return rounded


@lru_cache(maxsize=256)
def e4m3(byte: int) -> float:
    """Return the number that a byte encodes in F8_E4M3 (no infinities, one NaN); arXiv:2209.05433, table 1."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = nan if byte & 127 == 127 else ldexp(mantissa + 8 * (exponent > 0), max(exponent, 1) - 10)
    return -size if byte >> 7 else size
