"""Writes the outputs of plans that share a base: reader, hasher, folder and writer work on different windows at a time.

The base is read once. Each window makes one turn per plan: its base bytes, the image, are folded and written plan
by plan, the last one in place. With one plan, every turn is the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .digests import Digests
from .disk import PAGE, Writer, aligned_buffer
from .factors import Factors, view_bytes
from .folding import Folder, Item
from .placement import Placement, convert, one_core, threads
from .planning import Plan
from .recipe import slot as hash_slot
from .ring import Pool, drive
from .windows import SLOTS, Change, Fold, Window, window_bytes, windows


class Buffer:
    """Page-aligned memory that is reused; it grows with room to spare, as the system zeroes all of it each time."""

    def __init__(self) -> None:
        self._memory = aligned_buffer(0)

    def view(self, start: int, size: int) -> memoryview:
        """`size` bytes whose address has the residue of `start` modulo the page."""
        lead = start % PAGE
        held, needed = len(self._memory), lead + size
        if held < needed:
            self._memory = aligned_buffer(needed + needed // 4 if held else needed)
        return self._memory[lead : lead + size]


@dataclass
class Slot:
    """A window's place in memory: its output bytes, and base bytes where dtype or shape differ."""

    out: Buffer = field(default_factory=Buffer)
    base: Buffer = field(default_factory=Buffer)

    def views(self, window: Window) -> tuple[memoryview, memoryview]:
        """The two buffers at the window's sizes; output bytes lie in pages as they will in the file."""
        return self.out.view(window.start, window.size), self.base.view(0, window.input_size)


@dataclass(frozen=True)
class Turn:
    """One window for one plan, and the memory it holds."""

    window: Window
    plan: int
    image: Slot  # the base bytes, shared by the turns of the window
    own: Slot  # where the output bytes are made; the last turn makes them in the image
    first: bool
    last: bool

    @property
    def change(self) -> Change:
        """What the plan does in this window."""
        return self.window.changes[self.plan]


class Writing:
    """One run of plans, of one layout and one placement, into the folders or files `parts`."""

    def __init__(
        self, plans: Sequence[Plan], parts: Sequence[Path], digests: Digests, at: tuple[Placement, ...],
        progress: Callable[[int], object],
    ) -> None:  # fmt: skip
        self.plans, self.parts, self.digests, self.progress = plans, parts, digests, progress
        self.reader = reader = digests.reader
        files = frozenset(p for plan in plans for m in plan.adapters for p in m.adapter.index.files)
        self.factors = Factors(reader, files)
        self.folds = ThreadPoolExecutor(threads(at), thread_name_prefix="fold", initializer=one_core)
        self.kept: dict[Any, Any] = {}
        self.folder = Folder(
            at, self.factors.fetch, plans[0].base.tensors, self.folds, plans[0].job.max_vram, self.kept
        )
        self.pool = Pool(Slot() for _ in range(SLOTS))
        self.writers: dict[tuple[int, int], Writer] = {}
        self.seconds = {"read": 0.0, "hash": 0.0, "fold": 0.0, "write": 0.0}
        self.failed: dict[int, Exception] = {}
        """Plan → what went wrong with it alone; the others go on. What concerns all is raised."""

    def run(self) -> None:
        """All windows, then the headers with the inputs' hashes, then everything flushed to the disk."""
        stages = [self._timed(s) for s in (self.read, self.hash, self.fold, self.write)]
        try:
            drive(self._turns(), stages, self._give_back)
            for number in self._alive():
                self._alone(number, self._finish)
        finally:
            self.folds.shutdown()
            for writer in self.writers.values():
                writer.close()

    def _turns(self) -> Iterator[Turn]:
        limit = min(window_bytes(p) for p in self.plans)
        for window in windows(self.plans, limit):
            alive = self._alive()
            if not alive:
                return
            image = self.pool.take()
            for number in alive:
                last = number == alive[-1]
                own = image if last else self.pool.take()
                yield Turn(window, number, image, own, first=number == alive[0], last=last)

    def _give_back(self, turn: Turn) -> None:
        self.pool.give(turn.own)  # the last turn's own is the image

    def _alive(self) -> list[int]:
        return [n for n in range(len(self.plans)) if n not in self.failed]

    def read(self, turn: Turn) -> None:
        """Base bytes into the image."""
        if turn.first:
            out, base = turn.image.views(turn.window)
            for view, reads in ((out, turn.window.direct), (base, turn.window.apart)):
                for r in reads:
                    self.reader.read_into(view[r.at : r.at + r.nbytes], r.file, r.offset)

    def hash(self, turn: Turn) -> None:
        """The bytes just read, in the order of their file."""
        if turn.first:
            out, base = turn.image.views(turn.window)
            reads = [(r, out) for r in turn.window.direct] + [(r, base) for r in turn.window.apart]
            for r, view in sorted(reads, key=lambda pair: pair[0].offset):
                self.digests.feed(r.file, r.offset, view[r.at : r.at + r.nbytes])

    def fold(self, turn: Turn) -> None:
        """Changed blocks folded, other dtypes converted, the rest as it was read."""
        if turn.plan not in self.failed:
            self._alone(turn.plan, lambda _: self._make(turn))
        if turn.last:
            self.factors.forget()
            self.kept.clear()

    def _make(self, turn: Turn) -> None:
        image, base = turn.image.views(turn.window)
        out = turn.own.out.view(turn.window.start, turn.window.size)
        if not turn.last:
            for low, high in _kept(turn.window, turn.change):
                out[low:high] = image[low:high]
        for c in turn.change.converts:
            source = view_bytes(base[c.source : c.source + c.source_bytes], c.from_dtype, (c.count,))
            convert(source, view_bytes(out[c.at : c.at + c.bytes], c.to_dtype, (c.count,)))
        kept = None if turn.last else image  # the last turn folds where the base values lie
        self.folder.fold([_item(f, out, base if f.apart else kept) for f in turn.change.folds])

    def write(self, turn: Turn) -> None:
        """The finished window to the disk."""
        if turn.plan not in self.failed:
            out = turn.own.out.view(turn.window.start, turn.window.size)
            self._alone(turn.plan, lambda n: self._writer(n, turn.window.file).write(out))
        self.progress(turn.window.size)

    def _finish(self, number: int) -> None:
        plan = self.plans[number]
        slots = {hash_slot(n): self.digests.hexdigest(p) for n, p in enumerate(plan.inputs)}
        for n, file in enumerate(plan.files):
            header = file.header
            for slot, digest in slots.items():
                header = header.replace(slot.encode(), digest.encode())
            assert len(header) == len(file.header), "a digest is as long as what stands for it"
            writer = self._writer(number, n)
            writer.amend(0, header)
            writer.finish()

    def _writer(self, number: int, file: int) -> Writer:
        """The writer of a plan's output file, its header written first."""
        if (number, file) not in self.writers:
            planned, part = self.plans[number].files[file], self.parts[number]
            writer = Writer(part / planned.name if planned.name else part, planned.size)
            self.writers[number, file] = writer
            writer.write(memoryview(planned.header))
        return self.writers[number, file]

    def _alone(self, number: int, act: Callable[[int], None]) -> None:
        """Act for one plan; a failure is kept as its own, whatever it is, for `run.py` to raise or report."""
        try:
            act(number)
        except Exception as e:  # noqa: BLE001
            self.failed[number] = e

    def _timed(self, stage: Callable[[Turn], None]) -> Callable[[Turn], None]:
        def timed(turn: Turn) -> None:
            started = time.perf_counter()
            stage(turn)
            self.seconds[stage.__name__] += time.perf_counter() - started

        timed.__name__ = stage.__name__
        return timed


def _kept(window: Window, change: Change) -> Iterator[tuple[int, int]]:
    """The ranges of the window that are read into the output buffer and not folded."""
    folds = iter(sorted((f.at, f.at + f.nbytes) for f in change.folds if not f.apart))
    low, high = next(folds, (window.size, window.size))
    for r in window.direct:
        at, end = r.at, r.at + r.nbytes
        while low < end:
            if at < low:
                yield at, low
            at = high
            low, high = next(folds, (window.size, window.size))
        if at < end:
            yield at, end


def _item(f: Fold, out: memoryview, base: memoryview | None) -> Item:
    """The block's base values and the place of its result, as tensors on the buffers that hold them.

    Without `base` the values lie where the result goes.
    """
    block, shape = f.block, (f.block.last - f.block.first, f.block.cols)
    into = view_bytes(out[f.at : f.at + f.nbytes], block.target.dtype, shape)
    source = block.target.source
    if source is None:
        return Item(block, None, into)
    if base is None:
        return Item(block, into, into)
    values = view_bytes(base[f.source : f.source + f.source_bytes], source.dtype, (-1,) if block.reshaped else shape)
    return Item(block, values, into)
