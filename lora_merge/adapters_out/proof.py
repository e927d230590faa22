"""The proof of every written adapter: what was expected of a weight's change, against what the file holds.

Both are computed in numpy, in float64, by the formulas of proof/reference, from the bytes of the inputs and of the
file. Commands differ in what is expected alone: `combination_proof.py`, `conversion_proof.py`,
`extract/extraction_proof.py`, `averaged_tensors.py`. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, isnan, nan, prod, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ..disk.reader import Reader
from ..errors import VerificationFailed, beyond_fp64
from ..files.checkpoint import Index
from ..job import Job
from ..matching.patch import PatchPart
from ..merge_methods import METHODS, SUM
from ..models.weights import Weight
from ..planning.plan import OutputTensor
from ..progress import Counting
from ..proof.combination_methods import RowChanges, costs_all, together
from ..proof.recomputation import Recomputation
from ..proof.reference import REFERENCE
from ..proof.reference.floats import Array
from ..proof.reference.one_core import one_core
from ..proof.second_reading.comparison import compare, stored_number
from ..proof.weights import WeightReader
from .groups import Target
from .job import AdapterJob
from .output_file import Proof
from .parallel import PerThread, side_by_side
from .sources import Sources

BUDGET: Final = 2**27
"""Numbers that are formed for a proof that is not full: those of ΔW, once for every change of it."""

CHANGE_NUMBERS: Final = 2**18
"""Numbers of ΔW that are formed at once: they stay in the caches."""

RESIDUAL_TOLERANCE: Final = 0.01
"""The share by which a residual may differ from the reported one."""

FLOOR: Final = 1e-6
"""A residual below this is rounding in either computation."""

REDO: Final = "run it again; if it fails again, report it with the inputs"


class Squares(NamedTuple):
    """The numbers of the comparison of a layer, in float64."""

    size: float  # ‖Δ‖²
    off: float  # ‖Δ − Δ̂‖²; NaN for a layer that the file lacks
    unsure: float = 0.0  # ‖…‖² of how far entries may be from those of another computation in float64

    @property
    def residual(self) -> float:
        """‖Δ − Δ̂‖ / ‖Δ‖; ‖Δ̂‖ for a Δ of zeros."""
        return sqrt(self.off) / (sqrt(self.size) or 1.0)


class Stated(NamedTuple):
    """The loss that a run reports of a layer."""

    residual: float  # ‖Δ − Δ̂‖ / ‖Δ‖
    squares: float = 0.0  # ‖Δ − Δ̂‖², if that is more
    at_most: bool = False  # whether less may be lost

    def holds(self, squares: Squares) -> bool:
        """Return whether a comparison gives this loss."""
        size = sqrt(squares.size) or 1.0
        stated, residual = max(self.residual, sqrt(self.squares) / size), squares.residual
        slack = RESIDUAL_TOLERANCE * max(residual, stated) + FLOOR + sqrt(squares.unsure) / size
        return residual - stated <= slack and (self.at_most or stated - residual <= slack)


@dataclass(frozen=True)
class Comparison:
    """One layer of the output, and how what was expected of it is compared with what is stored."""

    name: str
    numbers: int  # that are formed; 0 for a comparison of bytes, which is always made
    nbytes: int  # that it takes at most
    stated: Stated
    squares: Callable[[], Squares | None]
    """Called in any thread. Returns None if a formula has no second one."""


def prove(comparisons: Sequence[Comparison], job: AdapterJob, path: Path, begin: Counting, *, layers: int) -> Proof:
    """Return what was proven of `layers` layers of the file at `path`; VerificationFailed if one is not what the run
    reports.

    Without --full it is a sample: as many, evenly over the file, as have at most BUDGET numbers, but one at least.
    """
    step = 1 if job.full else max(1, -(-sum(c.numbers for c in comparisons) // BUDGET))
    formed = [c for c in comparisons if c.numbers][::step]
    chosen = [*(c for c in comparisons if not c.numbers), *formed]
    count, worst, name, recomputed = begin("prove", sum(c.nbytes for c in chosen)), 0.0, "", 0

    def work(comparison: Comparison) -> Squares | None:
        with np.errstate(over="ignore", invalid="ignore"):  # a change beyond float64 is refused by name
            return comparison.squares()

    bound = job.inputs.max_memory // 2
    with one_core(), side_by_side(chosen, work, lambda comparison: comparison.nbytes, bound) as results:
        for comparison, squares in zip(chosen, results, strict=True):
            count(comparison.nbytes)
            if squares is None:
                continue
            _check(comparison, squares, path)
            worst, name = max((worst, name), (squares.residual, comparison.name))
            recomputed += 1
    return {"ok": True, "layers": layers, "recomputed": recomputed, "worst_residual": worst, "worst_layer": name}


def _check(comparison: Comparison, squares: Squares, path: Path) -> None:
    """Raise VerificationFailed if a layer is not what the run reports."""
    name, stated = comparison.name, comparison.stated
    if not isfinite(squares.size):
        raise beyond_fp64(name)
    if isnan(squares.off):
        raise VerificationFailed("a layer is not in the file", f"{path}: {name}", REDO)
    if not stated.holds(squares):
        most = "at most " if stated.at_most else ""
        where = f"{path}: {name}: residual {squares.residual:.6g}, stated {most}{stated.residual:.6g}"
        raise VerificationFailed("the written layer is not what the report says", where, REDO)


@dataclass(frozen=True)
class _Facts:
    """The facts of a plan that `Recomputation` reads."""

    job: Job
    base: Index
    weights: Mapping[str, Weight]
    files: Sequence[Any] = field(default_factory=tuple)


def recomputation(
    job: AdapterJob, base: Index, weights: Mapping[str, Weight], reader: Reader, stored: WeightReader | None = None
) -> Recomputation:
    """Return the second computation of changes of these weights, for one thread. `stored`: as for `Recomputation`."""
    facts: Any = _Facts(job.inputs, base, weights)
    return Recomputation(facts, reader, ThreadPoolExecutor(1), full=True, stored=stored)


def confirm(job: AdapterJob, sources: Sources, reader: Reader) -> None:
    """Raise VerificationFailed where a second reading of the adapters gives a module other places, another formula,
    scale or strength. Nothing without a base: rows are those of the adapters' own modules then."""
    if sources.matches:
        uses: dict[str, list[PatchPart]] = {}
        for match in sources.matches:
            for key, parts in match.uses.items():
                uses.setdefault(key, []).extend(parts)
        targets = [
            OutputTensor(key, key, "F64", sources.weights[key], 0, 0, tuple(parts)) for key, parts in uses.items()
        ]
        compare(job.inputs, sources.indexes[0], sources.matches, targets, partial(stored_number, reader))


Changes: TypeAlias = Callable[[slice], Array]
"""Function of a range of rows that returns Δ there."""


def known(target: Target) -> bool:
    """Return whether all formulas of a weight's change have a second one."""
    return all(use.patch.algorithm in REFERENCE for use in target.uses)


def shaped(target: Target, again: Recomputation) -> OutputTensor:
    """Return the weight of a target with its uses, as a merge would write it."""
    key = target.uses[0].piece.key if target.uses else target.key
    return OutputTensor(key, key, "F64", again.plan.weights[key], 0, 0, target.uses, METHODS[SUM])


def added(target: Target, again: Recomputation, rows: Array, cols: int) -> Array:
    """Return Σ s ΔW for rows of a weight, seen as a matrix `cols` wide. Its uses may see other columns, such as those
    of stacked experts: then the rows are consecutive, and have whole rows of theirs."""
    tensor = shaped(target, again)
    total, cache = np.zeros((len(rows), cols)), RowChanges(tensor, tensor.name)
    for part in together(target.uses):
        lines = rows
        if part.cols != cols and len(rows):
            lines = np.arange(rows[0] * cols // part.cols, (rows[-1] + 1) * cols // part.cols)
        total += again.whole(part, lines, cache).reshape(total.shape)
        cache.changes.clear()
    for _, info, strength in target.values:
        value = again.stored(info, (prod(again.plan.weights[target.key].shape) // cols, cols), rows)
        total += strength * (value - again.values(target.key, rows, cols))
    return total


def rows_at_once(target: Target, matrix: tuple[int, int]) -> int:
    """Return of how many rows the change is formed at once: all where one costs as much, or does not come alone.

    A few are the rule: whole matrices would be new memory from the system each time, which takes longer than the
    arithmetic."""
    rows, cols = matrix
    alone = all(use.piece.cols == cols and not costs_all(use) for use in target.uses)
    return max(1, CHANGE_NUMBERS // max(cols, 1)) if alone else max(rows, 1)


def squares_of(expected: Changes, stored: Changes | None, rows: int, step: int) -> Squares:
    """Return ‖Δ‖² and ‖Δ − Δ̂‖², `step` rows at a time."""
    size = off = 0.0
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        delta = expected(part)  # in new memory
        size += float(np.vdot(delta, delta))
        if stored is not None:
            delta -= stored(part)
            off += float(np.vdot(delta, delta))
    return Squares(size, off if stored is not None else nan)


def untouched(
    targets: Iterable[Target], again: PerThread[Recomputation], lost: Mapping[str, float]
) -> list[Comparison]:
    """Return the comparisons of weights that the output changes and of which no change is expected. `lost`: weight of
    the base → ‖Δ̂‖² that rounding may give it, as a part of a fused module."""

    def squares(target: Target) -> Squares | None:
        if not known(target):
            return None
        (rows, cols), every = target.matrix, np.arange(target.matrix[0])

        def stored(part: slice) -> Array:
            return added(target, again.get(), every[part], cols)

        return squares_of(
            lambda part: np.zeros((len(every[part]), cols)), stored, rows, rows_at_once(target, (rows, cols))
        )

    comparisons = []
    for target in targets:
        stated = Stated(0.0, lost.get(target.key, 0.0), at_most=True)
        numbers = prod(target.shape)
        comparisons.append(Comparison(target.key, numbers, 8 * 4 * numbers, stated, partial(squares, target)))
    return comparisons
