"""Memory for windows on their way from the disk to the disk."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..disk.pages import PAGE, aligned_buffer
from .windows import Change, Window


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
class WindowBuffers:
    """A window's place in memory: its output bytes, and base bytes where dtype or shape differ."""

    out: Buffer = field(default_factory=Buffer)
    base: Buffer = field(default_factory=Buffer)

    def views(self, window: Window) -> tuple[memoryview, memoryview]:
        """The two buffers at the window's sizes; output bytes lie in pages as they will in the file."""
        return self.out.view(window.start, window.size), self.base.view(0, window.input_size)


@dataclass(frozen=True)
class WindowTask:
    """One window for one plan, and the memory it holds."""

    window: Window
    plan: int
    base_bytes: WindowBuffers  # the base bytes, shared by the turns of the window
    own: WindowBuffers  # where the output bytes are made; the last turn makes them in the image
    first: bool
    last: bool
    shared: bool = False  # whether the output file shares these blocks with the base
    under_way: list[Future[Counter[str]]] = field(default_factory=list, compare=False)  # what is being folded
    saturated: Counter[str] = field(default_factory=Counter, compare=False)  # tensor → numbers that a conversion cut

    @property
    def ready(self) -> bool:
        """Whether its bytes go out as they were read, or are not read at all."""
        return self.shared or (self.last and self.window.untouched)

    @property
    def change(self) -> Change:
        """What the plan does in this window."""
        return self.window.changes[self.plan]
