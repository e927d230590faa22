"""Decodes the blocks of GGUF's types IQ1, IQ2 and IQ3: points of grids, with signs and scales. They are only read.

Source of the places of all bits: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
Blocks are `[blocks, bytes]`, u8, for 256 values each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..encodings.arithmetic import cached_table
from ..encodings.base import InvalidPart
from .bit_layouts import half
from .grid_points import POINTS
from .types import GGML_TYPES

SHIFT: Final = 0.125  # of a level, by which IQ1 moves its points up or down


class GridBlock(NamedTuple):
    """Some blocks as their bytes give them: points of a grid, scales and signs."""

    point: Tensor  # [blocks, points]
    scale: Tensor  # [blocks, sub-blocks], fp32
    signs: Tensor | None = None  # [blocks, 32]: a bit for each of eight values, 1 for a negative one
    down: Tensor | None = None  # [blocks, parts]: 1 if points are moved down, 0 if up


def _words(blocks: Tensor, start: int, count: int, width: int) -> Tensor:
    """Return `count` whole numbers of `width` bytes each, from a byte on: [blocks, count]."""
    raw = blocks[:, start : start + count * width].reshape(len(blocks), count, width).long()
    return (raw << 8 * torch.arange(width)).sum(2)


def _fields(words: Tensor, bits: int, count: int) -> Tensor:
    """Return `count` fields of each word, the lowest bits first: [blocks, words · count]."""
    return (words[:, :, None] >> bits * torch.arange(count)).bitwise_and_(2**bits - 1).flatten(1)


def _even(seven: Tensor) -> Tensor:
    """Return eight signs by seven of them: the number of negative ones is even."""
    parity = seven.clone()
    for shift in (4, 2, 1):
        parity ^= parity >> shift
    return seven | (parity & 1) << 7


def _iq2_xxs(blocks: Tensor) -> GridBlock:
    words = _words(blocks, 2, 16, 4)
    points, rest = words[:, 0::2], words[:, 1::2]
    scale = half(blocks, 0) * ((rest >> 28) + 0.5) * 0.25
    return GridBlock(_fields(points, 8, 4), scale, _even(_fields(rest, 7, 4)))


def _iq2_xs(blocks: Tensor) -> GridBlock:
    words = _words(blocks, 2, 32, 2)
    scale = half(blocks, 0) * (_fields(_words(blocks, 66, 8, 1), 4, 2) + 0.5) * 0.25
    return GridBlock(words & 511, scale, _even(words >> 9))


def _iq2_s(blocks: Tensor) -> GridBlock:
    points = _words(blocks, 2, 32, 1) | _fields(_words(blocks, 66, 8, 1), 2, 4) << 8
    scale = half(blocks, 0) * (_fields(_words(blocks, 74, 8, 1), 4, 2) + 0.5) * 0.25
    return GridBlock(points, scale, _words(blocks, 34, 32, 1))


def _iq3_xxs(blocks: Tensor) -> GridBlock:
    rest = _words(blocks, 66, 8, 4)
    scale = half(blocks, 0) * ((rest >> 28) + 0.5) * 0.5
    return GridBlock(_words(blocks, 2, 64, 1), scale, _even(_fields(rest, 7, 4)))


def _iq3_s(blocks: Tensor) -> GridBlock:
    points = _words(blocks, 2, 64, 1) | _fields(_words(blocks, 66, 8, 1), 1, 8) << 8
    scale = half(blocks, 0) * (2 * _fields(_words(blocks, 106, 4, 1), 4, 2) + 1)
    return GridBlock(points, scale, _words(blocks, 74, 32, 1))


def _iq1_s(blocks: Tensor) -> GridBlock:
    high = _words(blocks, 34, 8, 2)
    points = _words(blocks, 2, 32, 1) | _fields(high, 3, 4) << 8
    scale = half(blocks, 0) * (2 * (high >> 12 & 7) + 1)
    return GridBlock(points, scale, None, high >> 15)


def _iq1_m(blocks: Tensor) -> GridBlock:
    high, small = _fields(_words(blocks, 32, 16, 1), 4, 2), _words(blocks, 48, 4, 2)
    whole = (small >> 12 << 4 * torch.arange(4)).sum(1, keepdim=True)  # f16, four bits in each word
    scale = whole.to(torch.int16).view(torch.float16).float() * (2 * _fields(small, 3, 4) + 1)
    return GridBlock(_words(blocks, 0, 32, 1) | (high & 7) << 8, scale, None, high >> 3)


READERS: Final[Mapping[str, Callable[[Tensor], GridBlock]]] = MappingProxyType({
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
})  # fmt: skip
"""Type → the function that reads its blocks."""


@cached_table
def _points(kind: str) -> Tensor:
    """Return the levels of every point in fp32: [points, width]."""
    return torch.tensor(POINTS[kind].all(), dtype=torch.float32)


def decode(kind: str, raw: Tensor) -> Tensor:
    """Return the values of blocks, flat, in fp32; InvalidPart for scales that are not finite."""
    block = READERS[kind](raw.reshape(-1, GGML_TYPES[kind].unit[1]))
    if not bool(block.scale.isfinite().all()):
        raise InvalidPart("a scale is not a number")
    values = _points("IQ1_S" if kind == "IQ1_M" else kind)[block.point].flatten(1)
    if block.signs is not None:
        values = torch.where(_fields(block.signs, 1, 8) == 1, -values, values)
    if block.down is not None:
        values = values + (SHIFT - 2 * SHIFT * block.down).repeat_interleave(256 // block.down.shape[1], 1)
    return values.view(*block.scale.shape, -1).mul_(block.scale[:, :, None]).reshape(-1)
