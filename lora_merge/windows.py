"""Cuts the output into windows, and drives them through read → fold → write, side by side.

A window is a run of consecutive output bytes. Its base bytes are read straight into a reusable aligned
buffer, changed tensors are folded in place there, and the buffer is written out as it is. Memory is the
ring of buffers, not the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .blocks import Block, blocks
from .errors import ResourceError
from .header import ITEM_BYTES, TensorInfo
from .planning import OutputFile, Plan, Target

WINDOW_BYTES: Final = 64 * 2**20  # large enough for full disk speed, small enough to overlap early
SLOTS: Final = 4  # one being read, one hashed, one folded, one written
SMALLEST_WINDOW: Final = 2**20


@dataclass(frozen=True)
class Read:
    """Bytes of an input file that belong at `at` in the window's output (or input) buffer."""

    file: Path
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True)
class Convert:
    """Elements that change their dtype only: from `source` in the input buffer to `at` in the output one."""

    source: int
    at: int
    count: int
    from_dtype: str
    to_dtype: str

    @property
    def source_bytes(self) -> int:
        """Bytes in the input buffer."""
        return self.count * ITEM_BYTES[self.from_dtype]

    @property
    def bytes(self) -> int:
        """Bytes in the output buffer."""
        return self.count * ITEM_BYTES[self.to_dtype]


@dataclass(frozen=True)
class Fold:
    """A block: base values at `source` (in the input buffer if dtypes or shapes differ), result at `at`."""

    block: Block
    source: int
    at: int
    apart: bool  # whether base values lie in the input buffer

    @property
    def source_bytes(self) -> int:
        """Bytes of the base values; a block that is padded has its whole base tensor there."""
        source = self.block.target.source
        if source is None:
            return 0
        return source.nbytes if self.block.reshaped else self.block.elements * ITEM_BYTES[source.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.block.elements * ITEM_BYTES[self.block.target.dtype]


@dataclass
class Window:
    """Output bytes [start, start + size) of one file, and what makes them."""

    file: OutputFile
    start: int
    size: int = 0
    input_size: int = 0
    direct: list[Read] = field(default_factory=list)  # into the output buffer
    apart: list[Read] = field(default_factory=list)  # into the input buffer
    converts: list[Convert] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)

    def read(self, info: TensorInfo, skip: int, nbytes: int) -> None:
        """Plan to read bytes of a tensor that go out as they are, or are folded in place."""
        _append(self.direct, Read(info.file, info.offset + skip, nbytes, self.size))

    def read_apart(self, info: TensorInfo, skip: int, nbytes: int) -> int:
        """Plan to read bytes into the input buffer; returns where, at a multiple of 64."""
        at = -(-self.input_size // 64) * 64
        _append(self.apart, Read(info.file, info.offset + skip, nbytes, at))
        self.input_size = at + nbytes
        return at


def window_bytes(plan: Plan) -> int:
    """How large a window may be under the job's memory bound; ResourceError if nothing fits."""
    room = plan.job.max_memory // (2 * SLOTS)  # an output and at worst an input buffer per slot
    if room < SMALLEST_WINDOW:
        raise ResourceError("the memory bound is too small", f"--max-memory {plan.job.max_memory}",
                            f"give at least {2 * SLOTS * SMALLEST_WINDOW >> 20} MiB")  # fmt: skip
    return min(room, WINDOW_BYTES)


def windows(plan: Plan, limit: int) -> Iterator[Window]:
    """The whole output as windows of at most `limit` bytes; only a block that cannot be cut is larger."""
    for file in plan.files:
        window = Window(file, len(file.header))
        for target in file.targets:
            for size, add in _parts(target, limit):
                if window.size and window.size + size > limit:
                    yield window
                    window = Window(file, window.start + window.size)
                add(window)
                window.size += size
        if window.size:
            yield window


def _parts(target: Target, limit: int) -> Iterator[tuple[int, _Part]]:
    """The target in parts that fit a window: output bytes, and what adds the part to a window."""
    if target.uses:
        for block in blocks(target):
            yield block.elements * ITEM_BYTES[target.dtype], _Part(target, block=block)
        return
    unit = 1 if target.copied else ITEM_BYTES[target.dtype]  # bytes are copied, elements converted
    step = max(1, limit // (4 * unit))
    for low in range(0, target.nbytes // unit, step):
        count = min(step, target.nbytes // unit - low)
        yield count * unit, _Part(target, low=low, count=count)


@dataclass(frozen=True)
class _Part:
    target: Target
    block: Block | None = None
    low: int = 0
    count: int = 0

    def __call__(self, window: Window) -> None:
        """Append to the window what produces this part."""
        source = self.target.source
        if self.block is not None:
            self._fold(window, self.block)
        elif source is not None and self.target.copied:
            window.read(source, self.low, self.count)
        elif source is not None:
            width = ITEM_BYTES[source.dtype]
            at = window.read_apart(source, self.low * width, self.count * width)
            window.converts.append(Convert(at, window.size, self.count, source.dtype, self.target.dtype))

    def _fold(self, window: Window, block: Block) -> None:
        source = self.target.source
        if source is None:
            window.folds.append(Fold(block, 0, window.size, apart=True))
            return
        width = ITEM_BYTES[source.dtype]
        skip, nbytes = block.first * block.cols * width, block.elements * width
        if block.reshaped:
            skip, nbytes = 0, source.nbytes
        elif source.dtype == self.target.dtype:
            window.read(source, skip, nbytes)
            if block.slices:
                window.folds.append(Fold(block, window.size, window.size, apart=False))
            return
        at = window.read_apart(source, skip, nbytes)
        if block.slices:
            window.folds.append(Fold(block, at, window.size, apart=True))
        else:
            window.converts.append(Convert(at, window.size, block.elements, source.dtype, self.target.dtype))


def _append(reads: list[Read], new: Read) -> None:
    """Add a read, joined with the one before where both sides are consecutive."""
    if reads:
        last = reads[-1]
        if (last.file, last.offset + last.nbytes, last.at + last.nbytes) == (new.file, new.offset, new.at):
            reads[-1] = Read(last.file, last.offset, last.nbytes + new.nbytes, last.at)
            return
    reads.append(new)
