"""What is uploaded: the files of a local copy, and how what is at an address then is compared with them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Final, TypeAlias

from ..addresses import Address, upload_address
from ..disk.files import open_regular
from ..disk.remote import ReadRange
from ..errors import UsageError, VerificationFailed
from ..paths import WEIGHT_SUFFIXES
from .inputs import origin

SAMPLES: Final = 16  # ranges of each file that are read back
SAMPLE: Final = 64 << 10  # bytes of one
HEAD: Final = 1 << 20  # bytes at the beginning of a file, with its header, that are read back
PIECE: Final = 8 << 20  # bytes that are read at once
SEED: Final = 45


def refuse_input(address: Address, inputs: Sequence[Path]) -> None:
    """Raise UsageError if an output would replace an object that is read. A commit of the hub stays what it is."""
    for path in inputs:
        source = origin(path)
        if source is not None and source.scheme == address.scheme and f"{source.name}/".startswith(f"{address.name}/"):
            raise UsageError("the output would replace the base, an adapter or another file that is read",
                             str(address), "choose another name")  # fmt: skip


def address_of(target: Path) -> Address:
    """Return the address of an output whose local copy has a path."""
    address = upload_address(target)
    assert address is not None, "the path is that of a local copy"
    return address


Source: TypeAlias = Path | bytes
"""A file of a local copy, or the content of a card."""


def files_of(copy: Path) -> list[tuple[str, Path]]:
    """Return the files of a local copy in the order of their upload: name in the output ("" for a single file), path.

    Weights are first, then other files, then indexes, by which programs find the weights.
    """
    if not copy.is_dir():
        return [("", copy)]
    names = sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*") if not p.is_dir())

    def rank(name: str) -> int:
        return 2 if name.endswith(".index.json") else 0 if Path(name).suffix.lower() in WEIGHT_SUFFIXES else 1

    return [(name, copy / name) for name in sorted(names, key=rank)]


def size_of(source: Source) -> int:
    """Return the bytes of a file or of a card."""
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _opened(source: Source) -> IO[bytes]:
    return BytesIO(source) if isinstance(source, bytes) else open_regular(source)


def pieces(source: Source) -> Iterator[bytes]:
    """Yield the bytes of a file or of a card."""
    with _opened(source) as f:
        while data := f.read(PIECE):
            yield data


def compare(read: ReadRange, source: Source, where: Address, *, whole: bool = False) -> None:
    """Compare an uploaded file with its local copy: the header and ranges with a fixed seed, or the `whole` of it.

    VerificationFailed if any byte differs.
    """
    size, draw = size_of(source), random.Random(SEED)
    if whole or size <= HEAD + SAMPLES * SAMPLE:
        ranges = [(at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
    else:
        starts = sorted({draw.randrange(HEAD, size - SAMPLE) for _ in range(SAMPLES)} | {size - SAMPLE})
        ranges = [(0, HEAD), *((at, SAMPLE) for at in starts)]
    with _opened(source) as f:
        for at, length in ranges:
            f.seek(at)
            if f.read(length) != read(at, length):
                raise differs(where, f"bytes from {at} on")


def differs(where: Address, what: str) -> VerificationFailed:
    """Return the error for an upload that is not what was sent."""
    return VerificationFailed(f"the uploaded file is not the one that was sent: {what} differ", str(where),
                              "run again; if it happens again, ask the operator of the store")  # fmt: skip
