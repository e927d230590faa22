"""Finds the largest numbers of a matrix read by rows, exactly: bits of magnitudes are counted, a few at a time."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from .rows import Rows

AT_ONCE: Final = 16
"""Bits that are counted each time that all numbers are read."""

FEW: Final = 2**21
"""Numbers that are sorted: once no more than these have the known leading bits, further bits are not counted."""

INTEGERS: Final = {torch.float64: (torch.int64, 63), torch.float32: (torch.int32, 31)}
"""Dtype → the integers of its width, and their bits without the sign: bits of magnitudes are in the order of these."""


class Largest(NamedTuple):
    """The numbers that are the largest in magnitude: all above a bound, and the first of those that equal it."""

    least: float  # the smallest magnitude among them
    last: int  # the place, counted row by row, of the last number of that magnitude among them
    cols: int

    def of(self, block: Tensor, first: int) -> Tensor:
        """Return whether each number of a block of rows, the first of which has this number, is among them."""
        size = block.abs()
        kept = size >= self.least
        low = first * self.cols
        if self.last < low + block.numel() - 1:
            equal = (size == self.least).view(-1)
            kept.view(-1)[max(0, self.last + 1 - low) :][equal[max(0, self.last + 1 - low) :]] = False
        return kept


def largest(change: Rows, count: int) -> Largest:
    """Return which numbers are the largest `count` in magnitude."""
    cols = change.shape[1]
    if count <= 0 or count >= change.numel():
        return Largest(torch.inf if count <= 0 else 0.0, -1 if count <= 0 else change.numel(), cols)
    known, left, wanted, number = _leading_bits(change, count)
    bits, place = _with_leading_bits(known, left, number, change)
    least = bits.kthvalue(number - wanted + 1).values
    wanted -= int((bits > least).sum())
    last = int(place[int((bits == least).cumsum(0).clamp_(max=wanted).argmax())])  # the first that is `wanted`
    value = least.reshape(1).view(next(d for d, (i, _) in INTEGERS.items() if i == bits.dtype))
    return Largest(float(value[0]), last, cols)


def _leading_bits(change: Rows, count: int) -> tuple[int, int, int, int]:
    """Return (leading bits of the count-th largest magnitude, number of bits after them, its place among the magnitudes
    with these leading bits, counted from the largest, number of these magnitudes)."""
    known, left, wanted, number = 0, -1, count, change.numel()
    if change.numel() <= FEW:
        return known, INTEGERS[change.read(slice(0, 0)).dtype][1], wanted, change.numel()
    while left:
        counts: Tensor | None = None
        for _, block in change.blocks():
            kind, width = INTEGERS[block.dtype]
            before = width if left < 0 else left
            after = max(0, before - AT_ONCE)
            bits = block.abs_().reshape(-1).view(kind)
            if left >= 0:
                bits = bits[(bits >> left) == known]
            own = torch.bincount((bits >> after) & ((1 << (before - after)) - 1), minlength=1 << (before - after))
            counts = own if counts is None else counts.add_(own)
        assert counts is not None, "there are numbers"
        above = counts.flip(0).cumsum(0)
        place = int((above < wanted).sum())
        wanted -= int(above[place - 1]) if place else 0
        digit = len(counts) - 1 - place
        known, left = (known << (before - after)) | digit, after
        number = int(counts[digit])
        if number <= FEW:
            break
    return known, left, wanted, number


def _with_leading_bits(known: int, left: int, number: int, change: Rows) -> tuple[Tensor, Tensor]:
    """Return (bits, places) of the `number` magnitudes with these leading bits."""
    nothing = change.read(slice(0, 0))
    kind = INTEGERS[nothing.dtype][0]
    if number == change.numel():
        every = torch.cat([block.abs_().reshape(-1).view(kind) for _, block in change.blocks()])
        return every, torch.arange(number, device=every.device)
    found = nothing.new_empty(number, dtype=kind)
    places, at = nothing.new_empty(number, dtype=torch.int64), 0
    for rows, block in change.blocks():
        bits = block.abs_().reshape(-1).view(found.dtype)
        there = ((bits >> left) == known).nonzero().view(-1)
        end = at + len(there)
        found[at:end], places[at:end] = bits[there], there + rows.start * change.shape[1]
        at = end
    return found, places
