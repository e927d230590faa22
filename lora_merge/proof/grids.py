"""The numbers that a stored tensor can hold; no code of the codecs that wrote them is used."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..algorithms import Shape
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..files.checkpoint import Index
from .reference.floats import Array, beyond, decode, precision, rounded, saturated, step
from .sampling import runs

SCALES: Final = {"fp8_scaled": "scale"}
"""Codec → role of the tensor with the one number that scales the whole weight. Other codecs have none."""


@dataclass(frozen=True)
class Grid:
    """The numbers of a dtype, times a scale. Arrays are float64."""

    dtype: str
    scale: float = 1.0

    def decode(self, raw: bytes | bytearray | memoryview) -> Array:
        """Return the elements as float64, integers as int64, in one dimension."""
        found = decode(raw, self.dtype)
        return found if self.scale == 1 else found * self.scale

    def step(self, values: Array) -> Array:
        """Return the distance of neighbouring numbers around each value."""
        return step(values, self.dtype) if self.scale == 1 else step(values / self.scale, self.dtype) * self.scale

    def rounded(self, values: Array) -> Array:
        """Return the nearest numbers of the grid, ties to even, cut to its range."""
        if self.scale == 1:
            return saturated(rounded(values, self.dtype), self.dtype)
        return saturated(rounded(values / self.scale, self.dtype), self.dtype) * self.scale

    def saturated(self, values: Array) -> Array:
        """Return the values, cut to the range of the grid."""
        return saturated(values / self.scale, self.dtype) * self.scale

    def beyond(self, values: Array) -> Array:
        """Return which values are too large for the grid."""
        return beyond(values / self.scale, self.dtype)

    @property
    def digits(self) -> int:
        """Bits of a significand."""
        return precision(self.dtype)[0]


def scale_of(raw: bytes | bytearray) -> float:
    """Return the number in a scale's tensor; NaN where it is not finite and positive."""
    (scale,) = struct.unpack("<f", raw)
    return float(scale) if np.isfinite(scale) and scale > 0 else float("nan")


class Stored:
    """Reads entries of the inputs' tensors in float64; those of encoded weights are decoded."""

    def __init__(self, reader: Reader, base: Index) -> None:
        self._reader, self._base = reader, base
        self._grids: dict[str, Grid] = {}  # of the base's weights that are not plain numbers

    def grid(self, info: StoredTensor) -> Grid:
        """Return the numbers that a tensor can hold."""
        packing = self._base.packed.get(info.name)
        if packing is None or self._base.tensors[info.name] is not info:
            return Grid(info.dtype)
        if info.name not in self._grids:
            role = SCALES[packing.encoding.codec.name]
            self._grids[info.name] = Grid(info.dtype, scale_of(self._reader.read(packing.sides[role])))
        return self._grids[info.name]

    def __call__(self, info: StoredTensor, shape: Shape, entries: Array | None = None) -> Array:
        """Return the tensor in `shape`, or these entries of its first axis."""
        if entries is None:
            return self.grid(info).decode(self._reader.read(info)).reshape(shape)
        width = info.nbytes // max(shape[0], 1)
        raw = b"".join(self._reader.read(info, first * width, count * width) for first, count in runs(entries))
        return self.grid(info).decode(raw).reshape(len(entries), *shape[1:])
