"""The values that a stored tensor can hold; no code of the encodings that wrote them is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from .reference.floats import Array, Floats

DECODED: Final = 2.0**-20  # the error of decoding in fp32, as a share of what is added up

ROUNDING: Final = {"fp64": 32 * 2.0**-53, "fp32": 32 * 2.0**-24, "bf16": 16 * 2.0**-8, "fp16": 16 * 2.0**-11}
"""Largest error of a sum in the compute dtype, as a share of its largest term."""

CONTRACT: Final = 2e-6
"""Largest error of an fp32 sum that a user may rely on, as a share of the weight's largest number before or after."""

UNDERFLOW: Final = {"fp64": 32 * 2.0**-1074, "fp32": 32 * 2.0**-149, "bf16": 32 * 2.0**-133, "fp16": 32 * 2.0**-24}
"""The same as a number: half a step of the smallest values of the dtype, for each of as many terms as above."""

ZERO_SCALE: Final = 1e-300
"""The divisor in place of a scale of 0, of which all codes are the shift: then it alone is within half a step."""


class LevelTable:
    """Levels in any distances: whole numbers, 4-bit floats, the quantiles of a normal distribution."""

    digits: Final = 1

    def __init__(self, levels: Any) -> None:
        """`levels`: in any order; equal ones count once."""
        self.levels: Array = np.array(sorted({*np.ravel(levels).tolist()}), np.float64)  # np.unique imports numpy.ma
        self._middles = (self.levels[1:] + self.levels[:-1]) / 2
        gaps = np.diff(self.levels)
        self._gaps = np.concatenate([gaps[:1], gaps, gaps[-1:]])

    def step(self, values: Array) -> Array:
        """Return the distance of the two levels around each value; beyond the range that of the outermost two."""
        return np.asarray(self._gaps[np.searchsorted(self.levels, values)])

    def rounded(self, values: Array) -> Array:
        """Return the nearest levels."""
        return np.asarray(self.levels[np.searchsorted(self._middles, values)])

    def saturated(self, values: Array) -> Array:
        """Return the values, cut to the range of the levels."""
        return np.clip(values, self.levels[0], self.levels[-1])

    def beyond(self, values: Array) -> Array:
        """Return which values are more than half a step beyond the outermost levels."""
        low, high = self.levels[0] - self._gaps[0] / 2, self.levels[-1] + self._gaps[-1] / 2
        return np.asarray((values < low) | (values > high))


@dataclass(frozen=True)
class Grid:
    """Levels, the values that codes can mean, times a scale, plus a shift: these are numbers, or arrays in the shape of
    the values. Arrays are float64."""

    levels: Floats | LevelTable
    scale: Any = 1.0
    shift: Any = 0.0
    turn: Callable[[Array], Array] | None = None  # W ↔ the rotated weight that is stored, rows of a matrix
    terms: Any = 0.0  # magnitudes of what is added up in the shift, where it is a sum

    def step(self, values: Array) -> Array:
        """Return the distance of neighbouring values around each value."""
        return np.asarray(self.levels.step(self._level(values)) * np.abs(self._divisor))

    def rounded(self, values: Array) -> Array:
        """Return the nearest values of the grid, ties to even, cut to its range."""
        level = self._level(values)
        return self.value(self.levels.saturated(self.levels.rounded(level)))

    def saturated(self, values: Array) -> Array:
        """Return the values, cut to the range of the grid."""
        return self.value(self.levels.saturated(self._level(values)))

    def beyond(self, values: Array) -> Array:
        """Return which values are too large for the grid."""
        return self.levels.beyond(self._level(values))

    def value(self, levels: Array) -> Array:
        """Return the values of levels."""
        return levels if self._bare else np.asarray(levels * self.scale + self.shift)

    def lost(self, values: Array) -> Array:
        """Return by how much decoding in fp32 may miss each value of codes.

        A value may be the small difference of its level times the scale and a large shift; in a rotated row it is a sum
        over that row.
        """
        terms = np.abs(values) + np.abs(self.shift) + self.terms
        return np.asarray(DECODED * (terms if self.turn is None else np.max(terms, initial=0.0)))

    def at(self, choose: Any) -> Grid:
        """Return the grid of some of the values, as an index or a shape chooses them."""
        parts = ((name, getattr(self, name)) for name in ("scale", "shift", "terms"))
        fields_at = {k: (v.reshape(choose) if isinstance(choose, tuple) else v[choose]) for k, v in parts if np.ndim(v)}
        return replace(self, **fields_at)

    def _level(self, values: Array) -> Array:
        return values if self._bare else np.asarray((values - self.shift) / self._divisor)

    @cached_property
    def _divisor(self) -> Array:
        return np.where(self.scale == 0, ZERO_SCALE, self.scale)

    @property
    def _bare(self) -> bool:
        """Whether levels are values; a full proof takes a tenth longer if it computes these from those."""
        return isinstance(self.scale, float) and (self.scale, self.shift) == (1.0, 0.0)


def joined(grids: list[Grid]) -> Grid:
    """Return the grid of values that follow each other; grids of one weight differ in scale and shift alone."""
    first = grids[0]
    if len(grids) == 1 or not np.ndim(first.scale):
        return first

    def all_of(name: str) -> Any:
        values = [getattr(g, name) for g in grids]
        return np.concatenate(values) if np.ndim(values[0]) else values[0]

    return replace(first, scale=all_of("scale"), shift=all_of("shift"), terms=all_of("terms"))


def plain_grid(dtype: str) -> Grid:
    """Return the values of a dtype."""
    return Grid(Floats(dtype))
