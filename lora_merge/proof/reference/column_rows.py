"""A matrix whose rows are computed when they are asked for, so that a large one need not be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .floats import Array


@dataclass(frozen=True)
class ReferenceRows:
    """A matrix [out, cols] in float64. Its rows are always computed in the same blocks, as sums may round otherwise in
    others."""

    shape: tuple[int, int]
    read: Callable[[Array], Array]
    """Function of the numbers of some rows that returns them in new memory."""
    step: int
    """Rows of a block."""

    @staticmethod
    def of(whole: Array) -> ReferenceRows:
        """Return a matrix that is in memory."""
        return ReferenceRows((whole.shape[0], whole.shape[1]), lambda rows: whole[rows], max(1, len(whole)))

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        """Yield all rows in order."""
        for first in range(0, self.shape[0], self.step):
            rows = slice(first, min(first + self.step, self.shape[0]))
            yield rows, self.read(np.arange(rows.start, rows.stop))

    def at(self, rows: Array) -> Array:
        """Return some rows, in new memory."""
        values = np.empty((len(rows), self.shape[1]))
        for number in np.unique(rows // self.step):
            first = int(number) * self.step
            block = self.read(np.arange(first, min(first + self.step, self.shape[0])))
            here = rows // self.step == number
            values[here] = block[rows[here] - first]
        return values

    def flat(self, of: Callable[[Array], Array]) -> Array:
        """Return all numbers in order, or what a function makes of them."""
        values = np.empty(self.shape[0] * self.shape[1])
        for rows, block in self.blocks():
            values[rows.start * self.shape[1] : rows.stop * self.shape[1]] = of(block).ravel()
        return values

    @cached_property
    def largest(self) -> float:
        """The largest magnitude; 0 where there is no number."""
        return max((float(np.abs(block).max(initial=0.0)) for _, block in self.blocks()), default=0.0)
