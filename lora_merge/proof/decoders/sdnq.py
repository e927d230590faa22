"""Weights of SDNQ: q · s + z + up · down, in a rotated basis or not; codes of odd bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np

from ..grids import Floats, Grid, Table
from ..reference.floats import Array, decode
from .codes import BadPart, turned

Decoder: TypeAlias = Callable[[Mapping[str, Any], Any, int, int], tuple[Array, Grid]]

PLACES: Final = {
    3: [*([8 * n + p for p in range(3)] for n in range(3)), *([8 * n + p for p in range(3, 6)] for n in range(3)),
        [6, 7, 22], [14, 15, 23]],
    5: [*([8 * n + p for p in range(5)] for n in range(5)), [5, 6, 7, 29, 30], [13, 14, 15, 37, 38],
        [21, 22, 23, 39, 31]],
    6: [*([8 * n + p for p in range(6)] for n in range(3)), [22, 23, 14, 15, 6, 7]],
    7: [*([8 * n + p for p in range(7)] for n in range(7)), [55, 47, 39, 31, 23, 15, 7]],
}  # fmt: skip
"""Bits → for each number that is packed together the places of its bits in their bytes, the lowest first."""


def _finite(raw: Mapping[str, Any], role: str, dtype: str) -> Array:
    found = decode(raw[role], dtype)
    if not np.isfinite(found).all():
        raise BadPart(f"a number of its {role} is not finite")
    return found


def _packed(raw: Any, bits: int) -> Array:
    """Return the whole numbers of packed codes."""
    places = PLACES.get(bits, [range(n, n + bits) for n in range(0, 8, bits)])
    width = 8 * max(1, len(places) * bits // 8)
    found = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").reshape(-1, width)
    return np.asarray(found[:, np.array([list(p) for p in places])] @ (1 << np.arange(bits))).reshape(-1)


def low_rank(raw: Mapping[str, Any], encoding: Any, first: int, count: int, inner: Decoder) -> tuple[Array, Grid]:
    """Return the codes of another encoding, which `inner` decodes, with a product of two factors as a shift."""
    levels, grid = inner(raw, encoding.inner, first, count)
    product, size = _product(raw, encoding)
    spread = grid.scale if np.ndim(grid.scale) else np.full(count, float(grid.scale))
    return levels, replace(grid, scale=spread, shift=grid.shift + product, terms=np.abs(grid.shift) + size,
                           turn=turned(encoding.rotation))  # fmt: skip


def _product(raw: Mapping[str, Any], encoding: Any) -> tuple[Any, Any]:
    """Return the product of the factors, flat, and the sum of its terms' magnitudes; zeros without factors."""
    if not encoding.rank:
        return 0.0, 0.0
    up, down = (_finite(raw, role, encoding.factors).reshape(shape)
                for role, shape in (("up", (-1, encoding.rank)), ("down", (encoding.rank, -1))))  # fmt: skip
    return (up @ down).reshape(-1), (np.abs(up) @ np.abs(down)).reshape(-1)


def sums(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return codes, with their scales, and the zero points and the low-rank part as a shift."""
    groups, wide, places = encoding.shape
    cols = groups * wide * places
    rows = count // cols
    if encoding.dtype:
        levels = decode(raw["codes"], encoding.dtype).astype(np.float64)
    else:
        levels = _packed(raw["codes"], encoding.bits).astype(np.float64) + encoding.lowest

    def spread(role: str) -> Array:
        given = _finite(raw, role, encoding.scales).reshape(rows, groups, 1, places)
        return np.broadcast_to(given, (rows, groups, wide, places)).reshape(-1)

    shift = spread("zero") if "zero" in raw else np.zeros(count)
    product, size = _product(raw, encoding)
    grid = Floats(encoding.dtype) if encoding.dtype.startswith("F8") else Table(np.arange(-128, 256))
    return levels, Grid(grid, spread("scale"), shift + product, turned(encoding.rotation), np.abs(shift) + size)
