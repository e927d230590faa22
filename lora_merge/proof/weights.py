"""Reads weights in float64, however they are stored, with the values that each element could have had instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..disk.reader import Reader
from ..dtypes import FLOATS, Shape, StoredTensor
from ..errors import VerificationFailed
from ..files.checkpoint import Index
from ..files.encodings.base import CODES, Packing
from ..planning.plan import OutputTensor
from .grids import DECODED, Grid, joined, plain_grid
from .reference.floats import Array, decode
from .sample import runs

Read: TypeAlias = Callable[[StoredTensor, int, int], bytes | bytearray]
"""(tensor, first byte, bytes) → the bytes."""


@dataclass(frozen=True)
class CodedWeight:
    """A weight that is not stored as plain values."""

    packing: Packing
    total: int  # how many values it has
    read: Read

    def span(self, low: int, high: int) -> tuple[Array, Grid]:
        """Return the values [low, high) of the weight, flat, and their grid."""
        from .decoders import decoder  # for encoded weights only
        from .decoders.codes import BadPart, alone

        encoding, _, parts, _ = self.packing
        begin, end = self._around(low, high, encoding.group)
        raw = {role: self.read(part.info, *part.span(begin, end - begin)) for role, part in parts.items()}
        start, stop = self._around(low, high, alone(encoding))
        count = stop - start
        if CODES not in raw:
            raw[CODES] = self._codes(start, count)
        try:
            levels, grid = decoder(encoding)(raw, encoding, start, count)
        except BadPart as e:
            codes = self.packing.codes
            assert codes is not None, "a weight of codes has them"
            where, fix = f"{codes.file}: {codes.name}", "merge again; if it fails again, report it"
            raise VerificationFailed(f"a weight cannot be decoded: {e}", where, fix) from e
        inside = slice(low - start, high - start)
        values = grid.value(levels)
        return (values if grid.turn is None else grid.turn(values))[inside], grid.at(inside)

    def _around(self, low: int, high: int, size: int) -> tuple[int, int]:
        """Return the ends of whole groups of `size` values around [low, high)."""
        return low // size * size, min(-(-high // size) * size, self.total)

    def turned(self, low: int, high: int) -> tuple[int, int]:
        """Return the ends of a range around [low, high) that can be rotated by itself."""
        return self._around(low, high, self.packing.encoding.group)

    def rows(self, rows: Array, cols: int) -> tuple[Array, Grid]:
        """Return rows of the weight, seen as a matrix `cols` wide, and their grid."""
        spans = [self.span(first * cols, (first + count) * cols) for first, count in runs(rows)]
        values = np.concatenate([v for v, _ in spans]) if spans else np.zeros(0)
        shape = (len(rows), cols)
        return values.reshape(shape), joined([g for _, g in spans]).at(shape)

    def _codes(self, first: int, count: int) -> bytes | bytearray:
        codes, encoding = self.packing.codes, self.packing.encoding
        assert codes is not None, "a weight of codes has them"
        low = encoding.nbytes(first)
        return self.read(codes, low, min(encoding.nbytes(count), codes.nbytes - low))


class WeightReader:
    """Reads entries of the inputs' tensors in float64; those of encoded weights are decoded."""

    def __init__(self, reader: Reader, base: Index) -> None:
        self._reader, self._base = reader, base

    def coded(self, info: StoredTensor) -> CodedWeight | None:
        """Return how a tensor is read that is a weight of codes; None for plain values."""
        packing = self._base.packed.get(info.name)
        if packing is None or self._base.tensors[info.name] is not info:
            return None
        return CodedWeight(packing, prod(info.shape), self._reader.read)

    def __call__(self, info: StoredTensor, shape: Shape, entries: Array | None = None) -> Array:
        """Return the tensor in `shape`, or these entries of its first axis."""
        if (coded := self.coded(info)) is not None:
            if entries is None:
                return coded.span(0, coded.total)[0].reshape(shape)
            return coded.rows(entries, prod(shape[1:]))[0].reshape(len(entries), *shape[1:])
        if entries is None:
            return decode(self._reader.read(info), info.dtype).reshape(shape)
        width = info.nbytes // max(shape[0], 1)
        raw = b"".join(self._reader.read(info, first * width, count * width) for first, count in runs(entries))
        return decode(raw, info.dtype).reshape(len(entries), *shape[1:])


def coded_output(target: OutputTensor, places: Mapping[str, tuple[Path, OutputTensor]], read: Read) -> CodedWeight:
    """Return how a merged weight of codes is read from the output; `places`: tensor → its file and its place there."""

    def in_output(info: StoredTensor, name: str) -> StoredTensor:
        path, at = places[name]
        return replace(info, source=path, offset=at.offset)

    packing = target.packing
    assert packing.codes is not None, "a weight of codes has them"
    parts = {role: part._replace(info=in_output(part.info, part.info.name)) for role, part in packing.parts.items()}
    moved = packing._replace(codes=in_output(packing.codes, target.name), parts=parts)
    return CodedWeight(moved, prod(target.shape), read)


def within_rounding(reader: Reader, sides: Sequence[tuple[Index, StoredTensor, Array]], low: int, high: int) -> int:
    """Return how many of the values [low, high) of two tensors differ by no more than half a step of each format; 0 for
    a format that rotates weights, or is not one of floating-point numbers.

    `sides`: model, tensor and its values there in float64.
    """
    steps, (first, other) = np.zeros(high - low), (values for _, _, values in sides)
    for (index, info, _), values in zip(sides, (other, first), strict=True):  # the step around the unrounded value
        if (coded := WeightReader(reader, index).coded(info)) is not None:
            grid = coded.span(low, high)[1]
            if grid.turn is not None:
                return 0
            steps += (1 + DECODED) * grid.step(values) / 2 + grid.lost(values)
        elif info.dtype in FLOATS:
            steps += plain_grid(info.dtype).step(values) / 2
        else:
            return 0
    return int((np.abs(first - other) <= steps).sum())
