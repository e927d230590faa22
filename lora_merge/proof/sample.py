"""The fixed sample of bytes that a default proof compares, spread evenly over the whole file."""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Final, TypeAlias

import numpy as np

from ..planning.plan import OutputTensor
from .reference.floats import Array

SAMPLED_ROWS: Final = 2  # of a merged tensor, more if rows are short
LEAST_ELEMENTS: Final = 256  # of a merged tensor at least
RANGE: Final = 2**16  # bytes of one sampled range of untouched tensors
SAMPLED_RANGES: Final = 128  # of them per file, spread evenly
ALL_BELOW: Final = 8 * 2**20  # untouched bytes of a file that are compared completely
COMPARED_BYTES: Final = 2**22  # bytes compared at once

Range: TypeAlias = tuple[OutputTensor, int, int]
"""(tensor, first byte in it, bytes)."""


def shuffled(name: str) -> int:
    """Return a pseudo-random number that depends on the name alone (CRC-32), the same on every machine."""
    return zlib.crc32(name.encode())


def sample(target: OutputTensor) -> Array:
    """Return the rows of a tensor, always the same ones: spread evenly, at least one in every part that is changed."""
    rows, cols = target.matrix
    count = min(rows, max(SAMPLED_ROWS, -(-LEAST_ELEMENTS // max(cols, 1))))
    if count == rows:
        return np.arange(rows)
    random = Random(shuffled(target.name))
    chosen = sorted({random.randrange(rows * i // count, rows * (i + 1) // count) for i in range(count)})
    for part in (range(u.piece.start, u.piece.stop) for u in target.uses):
        at = bisect_left(chosen, part.start)
        if part and not (at < len(chosen) and chosen[at] in part):
            insort(chosen, random.choice(part))
    return np.array(chosen, dtype=np.int64)


def runs(entries: Array) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of consecutive entries."""
    first, count = 0, 0
    for entry in entries.tolist():
        if count and entry == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = entry, 1
    if count:
        yield first, count


def ranges(targets: list[OutputTensor], total: int, *, full: bool) -> Iterator[Range]:
    """Yield ranges of all bytes, or the fixed sample of them."""
    if full:
        for t in targets:
            yield from ((t, low, min(COMPARED_BYTES, t.nbytes - low)) for low in range(0, t.nbytes, COMPARED_BYTES))
        return
    random, before = Random(total), 0
    edges = [(total - RANGE) * i // SAMPLED_RANGES for i in range(SAMPLED_RANGES + 1)]
    starts = iter([random.randrange(low, max(high, low + 1)) for low, high in pairwise(edges)])
    start = next(starts)
    for t in targets:
        while start < before + t.nbytes:
            first = max(start - before, 0) // 64 * 64
            yield t, first, min(RANGE, t.nbytes - first)
            start = next(starts, total)
        before += t.nbytes


def neighbours(pieces: Iterable[Range]) -> Iterator[list[Range]]:
    """Yield groups of ranges that follow each other both in the output and in the input, COMPARED_BYTES bytes at most.

    Each group is compared at once."""
    some: list[Range] = []
    size = 0
    for this in pieces:
        if some and not (size + this[2] <= COMPARED_BYTES and _follows(some[-1], this)):
            yield some
            some, size = [], 0
        some.append(this)
        size += this[2]
    if some:
        yield some


def _follows(last: Range, this: Range) -> bool:
    (a, start, count), (b, first, _) = last, this
    if b.offset + first - a.offset - start != count or not (a.copied and b.copied):
        return False
    before, after = a.source, b.source
    same = before.source is after.source or before.source == after.source  # comparing paths takes the most time here
    return same and after.offset + first - before.offset - start == count


def stretch(some: Sequence[Range]) -> Range:
    """Return the bytes of a group of ranges as a single range of the first tensor."""
    target, first, _ = some[0]
    return target, first, sum(count for _, _, count in some)
