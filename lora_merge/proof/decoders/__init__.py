"""A second decoder for every encoding, in numpy: bytes → levels, and the grid that gives their values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..grids import Grid, joined
from ..reference.floats import Array
from .codes import (
    BadPart,
    Decoder,
    alone,
    aqlm,
    bnb4,
    bytes_of_fnuz,
    columns,
    fp4,
    grouped,
    halves,
    low_rank,
    packed_ints,
    scaled,
    streams,
    sums,
    transposed,
)
from .ggml import blocks
from .grids import points


def _low_rank(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    return low_rank(raw, encoding, first, count, DECODERS[encoding.inner.name])


def _stacked(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return matrices that are stored one by one."""
    matrices, inner = count // encoding.group, DECODERS[encoding.inner.name]
    decoded = []
    for n in range(matrices):
        parts = {}
        for role, data in raw.items():
            size = len(data) // matrices
            parts[role] = data[n * size : (n + 1) * size]
        decoded.append(inner(parts, encoding.inner, 0, encoding.group))
    return np.concatenate([levels for levels, _ in decoded]), joined([grid for _, grid in decoded])


DECODERS: Final[Mapping[str, Decoder]] = MappingProxyType({
    "aqlm": aqlm,
    "asym_w4a8_int8": grouped,
    "awq_w4a16": columns,
    "bnb4": bnb4,
    "gptq": transposed,
    "fnuz": bytes_of_fnuz,
    "fp4": fp4,
    "packed_ints": packed_ints,
    "scaled": scaled,
    "ggml": blocks,
    "ggml_grids": points,
    "halves": halves,
    "mlx": streams,
    "low_rank": _low_rank,
    "stacked": _stacked,
    "sdnq": sums,
})  # fmt: skip
"""Codec → function (bytes by role, encoding, first number, count) → (levels, grid), flat."""

__all__ = ["DECODERS", "BadPart", "alone"]
