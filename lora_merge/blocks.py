"""Cuts changed tensors into blocks: runs of rows that are folded at once.

Blocks depend on the shapes alone, never on the memory bound or the number of threads, so that the same
merge gives the same bytes on every machine of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from .matched import Use
from .planning import Target, rows_of

BLOCK_ELEMENTS: Final = 2**20  # 4 MiB in fp32 stay in the caches: both casts take a third of what 2**22 take


@dataclass(frozen=True)
class Slice:
    """One use inside a block: block rows [low, high), which are the view's rows [start, start + high − low).

    `start` is None where the formula cannot be sliced: the whole ΔW is formed and rows `taken` are used.
    """

    use: Use
    low: int
    high: int
    start: int | None
    taken: tuple[int, int] | None

    @property
    def needs_view(self) -> bool:
        """Whether the formula needs rows of the base that lie outside this block."""
        patch = self.use.patch
        return self.taken is not None and patch.reads_base and len(patch.view.pieces) > 1


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of a target with all that is added to them."""

    target: Target
    first: int
    last: int
    cols: int
    slices: tuple[Slice, ...]

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """Equal for blocks that can be stacked into one batched call."""
        return (
            self.last - self.first, self.cols, self.target.dtype,
            self.target.source.dtype if self.target.source else None, self.reshaped,
            tuple(
                (s.low, s.high, s.use.patch.algorithm, tuple(sorted(s.use.patch.shapes.items())),
                 s.use.patch.settings, s.use.patch.magnitude, s.use.piece.transposed, s.start is None, s.taken,
                 s.use.patch.view.shape if s.taken is not None else None)
                for s in self.slices
            ),
        )  # fmt: skip

    @property
    def reshaped(self) -> bool:
        """Whether the base tensor is absent or smaller and has to be padded with zeros."""
        return self.target.source is None or self.target.source.shape != self.target.shape

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return (self.last - self.first) * self.cols


def blocks(target: Target) -> Iterator[Block]:
    """The target's rows in blocks, in order, without a gap. A use that cannot be sliced is never cut."""
    rows, cols = rows_of(target)
    for low, high in _uncut(target, rows):
        whole = target.source is not None and target.source.shape != target.shape
        whole = whole or any(_overlaps(u, low, high) and not _sliceable(u) for u in target.uses)
        step = high - low if whole else max(1, BLOCK_ELEMENTS // max(cols, 1))
        for first in range(low, high, step):
            last = min(first + step, high)
            found = tuple(_slice(u, first, last) for u in target.uses if _overlaps(u, first, last))
            yield Block(target, first, last, cols, found)


def _uncut(target: Target, rows: int) -> list[tuple[int, int]]:
    """Row ranges between boundaries of uses, joined where a use that cannot be sliced spans several."""
    if target.source is not None and target.source.shape != target.shape:
        return [(0, rows)]
    edges = {0, rows}
    for u in target.uses:
        edges |= {u.piece.start, u.piece.stop}
    held = [(u.piece.start, u.piece.stop) for u in target.uses if not _sliceable(u)]
    cuts = sorted(e for e in edges if not any(a < e < b for a, b in held))
    return list(pairwise(cuts))


def _sliceable(use: Use) -> bool:
    return use.patch.sliceable and not use.piece.transposed


def _overlaps(use: Use, low: int, high: int) -> bool:
    return use.piece.start < high and low < use.piece.stop


def _slice(use: Use, first: int, last: int) -> Slice:
    low, high = max(use.piece.start, first), min(use.piece.stop, last)
    if _sliceable(use):
        return Slice(use, low - first, high - first, use.start + low - use.piece.start, None)
    whole = len(use.patch.view.pieces) == 1
    taken = None if whole else (use.start, use.start + use.piece.rows)
    return Slice(use, low - first, high - first, None, taken)
