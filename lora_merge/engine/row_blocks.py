"""Cuts changed tensors into blocks: ranges of rows that are folded at once.

Blocks depend only on shapes, never on the memory limit or the number of threads, so that on CPUs of one kind the same
merge gives the same bytes: there each call computes one block. Other devices may round the products of several blocks
in one call differently from those of one block, and the number of blocks in a call depends on the window, the limits
and the free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple, TypeVar

from ..algorithms import ALGORITHMS
from ..grouping import by_key
from ..matching.patch import PatchPart
from ..planning.plan import OutputTensor
from ..row_ranges import Ranges

FURTHER: Final = 5
"""Arrays of a block's size in addition to one for each adapter: base and its buffer, magnitudes, and temporaries."""

Work = TypeVar("Work")

ROWS_BYTES: Final = 8 + 4
ROWS_ROOM: Final = 2**27
"""Bytes for a block whose changes are computed by rows: for a number its base, and what stochastic rounding makes of
it; and for all together counts, places, some rows."""

BY_ROWS: Final = 2**21
"""Values of a block up to which its changes are computed as a whole, where they become one change."""

WIDENED_PER_BLOCK: Final = 2**19
"""Values of an adapter's tensor from which on it is widened again for every block that reads it, not kept."""

WIDENED: Final = 8
"""Bytes of a number of such a tensor while a block is folded: as it is stored, and in fp32."""

BLOCK_ELEMENTS: Final = 2**20  # 4 MiB in fp32 stay in the caches: casts take a third of their time at 2**22


@dataclass(frozen=True)
class BlockPart:
    """The part of one patch that changes rows [low, high) of a block.

    The formula computes ΔW for the rows `formed` of its view, in whole row groups. `taken` are the rows of that ΔW that
    belong to the block; None: all.
    """

    use: PatchPart
    low: int
    high: int
    formed: tuple[int, int]
    taken: tuple[int, int] | None
    target: OutputTensor

    @property
    def needs_view(self) -> bool:
        """Whether the formula needs rows of the base outside this block."""
        patch = self.use.patch
        return self.taken is not None and patch.reads_base and len(patch.view.row_slices) > 1

    @property
    def by_rows(self) -> bool:
        """Whether each row of ΔW follows from its own entries of the stored tensors and its own row of the base."""
        patch = self.use.patch
        row = ALGORITHMS[patch.algorithm]
        computed = (
            row.prepare is not None or row.decomposes or row.derive is not None or row.rebuild or patch.base_slots
        )
        return patch.row_group == 1 and not (computed or self.use.piece.transposed or self.taken)

    @property
    def whole(self) -> Iterator[int]:
        """The values of each of the patch's tensors of which more than the block's rows are read."""
        patch = self.use.patch
        by_rows = ALGORITHMS[patch.algorithm].row_axes or {} if patch.row_group < patch.view.matrix[0] else {}
        return (prod(shape) for slot, shape in patch.shapes.items() if by_rows.get(slot) != 0)

    def entries(self, axis_length: int) -> tuple[int, int]:
        """Return (first, count) of the needed entries along an axis that `row_axes` names."""
        row_group = self.use.patch.view.matrix[0] // axis_length
        return self.formed[0] // row_group, (self.formed[1] - self.formed[0]) // row_group


class BlockRun(NamedTuple):
    """Rows [low, high) that the same patches change, cut into blocks of `step` rows."""

    low: int
    high: int
    step: int


@dataclass(frozen=True)
class Block:
    """Rows [first, last) of a target with all patches that change them."""

    target: OutputTensor
    first: int
    last: int
    cols: int
    slices: tuple[BlockPart, ...]
    run: BlockRun  # of which it is one block
    exact: bool = False  # whether it is computed in fp64, as its terms cancel

    @cached_property
    def kind(self) -> tuple[Any, ...]:
        """A key that is equal for blocks that can be stacked into one batched call."""
        return (
            self.last - self.first, self.cols, self.target.packing.encoding,
            self.target.weight.packing.encoding, self.target.weight.padded, self.target.combination,
            self.by_rows, self.exact,
            tuple(
                (s.low, s.high, s.formed[1] - s.formed[0], s.taken, s.needs_view, s.use.patch.adapter,
                 s.use.patch.algorithm, tuple(sorted(s.use.patch.shapes.items())), s.use.patch.settings,
                 s.use.patch.magnitude, s.use.piece.transposed, s.use.piece.columns, s.use.patch.view.shape)
                for s in self.slices
            ),
        )  # fmt: skip

    @property
    def stored(self) -> tuple[int, int]:
        """(first, count) of the block's stored elements; all other elements of a padded weight are zeros."""
        return self.target.weight.span(self.first * self.cols, self.last * self.cols)

    def folded(self, *, drawn: bool) -> bool:
        """Whether the block is folded: if an adapter changes it, or its weight is padded. `drawn`: whether merged
        weights are rounded stochastically, which is done while they are folded, and to all rows of a weight."""
        target = self.target
        return bool(self.slices) or target.weight.padded or (drawn and target.recoded and bool(target.uses))

    @cached_property
    def several(self) -> bool:
        """Whether several adapters change the block."""
        return self.target.combines or len({s.use.patch.adapter for s in self.slices}) > 1

    @property
    def begins(self) -> bool:
        """Whether the changes of the weight begin in this block."""
        return bool(self.slices) and self.first <= self.target.uses[0].piece.start < self.last

    @property
    def reads(self) -> set[str]:
        """Keys of the base tensors of which a formula reads more than the values that it changes."""
        patches = [s.use.patch for s in self.slices]
        views = [p.view for p in patches if p.reads_base] + [v for p in patches for v in p.base_slots.values()]
        return {piece.key for view in views for piece in view.row_slices}

    @property
    def by_rows(self) -> bool:
        """Whether a CPU computes the changes of this block some rows at a time, each time that they are read, as they
        become one change and take much memory."""
        combines = self.target.combines and self.elements > BY_ROWS
        return combines and len(self.target.shape) > 1 and all(s.by_rows for s in self.slices)

    @property
    def room(self) -> int:
        """The bytes that the changes of this block take at once, with temporaries, where they become one change; for
        other blocks, which are small, those of the large tensors that their formulas read whole."""
        if not self.target.combines:
            return WIDENED * sum(n for s in self.slices for n in s.whole if n > WIDENED_PER_BLOCK)
        if self.by_rows:
            plain = self.target.packed is None and self.target.weight.packed is None
            return (ROWS_BYTES if plain else 8 * FURTHER) * self.elements + ROWS_ROOM
        return 8 * self.elements * (len({s.use.patch.adapter for s in self.slices}) + FURTHER)

    @property
    def elements(self) -> int:
        """The number of elements."""
        return (self.last - self.first) * self.cols


def blocks(target: OutputTensor) -> Iterator[Block]:
    """Yield the target's rows in blocks, in order, without a gap. Rows that a formula gives together stay together; a
    weight whose changes become one change, for which all of them are needed, is one block."""
    (rows, cols), group = target.matrix, target.row_group
    if target.combines:
        yield block(target, 0, rows)
        return
    uses = Ranges((u.piece.start, u.piece.stop, u) for u in target.uses)
    for low, high in _ranges(target, rows, cols):
        changing = uses.meeting(low, high)
        step = high - low if any(map(_joined, changing)) else max(1, BLOCK_ELEMENTS // max(cols * group, 1)) * group
        for first in range(low, high, step):
            yield _block(target, first, min(first + step, high), changing, BlockRun(low, high, step))


def block(target: OutputTensor, first: int, last: int) -> Block:
    """Return rows [first, last) of a target as one block; they begin and end where other blocks do."""
    return _block(target, first, last, target.uses, BlockRun(first, last, last - first))


def _block(target: OutputTensor, first: int, last: int, uses: Sequence[PatchPart], run: BlockRun) -> Block:
    parts = tuple(_slice(target, u, first, last) for u in uses if u.piece.start < last and first < u.piece.stop)
    return Block(target, first, last, target.matrix[1], parts, run)


def groups(items: Sequence[Work], of: Callable[[Work], Block], most: Callable[[Block], int]) -> Iterator[list[Work]]:
    """Yield the items whose blocks (`of`) are of one kind together, at most so many as `most` says of a block."""
    for same in by_key((of(item).kind, item) for item in items).values():
        n = most(of(same[0]))
        for first in range(0, len(same), n):
            yield same[first : first + n]


def portions(items: Iterable[Work], size: Callable[[Work], int], most: int) -> Iterator[list[Work]]:
    """Yield the items in lists, each closed when the sizes of its items reach `most`."""
    some: list[Work] = []
    total = 0
    for item in items:
        some.append(item)
        total += size(item)
        if total >= most:
            yield some
            some, total = [], 0
    if some:
        yield some


def _ranges(target: OutputTensor, rows: int, cols: int) -> list[tuple[int, int]]:
    """Return the row ranges between the bounds of all uses, without bounds inside rows that stay together: rows that
    one formula gives together, or that are encoded together."""
    edges = {0, rows}
    joined: Ranges[None] = Ranges()
    for u in target.uses:
        bounds = list(_bounds(u, cols))
        edges.update(bounds)
        if _joined(u):
            for low, high in pairwise(bounds):
                joined.add(low + 1, high, None)
    group = target.row_group
    cuts = sorted(e for e in edges if e in (0, rows) or (e % group == 0 and not joined.meeting(e, e + 1)))
    return list(pairwise(cuts))


def _bounds(use: PatchPart, cols: int) -> Iterator[int]:
    """Yield the first and the last bound of a use, and bounds of row groups between them, about a block apart."""
    piece, row_group = use.piece, use.patch.row_group
    yield piece.start
    if not piece.transposed and 1 < row_group < use.patch.view.matrix[0]:
        step = max(1, BLOCK_ELEMENTS // max(cols * row_group, 1)) * row_group
        first = piece.start - use.start % step + step
        yield from range(first, piece.stop, step)
    yield piece.stop


def _joined(use: PatchPart) -> bool:
    """Return whether the formula cannot compute the rows of ΔW one by one."""
    return use.piece.transposed or use.patch.row_group > 1


def _slice(target: OutputTensor, use: PatchPart, first: int, last: int) -> BlockPart:
    low, high = max(use.piece.start, first), min(use.piece.stop, last)
    start, rows = use.start + low - use.piece.start, high - low
    if use.piece.transposed:
        start, rows = use.start, use.piece.rows
    row_group = use.patch.row_group
    formed = start // row_group * row_group, -(-(start + rows) // row_group) * row_group
    taken = None if formed == (start, start + rows) else (start - formed[0], start - formed[0] + rows)
    return BlockPart(use, low - first, high - first, formed, taken, target)
