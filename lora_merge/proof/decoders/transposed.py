"""GPTQ and AWQ: whole numbers of the transposed weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..grids import Grid, Table
from ..reference.floats import Array, decode
from .numbers import BadPart


def transposed(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return the numbers of rows of the weight, which are columns of what is stored."""
    bits, (rows, cols) = encoding.bits, encoding.shape
    each, mask = 32 // bits, 2**bits - 1
    codes, zeros = (np.frombuffer(raw[role], "<u4").astype(np.int64) for role in ("codes", "zero"))
    scale = decode(raw["scale"], encoding.scales).reshape(-1, rows)
    row, column = np.arange(first // cols, (first + count) // cols)[:, None], np.arange(cols)[None, :]
    group = np.frombuffer(raw["order"], "<i4")[column] if "order" in raw else column // (cols // len(scale))
    if not np.isfinite(scale).all() or (group < 0).any() or (group >= len(scale)).any():
        raise BadPart("a scale is no finite number, or a column belongs to no group")
    if encoding.along_rows:
        shift = bits * np.array([0, 4, 1, 5, 2, 6, 3, 7])[row % each]
        level = codes[column * (rows // each) + row // each] >> shift & mask
        zero = zeros[group * (rows // each) + row // each] >> shift & mask
    else:
        level = codes[column // each * rows + row] >> bits * (column % each) & mask
        zero = (zeros[group * (rows // each) + row // each] >> bits * (row % each) & mask) + int(encoding.plus_one)
    spread = np.broadcast_to(scale[group, row], level.shape).reshape(-1)
    levels = (level - zero).reshape(-1).astype(np.float64)
    return levels, Grid(Table(np.arange(-mask - 1, mask + 1)), spread)
