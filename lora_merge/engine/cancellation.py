"""Finds merged weights whose terms cancel, such as those of strengths 1e7 and −1e7.

A sum in fp32 is off by up to 2⁻²⁴ of the largest sum on the way. If that is far above what is left, fp32 cannot hold
the digits that a merge promises, and the weight is computed in fp64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from .tensor_moves import strided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from .fold import SampleOf
    from .row_blocks import Block

LARGEST_SUM: Final = 4.0
"""Times the largest merged number that a sum on the way may be: 2e-6, which is promised, is 33 times 2⁻²⁴."""

LEAST_CHECKED: Final = 2**12
"""The least values of a block that are checked, in rows spread evenly: all of them would take as long as to add
up the changes of small ranks."""


class Cancelled(Exception):  # no failure: the blocks are folded again
    """The terms of some blocks of a call cancel."""

    def __init__(self, numbers: frozenset[int]) -> None:
        super().__init__(numbers)
        self.numbers = numbers  # of these blocks in the call


def stop_where(cancelled: Tensor) -> None:
    """Raise Cancelled if the terms of a block of a call cancel, before its result is written."""
    if numbers := frozenset(n for n, yes in enumerate(cancelled.tolist()) if yes):
        raise Cancelled(numbers)


class LargestSums:
    """The largest sums on the way to merged weights, as an observer of their fold.

    `base`: [n, rows, cols], before anything is added.
    """

    def __init__(self, base: Tensor) -> None:
        rows = base.shape[1]
        count = min(rows, max(1, -(-LEAST_CHECKED // max(base.shape[2], 1))))
        self._rows = range(0, rows // count * count, rows // count)
        self._last = self._most = self._largest(base)

    @staticmethod
    def of(blocks: Sequence[Block], base: Tensor) -> LargestSums | None:
        """Return the observer of some blocks of one kind; None if terms that cancel are not searched: in other dtypes
        than fp32, where changes become one, and on a device also for the change of a single adapter, which would take
        two more calls each."""
        first = blocks[0]
        if base.dtype != torch.float32 or first.target.combines or not (first.slices and base.numel()):
            return None
        return LargestSums(base) if first.several or base.device.type == "cpu" else None

    def note_sum(self, adapter: int, merged: Tensor) -> None:
        """Record blocks to which all changes up to those of an adapter are added."""
        self.note_merged(merged)

    def note_change(self, adapter: int, change: SampleOf, strengths: Sequence[float]) -> None:
        """Record nothing: a change that becomes one change with others is no sum."""

    def note_merged(self, merged: Tensor) -> None:
        """Record sums [n, rows, cols]; the last ones are the merged weights."""
        self._last = self._largest(merged)
        self._most = torch.maximum(self._most, self._last)

    @property
    def cancelled(self) -> Tensor:
        """1 for each weight whose terms cancel, else 0: [n], in the dtype of the sums."""
        return torch.gt(self._most, LARGEST_SUM * self._last, out=torch.empty_like(self._most))

    def _largest(self, sums: Tensor) -> Tensor:
        return strided(sums, self._rows).abs().amax((1, 2))
