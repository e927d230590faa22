"""Codes of mlx: whole numbers in a stream of bits, with a scale and a bias for each group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..grids import Grid, Table
from ..reference.floats import Array, decode
from .codes import BadPart


def streams(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers, with their scales and biases."""
    bits = np.unpackbits(np.frombuffer(raw["codes"], np.uint8), bitorder="little").reshape(count, encoding.bits)
    levels = bits @ (1 << np.arange(encoding.bits))
    scale, bias = (decode(raw[role], encoding.numbers) for role in ("scale", "bias"))
    if not (np.isfinite(scale) & np.isfinite(bias)).all():
        raise BadPart("a scale or a bias is not a finite number")
    group = np.arange(count) // encoding.group
    return levels.astype(np.float64), Grid(Table(np.arange(2**encoding.bits)), scale[group], bias[group])
