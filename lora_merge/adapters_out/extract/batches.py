"""Which parameters are decomposed together: on a device those of one shape, on a processor tiny ones of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final, TypeAlias

from ..truncation.tiny import FEW, TOGETHER
from .pair import Pair

NUMBER: Final = 10
"""Bytes on the host for each number of a weight under way: Δ in fp32, both weights in 16 bits, bases of a search."""

ON_DEVICE: Final = 16
"""Bytes on a device for each number of a Δ: fp32, its bases, and fp64 where one is searched again."""

Batch: TypeAlias = tuple[Pair, ...]


def batches(pairs: Sequence[Pair], room: int, bound: int) -> Iterator[Batch]:
    """Yield the pairs, matrices of one shape together, in the order of the first of each batch.

    Parameters:
        pairs: All pairs.
        room: Bytes of the device's memory that a batch may use; 0: each pair is alone, unless it is tiny.
        bound: Bytes of the host's memory that a batch may use.
    """
    open_ones: dict[tuple[int, ...], list[Pair]] = {}
    for pair in pairs:
        shape = pair.place.view.shape
        numbers = prod(shape)
        count = min(TOGETHER if tiny(pair) else room // ON_DEVICE, bound // NUMBER) // max(numbers, 1)
        if pair.place.vector or count < 2 or pair.fresh:
            yield (pair,)
            continue
        batch = open_ones.setdefault(shape, [])
        batch.append(pair)
        if len(batch) == count:
            yield tuple(open_ones.pop(shape))
    yield from map(tuple, open_ones.values())


def tiny(pair: Pair) -> bool:
    """Return whether a parameter is a matrix so small that many are decomposed at once on a processor."""
    shape = pair.place.view.shape
    return not pair.place.vector and 0 < prod(shape) <= FEW and not pair.fresh


def nbytes(batch: Batch) -> int:
    """Return about how many bytes the differences of a batch take, with both weights as they are stored."""
    return sum(prod(pair.place.view.shape) for pair in batch) * NUMBER
