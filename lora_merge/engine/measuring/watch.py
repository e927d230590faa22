"""Looks at some rows of each block while it is folded: base, change and stored numbers, added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...measure import NONE, Checked, Measure, Measured, Share
from ..blocks import Block
from ..device.placement import brought
from ..fold import new_weights
from ..placement import TORCH_DTYPES, DeviceStream, Placement, host
from .factors import factor_norms
from .placement import as_stored, numbers_of, take, workspace

if TYPE_CHECKING:
    from ..fold import StackedPatch
    from ..patch_tensors import PatchTensors

SUMS: Final = 11
"""Of every block: the products of W, ΔW and what is applied of it with each other, the numbers that differ, and the
largest |ΔW|."""


COARSE: Final = 4
"""How many times as many numbers as usual are looked at where whole tiles of rows are encoded together."""


@dataclass(frozen=True)
class Looks:
    """The number of rows of a block that are looked at: about one number in `every`, and at least `least`."""

    every: int = 128
    least: int = 2**11

    def rows(self, block: Block) -> list[int]:
        """Return the rows of a block that are looked at, spread evenly; rows of codes lie side by side, as those that
        share a scale are encoded together."""
        rows = block.last - block.first
        count = min(rows, -(-self._wanted(block) // max(block.cols, 1)))
        if block.target.packed is None:
            return [rows * i // count for i in range(count)]
        group = block.target.row_group
        return [*range(min(rows, -(-count // group) * group))]

    def stands_for(self, blocks: Sequence[Block]) -> int:
        """Return how many rows of its weight the rows of a block that are looked at stand for; 0 if the block is not
        looked at. Rows that are encoded together may be most of a block: then only some of such blocks are, unless
        several are folded in one call."""
        block = blocks[0]
        rows, group = block.last - block.first, block.target.row_group
        if len(blocks) > 1 or block.target.packed is None or group * block.cols <= COARSE * self._wanted(block):
            return rows
        period = group * max(self.every // COARSE, 1)
        at = -(-block.first // period) * period
        return min(period, block.target.matrix[0] - at) if at < block.last else 0

    def _wanted(self, block: Block) -> int:
        """Return how many numbers of a block are to be looked at."""
        return max(block.elements // self.every, self.least)


Nearest: TypeAlias = Callable[[Tensor], Tensor]
"""Function that returns the numbers [n, k · cols] that the output can hold for some."""


@dataclass(frozen=True)
class Stored:
    """The numbers that the output holds in the rows that are looked at."""

    nearest: Nearest
    found: Tensor | None = None  # [n, k · cols]; None: the nearest of the merged numbers
    same: bool = False  # whether it can hold the numbers of the base as they are


class Own(NamedTuple):
    """The change of one adapter in the rows that are looked at."""

    adapter: int
    change: Tensor  # [n, k · cols]
    combined: bool  # whether it becomes one change with others, in which its part is not told apart


@dataclass
class Watch:
    """Some rows of blocks of one kind, before and after they are folded."""

    blocks: Sequence[Block]
    rows: list[int]  # of each block
    index: Tensor  # [n · k] the rows of all blocks
    work: Tensor  # [3, n, k · cols]: base, merged (then ΔW), stored (then what is applied of it)
    stands_for: int  # rows of the weight that the rows of a block stand for
    norms: Sequence[tuple[int, Mapping[int, Tensor]]] = ()  # number of a block → what factors tell of its whole weight
    parts: list[Own] = field(default_factory=list)

    @staticmethod
    def of(blocks: Sequence[Block], base: Tensor, looks: Looks) -> Watch | None:
        """Return rows of base values [n, rows, cols], which are not folded yet; None if they are not looked at."""
        if not (stands_for := looks.stands_for(blocks)):
            return None
        rows, (n, height, cols) = looks.rows(blocks[0]), base.shape
        flat = rows if n == 1 else [number * height + row for number in range(n) for row in rows]
        index = numbers_of(flat, base)
        watch = Watch(blocks, rows, index, workspace(base, (3, n, len(rows) * cols)), stands_for)
        take(base, index, watch.work.select(0, 0))
        return watch

    @property
    def several(self) -> bool:
        """Whether the parts of the adapters are to be told apart."""
        block = self.blocks[0]
        return block.target.combining is not None or len({s.use.patch.adapter for s in block.slices}) > 1

    def seen(self, adapter: int, merged: Tensor) -> None:
        """Take note of blocks [n, rows, cols] to which all changes up to those of an adapter are added."""
        before = self.work.select(0, 1).clone() if self.parts else self.work.select(0, 0)
        take(merged, self.index, self.work.select(0, 1))
        self.parts.append(Own(adapter, self.work.select(0, 1) - before, combined=False))

    def tell(self, adapter: int, change: Tensor, strengths: Sequence[float]) -> None:
        """Take note of a change [n, rows, cols] that becomes one change with others."""
        own = torch.empty_like(self.work.select(0, 0))
        take(change, self.index, own)
        for part, strength in zip(own.unbind(), strengths, strict=True):
            part.mul_(strength)
        self.parts.append(Own(adapter, own, combined=True))

    def done(self, merged: Tensor) -> None:
        """Take note of the merged blocks [n, rows, cols]."""
        take(merged, self.index, self.work.select(0, 1))

    def on_host(self) -> Watch:
        """Return the same with its rows on the host."""
        norms = [(n, {adapter: host(norm) for adapter, norm in found.items()}) for n, found in self.norms]
        parts = [part._replace(change=host(part.change)) for part in self.parts]
        return Watch(self.blocks, self.rows, host(self.index), host(self.work), self.stands_for, norms, parts)

    def sums(self, stored: Stored | None) -> Tensor:
        """Return flat what `read` reads: `SUMS` of every block, ΔW² and applied · ΔW of each part, norms of factors.

        `stored`: None where it is not looked at. The merged numbers are overwritten.
        """
        base, change, applied = self.work.unbind()
        found = change if stored is None else stored.nearest(change) if stored.found is None else stored.found
        more = []
        for part in self.parts:
            own = left = part.change
            if stored is not None and not part.combined:
                left = found - stored.nearest(change - own)
            more += [(own * own).sum(1), (left * own).sum(1)]
        torch.sub(found, base if stored is None or stored.same else stored.nearest(base), out=applied)
        change -= base
        return self._added(more)

    def sound(self) -> list[float]:
        """Return the sums without the numbers that are NaN, infinite, or too large for what is stored."""
        found = self.on_host()
        found.work.masked_fill_(~torch.isfinite(found.work).all(0), 0.0)
        more = [p.change.masked_fill(~torch.isfinite(p.change), 0.0).square().sum(1) for p in found.parts]
        sums: list[float] = found._added([x for own in more for x in (own, torch.full_like(own, torch.nan))]).tolist()
        return sums

    def _added(self, more: Sequence[Tensor]) -> Tensor:
        across = self.work.transpose(0, 1)
        _, change, applied = self.work.unbind()
        products, differ = across @ across.mT, torch.count_nonzero(applied, 1)
        norms = [norm for _, found in self.norms for norm in found.values()]
        return torch.cat([products.flatten(1).T.reshape(-1), differ, change.abs().amax(1), *more, *norms])

    def measured(self, sums: Tensor, *, known: bool) -> tuple[Measured, ...]:
        """Return the measure of each block. `known`: whether what is stored was looked at."""
        found = sums.tolist()
        return tuple(self._read(found if all(map(isfinite, found)) else self.sound(), known=known))

    def _read(self, found: Sequence[float], *, known: bool) -> Iterator[Measured]:
        count = len(self.blocks)
        ends = iter(found[count * (SUMS + 2 * len(self.parts)) :])
        exact = {n: {adapter: max(0.0, next(ends)) for adapter in norms} for n, norms in self.norms}
        for n, block in enumerate(self.blocks):
            yield self._measure(block, found[n::count], known=known)._replace(norms=exact.get(n, NONE))

    def _measure(self, block: Block, own: Sequence[float], *, known: bool) -> Measured:
        weight, change, left, square, changed, largest = (own[k] for k in (0, 4, 5, 8, 9, 10))
        scale = self.stands_for / len(self.rows)
        whole = Share(scale * change, scale * change, scale * left if known else None)
        shares = {} if self.several else {block.slices[0].use.patch.adapter: whole}
        for number, part in enumerate(self.parts):
            size, kept = (scale * x for x in own[SUMS + 2 * number : SUMS + 2 * number + 2])
            told = known and not part.combined and isfinite(kept)
            shares[part.adapter] = Share(size, size if told else 0.0, kept if told else None)
        sums = Measure(
            self.stands_for * block.cols, len(self.rows) * block.cols, scale * changed if known else 0.0, 0,
            scale * weight,
            scale * max(square - 2 * left + change, 0.0) if known else 0.0, largest, whole, shares,
        )  # fmt: skip
        rows = tuple(block.first + row for row in self.rows)
        return Measured(block.target.name, sums, Checked(rows, weight, change, round(changed) if known else None))


Read: TypeAlias = Callable[[], tuple[Measured, ...]]
"""Function that returns the measures of some blocks, once their lane is settled."""


def look(watch: Watch, drawn: Tensor | None = None) -> tuple[Watch, Tensor]:
    """Return what is seen of blocks whose output is plain numbers. `drawn`: the merged blocks, where they are
    rounded by chance."""
    target, found = watch.blocks[0].target, None
    if drawn is not None:
        found = torch.empty_like(watch.work.select(0, 0))
        take(drawn, watch.index, found)
    same = target.weight.packing.encoding.plain and target.weight.stored.dtype == target.dtype
    return watch, watch.sums(Stored(partial(as_stored, dtype=TORCH_DTYPES[target.dtype]), found, same))


def bring(seen: Sequence[tuple[Watch, Tensor]], lane: DeviceStream) -> Read:
    """Bring all sums to the host with one transfer."""
    if not seen:
        return tuple
    sizes = [len(sums) for _, sums in seen]
    every = brought(torch.cat([sums for _, sums in seen]), lane, "sums")

    def read() -> tuple[Measured, ...]:
        parts = zip(seen, every.split_with_sizes(sizes), strict=True)
        return tuple(one for (watch, _), sums in parts for one in watch.measured(sums, known=True))

    return read


def watched(  # noqa: PLR0913, PLR0917  # what is folded, and where
    blocks: Sequence[Block], base: Tensor, stacks: Sequence[StackedPatch], tensors: PatchTensors, lane: DeviceStream,
    looks: Looks | None,
) -> tuple[Tensor, Watch | None]:  # fmt: skip
    """Return merged weights [n, rows, cols] as `new_weights` does, and what was seen of them; nothing without looks."""
    watch = Watch.of(blocks, base, looks) if looks is not None and base.numel() and stacks else None
    merged = new_weights(blocks, base, stacks, watch if watch is not None and watch.several else None)
    if watch is not None:
        watch.done(merged)
        at = Placement(base.device, base.dtype)
        firsts = ((n, b.target) for n, b in enumerate(blocks) if b.first <= b.target.uses[0].piece.start < b.last)
        watch.norms = [(n, norms) for n, target in firsts if (norms := factor_norms(target, tensors, at, lane))]
    return merged, watch
