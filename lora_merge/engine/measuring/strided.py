"""Looks at every so-many-th run of a window's numbers on a device, whatever weights they are of: a few operations for
many windows, where rows of each block would take a dozen for each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...measure import Measure, Measured, Share
from ..blocks import Block
from ..device.placement import brought
from ..placement import TORCH_DTYPES, DeviceStream
from .placement import as_stored
from .watch import same, several

RUN: Final = 64
"""The numbers of a run; they lie side by side."""

PERIOD: Final = 256 * RUN
"""One run lies in so many numbers, at their beginning."""

LEAST: Final = 2 * PERIOD
"""The numbers of a block that surely holds a whole run, wherever it begins."""

HELD: Final = 2**21
"""The numbers that wait on a lane for their sums, where the lane's share of the memory has `ROOM` bytes for each."""

ROOM: Final = 256
"""Bytes; adding a number up takes less than 40."""

Read: TypeAlias = Callable[[], list[tuple[int, Measured]]]
"""Function that returns plans with measures of their tensors, once the lane is settled."""


def suits(block: Block) -> bool:
    """Return whether runs tell what is done to a block: it holds some, and one adapter changes it."""
    return block.elements >= LEAST and not several(block)


def runs(work: Tensor) -> Tensor:
    """Return a copy of the runs [n, RUN] of flat numbers."""
    whole = len(work) // PERIOD * PERIOD
    return work.narrow(0, 0, whole).view(-1, PERIOD).narrow(1, 0, RUN).clone()


class Seen(NamedTuple):
    """The runs of some blocks that lie one after another, before and after they are folded."""

    plan: int
    blocks: Sequence[Block]  # those that runs do not suit are measured otherwise
    before: Tensor  # [n, RUN]
    after: Tensor


@dataclass
class StridedLooks:
    """What the lanes of devices have seen, until it is added up."""

    most: int  # numbers that wait on a lane for their sums, if no part has more
    found: list[tuple[int, Measured]] = field(default_factory=list)
    _kept: dict[DeviceStream, list[Seen]] = field(default_factory=dict)

    def add(self, seen: Sequence[Seen], lane: DeviceStream) -> Read | None:
        """Keep what a lane has seen; once it is much, start to add it up, and return a function for its result."""
        kept = self._kept.setdefault(lane, [])
        kept += seen
        if sum(one.before.numel() for one in kept) < self.most:
            return None
        self._kept[lane] = []
        return added(kept, lane)

    def rest(self) -> Iterator[tuple[DeviceStream, list[Seen]]]:
        """Yield each lane with what it has seen and not added up, which is forgotten; nothing may be under way."""
        kept, self._kept = self._kept, {}
        return ((lane, seen) for lane, seen in kept.items() if seen)


def added(every: Sequence[Seen], lane: DeviceStream) -> Read:
    """Start to add up the numbers of each run; return a function for the measures of the blocks."""
    kinds: dict[tuple[torch.dtype, str, bool], list[Seen]] = {}
    for one in every:
        target = one.blocks[0].target
        alike = all(same(b.target) for b in one.blocks)
        kinds.setdefault((one.before.dtype, target.dtype, alike), []).append(one)
    sums = [_sums(some, TORCH_DTYPES[dtype], alike=alike) for (_, dtype, alike), some in kinds.items()]
    there = brought(torch.cat(sums, 1), lane, "strided")
    ordered = [one for some in kinds.values() for one in some]

    def read() -> list[tuple[int, Measured]]:
        parts = there.split_with_sizes([len(one.before) for one in ordered], 1)
        return [(one.plan, m) for one, part in zip(ordered, parts, strict=True) for m in _measured(one, part)]

    return read


def _sums(some: Sequence[Seen], dtype: torch.dtype, *, alike: bool) -> Tensor:
    """Return of each run [6, n]: W², ΔW², applied · ΔW, applied², the numbers that differ, and the largest |ΔW|.

    `alike`: whether an output of this dtype holds the base's numbers as they are.
    """
    before, after = (torch.cat([getattr(one, name) for one in some]) for name in ("before", "after"))
    change = after - before
    applied = as_stored(after, dtype) - (before if alike else as_stored(before, dtype))
    squares = torch.stack((before * before, change * change, applied * change, applied * applied, applied.ne(0)))
    return torch.cat((squares.sum(2), change.abs().amax(1).unsqueeze(0)))


def _measured(seen: Seen, sums: Tensor) -> Iterator[Measured]:
    """Yield the measures of blocks from the sums of their runs; runs with numbers that are not finite are left out."""
    end = 0
    for block in seen.blocks:
        low, end = end, end + block.elements
        if not suits(block):
            continue
        own = sums[:, -(-low // PERIOD) : (end - RUN) // PERIOD + 1]
        if not own.isfinite().all():
            own = own[:, own.isfinite().all(0)]
        if looked := RUN * own.shape[1]:
            scaled = own[:5].sum(1, dtype=torch.float64) * (block.elements / looked)
            weight, change, kept, applied, changed = scaled.tolist()
            whole, noise = Share(change, change, kept), max(applied - 2 * kept + change, 0.0)
            measure = Measure(
                block.elements, looked, changed, 0, weight, noise, float(own[5].max()), whole,
                {block.slices[0].use.patch.adapter: whole},
            )  # fmt: skip
            yield Measured(block.target.name, measure)
