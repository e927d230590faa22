"""Codes of one byte times scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..grids import Floats, Grid, Table
from ..reference.floats import Array, decode
from .numbers import places, scales, turned


def scaled(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return fp8 numbers or whole numbers, with scales for the weight, its rows or its blocks."""
    levels = decode(raw["codes"], encoding.dtype).astype(np.float64)
    grid = Table(np.arange(encoding.lowest, 128)) if encoding.dtype == "I8" else Floats(encoding.dtype)
    scale = scales(raw["scale"], encoding.kind, zero=encoding.zero_rows) * encoding.factor
    if not encoding.block[0]:
        return levels, Grid(grid, float(scale[0]))
    at = places(encoding.shape, encoding.block, count, tiles=encoding.swizzled)
    shift: Any = 0.0
    if encoding.zeros:
        shift = -decode(raw["zero"], encoding.zeros)[at] * scale[at]
    return levels, Grid(grid, scale[at], shift, turned(encoding.rotation))
