"""Matrices whose rows are computed on demand, and the search for their largest values, which reads them by rows.

`largest` is exact: bits of magnitudes are counted, a few at a time, until few values with the known leading bits are
left, which are sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

BLOCK_VALUES: Final = 2**18
"""Values of a block of rows: they stay in the caches."""

CACHED: Final = 2**21
"""Values up to which a matrix is kept in memory once it is computed, because it is read several times."""

BITS_AT_ONCE: Final = 16
"""Bits that are counted each time that all values are read."""

SORTED_VALUES: Final = 2**21
"""Values that are sorted: once no more than these have the known leading bits, further bits are not counted."""

INTEGERS: Final = {torch.float64: (torch.int64, 63), torch.float32: (torch.int32, 31)}
"""Dtype → the integers of its width, and their bits without the sign: bits of magnitudes are in the order of these."""


@dataclass(frozen=True)
class RowMatrix:
    """A matrix [out, cols]. Its blocks of rows are the same whatever memory there is, and so are sums over them."""

    shape: tuple[int, int]
    read: Callable[[slice], Tensor]
    """Function of a range of rows that returns them in new memory, which the caller may overwrite."""
    memory: Tensor | None = None
    """The whole matrix, where it is in memory."""

    @staticmethod
    def of(whole: Tensor) -> RowMatrix:
        """Return a matrix that is in memory."""
        return RowMatrix((whole.shape[0], whole.shape[1]), lambda rows: whole[rows].clone(), whole)

    @staticmethod
    def product(left: Tensor, right: Tensor) -> RowMatrix:
        """Return the product of two factors."""
        return RowMatrix((left.shape[0], right.shape[1]), lambda rows: left[rows] @ right)

    def blocks(self, *, owned: bool = True) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in order, as many at a time as `BLOCK_VALUES` says; all at once if a device holds the
        matrix. `owned`: whether the caller may overwrite them."""
        out, cols = self.shape
        on_device = self.memory is not None and self.memory.device.type != "cpu"
        step = max(1, out if on_device else BLOCK_VALUES // max(cols, 1))
        for first in range(0, out, step):
            rows = slice(first, min(first + step, out))
            yield rows, self.read(rows) if owned or self.memory is None else self.memory[rows]

    def numel(self) -> int:
        """Return how many values it has."""
        return self.shape[0] * self.shape[1]

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the whole matrix, in a dtype or in its own; one that is in memory is not copied."""
        if self.memory is not None and dtype in (None, self.memory.dtype):
            return self.memory
        whole = None
        for rows, block in self.blocks():
            if whole is None:
                whole = torch.empty(self.shape, dtype=dtype or block.dtype, device=block.device)
            whole[rows] = block
        return self.read(slice(0, 0)) if whole is None else whole

    def cached(self) -> RowMatrix:
        """Return the same matrix; a small one is computed once."""
        return self if self.numel() > CACHED or self.memory is not None else RowMatrix.of(self.dense())

    def part(self, rows: slice) -> RowMatrix:
        """Return a range of the rows."""
        return self if rows == slice(0, self.shape[0]) else RowMatrix(
            (rows.stop - rows.start, self.shape[1]),
            lambda some: self.read(slice(rows.start + some.start, rows.start + some.stop)))  # fmt: skip

    def of_rows(self, order: Tensor) -> RowMatrix:
        """Return the rows with these numbers, in this order."""
        return RowMatrix((len(order), self.shape[1]), lambda rows: self._some(order[rows]))

    def _some(self, order: Tensor) -> Tensor:
        """Return the rows with these numbers; neighbours are computed in one call."""
        cuts = [0, *(order.diff() != 1).nonzero().flatten().add_(1).tolist(), len(order)]
        runs = [order[low:high].tolist() for low, high in pairwise(cuts) if low < high]
        return torch.cat([self.read(slice(run[0], run[-1] + 1)) for run in runs]) if runs else self.read(slice(0, 0))


class Largest(NamedTuple):
    """The values that are the largest in magnitude: all above a bound, and the first ones that equal it."""

    least: float  # the smallest magnitude among them
    last: int  # the place, counted row by row, of the last number of that magnitude among them
    cols: int

    def of(self, block: Tensor, first: int) -> Tensor:
        """Return whether each number of a block of rows, the first of which has this number, is among them."""
        size = block.abs()
        among = size >= self.least
        low = first * self.cols
        if self.last < low + block.numel() - 1:
            equal = (size == self.least).view(-1)
            among.view(-1)[max(0, self.last + 1 - low) :][equal[max(0, self.last + 1 - low) :]] = False
        return among


def largest(change: RowMatrix, count: int) -> Largest:
    """Return which values are the largest `count` in magnitude."""
    cols = change.shape[1]
    if count <= 0 or count >= change.numel():
        return Largest(torch.inf if count <= 0 else 0.0, -1 if count <= 0 else change.numel(), cols)
    # The leading bits of the count-th largest magnitude, then all magnitudes that begin with them.
    known, left, rank, number = _leading_bits(change, count)
    bits, place = _with_leading_bits(known, left, number, change)
    least = bits.kthvalue(number - rank + 1).values
    rank -= int((bits > least).sum())
    last = int(place[int((bits == least).cumsum(0).clamp_(max=rank).argmax())])  # the first of this rank
    value = least.reshape(1).view(next(d for d, (i, _) in INTEGERS.items() if i == bits.dtype))
    return Largest(float(value[0]), last, cols)


def _leading_bits(change: RowMatrix, count: int) -> tuple[int, int, int, int]:
    """Return (leading bits of the count-th largest magnitude, number of bits after them, its place among the magnitudes
    with these leading bits, counted from the largest, number of these magnitudes)."""
    # The next bits of all magnitudes with the known leading bits are counted, until few magnitudes are left.
    known, left, rank, number = 0, -1, count, change.numel()
    if change.numel() <= SORTED_VALUES:
        return known, INTEGERS[change.read(slice(0, 0)).dtype][1], rank, change.numel()
    while left:
        counts: Tensor | None = None
        for _, block in change.blocks():
            kind, width = INTEGERS[block.dtype]
            before = width if left < 0 else left
            after = max(0, before - BITS_AT_ONCE)
            bits = block.abs_().reshape(-1).view(kind)
            if left >= 0:
                bits = bits[(bits >> left) == known]
            more = torch.bincount((bits >> after) & ((1 << (before - after)) - 1), minlength=1 << (before - after))
            counts = more if counts is None else counts.add_(more)
        assert counts is not None, "there are numbers"
        above = counts.flip(0).cumsum(0)
        place = int((above < rank).sum())
        rank -= int(above[place - 1]) if place else 0
        digit = len(counts) - 1 - place
        known, left = (known << (before - after)) | digit, after
        number = int(counts[digit])
        if number <= SORTED_VALUES:
            break
    return known, left, rank, number


def _with_leading_bits(known: int, left: int, number: int, change: RowMatrix) -> tuple[Tensor, Tensor]:
    """Return (bits, places) of the `number` magnitudes with these leading bits."""
    nothing = change.read(slice(0, 0))
    kind = INTEGERS[nothing.dtype][0]
    if number == change.numel():
        every = torch.cat([block.abs_().reshape(-1).view(kind) for _, block in change.blocks()])
        return every, torch.arange(number, device=every.device)
    every_bits = nothing.new_empty(number, dtype=kind)
    places, at = nothing.new_empty(number, dtype=torch.int64), 0
    for rows, block in change.blocks():
        bits = block.abs_().reshape(-1).view(every_bits.dtype)
        matching = ((bits >> left) == known).nonzero().view(-1)
        end = at + len(matching)
        every_bits[at:end], places[at:end] = bits[matching], matching + rows.start * change.shape[1]
        at = end
    return every_bits, places
