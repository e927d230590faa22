"""CRC-32 of every tensor of codes or scales that a merge changes: an entry of the header that finds a damaged bit.

Numbers that are computed again cannot find every bit: a scale that is larger by a millionth decodes to numbers that are
right, and some bits no reader looks at. The entry has eight digits for each such tensor, in the order of the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zlib import crc32

from ..disk.files import open_regular
from .recipe import CHECKSUMS

if TYPE_CHECKING:
    from .plan import OutputTensor, Plan

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


class Checksums:
    """The sums of one output. Codes are summed as they pass; what is written later is read again at the end."""

    def __init__(self, plan: Plan) -> None:
        """`plan`: the output's; without metadata there is no place for sums."""
        self._files = summed([() if plan.job.no_metadata else f.targets for f in plan.files])
        self._starts = [[t.offset for t in tensors] for tensors in self._files]
        self._names = [f.name for f in plan.files]
        self._sums: dict[str, tuple[int, int]] = {}  # codes → (sum, how many of their first bytes it has)

    def feed(self, file: int, at: int, data: memoryview) -> None:
        """Take bytes of a file from `at` on."""
        for t in self._files[file][max(0, bisect_right(self._starts[file], at) - 1) :]:
            if t.offset >= at + len(data):
                return
            low, high = max(at, t.offset), min(at + len(data), t.offset + t.nbytes)
            done, have = self._sums.get(t.name, (0, 0))
            if low < high and low - t.offset == have and t.packed is not None:
                self._sums[t.name] = crc32(data[low - at : high - at], done), high - t.offset

    def entries(self, part: Path, again: Collection[str]) -> list[dict[str, str]]:
        """Return the entry of each file of the output at `part`. `again`: codes that were written a second time."""
        by_file = []
        for name, tensors in zip(self._names, self._files, strict=True):
            path = part / name if name else part
            by_file.append(entry([self._sum(t, path, again) for t in tensors]))
        return by_file

    def _sum(self, target: OutputTensor, path: Path, again: Collection[str]) -> int:
        value, have = self._sums.get(target.name, (0, 0))
        fed = have == target.nbytes and target.name not in again
        return value if fed else next(sums_of(path, [target]))
