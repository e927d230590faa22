"""Samples short runs of numbers, evenly spread over blocks: it takes two copies for each block, or on a device for a
whole window, and a few operations for the sums of many blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...measure import Measure, Measured, Share
from ...planning.plan import OutputTensor
from ..blocks import Block
from ..device.placement import brought
from ..placement import TORCH_DTYPES, DeviceStream
from .placement import as_stored

RUN: Final = 128
"""The numbers of a run; they lie side by side."""

PERIOD: Final = 256 * RUN
"""One run lies in so many numbers, at their beginning."""

LEAST: Final = 2 * PERIOD
"""The numbers of a block that surely holds a whole run, wherever it begins."""

HELD: Final = 2**22
"""The numbers that wait on a lane for their sums, where the lane's share of the memory has `ROOM` bytes for each."""

ROOM: Final = 256
"""Bytes; adding a number up takes less than 40."""

Read: TypeAlias = Callable[[], list[tuple[Measured, ...]]]
"""Function that returns the measures of samples, once the lane is settled."""


def several(block: Block) -> bool:
    """Return whether several adapters change a block."""
    return block.target.combining is not None or len({s.use.patch.adapter for s in block.slices}) > 1


def same(target: OutputTensor) -> bool:
    """Return whether the output can hold the numbers of the base as they are."""
    return target.weight.packing.encoding is target.packing.encoding


def suits(block: Block) -> bool:
    """Return whether runs are enough for a block: it holds some, of plain numbers, and one adapter changes it."""
    return block.elements >= LEAST and block.target.packed is None and not several(block)


def runs(work: Tensor, period: int) -> Tensor:
    """Return a copy of the runs [n, RUN] of flat numbers, one in so many."""
    whole = len(work) // period * period
    return work.narrow(0, 0, whole).view(-1, period).narrow(1, 0, RUN).clone()


class RunSample(NamedTuple):
    """Runs of some blocks that lie one after another, before and after the blocks are folded."""

    blocks: Sequence[Block]
    stands_for: Sequence[int]  # numbers of its weight that those of each block stand for; 0: no sample
    before: Tensor  # [n, RUN]
    after: Tensor
    period: int  # one run lies in so many numbers

    @property
    def numbers(self) -> int:
        """How many numbers are kept."""
        return 2 * self.before.numel()

    @property
    def on_device(self) -> bool:
        """Whether they are on a device."""
        return self.before.device.type != "cpu"


@dataclass
class RunSums:
    """Runs that the lanes of devices have sampled and not added up yet, and the measures of the others."""

    most: int  # numbers that wait on a lane for their sums, if no part has more
    _found: list[tuple[int, tuple[Measured, ...]]] = field(default_factory=list)  # with the number of a plan
    _kept: dict[DeviceStream, list[tuple[int, RunSample]]] = field(default_factory=dict)

    def add(self, plan: int, samples: Sequence[RunSample], lane: DeviceStream) -> Callable[[], None]:
        """Keep the samples of a lane; add them up once they are many. Call the result when the lane is settled."""
        kept = self._kept.setdefault(lane, [])
        kept += [(plan, one) for one in samples]
        if sum(one.numbers for _, one in kept) < self.most:
            return lambda: None
        self._kept[lane] = []
        return self._added(kept, lane)

    def rest(self) -> Iterator[tuple[DeviceStream, Callable[[DeviceStream], Callable[[], None]]]]:
        """Yield each lane with samples left, and a function that adds them up as `add` does; nothing is under way."""
        kept, self._kept = self._kept, {}
        return ((lane, partial(self._added, some)) for lane, some in kept.items() if some)

    def of(self, plan: int) -> Iterator[Measured]:
        """Yield the measures of a plan's tensors."""
        return (one for number, some in self._found if number == plan for one in some)

    def _added(self, kept: Sequence[tuple[int, RunSample]], lane: DeviceStream) -> Callable[[], None]:
        read = added([one for _, one in kept], lane)
        return lambda: self._found.extend(zip((plan for plan, _ in kept), read(), strict=True))


def added(every: Sequence[RunSample], lane: DeviceStream) -> Read:
    """Start to add up the numbers of each run; return a function for the measures of the blocks of each."""
    kinds: dict[tuple[torch.dtype, str, bool], list[int]] = {}
    for number, one in enumerate(every):
        alike = all(same(b.target) for b in one.blocks)
        kinds.setdefault((one.before.dtype, one.blocks[0].target.dtype, alike), []).append(number)
    sums = [
        _sums([every[number] for number in some], TORCH_DTYPES[dtype], alike=alike)
        for (_, dtype, alike), some in kinds.items()
    ]
    there = brought(torch.cat(sums, 1), lane, "runs")
    ordered = [number for some in kinds.values() for number in some]

    def read() -> list[tuple[Measured, ...]]:
        parts = there.split_with_sizes([len(every[number].before) for number in ordered], 1)
        found, finite = dict(zip(ordered, parts, strict=True)), bool(there.isfinite().all())
        return [tuple(_measured(one, found[number], finite=finite)) for number, one in enumerate(every)]

    return read


def _sums(some: Sequence[RunSample], dtype: torch.dtype, *, alike: bool) -> Tensor:
    """Return of each run [6, n]: W², ΔW², applied · ΔW, applied², the numbers that differ, and the largest |ΔW|.

    `alike`: whether an output of this dtype holds the base's numbers as they are.
    """
    before, after = (torch.cat([getattr(one, name) for one in some]) for name in ("before", "after"))
    change = after - before
    applied = as_stored(after, dtype) - (before if alike else as_stored(before, dtype))
    differ = torch.ne(applied, 0, out=torch.empty_like(applied))  # a sum of truth values takes three times as long
    pairs = (before, before), (change, change), (applied, change), (applied, applied)
    return torch.stack([*((x * y).sum(1) for x, y in pairs), differ.sum(1), change.abs().amax(1)])


def _measured(sample: RunSample, sums: Tensor, *, finite: bool) -> Iterator[Measured]:
    """Yield the measures of blocks from the sums of their runs; runs with numbers that are not finite are left out."""
    end = 0
    for block, stands_for in zip(sample.blocks, sample.stands_for, strict=True):
        low, end = end, end + block.elements
        if not stands_for:
            continue
        own = sums[:, -(-low // sample.period) : (end - RUN) // sample.period + 1]
        if not finite:
            own = own[:, own.isfinite().all(0)]
        if elements := RUN * own.shape[1]:
            weight, change, kept, applied, changed, _ = own.sum(1, dtype=torch.float64).tolist()
            scale = stands_for / elements
            whole = Share(scale * change, scale * change, scale * kept)
            yield Measured(block.target.name, Measure(
                stands_for, elements, scale * changed, 0, scale * weight,
                scale * max(applied - 2 * kept + change, 0.0), float(own[5].max()), whole,
                {block.slices[0].use.patch.adapter: whole},
            ))  # fmt: skip
