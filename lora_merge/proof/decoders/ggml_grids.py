"""Points of GGUF's grids (IQ1, IQ2, IQ3): for every number the places of its bits, as ggml-common.h says them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from ...files.gguf.grid_points import POINTS
from ..grids import Grid, LevelTable
from ..reference.floats import Array
from .codes import BadPart

Bits = Sequence[int]
"""The places of the bits of a whole number in a block, the lowest bit first."""


def _span(byte: int, shift: int, bits: int) -> Bits:
    return range(8 * byte + shift, 8 * byte + shift + bits)


def _half(byte: int) -> Bits:
    return _span(byte, 0, 16)


class PointForm(NamedTuple):
    """One type: the places of the index of each point, of the signs of eight values, of the scales."""

    size: int
    grid: str
    point: Callable[[int], Bits]
    scales: int
    scale: Callable[[int], Bits]
    factor: Callable[[Array], Array]  # whole number of a sub-block → its factor of d
    signs: Callable[[int], Bits] | None = None  # seven, of which the eighth follows, or eight
    down: tuple[int, Callable[[int], Bits]] = (0, lambda _: ())  # how many, and the place: 1 moves points down
    d: Bits = _half(0)


def _quarter(sc: Array) -> Array:
    return (sc + 0.5) / 4


def _odd(sc: Array) -> Array:
    return 2 * sc + 1


POINT_FORMS: Final[Mapping[str, PointForm]] = MappingProxyType({
    "IQ2_XXS": PointForm(66, "IQ2_XXS", lambda g: _span(2 + 8 * (g // 4) + g % 4, 0, 8), 8,
        lambda s: _span(6 + 8 * s, 28, 4), _quarter, lambda e: _span(6 + 8 * (e // 4), 7 * (e % 4), 7)),
    "IQ2_XS": PointForm(74, "IQ2_XS", lambda g: _span(2 + 2 * g, 0, 9), 16, lambda s: _span(66, 4 * s, 4), _quarter,
        lambda e: _span(2 + 2 * e, 9, 7)),
    "IQ2_S": PointForm(82, "IQ2_S", lambda g: [*_span(2 + g, 0, 8), *_span(66, 2 * g, 2)], 16,
        lambda s: _span(74, 4 * s, 4), _quarter, lambda e: _span(34 + e, 0, 8)),
    "IQ3_XXS": PointForm(98, "IQ3_XXS", lambda g: _span(2 + g, 0, 8), 8, lambda s: _span(66 + 4 * s, 28, 4),
        lambda sc: 2 * _quarter(sc), lambda e: _span(66 + 4 * (e // 4), 7 * (e % 4), 7)),
    "IQ3_S": PointForm(110, "IQ3_S", lambda g: [*_span(2 + g, 0, 8), *_span(66, g, 1)], 8,
        lambda s: _span(106, 4 * s, 4), _odd, lambda e: _span(74 + e, 0, 8)),
    "IQ1_S": PointForm(50, "IQ1_S", lambda g: [*_span(2 + g, 0, 8), *_span(34 + 2 * (g // 4), 3 * (g % 4), 3)], 8,
        lambda s: _span(34 + 2 * s, 12, 3), _odd, None, (8, lambda j: _span(34 + 2 * j, 15, 1))),
    "IQ1_M": PointForm(56, "IQ1_S", lambda g: [*_span(g, 0, 8), *_span(32, 4 * g, 3)], 16,
        lambda s: _span(48 + 2 * (s // 4), 3 * (s % 4), 3), _odd, None, (32, lambda j: _span(32, 4 * j + 3, 1)),
        [b for j in range(4) for b in _span(48 + 2 * j, 12, 4)]),
})  # fmt: skip


@cache
def _grid(kind: str) -> Array:
    return np.array(POINTS[kind].all(), np.float64)


def _fields(bits: Array, places: Sequence[Bits]) -> Array:
    """Return whole numbers, [blocks, values]."""
    chosen = bits[:, np.array(places).ravel()].reshape(len(bits), len(places), -1)
    return np.asarray(chosen.astype(np.int64) @ (1 << np.arange(chosen.shape[2])))


def points(raw: Mapping[str, Any], encoding: Any, _: int, __: int) -> tuple[Array, Grid]:
    """Return the levels of points with their signs, and the scale of each number."""
    form = POINT_FORMS[encoding.kind]
    bits = np.unpackbits(np.frombuffer(raw["codes"], np.uint8).reshape(-1, form.size), axis=1, bitorder="little")
    grid = _grid(form.grid)
    levels = grid[_fields(bits, [form.point(g) for g in range(256 // grid.shape[1])])].reshape(len(bits), 256)
    if form.signs is not None:
        places = [form.signs(e) for e in range(32)]
        signs = bits[:, np.array(places).ravel()].reshape(len(bits), 32, -1)
        if signs.shape[2] == 7:
            signs = np.concatenate([signs, signs.sum(2, keepdims=True) % 2], axis=2)
        levels = levels * (1 - 2.0 * signs.reshape(len(bits), 256))
    count, place = form.down
    if count:
        down = _fields(bits, [place(j) for j in range(count)])
        levels = levels + np.repeat(0.125 - 0.25 * down, 256 // count, axis=1)
    d = _fields(bits, [form.d]).astype(np.uint16).view(np.float16).astype(np.float64)
    if not np.isfinite(d).all():
        raise BadPart("a scale is not a number")
    scale = d * form.factor(_fields(bits, [form.scale(s) for s in range(form.scales)]))
    spread = scale.repeat(256 // form.scales, axis=1)
    return ordered(levels.ravel(), encoding), Grid(LevelTable(np.unique(levels)), ordered(spread.ravel(), encoding))


def ordered(values: Array, encoding: Any) -> Array:
    """Return values as transformers has them: rows 0, 2, 4 … of a head in the file are its first half."""
    if not encoding.head:
        return values
    heads = values.reshape(-1, encoding.head, encoding.cols)
    return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).ravel()
