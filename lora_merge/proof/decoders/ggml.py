"""Blocks of GGUF types: for every element the byte and the bits of its code, as ggml-common.h and ggml-quants.c say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from ..grids import Grid, LevelTable
from ..reference.floats import Array, Floats, decode
from .codes import E2M1, BadPart
from .ggml_grids import ordered

LEVELS_OF_FOUR_BITS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Field = tuple[int, int, int]
"""(byte, shift, bits)."""


class BlockForm(NamedTuple):
    """One type: the elements and bytes of a block, where the code of element i is, and the levels of the codes."""

    elements: int
    size: int
    code: Callable[[int], tuple[Field, ...]]  # the lowest bits first
    levels: Sequence[float] | Array  # by code
    scales: Callable[[Array], Array]  # blocks → scales, [blocks, parts]
    shifts: Callable[[Array], Array] | None = None  # blocks → what is added, [blocks, parts]
    codes: Callable[[Array], Array] | None = None  # blocks → all codes, where they are no fields of bits


def _half(raw: Array, at: int) -> Array:
    values = np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float64)
    if not np.isfinite(values).all():
        raise BadPart("a scale is not a number")
    return np.asarray(values)


def _small(raw: Array, fields: tuple[tuple[Field, ...], ...]) -> Array:
    """Return small whole numbers, [blocks, values]: each one's fields, the lowest bits first."""
    return np.stack([_joined_bits(raw, [parts])[:, 0] for parts in fields], 1)


def _joined_bits(raw: Array, codes: list[tuple[Field, ...]]) -> Array:
    """Return codes, [blocks, codes]."""
    joined, low = np.zeros((len(raw), len(codes)), np.int64), 0
    for part in zip(*codes, strict=True):
        place, shift, bits = (np.array(column) for column in zip(*part, strict=True))
        joined |= ((raw[:, place].astype(np.int64) >> shift) & ((1 << bits) - 1)) << low
        low += int(bits[0])
    return joined


def _f16(at: int) -> Callable[[Array], Array]:
    return lambda raw: _half(raw, at)


def _power(raw: Array) -> Array:
    if (raw[:, 0] == 255).any():
        raise BadPart("a scale is not a number")
    return np.ldexp(1.0, raw[:, :1].astype(np.int64) - 127)


def _fp8(raw: Array) -> Array:
    if (raw[:, :4] > 0x7E).any():
        raise BadPart("a scale is not a number")
    return decode(np.ascontiguousarray(raw[:, :4]).tobytes(), "F8_E4M3").reshape(-1, 4)


def _trits(raw: Array) -> Array:
    """Return the digits of base 3 in bytes: digit n of a byte is the whole part of its 3ⁿ-fold as a fraction of 256."""
    places = [(32, 0)] * 5, [(16, 32)] * 5, [(4, 48)] * 4
    digits = [
        raw[:, at : at + wide].astype(np.int64) * 3**n % 256 * 3 // 256
        for p in places
        for n, (wide, at) in enumerate(p)
    ]
    return np.concatenate(digits, axis=1)


def _six_bits(raw: Array) -> Array:
    sc = tuple(((4 + j, 0, 6),) if j < 4 else ((8 + j, 0, 4), (j, 6, 2)) for j in range(8))
    return _half(raw, 0) * _small(raw, sc)


def _six_bit_minima(raw: Array) -> Array:
    mn = tuple(((8 + j, 0, 6),) if j < 4 else ((8 + j, 4, 4), (4 + j, 6, 2)) for j in range(8))
    return -_half(raw, 2) * _small(raw, mn)


def _four_bits(raw: Array) -> Array:
    return _half(raw, 80) * _small(raw, tuple(((j, 0, 4),) for j in range(16)))


def _four_bit_minima(raw: Array) -> Array:
    return -_half(raw, 82) * _small(raw, tuple(((j, 4, 4),) for j in range(16)))


def _q3(raw: Array) -> Array:
    sc = tuple(((96 + j % 8, 4 * (j // 8), 4), (104 + j % 4, 2 * (j // 4), 2)) for j in range(16))
    return np.asarray(_half(raw, 108) * (_small(raw, sc) - 32))


def _q6(raw: Array) -> Array:
    return _half(raw, 208) * np.ascontiguousarray(raw[:, 192:208]).view(np.int8)


def _iq4(raw: Array) -> Array:
    sc = tuple(((4 + j // 2, 4 * (j % 2), 4), (2 + j // 4, 2 * (j % 4), 2)) for j in range(8))
    return np.asarray(_half(raw, 0) * (_small(raw, sc) - 32))


def _nibble(start: int) -> Callable[[int], tuple[Field, ...]]:
    return lambda i: ((start + i % 16, 4 * (i // 16), 4),)


def _fifth(start: int, high: int) -> Callable[[int], tuple[Field, ...]]:
    return lambda i: ((start + i % 16, 4 * (i // 16), 4), (high + i // 8, i % 8, 1))


def _count(first: int, codes: int) -> tuple[float, ...]:
    return tuple(float(first + n) for n in range(codes))


BLOCK_FORMS: Final[Mapping[str, BlockForm]] = MappingProxyType({
    "Q4_0": BlockForm(32, 18, _nibble(2), _count(-8, 16), _f16(0)),
    "Q4_1": BlockForm(32, 20, _nibble(4), _count(0, 16), _f16(0), _f16(2)),
    "Q5_0": BlockForm(32, 22, _fifth(6, 2), _count(-16, 32), _f16(0)),
    "Q5_1": BlockForm(32, 24, _fifth(8, 4), _count(0, 32), _f16(0), _f16(2)),
    "Q8_0": BlockForm(32, 34, lambda i: ((2 + i, 0, 8),), (*_count(0, 128), *_count(-128, 128)), _f16(0)),
    "Q2_K": BlockForm(256, 84, lambda i: ((16 + 32 * (i // 128) + i % 32, 2 * (i % 128 // 32), 2),), _count(0, 4),
        _four_bits, _four_bit_minima),
    "Q3_K": BlockForm(256, 110,
        lambda i: ((32 + 32 * (i // 128) + i % 32, 2 * (i % 128 // 32), 2), (i % 32, i // 32, 1)), _count(-4, 8), _q3),
    "Q4_K": BlockForm(256, 144, lambda i: ((16 + 32 * (i // 64) + i % 32, 4 * (i % 64 // 32), 4),), _count(0, 16),
        _six_bits, _six_bit_minima),
    "Q5_K": BlockForm(256, 176,
        lambda i: ((48 + 32 * (i // 64) + i % 32, 4 * (i % 64 // 32), 4), (16 + i % 32, i // 32, 1)), _count(0, 32),
        _six_bits, _six_bit_minima),
    "Q6_K": BlockForm(256, 210,
        lambda i: ((64 * (i // 128) + i % 64, 4 * (i % 128 // 64), 4),
            (128 + 32 * (i // 128) + i % 32, 2 * (i % 128 // 32), 2)), _count(-32, 64), _q6),
    "IQ4_NL": BlockForm(32, 18, _nibble(2), LEVELS_OF_FOUR_BITS, _f16(0)),
    "IQ4_XS": BlockForm(256, 136, lambda i: ((8 + 16 * (i // 32) + i % 16, 4 * (i % 32 // 16), 4),),
        LEVELS_OF_FOUR_BITS, _iq4),
    "MXFP4": BlockForm(32, 17, _nibble(1), E2M1, _power),
    "NVFP4": BlockForm(64, 36, lambda i: ((4 + 8 * (i // 16) + i % 8, 4 * (i % 16 // 8), 4),), E2M1, _fp8),
    "TQ1_0": BlockForm(256, 54, lambda _: (), _count(-1, 3), _f16(52), codes=_trits),
    "TQ2_0": BlockForm(256, 66, lambda i: ((32 * (i // 128) + i % 32, 2 * (i % 128 // 32), 2),), _count(-1, 4),
        _f16(64)),
})  # fmt: skip


@cache
def _codes(kind: str) -> list[tuple[Field, ...]]:
    return [BLOCK_FORMS[kind].code(i) for i in range(BLOCK_FORMS[kind].elements)]


@cache
def _table(kind: str) -> LevelTable:
    return LevelTable(BLOCK_FORMS[kind].levels)


def blocks(raw: Mapping[str, Any], encoding: Any, _: int, __: int) -> tuple[Array, Grid]:
    """Return the levels of blocks, and the scale and shift of each; q and k of llama in the order of transformers."""
    kind = encoding.kind
    if kind not in BLOCK_FORMS:
        levels = decode(raw["codes"], kind)
        return ordered(levels, encoding), Grid(Floats(kind), 1.0, -encoding.offset)
    form = BLOCK_FORMS[kind]
    data = np.frombuffer(raw["codes"], np.uint8).reshape(-1, form.size)
    codes = form.codes(data) if form.codes else _joined_bits(data, _codes(kind))
    levels = np.array(form.levels)[codes].ravel()

    def spread(part: Array) -> Array:
        return ordered(np.repeat(part, form.elements // part.shape[1], axis=1).ravel(), encoding)

    shift = spread(form.shifts(data)) if form.shifts else 0.0
    return ordered(levels, encoding), Grid(_table(kind), spread(form.scales(data)), shift - encoding.offset)
