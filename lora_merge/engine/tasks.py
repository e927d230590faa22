"""What a block folder is asked to do with a block, and what comes of it.

A `FoldTask` adds the adapters to a block and writes the result. A weight whose codes depend on its largest number needs
two steps: `LargestTask` folds each of its blocks for that number alone, then `EncodeTask` writes the codes of a block
that is merged already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..change_statistics import Measurement, Norms
from ..disk.scale_spool import PartBytes

if TYPE_CHECKING:
    from torch import Tensor

    from .change_sample import RowSample, RunSample
    from .row_blocks import Block

Result = TypeVar("Result")


@dataclass(frozen=True)
class BlockTask:
    """A block with its stored base values, on the host or where the caller has them."""

    block: Block
    base: Tensor  # [rows, cols], or the stored values of a padded weight's rows, or codes as flat bytes


@dataclass(frozen=True)
class FoldTask(BlockTask):
    """Fold a block, and write the result."""

    into: Tensor  # [rows, cols] in the output's dtype, or codes as flat bytes; may be `base`


@dataclass(frozen=True)
class InUnitsTask(FoldTask):
    """A fold task in which the values of the block, base and merged, are in units of the scale of the whole weight."""

    unit: float
    original: FoldTask  # the same task in units of 1


@dataclass(frozen=True)
class LargestTask(BlockTask):
    """Fold a block of a weight of codes for its largest number; nothing is written."""

    keep: bool  # whether the merged values are returned too


class MergedBlock(NamedTuple):
    """The merged values of a block whose codes are made later, and their sample."""

    values: Tensor  # [rows, cols]
    sample: RowSample | None  # None if no values are measured


@dataclass(frozen=True)
class EncodeTask(FoldTask):
    """Write the codes of a block that is merged already."""

    merged: MergedBlock


@dataclass(frozen=True)
class FoldResult:
    """The results of fold tasks, without the bytes that they write; the sum of several."""

    cut: Counter[str] = field(default_factory=Counter)  # tensor → how many values were cut
    uncovered: Mapping[str, float] = field(default_factory=dict)
    """Weight → its largest magnitude, if the scale of the whole weight does not cover it: nothing is written then."""
    parts: tuple[PartBytes, ...] = ()  # stored next to codes
    measures: tuple[Measurement, ...] = ()
    samples: tuple[RowSample | RunSample, ...] = ()  # whose sums, and so the measures, are not made yet
    norms: Norms = field(default_factory=dict)

    def __add__(self, other: FoldResult) -> FoldResult:
        return FoldResult(
            self.cut + other.cut, largest_of_each(self.uncovered, other.uncovered), self.parts + other.parts,
            self.measures + other.measures, self.samples + other.samples, {**self.norms, **other.norms},
        )  # fmt: skip


def largest_of_each(some: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return weight → the largest of its magnitudes in two tables."""
    return {**some, **{name: max(magnitude, some.get(name, 0.0)) for name, magnitude in more.items()}}


class LargestNumber(NamedTuple):
    """The largest magnitude of the finite values of a block or another part of a weight."""

    weight: str
    magnitude: float
    first: int = 0  # the block's first row
    merged: MergedBlock | None = None  # if the task keeps it


class OutOfMemory(NamedTuple):
    """A call that a device has no memory for, with the device's message; nothing is written."""

    message: str


def results(under_way: Sequence[Future[Result]]) -> list[Result]:
    """Wait for all futures, also if one fails, as their buffers are reused then; return their results."""
    wait(under_way)
    return [future.result() for future in under_way]


def settled(under_way: Sequence[Future[FoldResult]]) -> FoldResult:
    """Wait for all futures, and return the sum of their results."""
    return sum(results(under_way), FoldResult())
