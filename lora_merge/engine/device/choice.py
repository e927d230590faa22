"""Chooses between a GPU and the CPU for `--device auto`: the one that a model of the merge's seconds says is faster.

The constants are those of common machines: PCIe 3, a disk that writes 3 GB/s, the start of CUDA on Linux. They decide
only whether a GPU is worth its start; a device that is named is used whatever they say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final, NamedTuple

from ...algorithms import ALGORITHMS
from ...planning.plan import OutputTensor, Plan
from ..devices import fast_kinds, started, threads
from ..placement import HOST

START: Final = {"cuda": 1.5, "xpu": 1.5, "mps": 0.3}
"""Seconds until a device computes: its context, its libraries, pinned memory."""

DISK: Final = 3e9
LINK: Final = 12e9
"""Bytes per second: written to the disk; to a device and at the same time from it."""

HOSTED: Final = 60e-12
"""Seconds of one thread of the host for a byte that a device folds; tests/bench measures it."""

CASTS: Final = 1.6e-9
USED: Final = 1.3e-9
COMBINED: Final = 1e-7
DECOMPOSED: Final = 4e-9
"""Seconds of one core for one number: its casts; one formula; one change that `--method` combines with others by size;
a decomposition in fp64, times the smaller side of the matrix."""

CORES: Final = {"plain": 200.0, "decomposed": 10.0}
"""The number of cores that a GPU replaces: for most formulas, where its memory decides; for decompositions."""

CLEAR: Final = 0.9
"""The largest share of the CPU's seconds at which a GPU is taken."""


class Choice(NamedTuple):
    """The device to use, as `--device` names it, and why; "" where there was no choice."""

    device: str
    why: str = ""


def choose(plans: Sequence[Plan]) -> Choice:
    """Return the device for merges that share a base; nothing is started for that."""
    targets = [t for p in plans for f in p.files for t in f.targets]
    return fastest(plans[0].job.device, targets, sum(p.size for p in plans) / DISK, threads([HOST]))


def fastest(asked: str, targets: Iterable[OutputTensor], disk: float, cores: int) -> Choice:
    """Return the device for the targets of merges, and of a CPU as many cores.

    `asked`: the value of `--device`. `disk`: the seconds that the disk needs; 0 for tensors in memory.
    """
    kinds = fast_kinds() if asked == "auto" else []
    if not kinds:
        return Choice(asked)
    kind, changed = kinds[0], [t for t in targets if t.uses or t.recoded]
    plain, decomposed = map(sum, zip(*map(_core_seconds, changed), strict=True)) if changed else (0.0, 0.0)
    moved = sum(max(t.nbytes, t.source.nbytes) for t in changed if t.uses)
    on_cpu = max(disk, (plain + decomposed) / cores)
    folded = plain / CORES["plain"] + decomposed / CORES["decomposed"]
    on_device = (0.0 if started(kind) else START[kind]) + max(disk, folded, moved / LINK, moved * HOSTED)
    why = f"about {on_cpu:.1f} s on the CPU ({cores} cores), {on_device:.1f} s on {kind} with its start"
    return Choice("auto" if on_device < CLEAR * on_cpu else "cpu", why)


def _core_seconds(target: OutputTensor) -> tuple[float, float]:
    """Return the seconds of one core for a tensor: of most formulas, and of those that decompose a matrix."""
    numbers = prod(target.matrix)
    rows = [ALGORITHMS[u.patch.algorithm] for u in target.uses]
    each = COMBINED if target.combining is not None else USED
    sides = [min(u.patch.view.matrix) for u, row in zip(target.uses, rows, strict=True) if row.decomposes]
    return numbers * (CASTS + each * len(rows)), numbers * DECOMPOSED * sum(sides)
