"""Rows by their numbers, and ranges of rows that are found without looking at all others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RowNumbers(tuple[int, ...]):
    """Numbers of rows, each once, in the order of an adapter's tensor. Thousands of modules may share one list, so what
    takes as long as the list is done once."""

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(first, count) of each run of consecutive rows, in the order of the list."""
        runs: list[tuple[int, int]] = []
        for row in self:
            if runs and row == sum(runs[-1]):
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((row, 1))
        return tuple(runs)

    @cached_property
    def last(self) -> int:
        """The highest number; -1 without rows."""
        return max(self, default=-1)

    @cached_property
    def _hash(self) -> int:
        return tuple.__hash__(self)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


class Ranges(Generic[Item]):
    """Items that each lie in a range of rows, and may overlap.

    Ranges of about one length (between two powers of 2) are kept together, sorted by their starts. Of those, all that
    meet rows [start, stop) begin within one such length before it, and no more than as many others do.
    """

    def __init__(self, items: Iterable[tuple[int, int, Item]] = ()) -> None:
        self._count = 0
        self._lengths: dict[int, list[tuple[int, int, int, Item]]] = {}  # power of 2 → start, number, stop, item
        for start, stop, item in items:
            self.add(start, stop, item)

    def add(self, start: int, stop: int, item: Item) -> None:
        """Remember an item of rows [start, stop); one without rows meets nothing."""
        if stop <= start:
            return
        insort(self._lengths.setdefault((stop - start).bit_length(), []), (start, self._count, stop, item))
        self._count += 1

    def meeting(self, start: int, stop: int) -> list[Item]:
        """Return the items that have a row of [start, stop), in the order in which they were added."""
        return [item for _, item in sorted(self._items(start, stop), key=lambda entry: entry[0])]

    def _items(self, start: int, stop: int) -> Iterator[tuple[int, Item]]:
        if stop <= start:
            return
        for power, ranges in self._lengths.items():
            for at in range(bisect_left(ranges, (start - (1 << power),)), len(ranges)):
                first, number, last, item = ranges[at]
                if first >= stop:
                    break
                if last > start:
                    yield number, item
