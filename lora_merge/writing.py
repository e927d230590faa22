"""Writes the output of a plan: reader, hasher, folder and writer work on different windows at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .checkpoint import Reader
from .digests import Digests
from .disk import PAGE, Writer, aligned_buffer
from .factors import Factors, view_bytes
from .folding import Folder, Item, check_range
from .placement import Placement, convert
from .planning import HASH_SLOT, OutputFile, Plan
from .ring import drive
from .windows import SLOTS, Fold, Window, window_bytes, windows


class Buffer:
    """Page-aligned memory that is reused and only ever grows."""

    def __init__(self) -> None:
        self._memory = aligned_buffer(0)

    def view(self, start: int, size: int) -> memoryview:
        """`size` bytes whose address has the residue of `start` modulo the page."""
        lead = start % PAGE
        if len(self._memory) < lead + size:
            self._memory = aligned_buffer(lead + size)
        return self._memory[lead : lead + size]


@dataclass
class Slot:
    """A window's place in memory: its output bytes, and base bytes where dtype or shape differ."""

    out: Buffer = field(default_factory=Buffer)
    base: Buffer = field(default_factory=Buffer)

    def views(self, window: Window) -> tuple[memoryview, memoryview]:
        """The two buffers at the window's sizes; output bytes lie in pages as they will in the file."""
        return self.out.view(window.start, window.size), self.base.view(0, window.input_size)


class Writing:
    """One run of a plan into the folder or file `part`."""

    def __init__(
        self, plan: Plan, reader: Reader, at: Placement, part: Path, progress: Callable[[int], object]
    ) -> None:
        self.plan, self.reader, self.part, self.progress = plan, reader, part, progress
        files = frozenset(p for m in plan.adapters for p in m.adapter.index.files)
        self.factors = Factors(reader, files)
        self.folder = Folder(at, self.factors.fetch, plan.base.tensors)
        self.digests = Digests(reader, {p: p.stat().st_size for p in plan.inputs})
        self.writers: dict[str, Writer] = {}
        self.seconds = {"read": 0.0, "hash": 0.0, "fold": 0.0, "write": 0.0}

    def run(self) -> None:
        """All windows, then the header with the inputs' hashes, then everything flushed to the disk."""
        stages = [self._timed(s) for s in (self.read, self.hash, self.fold, self.write)]
        try:
            drive(windows(self.plan, window_bytes(self.plan)), [Slot() for _ in range(SLOTS)], stages)
            slots = {HASH_SLOT.format(n): self.digests.hexdigest(p) for n, p in enumerate(self.plan.inputs)}
            for file in self.plan.files:
                header = file.header
                for slot, digest in slots.items():
                    header = header.replace(slot.encode(), digest.encode())
                assert len(header) == len(file.header), "a digest is as long as what stands for it"
                writer = self._writer(file)
                writer.amend(0, header)
                writer.finish()
        finally:
            for writer in self.writers.values():
                writer.close()

    def read(self, slot: Slot, window: Window) -> None:
        """Base bytes into the window's buffers."""
        out, base = slot.views(window)
        for view, reads in ((out, window.direct), (base, window.apart)):
            for r in reads:
                self.reader.read_into(view[r.at : r.at + r.nbytes], r.file, r.offset)

    def hash(self, slot: Slot, window: Window) -> None:
        """The bytes just read, in the order of their file."""
        out, base = slot.views(window)
        reads = [(r, out) for r in window.direct] + [(r, base) for r in window.apart]
        for r, view in sorted(reads, key=lambda pair: pair[0].offset):
            self.digests.feed(r.file, r.offset, view[r.at : r.at + r.nbytes])

    def fold(self, slot: Slot, window: Window) -> None:
        """Changed blocks folded, other dtypes converted, both in place."""
        out, base = slot.views(window)
        for c in window.converts:
            source = view_bytes(base[c.source : c.source + c.source_bytes], c.from_dtype, (c.count,))
            convert(source, view_bytes(out[c.at : c.at + c.bytes], c.to_dtype, (c.count,)))
        items = [_item(f, out, base) for f in window.folds]
        self.folder.fold(items)
        check_range(items)
        self.factors.forget()

    def write(self, slot: Slot, window: Window) -> None:
        """The finished window to the disk."""
        self._writer(window.file).write(slot.views(window)[0])
        self.progress(window.size)

    def _writer(self, file: OutputFile) -> Writer:
        """The writer of an output file, its header written first."""
        if file.name not in self.writers:
            path = self.part / file.name if file.name else self.part
            self.writers[file.name] = Writer(path, file.size)
            self.writers[file.name].write(memoryview(file.header))
        return self.writers[file.name]

    def _timed(self, stage: Callable[[Slot, Window], None]) -> Callable[[Slot, Window], None]:
        def timed(slot: Slot, window: Window) -> None:
            started = time.perf_counter()
            stage(slot, window)
            self.seconds[stage.__name__] += time.perf_counter() - started

        timed.__name__ = stage.__name__
        return timed


def _item(f: Fold, out: memoryview, base: memoryview) -> Item:
    """The block's base values and the place of its result, as tensors on the window's buffers."""
    block, shape = f.block, (f.block.last - f.block.first, f.block.cols)
    into = view_bytes(out[f.at : f.at + f.nbytes], block.target.dtype, shape)
    source = block.target.source
    if source is None:
        return Item(block, None, into)
    if not f.apart:
        return Item(block, into, into)
    values = view_bytes(base[f.source : f.source + f.source_bytes], source.dtype, (-1,) if block.reshaped else shape)
    return Item(block, values, into)
