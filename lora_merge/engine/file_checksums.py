"""Sums of the codes and scales of an output, taken from the bytes while they are written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from pathlib import Path
from zlib import crc32

from ..planning.output_checksums import entry, summed, sums_of
from ..planning.plan import OutputTensor, Plan


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
