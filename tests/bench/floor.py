"""`python -m tests.bench.floor BASE OUT`: what the disk alone allows. Base read and written as a merge does it, nothing changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from lora_merge.disk.pages import aligned_buffer
from lora_merge.disk.reader import Reader
from lora_merge.disk.writer import Writer
from lora_merge.engine.stages import Pool, drive
from lora_merge.engine.windows import SLOTS, WINDOW_BYTES
from lora_merge.files.checkpoint import open_checkpoint

Piece = tuple[int, memoryview, memoryview]  # where in the file, its bytes, the buffer that these are part of


def floor(base: Path, out: Path) -> None:
    """One thread reads, one writes, as many windows as a merge has between them; ends when the disk has it all."""
    size = base.stat().st_size
    pool = Pool(aligned_buffer(WINDOW_BYTES) for _ in range(SLOTS))
    out.touch()
    with Reader([open_checkpoint(base)]) as reader, Writer(out, size) as writer:

        def pieces() -> Iterator[Piece]:
            for low in range(0, size, WINDOW_BYTES):
                buffer = pool.take()
                yield low, buffer[: size - low], buffer

        def read(piece: Piece) -> None:
            reader.read_into(piece[1], base, piece[0])

        def write(piece: Piece) -> None:
            writer.write(piece[1], piece[0])

        drive(pieces(), [read, write], lambda piece: pool.give(piece[2]))
        writer.finish()


if __name__ == "__main__":
    floor(*map(Path, sys.argv[1:]))
