"""Which numbers of a block are sampled, and how many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..blocks import Block
from . import run_sample
from .run_sample import suits

COARSE: Final = 4
"""The factor by which more numbers than usual are sampled where whole tiles of rows are encoded together."""

PERIOD: Final = 4
"""Of so many blocks that the same patches change, one is sampled: each costs a dozen calls, however few rows it has."""


@dataclass(frozen=True)
class Sampling:
    """The density of a sample: about one number of a block in `every`, and at least `least`."""

    every: int = 256
    least: int = 2**11
    runs: bool = True  # whether runs of numbers may be sampled in place of rows
    checked: frozenset[str] = frozenset()  # weights of which rows are sampled: the proof computes these rows again

    def rows(self, blocks: Sequence[Block]) -> range:
        """Return the sampled rows of each of some blocks of one kind, spread evenly; rows of codes lie side by side,
        because those that share a scale are encoded together."""
        block = blocks[0]
        rows, cols, group = block.last - block.first, max(block.cols, 1), block.target.row_group
        count = min(rows, max(-(-self.least // cols), self._others(blocks) * self._wanted(block) // cols))
        if block.target.packed is None:
            return range(0, rows // count * count, rows // count)
        return range(min(rows, -(-count // group) * group))

    def step(self, blocks: Sequence[Block], stands_for: int) -> int:
        """Return n: one in n of `rows` is enough, if all of them stand for so many rows of the weight."""
        block = blocks[0]
        if block.target.packed is None:
            return 1
        rows, enough = self.rows(blocks), max(stands_for // self.every, COARSE * self.least // max(block.cols, 1), 1)
        return max(
            (step for step in (1, 2, 4, 8, 16) if len(rows) % step == 0 and len(rows) // step >= enough), default=1
        )

    def by_runs(self, blocks: Sequence[Block]) -> bool:
        """Return whether these blocks are sampled by runs."""
        return self.runs and suits(blocks[0]) and self.checked.isdisjoint(b.target.name for b in blocks)

    def period(self, blocks: Sequence[Block]) -> int:
        """Return n: one run is sampled in every n numbers of each of some blocks."""
        return max(run_sample.RUN, run_sample.PERIOD // 256 * self.every // self._others(blocks))

    def stands_for(self, blocks: Sequence[Block]) -> list[int]:
        """Return how many rows of its weight the sampled rows of each block stand for; 0 for a block without a sample.

        Rows that are encoded together may be most of a block: then only some of such blocks are sampled, unless
        several are folded in one call.
        """
        block = blocks[0]
        group = block.target.row_group
        if len(blocks) > 1 or block.target.packed is None or group * block.cols <= COARSE * self._wanted(block):
            return [self._until(b) for b in blocks]
        period = group * max(self.every // COARSE, 1)
        at = -(-block.first // period) * period
        return [min(period, block.target.matrix[0] - at) if at < block.last else 0]

    @property
    def _period(self) -> int:
        return min(PERIOD, self.every)

    def _others(self, blocks: Sequence[Block]) -> int:
        """Return how many blocks of its run one of some sampled blocks stands for, at most."""
        return min(self._period, max(-(-(b.run.high - b.run.low) // b.run.step) for b in blocks))

    def _until(self, block: Block) -> int:
        """Return the rows from a sampled block to the next sampled block of its run; 0 for a block without a sample."""
        period = self._period * block.run.step
        return 0 if (block.first - block.run.low) % period else min(period, block.run.high - block.first)

    def _wanted(self, block: Block) -> int:
        """Return how many numbers of a block are sampled, if all blocks are."""
        return max(block.elements // self.every, self.least)
