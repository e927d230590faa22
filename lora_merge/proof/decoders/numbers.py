"""Scales and codes in numpy, as the decoders share them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference.floats import Array, decode


class BadPart(ValueError):
    """A scale that stands for no number."""


def scales(raw: Any, dtype: str, *, zero: bool = False) -> Array:
    """Return the scales as float64; BadPart unless all are positive, or 0 where a row of zeros has that."""
    found = decode(raw, "F8_E8M0" if dtype == "E8M0" else dtype)
    if not (np.isfinite(found) & ((found > 0) | (zero & (found == 0)))).all():
        raise BadPart("a scale is no positive number")
    return nonzero(found)


def places(shape: tuple[int, int], block: tuple[int, int], count: int, *, tiles: bool = False) -> Array:
    """Return, for each of `count` numbers from the first row of a block on, the place of its scale.

    `shape` is that of one matrix, `block` are the rows and columns with one scale. In tiles of 128 rows and 4 columns,
    the scale (r, c) lies at ((r // 128) * C + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4.
    """
    (rows, cols), (high, wide) = shape, block
    row, column = np.divmod(np.arange(count), cols)
    across, c = -(-cols // wide), column // wide
    if tiles:
        return np.asarray((row // 128 * -(-across // 4) + c // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + c % 4)
    matrix, inside = (row // rows, row % rows) if rows % high else (0, row)
    return np.asarray((matrix * -(-rows // high) + inside // high) * across + c)


def turned(size: int) -> Any:
    """Return the function that rotates the rows of a matrix in groups of columns; None for no rotation."""
    if not size:
        return None
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    matrix: Array = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, four)
    return lambda values: (values.reshape(-1, size) @ matrix).reshape(values.shape)


def nonzero(scale: Array) -> Array:
    """Return scales; a block with the scale 0 can hold nothing but 0."""
    return np.where(scale > 0, scale, np.finfo(np.float64).tiny)
