"""CRC-32 of every tensor of codes or scales that a merge changes: an entry of the header that finds a damaged bit.

Numbers that are computed again cannot find every bit: a scale that is larger by a millionth decodes to numbers that are
right, and some bits no reader looks at. The entry has eight digits for each such tensor, in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

from ..disk.files import open_regular
from .recipe import CHECKSUMS

if TYPE_CHECKING:
    from .plan import OutputTensor

CHECKSUM_DIGITS: Final = 8
SUMMED_BYTES: Final = 1 << 24  # bytes that are read at once


def summed(files: Sequence[Iterable[OutputTensor]]) -> list[tuple[OutputTensor, ...]]:
    """Return, for the tensors of each file of an output, those of codes and scales that are not the base's."""
    coded = {t.name: t.packed for targets in files for t in targets if t.packed is not None and not t.copied}
    names = coded.keys() | frozenset[str]().union(*(packing.changing for packing in coded.values()))
    return [tuple(t for t in targets if t.name in names) if names else () for targets in files]


def entry(sums: Sequence[int]) -> dict[str, str]:
    """Return the entry of a file whose changed tensors have these sums; none for a file without such tensors."""
    return {CHECKSUMS: "".join(f"{crc:0{CHECKSUM_DIGITS}x}" for crc in sums)} if sums else {}


def sums_of(path: Path, tensors: Iterable[OutputTensor]) -> Iterator[int]:
    """Yield the sums of tensors of a written file; a sum of fewer bytes where the file ends before."""
    with open_regular(path) as f:
        for t in tensors:
            f.seek(t.offset)
            crc, left = 0, t.nbytes
            while left and (piece := f.read(min(left, SUMMED_BYTES))):
                crc, left = crc32(piece, crc), left - len(piece)
            yield crc
