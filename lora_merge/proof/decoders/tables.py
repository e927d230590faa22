"""Codes that choose from tables which were fitted to each weight: AQLM, ComfyUI's asym_w4a8_int8 and awq_w4a16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..grids import Floats, Grid, Table
from ..reference.floats import Array, decode
from .codes import BadPart, nibbles, turned


def _finite(raw: Mapping[str, Any], role: str, dtype: str) -> Array:
    found = decode(raw[role], dtype)
    if not np.isfinite(found).all():
        raise BadPart(f"a number of its {role} is not finite")
    return found


def aqlm(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return sums of entries of codebooks, times the scales of rows."""
    codes = np.frombuffer(raw["codes"], "<i2" if encoding.wide else "i1").astype(np.int64).reshape(-1, encoding.books)
    book = _finite(raw, "book", encoding.numbers).reshape(encoding.books, encoding.entries, encoding.width)
    found = np.zeros((len(codes), encoding.width))
    for n in range(encoding.books):
        found += book[n, codes[:, n] & (encoding.entries - 1)]
    scale = _finite(raw, "scale", encoding.scales)
    return found.ravel() * np.repeat(scale, encoding.cols), Grid(Floats("F32"))


def grouped(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers that levels and scales of groups give, with scales of rows."""
    data = np.frombuffer(raw["codes"], np.uint8).reshape(count // encoding.cols, -1)
    plane = encoding.cols // 2
    codes = nibbles(np.ascontiguousarray(data[:, :plane]), np.arange(16), high_first=False)
    if encoding.bits == 6:
        codes += 16 * (data[:, plane:, None] >> np.array([0, 2, 4, 6]) & 3).ravel()
    half = 2 ** (encoding.bits - 1)
    level = _finite(raw, "book", "F32") if "book" in raw else np.arange(-half, half).astype(np.float64)
    group = np.repeat(_finite(raw, "scale", encoding.kind), encoding.size)
    whole = np.rint(np.clip((level[codes] * group).astype(np.float32), -127, 127)).astype(np.float64)
    row = np.repeat(_finite(raw, "row", "F32"), encoding.cols)
    return whole, Grid(Table(np.arange(-127, 128)), row, 0.0, turned(encoding.rotation))


def columns(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers with the scales and zero points of their groups, which are stored column by column."""
    rows, cols = encoding.shape
    scale, zero = (_finite(raw, role, encoding.scales).reshape(-1, rows) for role in ("scale", "zero"))
    row, column = np.divmod(np.arange(first, first + count), cols)
    group = column // (cols // len(scale))
    levels = nibbles(raw["codes"], np.arange(-8.0, 8.0), high_first=False)
    return levels, Grid(Table(np.arange(-8, 8)), scale[group, row], zero[group, row])
