"""4-bit codes in halves of bytes, and whole numbers packed into words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..grids import Grid, Table
from ..reference.floats import Array, decode
from .numbers import BadPart, nonzero, places, scales

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(raw: Any, *, high_first: bool) -> Array:
    """Return the 4-bit codes of bytes, in the order of the columns."""
    pairs = np.frombuffer(raw, np.uint8)[:, None] >> np.array([4, 0] if high_first else [0, 4], np.uint8)
    return np.asarray(pairs & np.uint8(15)).reshape(-1)


def fp4(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return e2m1 numbers with scales of blocks and of the whole weight."""
    levels = E2M1[nibbles(raw["codes"], high_first=encoding.high_first)]
    found = decode(raw["scale"], "F8_E8M0" if encoding.kind == "E8M0" else "F8_E4M3")
    if not (np.isfinite(found) & (found >= 0)).all():
        raise BadPart("a scale is negative or no number")
    if "whole" in raw:
        (whole,) = scales(raw["whole"], "F32")
        found = found / whole if encoding.divided else found * whole
    if encoding.swizzled:
        shape = count // encoding.cols, encoding.cols
        return levels, Grid(Table(E2M1), nonzero(found[places(shape, (1, encoding.size), count, tiles=True)]))
    scale = np.repeat(nonzero(found), encoding.size)
    if encoding.turned:
        levels, scale = (v.reshape(-1, encoding.turned, encoding.cols).swapaxes(1, 2).ravel() for v in (levels, scale))
    return levels, Grid(Table(E2M1), scale)


def packed_ints(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers of 4 or 8 bits, with scales and zero points of groups."""
    bits, cols, half = encoding.bits, encoding.cols, 2 ** (encoding.bits - 1)
    rows, across = count // cols, cols // encoding.size
    levels = _unpacked(raw["codes"], bits).reshape(rows, -1)[:, :cols] - half
    column = np.arange(cols) // encoding.size
    if "order" in raw:
        column = np.frombuffer(raw["order"], "<i4")
    scale = scales(raw["scale"], encoding.scales).reshape(rows, across)[:, column]
    shift: Any = 0.0
    if encoding.zeros:
        words = _unpacked(raw["zero"], bits).reshape(-1, across, 32 // bits)
        zero = words.transpose(0, 2, 1).reshape(-1, across)[:rows, column] - half
        shift = (-zero * scale).reshape(-1)
    return levels.reshape(-1).astype(np.float64), Grid(Table(np.arange(-half, half)), scale.reshape(-1), shift)


def _unpacked(raw: Any, bits: int) -> Array:
    """Return the whole numbers of words, from the lowest bits on."""
    words = np.frombuffer(raw, "<u4").astype(np.int64)
    return np.asarray(words[:, None] >> np.arange(0, 32, bits) & (2**bits - 1)).reshape(-1)
