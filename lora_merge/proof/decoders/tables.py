"""bitsandbytes' 4-bit codes by a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..grids import Grid, Table
from ..reference.floats import Array, decode
from .fp4 import nibbles
from .numbers import BadPart, nonzero


def bnb4(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return numbers of a table of 16, with scales of blocks of the flat weight, which may be codes themselves."""
    table = decode(raw["map"], "F32")
    scale = decode(raw["absmax"], "U8" if encoding.nested else "F32")
    if encoding.nested:
        outer = decode(raw["nested"], "F32")[np.arange(len(scale)) // encoding.nested]
        scale = decode(raw["nested_map"], "F32")[scale] * outer + encoding.offset
    if not np.isfinite(scale).all() or (not encoding.nested and (scale < 0).any()):
        raise BadPart("a scale is negative or no finite number")
    levels = table[nibbles(raw["codes"], high_first=True)[:count]]
    return levels, Grid(Table(table), np.copysign(nonzero(np.abs(scale)), scale)[np.arange(count) // encoding.size])
