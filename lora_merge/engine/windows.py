"""Cuts outputs into windows: ranges of consecutive bytes, each with its reads, conversions and folds.

A window's base bytes are read into a reusable aligned buffer, changed tensors are folded there, and the buffer is
written. Plans that share base and layout share their windows: one read for all, and a fold for each plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Final

from ..disk.pages import PAGE
from ..disk.system import has_gpu
from ..dtypes import Memory, Source, StoredTensor
from ..errors import ResourceError
from ..files.encodings.base import Encoding
from ..job import Job
from ..planning.plan import OutputTensor, Plan
from .row_blocks import Block, blocks

WINDOW_BYTES: Final = 32 * 2**20  # reaches full disk speed; larger windows measured no faster, and take more memory
SMALLEST_WINDOW: Final = 2**20
SLOTS: Final = 4  # windows in memory: one is read, one hashed, one folded, one written
DEVICE_WINDOW_BYTES: Final = 64 * 2**20  # on a GPU few operations cost less than many: 16 windows for each GB
DEVICE_SLOTS: Final = 7  # three are folded by the lanes of one GPU, and one waits for them
PINNED: Final = 96 * 2**20  # bytes through which a GPU gets what it cannot read itself
STRETCH: Final = 8 * 2**20  # untouched bytes from which on they get their own windows


@dataclass(slots=True)  # not frozen: there is one for every tensor, and freezing doubles the time
class CopiedBytes:
    """Bytes [low, low + nbytes) of a tensor that every plan writes as they are."""

    target: OutputTensor
    low: int
    nbytes: int


@dataclass(slots=True)
class ChangedValues:
    """Elements [low, low + count) of a tensor that plans change or store in another form, with the blocks of every
    plan; a plan without changes has no blocks.
    """

    target: OutputTensor
    low: int
    count: int
    blocks: tuple[tuple[Block, ...], ...]  # per plan

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.target.packing.encoding.nbytes(self.count)


@dataclass(frozen=True)
class WindowRead:
    """Bytes of a source that are read to offset `at` of the window's output (or input) buffer."""

    source: Source
    offset: int
    nbytes: int
    at: int


@dataclass(frozen=True)
class Convert:
    """Unchanged elements that the output stores in another encoding: from offset `source` of the input buffer to offset
    `at` of the output buffer. There are `count` of them from `first` on.
    """

    target: OutputTensor
    first: int
    count: int
    source: int
    at: int

    @property
    def source_bytes(self) -> int:
        """Bytes in the input buffer."""
        return self.target.weight.packing.encoding.nbytes(self.count)

    @property
    def nbytes(self) -> int:
        """Bytes in the output buffer."""
        return self.target.packing.encoding.nbytes(self.count)


@dataclass(frozen=True)
class Fold:
    """A block with the offsets of its base values (in the input buffer if `apart`) and of its result."""

    block: Block
    source: int
    at: int
    apart: bool  # whether base values are in the input buffer, as dtypes or shapes differ

    @property
    def source_bytes(self) -> int:
        """Bytes of the stored base values."""
        return self.block.target.weight.packing.encoding.nbytes(self.block.stored[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the result."""
        return self.block.target.packing.encoding.nbytes(self.block.elements)


@dataclass(frozen=True)
class WindowChange:
    """The conversions and folds of one plan in a window; all other bytes are written as they were read."""

    converts: list[Convert] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)


@dataclass
class Window:
    """Output bytes [start, start + size) of one file of every plan, with their reads and changes.

    `start` is the offset in the first plan's file; in other plans' files it differs by whole pages, as headers do.
    """

    file: int
    start: int
    changes: tuple[WindowChange, ...]  # one per plan
    size: int = 0
    input_size: int = 0
    direct: list[WindowRead] = field(default_factory=list)  # into the output buffer
    apart: list[WindowRead] = field(default_factory=list)  # into the input buffer

    @property
    def untouched(self) -> bool:
        """Whether the bytes of every plan are written as they were read."""
        return not any(c.folds or c.converts for c in self.changes)

    def copy(self, part: CopiedBytes) -> None:
        """Plan to read bytes that are written as they are."""
        self._read(part.target.source, part.low, part.nbytes)
        self.size += part.nbytes

    def change(self, part: ChangedValues, *, drawn: bool) -> None:
        """Plan one read of values, and for every plan its folds and the conversion of unchanged blocks. `drawn`:
        whether merged weights are rounded stochastically."""
        target, low = part.target, part.low
        first, count = target.weight.span(low, low + part.count)
        reads, writes = target.weight.packing.encoding.nbytes, target.packing.encoding.nbytes
        # The base values: in the output buffer, where they are folded in place, or apart from it.
        apart = target.weight.padded or target.recoded
        if apart:
            start = self._read_apart(target.source, reads(first), reads(count))
        else:
            start = self.size
            self._read(target.source, reads(first), reads(count))
        for change, of_plan in zip(self.changes, part.blocks, strict=True):
            for b in of_plan:
                values = start + reads(b.stored[0] - first)
                at = self.size + writes(b.first * b.cols - low)
                if b.folded(drawn=drawn):
                    change.folds.append(Fold(b, values, at, apart))
                elif apart:
                    change.converts.append(Convert(target, b.first * b.cols, b.elements, values, at))
            if not of_plan and apart:
                change.converts.append(Convert(target, low, part.count, start, self.size))
        self.size += part.nbytes

    def fill_to(self, offset: int) -> None:
        """Plan zeros up to this offset of the file, between tensors that are aligned."""
        gap = offset - self.start - self.size
        if gap > 0:
            self.direct.append(WindowRead(Memory.of(Path(), memoryview(bytearray(gap))), 0, gap, self.size))
            self.size = offset - self.start

    def _read(self, info: StoredTensor, skip: int, nbytes: int) -> None:
        """Plan to read bytes of a tensor into the output buffer."""
        _append(self.direct, WindowRead(info.source, info.offset + skip, nbytes, self.size))

    def _read_apart(self, info: StoredTensor, skip: int, nbytes: int) -> int:
        """Plan to read bytes into the input buffer; return their offset, a multiple of 64."""
        at = -(-self.input_size // 64) * 64
        _append(self.apart, WindowRead(info.source, info.offset + skip, nbytes, at))
        self.input_size = at + nbytes
        return at


def window_room(job: Job, workers: int = 1) -> int:
    """Return the most bytes of a window's output, and of its input; ResourceError if the job's limit is too low."""
    limit, job = job.max_memory, replace(job, max_memory=job.max_memory // workers)
    room = (job.max_memory - (pinned_bytes(job) if on_gpu(job) else 0)) // (2 * slots(job))
    if room < SMALLEST_WINDOW:
        least = (3 if on_gpu(job) else 2) * SLOTS * SMALLEST_WINDOW * workers
        shared = f", shared by {workers} workers" if workers > 1 else ""
        raise ResourceError("the memory limit is too low", f"`--max-memory {limit}`{shared}",
                         f"write `--max-memory {least >> 20}MiB`")  # fmt: skip
    return min(room, DEVICE_WINDOW_BYTES if slots(job) > SLOTS else WINDOW_BYTES)


def slots(job: Job) -> int:
    """Return how many windows are in memory at once: more if a GPU may fold them, and memory allows it."""
    return DEVICE_SLOTS if on_gpu(job) and job.max_memory >= 4 * DEVICE_SLOTS * SMALLEST_WINDOW else SLOTS


def on_gpu(job: Job) -> bool:
    """Return whether a GPU may fold the windows."""
    return job.device != "cpu" and (job.device != "auto" or has_gpu())


def pinned_bytes(job: Job) -> int:
    """Return the bytes of the memory limit that transfers to a GPU may use in addition to the windows."""
    return min(PINNED, job.max_memory // 4)


def window_bytes(plan: Plan) -> int:
    """Return the most bytes of a window under the job's memory limit; UsageError if the limit is too low."""
    return max(SMALLEST_WINDOW, int(window_room(plan.job) / _widening(plan)))


def unshared_bytes(plan: Plan) -> int:
    """Return the bytes that the output takes on a disk if it shares blocks with the base."""
    untouched = (w for w in windows([plan], window_bytes(plan)) if sharable(w))
    return plan.size - sum(max(0, r.nbytes - 2 * PAGE) for w in untouched for r in w.direct)


def buffer_bytes(plan: Plan) -> int:
    """Return how much host memory the buffers of all windows take at most."""
    output_bytes = min(slots(plan.job) * window_bytes(plan), plan.size)
    return int(output_bytes * (1 + _widening(plan)))


def _widening(plan: Plan) -> float:
    """Return the largest ratio of bytes read to bytes written of all tensors that are converted; at least 1."""
    stored_anew = [t for t in plan.targets if not t.copied]
    pairs = {(t.weight.packing.encoding, t.packing.encoding) for t in stored_anew}
    return max([1.0, *(_width(read) / _width(written) for read, written in pairs)])


def _width(encoding: Encoding) -> float:
    """Return the bytes of one number."""
    elements, size = encoding.unit
    return size / elements


def layout_key(plan: Plan) -> tuple[Any, ...]:
    """Return a key that is equal for plans that can share windows: same tensors, from the same bytes, at the same
    places."""
    return tuple(
        (f.name, len(f.header) % PAGE, *((t.name, t.packing.encoding, t.shape, t.source) for t in f.targets))
        for f in plan.files
    )


def windows(plans: Sequence[Plan], limit: int) -> Iterator[Window]:
    """Yield the whole output as windows of at most `limit` bytes; only a block that cannot be cut may be larger.

    Long untouched ranges get their own windows, which can be written before torch is imported.
    """
    drawn = plans[0].job.rounding == "stochastic"  # plans that share windows share it
    for number, files in enumerate(zip(*(p.files for p in plans), strict=True)):
        window = _window(number, len(files[0].header), len(plans))
        for targets in zip(*(f.targets for f in files), strict=True):
            window.fill_to(targets[0].offset)
            for part in _parts(targets, limit):
                if window.size and (window.size + part.nbytes > limit or _turns(window, part)):
                    yield window
                    window = _window(number, window.start + window.size, len(plans))
                if isinstance(part, CopiedBytes):
                    window.copy(part)
                else:
                    window.change(part, drawn=drawn)
        window.fill_to(files[0].size)
        if window.size:
            yield window


def sharable(window: Window) -> bool:
    """Return whether the output can share a window's blocks with the base: its bytes are unchanged, and have the same
    offset in a page in both files."""
    return window.untouched and all(
        isinstance(r.source, Path) and (r.offset - window.start - r.at) % PAGE == 0 for r in window.direct
    )


def _turns(window: Window, part: CopiedBytes | ChangedValues) -> bool:
    """Return whether a new window starts: long untouched ranges and changed bytes do not share one."""
    if window.untouched:
        return window.size >= STRETCH and not isinstance(part, CopiedBytes)
    return isinstance(part, CopiedBytes) and part.target.nbytes >= STRETCH


def _window(file: int, start: int, plans: int) -> Window:
    return Window(file, start, tuple(WindowChange() for _ in range(plans)))


def _parts(targets: Sequence[OutputTensor], limit: int) -> Iterator[CopiedBytes | ChangedValues]:
    """Yield the parts of one tensor, the same tensor of every plan; parts fit a window."""
    target = targets[0]
    if not target.nbytes:
        return  # a tensor without elements may have patches too
    if target.uses or (len(targets) > 1 and any(t.uses for t in targets)):
        yield from _runs(targets)
        if rest := target.padding:
            yield CopiedBytes(target, target.nbytes - rest, rest)
        return
    if target.copied:
        step = max(1, limit // 4)
        for low in range(0, target.nbytes, step):
            yield CopiedBytes(target, low, min(step, target.nbytes - low))
        return
    total, whole, none = prod(target.matrix), target.group, ((),) * len(targets)
    step = max(1, target.packing.encoding.count(limit // 4) // whole) * whole
    for low in range(0, total, step):
        yield ChangedValues(target, low, min(step, total - low), none)


def _runs(targets: Sequence[OutputTensor]) -> Iterator[ChangedValues]:
    """Yield the shortest ranges of elements that cut no block of any plan."""
    by_plan = [list(blocks(t)) if t.uses else [] for t in targets]
    cuts = set.intersection(*({0, *(b.last * b.cols for b in some)} for some in by_plan if some))
    firsts = [[b.first * b.cols for b in some] for some in by_plan]
    for low, high in pairwise(sorted(cuts)):
        inside = (some[bisect_left(at, low) : bisect_left(at, high)] for some, at in zip(by_plan, firsts, strict=True))
        yield ChangedValues(targets[0], low, high - low, tuple(map(tuple, inside)))


def _append(reads: list[WindowRead], new: WindowRead) -> None:
    """Add a read, joined with the previous one if both source and buffer continue it."""
    if reads:
        last = reads[-1]
        if (last.source, last.offset + last.nbytes, last.at + last.nbytes) == (new.source, new.offset, new.at):
            reads[-1] = WindowRead(last.source, last.offset, last.nbytes + new.nbytes, last.at)
            return
    reads.append(new)
