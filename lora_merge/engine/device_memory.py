"""Divides `--max-vram` among lanes, and counts what a block takes of a device's memory while it is folded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from threading import Condition, Lock
from typing import Final

from ..algorithms import ALGORITHMS
from .row_blocks import BLOCK_ELEMENTS, Block, BlockPart
from .tensor_moves import TORCH_DTYPES, Placement

LANES: Final = 3
"""Lanes of one CUDA device: one uploads, one computes, one downloads."""

WORKSPACE: Final = 32 * 2**20
"""Bytes that cuBLAS keeps for a stream on an H100; less on older devices."""

LEAST_SHARE: Final = 64 * 2**20
"""Bytes of a lane's share, without its workspace, below which one lane gets all memory."""

ADDED, FORMED, DECOMPOSED = 2, 4, 8
"""The values of the compute dtype that a formula holds for a value of the weight: one that adds products in place,
one that forms ΔW first, one that decomposes the weight."""

ROUNDED: Final = 36
"""Bytes for a number while fp64 is rounded to 16 or 8 bits."""

CODED: Final = 32
"""Bytes for a number while it is decoded, or encoded: places in tables, levels, codes."""

STOCHASTIC_BYTES: Final = 40
"""Bytes for a number while it is rounded stochastically: two counters of 64 bits, their product, and the draws."""

SPILLED: Final = 3
"""Blocks that do not fit, after which all others go to the CPU at once."""


class DeviceMemory:
    """A limit on the blocks in one call, lowered after an out-of-memory error, and a lock for the use of a device.

    Threads use the device side by side (`shared`), or one of them uses it alone (`alone`).
    """

    def __init__(self) -> None:
        self.most = sys.maxsize
        """The most values that may go into one call: half of the values that did not fit."""
        self.spilled = 0
        """The number of blocks that did not fit even alone, and were folded on the CPU."""
        self._door, self._left, self._inside = Lock(), Condition(), 0

    @property
    def full(self) -> bool:
        """Whether the device has no room for blocks like these: further tries would only take time."""
        return self.spilled >= SPILLED

    def halve(self, elements: int) -> None:
        """Limit later calls to half of the values that did not fit."""
        self.most = min(self.most, elements // 2)

    def spill(self) -> None:
        """Count a block that did not fit even alone."""
        self.spilled += 1

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Use the device side by side with other threads; waits while a thread holds `alone` or waits for it."""
        with self._door, self._left:
            self._inside += 1
        try:
            yield
        finally:
            with self._left:
                self._inside -= 1
                self._left.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Use the device alone; a thread that holds `shared` must not call it."""
        with self._door:
            with self._left:
                self._left.wait_for(lambda: not self._inside)
            yield


def lane_count(at: Placement, limit: int) -> int:
    """Return how many lanes one device gets; several threads must not use Metal's one queue."""
    return LANES if at.device.type == "cuda" and limit >= LANES * (WORKSPACE + LEAST_SHARE) else 1


def base_share(limit: int) -> int:
    """Return the bytes that base bytes may take which several plans merge."""
    return limit // 8


def lane_share(at: Placement, limit: int, taken: int) -> int:
    """Return the bytes that a lane may use for blocks, where so many bytes of the limit are `taken`."""
    return max(
        0, (limit - base_share(limit) - taken) // lane_count(at, limit) - (WORKSPACE if at.device.type == "cuda" else 0)
    )


def block_bytes(block: Block, at: Placement) -> int:
    """Return the bytes of the device's memory that folding a block takes at most: its stored and new bytes, its
    values, what the formulas hold, and their factors, each as stored and stacked."""
    target, item = block.target, at.dtype.itemsize
    stored = target.weight.packing.encoding.nbytes(block.stored[1]) + target.packing.encoding.nbytes(block.elements)
    rounded = ROUNDED if item == 8 and TORCH_DTYPES.get(target.dtype, at.dtype).itemsize <= 2 else 0
    formed = max((_formed(s, block) for s in block.slices), default=block.elements)
    combined = len(block.slices) if target.combines else 0
    elements = (1 + combined) * block.elements + formed
    coded = CODED if target.packed is not None or target.weight.packed is not None else 0
    return stored + (rounded + coded) * block.elements + item * (elements + sum(2 * _factors(s) for s in block.slices))


def _formed(s: BlockPart, block: Block) -> int:
    """Return how many values a formula holds in addition to the weight's own."""
    patch = s.use.patch
    row, rows = ALGORITHMS[patch.algorithm], s.formed[1] - s.formed[0]
    plain = row.accumulate is not None and patch.magnitude is None and s.taken is None
    if plain and not block.target.combines and row.takes_one_number:
        return ADDED * min(block.elements, BLOCK_ELEMENTS)  # some rows at a time
    count = max(rows * patch.view.matrix[1], prod(patch.view.matrix) if s.needs_view else 0)
    return (DECOMPOSED if row.decomposes else FORMED) * count


def _factors(s: BlockPart) -> int:
    """Return how many values of factors a part of a block needs."""
    patch = s.use.patch
    axes = ALGORITHMS[patch.algorithm].row_axes or {}
    cut = patch.row_group < patch.view.matrix[0]
    count = 0
    for slot, shape in patch.shapes.items():
        axis = axes.get(slot) if cut else None
        count += prod(shape) if axis is None else prod(shape) // max(shape[axis], 1) * s.entries(shape[axis])[1]
    return count
