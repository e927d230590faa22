"""Decoders in numpy for all codes but GGUF's: bytes, halves of bytes, packed whole numbers, tables, rotated sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final, TypeAlias

import numpy as np

from ..grids import Grid, LevelTable
from ..reference.floats import Array, Floats, decode

E2M1: Final[Array] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
E2M1_LEVELS: Final = LevelTable(E2M1)

Decoder: TypeAlias = Callable[[Mapping[str, Any], Any, int, int], tuple[Array, Grid]]

PACKED_PLACES: Final = {
    3: [*([8 * n + p for p in range(3)] for n in range(3)), *([8 * n + p for p in range(3, 6)] for n in range(3)),
        [6, 7, 22], [14, 15, 23]],
    5: [*([8 * n + p for p in range(5)] for n in range(5)), [5, 6, 7, 29, 30], [13, 14, 15, 37, 38],
        [21, 22, 23, 39, 31]],
    6: [*([8 * n + p for p in range(6)] for n in range(3)), [22, 23, 14, 15, 6, 7]],
    7: [*([8 * n + p for p in range(7)] for n in range(7)), [55, 47, 39, 31, 23, 15, 7]],
}  # fmt: skip
"""Bits → for each number that is packed together the places of its bits in their bytes, the lowest first."""


class BadPart(ValueError):
    """The error for a scale that is not a number, or that the format does not allow."""


def scales(raw: Any, dtype: str) -> Array:
    """Return the scales as float64; BadPart if one is negative or not a number."""
    values = decode(raw, "F8_E8M0" if dtype == "E8M0" else dtype)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise BadPart("a scale is negative or not a number")
    return values


def spread(scales: Array, shape: tuple[int, int], block: tuple[int, int], span: range, *, tiles: bool = False) -> Array:
    """Return, for each number of `span`, whole rows of the group that the scales belong to, its scale.

    `shape` is that of one matrix, `block` are the rows and columns with one scale. In tiles of 128 rows and 4 columns,
    the scale (r, c) is at ((r // 128) * C + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4.
    """
    (rows, cols), (high, wide) = shape, block
    row, across = np.arange(span.start // cols, span.stop // cols)[:, None], -(-cols // wide)
    c = np.arange(across)
    if tiles:
        of_row = row // 128 * -(-across // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4
        at = of_row + (c // 4 * 512 + c % 4)
    else:
        matrix, inside = (row // rows, row % rows) if rows % high else (0, row)
        at = (matrix * -(-rows // high) + inside // high) * across + c
    return np.repeat(scales[at], wide, axis=1)[:, :cols].reshape(-1)


def alone(encoding: Any) -> int:
    """Return how many of the consecutive values that share parts with others can be decoded without the codes of the
    others."""
    if type(encoding).__name__ == "ScaledCodes" and encoding.block[0]:
        row = encoding.shape[1]
    elif type(encoding).__name__ == "Fp4" and not encoding.turned:
        row = encoding.cols
    else:
        return int(encoding.group)
    return int(row) if encoding.group % row == 0 else int(encoding.group)


def turned(size: int) -> Any:
    """Return the function that rotates the rows of a matrix in groups of columns; None for no rotation."""
    if not size:
        return None
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    matrix: Array = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, four)
    return lambda values: (values.reshape(-1, size) @ matrix).reshape(values.shape)


@cache
def _integers(lowest: int, highest: int) -> LevelTable:
    return LevelTable(np.arange(lowest, highest + 1))


def scaled_codes(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return fp8 values or whole numbers, with scales for the weight, its rows or its blocks."""
    levels = decode(raw["codes"], encoding.dtype).astype(np.float64, copy=False)
    grid = _integers(*encoding.ends) if encoding.dtype == "I8" else Floats(encoding.dtype)
    scale = scales(raw["scale"], encoding.kind) * encoding.factor
    if not encoding.block[0]:
        return levels, Grid(grid, float(scale[0]))
    span = range(first % encoding.group, first % encoding.group + count)
    spread_out = partial(spread, shape=encoding.shape, block=encoding.block, span=span, tiles=encoding.swizzled)
    scale = spread_out(scale)
    shift = -spread_out(decode(raw["zero"], encoding.zeros)) * scale if encoding.zeros else 0.0
    return levels, Grid(grid, scale, shift, turned(encoding.rotation))


def fnuz(raw: Mapping[str, Any], encoding: Any, _: int, __: int) -> tuple[Array, Grid]:
    """Return fp8 values without a negative zero."""
    return decode(raw["codes"], encoding.dtype).astype(np.float64), Grid(Floats(encoding.dtype))


def nibbles(raw: Any, table: Array, *, high_first: bool) -> Array:
    """Return the values of the 4-bit codes of bytes, in the order of the columns."""
    byte = np.arange(256)
    pairs = table[np.stack([byte >> 4, byte & 15] if high_first else [byte & 15, byte >> 4], axis=1)]
    return np.asarray(pairs[np.frombuffer(raw, np.uint8)]).reshape(-1)


def fp4(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return e2m1 values with scales of blocks and of the whole weight."""
    levels = nibbles(raw["codes"], E2M1, high_first=encoding.high_first)
    factors = scales(raw["scale"], encoding.kind)
    if "whole" in raw:
        (whole,) = scales(raw["whole"], "F32")
        if encoding.divided and not whole:
            raise BadPart("a scale by which others are divided is 0")
        factors = factors / whole if encoding.divided else factors * whole
    if encoding.swizzled:
        span = range(first % encoding.group, first % encoding.group + count)
        scale = spread(factors, (len(span) // encoding.cols, encoding.cols), (1, encoding.size), span, tiles=True)
    else:
        scale = np.repeat(factors, encoding.size)
    if "pre" in raw:
        scale = scale * np.resize(scales(raw["pre"], encoding.inputs), count)
    if encoding.turned:
        levels, scale = (v.reshape(-1, encoding.turned, encoding.cols).swapaxes(1, 2).ravel() for v in (levels, scale))
    return levels, Grid(E2M1_LEVELS, scale)


def packed_ints(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers of 2 to 8 bits, with scales and zero points of groups."""
    bits, cols, half = encoding.bits, encoding.cols, 2 ** (encoding.bits - 1)
    rows, across = count // cols, cols // encoding.size
    levels = _unpacked(np.frombuffer(raw["codes"], np.uint8).reshape(rows, -1), bits, dense=encoding.dense)
    levels = (levels[:, :cols] ^ (half * encoding.signed)) - half
    column = np.arange(cols) // encoding.size
    if "order" in raw:
        column = np.frombuffer(raw["order"], "<i4")
    scale = scales(raw["scale"], encoding.scales).reshape(rows, across)[:, column]
    shift: Any = 0.0
    if encoding.zeros:
        words = np.frombuffer(raw["zero"], np.uint8).reshape(-1, across, 4).transpose(1, 0, 2).reshape(across, -1)
        zero = _unpacked(words, bits, dense=encoding.dense).T[:rows, column] - half
        shift = (-zero * scale).reshape(-1)
    grid = _integers(-half + encoding.signed, half - 1)
    return levels.reshape(-1).astype(np.float64), Grid(grid, scale.reshape(-1), shift, turned(encoding.rotation))


def _unpacked(rows: Any, bits: int, *, dense: bool) -> Array:
    """Return the whole numbers in rows of bytes, from the lowest bits on; unless they are dense, none is in two words
    of 32 bits."""
    spread = np.unpackbits(rows, axis=1, bitorder="little")
    span, each = (spread.shape[1], spread.shape[1] // bits) if dense else (32, 32 // bits)
    used = spread.reshape(len(rows), -1, span)[:, :, : each * bits]
    return np.asarray(used.reshape(len(rows), -1, bits) @ (1 << np.arange(bits)))


def table_codes(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return values of a table of 16, with scales of blocks of the flat weight, which may be codes themselves."""
    table = decode(raw["map"], "F32")
    scale = decode(raw["absmax"], "U8" if encoding.nested else "F32")
    maps = table
    if encoding.nested:
        outer = decode(raw["nested"], "F32")[np.arange(len(scale)) // encoding.nested]
        maps = np.concatenate([table, decode(raw["nested_map"], "F32")])
        scale = maps[len(table) :][scale] * outer + encoding.offset
    if not (np.isfinite(scale).all() and np.isfinite(maps).all()) or (not encoding.nested and (scale < 0).any()):
        raise BadPart("a scale or a number of a map is negative or not a finite number")
    levels = nibbles(raw["codes"], table, high_first=True)[:count]
    return levels, Grid(LevelTable(table), scale[np.arange(count) // encoding.size])


def transposed_ints(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return the numbers of rows of the weight, which are columns of what is stored."""
    bits, (rows, cols) = encoding.bits, encoding.shape
    each, mask = 32 // bits, 2**bits - 1
    codes, zeros = (np.frombuffer(raw[role], "<u4").astype(np.int64) for role in ("codes", "zero"))
    scale = decode(raw["scale"], encoding.scales).reshape(-1, rows)
    row, column = np.arange(first // cols, (first + count) // cols)[:, None], np.arange(cols)[None, :]
    group = np.frombuffer(raw["order"], "<i4")[column] if "order" in raw else column // (cols // len(scale))
    if not np.isfinite(scale).all() or (group < 0).any() or (group >= len(scale)).any():
        raise BadPart("a scale is not a finite number, or a column belongs to no group")
    if encoding.along_rows:
        shift = bits * np.array([0, 4, 1, 5, 2, 6, 3, 7])[row % each]
        level = codes[column * (rows // each) + row // each] >> shift & mask
        zero = zeros[group * (rows // each) + row // each] >> shift & mask
    else:
        words = np.ascontiguousarray(np.frombuffer(raw["codes"], "<u4").reshape(-1, rows).T[row[:, 0]])
        level = _unpacked(words.view(np.uint8), bits, dense=True)
        of_groups = np.frombuffer(raw["zero"], np.uint8).reshape(-1, rows * bits // 8)
        zero = _unpacked(of_groups, bits, dense=True)[group, row] + int(encoding.plus_one)
    spread = np.broadcast_to(scale[group, row], level.shape).reshape(-1)
    levels = (level - zero).reshape(-1).astype(np.float64)
    return levels, Grid(_integers(-mask - 1, mask), spread)


def shared_byte_ints(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers whose matrix of groups is stored in parts of rows, each in other bits of the same bytes."""
    data, bits, cols = np.frombuffer(raw["codes"], np.uint8).reshape(-1, encoding.cols), encoding.bits, encoding.cols
    shifts = range(8 - bits, -1, -bits) if encoding.high_first else range(0, 8, bits)
    levels = np.concatenate([data >> shift for shift in shifts]) & (2**bits - 1)
    scale, zero = decode(raw["scale"], encoding.scales), decode(raw["zero"], encoding.zeros)
    if not (np.isfinite(scale).all() and np.isfinite(zero).all()):
        raise BadPart("a scale or a zero point is not a finite number")
    number = np.arange(first, first + count)
    group = number % cols if encoding.across else number // cols
    shift = -zero * scale if encoding.high_first else -zero
    values = levels.ravel()[first : first + count].astype(np.float64)
    return values, Grid(_integers(0, 2**bits - 1), scale[group], shift[group])


def _finite(raw: Mapping[str, Any], role: str, dtype: str) -> Array:
    values = decode(raw[role], dtype)
    if not np.isfinite(values).all():
        raise BadPart(f"a number of its {role} is not finite")
    return values


def aqlm(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return sums of entries of codebooks, times the scales of rows."""
    codes = np.frombuffer(raw["codes"], "<i2" if encoding.wide else "i1").astype(np.int64).reshape(-1, encoding.books)
    book = _finite(raw, "book", encoding.float_dtype).reshape(encoding.books, encoding.entries, encoding.width)
    values = np.zeros((len(codes), encoding.width))
    for n in range(encoding.books):
        values += book[n, codes[:, n] & (encoding.entries - 1)]
    scale = _finite(raw, "scale", encoding.scales)
    return values.ravel() * np.repeat(scale, encoding.cols), Grid(Floats("F32"))


def grouped_codebook(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
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
    return whole, Grid(_integers(-127, 127), row, 0.0, turned(encoding.rotation))


def columns(raw: Mapping[str, Any], encoding: Any, first: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers with the scales and zero points of their groups, which are stored column by column."""
    rows, cols = encoding.shape
    scale, zero = (_finite(raw, role, encoding.scales).reshape(-1, rows) for role in ("scale", "zero"))
    row, column = np.divmod(np.arange(first, first + count), cols)
    group = column // (cols // len(scale))
    levels = nibbles(raw["codes"], np.arange(-8.0, 8.0), high_first=False)
    return levels, Grid(_integers(-8, 7), scale[group, row], zero[group, row])


def _packed(raw: Any, bits: int) -> Array:
    """Return the whole numbers of packed codes."""
    places = PACKED_PLACES.get(bits, [range(n, n + bits) for n in range(0, 8, bits)])
    width = 8 * max(1, len(places) * bits // 8)
    bits_of = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little").reshape(-1, width)
    return np.asarray(bits_of[:, np.array([list(p) for p in places])] @ (1 << np.arange(bits))).reshape(-1)


def product(raw: Mapping[str, Any], encoding: Any) -> tuple[Any, Any]:
    """Return the product of the factors, flat, and the sum of its terms' magnitudes; zeros without factors."""
    if not encoding.rank:
        return 0.0, 0.0
    up, down = (_finite(raw, role, encoding.factors).reshape(shape)
                for role, shape in (("up", (-1, encoding.rank)), ("down", (encoding.rank, -1))))  # fmt: skip
    return (up @ down).reshape(-1), (np.abs(up) @ np.abs(down)).reshape(-1)


def low_rank_sums(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return codes, with their scales, and the zero points and the low-rank part as a shift."""
    groups, wide, places = encoding.shape
    cols = groups * wide * places
    rows = count // cols
    if encoding.dtype:
        levels = decode(raw["codes"], encoding.dtype).astype(np.float64)
    else:
        levels = _packed(raw["codes"], encoding.bits).astype(np.float64) + encoding.lowest

    def spread(role: str) -> Array:
        values = _finite(raw, role, encoding.scales).reshape(rows, groups, 1, places)
        return np.broadcast_to(values, (rows, groups, wide, places)).reshape(-1)

    shift = spread("zero") if "zero" in raw else np.zeros(count)
    product_of_factors, size = product(raw, encoding)
    grid = Floats(encoding.dtype) if encoding.dtype.startswith("F8") else _integers(-128, 255)
    return levels, Grid(
        grid, spread("scale"), shift + product_of_factors, turned(encoding.rotation), np.abs(shift) + size
    )


def affine(raw: Mapping[str, Any], encoding: Any, _: int, count: int) -> tuple[Array, Grid]:
    """Return whole numbers, with their scales and biases."""
    bits = np.unpackbits(np.frombuffer(raw["codes"], np.uint8), bitorder="little").reshape(count, encoding.bits)
    levels = bits @ (1 << np.arange(encoding.bits))
    scale, bias = (decode(raw[role], encoding.float_dtype) for role in ("scale", "bias"))
    if not (np.isfinite(scale) & np.isfinite(bias)).all():
        raise BadPart("a scale or a bias is not a finite number")
    group = np.arange(count) // encoding.group
    return levels.astype(np.float64), Grid(_integers(0, 2**encoding.bits - 1), scale[group], bias[group])
