"""A matrix whose rows are computed when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

PIECE: Final = 2**18
"""Numbers of a block of rows: they stay in the caches."""

HELD: Final = 2**21
"""Numbers up to which a matrix is kept in memory once it is computed, because it is read several times."""


@dataclass(frozen=True)
class Rows:
    """A matrix [out, cols]. Its blocks of rows are the same whatever memory there is, and so are sums over them."""

    shape: tuple[int, int]
    read: Callable[[slice], Tensor]
    """Function of a range of rows that returns them in new memory, which the caller may overwrite."""
    memory: Tensor | None = None
    """The whole matrix, where it is in memory."""

    @staticmethod
    def of(whole: Tensor) -> Rows:
        """Return a matrix that is in memory."""
        return Rows((whole.shape[0], whole.shape[1]), lambda rows: whole[rows].clone(), whole)

    @staticmethod
    def product(left: Tensor, right: Tensor) -> Rows:
        """Return the product of two factors."""
        return Rows((left.shape[0], right.shape[1]), lambda rows: left[rows] @ right)

    def blocks(self, *, owned: bool = True) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in order, as many at a time as `PIECE` says; all at once where a device holds the matrix.
        `owned`: whether the caller may overwrite them."""
        out, cols = self.shape
        held = self.memory is not None and self.memory.device.type != "cpu"
        step = max(1, out if held else PIECE // max(cols, 1))
        for first in range(0, out, step):
            rows = slice(first, min(first + step, out))
            yield rows, self.read(rows) if owned or self.memory is None else self.memory[rows]

    def numel(self) -> int:
        """Return how many numbers it has."""
        return self.shape[0] * self.shape[1]

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole matrix, in a dtype or in its own; one that is in memory is not copied."""
        if self.memory is not None and dtype in (None, self.memory.dtype):
            return self.memory
        found = None
        for rows, block in self.blocks():
            if found is None:
                found = torch.empty(self.shape, dtype=dtype or block.dtype, device=block.device)
            found[rows] = block
        return self.read(slice(0, 0)) if found is None else found

    def held(self) -> Rows:
        """Return the same matrix; a small one is computed once."""
        return self if self.numel() > HELD or self.memory is not None else Rows.of(self.dense())

    def part(self, rows: slice) -> Rows:
        """Return a range of the rows."""
        return self if rows == slice(0, self.shape[0]) else Rows(
            (rows.stop - rows.start, self.shape[1]),
            lambda own: self.read(slice(rows.start + own.start, rows.start + own.stop)))  # fmt: skip

    def of_rows(self, order: Tensor) -> Rows:
        """Return the rows with these numbers, in this order."""
        return Rows((len(order), self.shape[1]), lambda rows: self._some(order[rows]))

    def _some(self, order: Tensor) -> Tensor:
        """Return the rows with these numbers; neighbours are computed in one call."""
        cuts = [0, *(order.diff() != 1).nonzero().flatten().add_(1).tolist(), len(order)]
        runs = [order[low:high].tolist() for low, high in pairwise(cuts) if low < high]
        return torch.cat([self.read(slice(run[0], run[-1] + 1)) for run in runs]) if runs else self.read(slice(0, 0))
