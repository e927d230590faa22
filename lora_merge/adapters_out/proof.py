"""The proof of a written adapter: Δ of some layers again in numpy, in float64, from the inputs and from the file.

The reference formulas of proof/reference compute the inputs' changes, so nothing of the run's arithmetic is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import isnan, nan, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..adapters.modules import group
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES, flat
from ..errors import VerificationFailed
from ..files.checkpoint import Index, open_checkpoint
from ..job import Job
from ..merge_methods import MEAN, METHODS, SUM
from ..models.weights import Weight
from ..planning.combination import Combining
from ..planning.plan import OutputTensor
from ..progress import Counting
from ..proof.methods_again import Made, costs_all, of_weight, together
from ..proof.recompute import Recomputation
from ..proof.reference import REFERENCE
from ..proof.reference.floats import Array, decode
from ..proof.reference.one_core import one_core
from .groups import Target
from .job import AdapterJob
from .parallel import PerThread, side_by_side
from .sources import Sources

T = TypeVar("T")

BUDGET: Final = 2**25
"""Numbers of ΔW that are formed for a proof that is not full."""

BLOCK: Final = 2**18
"""Numbers of ΔW that are formed at once: they stay in the caches."""

TOLERANCE: Final = 0.01
"""The share by which a residual may differ from the reported one."""

ADDING: Final = (SUM, MEAN)
"""Methods whose result has rows that follow from the same rows of the changes."""

OF_MODULES: Final = ("weight", "bias")
"""Parameters that belong to a module; others are named like one, such as the stacked weights of experts."""

FLOOR: Final = 1e-6
"""A residual below this is rounding in either computation."""


@dataclass(frozen=True)
class _Facts:
    """The facts of a plan that `Recomputation` reads."""

    job: Job
    base: Index
    weights: Mapping[str, Weight]
    files: Sequence[Any] = field(default_factory=tuple)


@dataclass(frozen=True)
class Claims:
    """The claims of a run about its output."""

    job: AdapterJob
    sources: Sources
    layers: Mapping[str, Mapping[str, Any]]  # layer → its facts for the report
    nbytes: int  # of all tensors


def prove(claims: Claims, reader: Reader, path: Path, begin: Counting) -> dict[str, Any]:
    """Return what was proven of the file at `path`; VerificationFailed where it is not what the run says.

    Methods that choose entries choose others where changes are computed in fp32: then only the tensors' bytes are
    counted.
    """
    index = open_checkpoint(path)
    nbytes = sum(info.nbytes for info in index.tensors.values())
    if nbytes != claims.nbytes:
        raise VerificationFailed("the file does not hold the tensors that were made", f"{path}: {nbytes} bytes", REDO)
    residuals: dict[str, float] = {}
    if claims.job.method in ADDING or claims.job.compute_dtype != "fp32":
        residuals = _residuals(claims, reader, index, path, begin)
    worst = max(residuals, key=lambda name: residuals[name], default="")
    return {"ok": True, "layers": len(claims.layers), "recomputed": len(residuals),
            "worst_residual": residuals.get(worst, 0.0), "worst_layer": worst}  # fmt: skip


def _residuals(claims: Claims, reader: Reader, index: Index, path: Path, begin: Counting) -> dict[str, float]:
    """Return layer → ‖Δ − Δ̂‖ / ‖Δ‖ of the file; VerificationFailed where it is not the stated one."""
    job, sources = claims.job, claims.sources
    modules = {(m.name, m.parameter): m for m in group(index).modules}
    facts: Any = _Facts(job.inputs, sources.indexes[0], sources.weights)
    squares_of, size_of, bound = partial(_squares, job), _nbytes, job.inputs.max_memory // 2
    residuals, chosen = {}, _chosen(sources, claims.layers, full=job.full)
    if job.method not in ADDING:
        squares_of = partial(_squares_of_method, Combining(METHODS[job.method], job.numbers, sources.adapters))
        size_of = _nbytes_of_method
        chosen = [layer for layer in chosen if size_of(layer) <= bound and not _is_column(layer[0])]
    count = begin("prove", 8 * sum(_count(part) for _, part in chosen))
    with one_core(), ThreadPoolExecutor(1) as pool, Reader([index]) as written:
        again = PerThread(lambda: Recomputation(facts, reader, pool, full=True))

        def work(layer: tuple[Target, Target]) -> Squares | None:
            part = layer[1]
            own_name = (part.name, part.parameter) if part.parameter in OF_MODULES else (part.label, OF_MODULES[0])
            stored = _stored_rows(modules.get(own_name), written, flat(part.shape[::-1] if part.turned else part.shape))
            if part.turned and stored is not None:
                whole = stored(slice(0, part.shape[1])).T
                return squares_of(*layer, again.get(), lambda rows: whole[rows])
            return squares_of(*layer, again.get(), stored)

        for (_, target), squares in zip(chosen, side_by_side(chosen, work, size_of, bound), strict=True):
            count(8 * _count(target))
            if squares is None:
                continue
            name = target.label
            if isnan(squares.off):
                raise VerificationFailed("a layer is not in the file", f"{path}: {name}", REDO)
            size, off, unsure = map(sqrt, squares)
            residual, slack = (off / size, unsure / size) if size else (0.0, 0.0)
            stated = float(claims.layers[name]["residual"])
            if abs(residual - stated) > TOLERANCE * max(residual, stated) + FLOOR + slack:
                where = f"{path}: {name}: residual {residual:.6g}, stated {stated:.6g}"
                raise VerificationFailed("the written layer is not what the report says", where, REDO)
            residuals[name] = residual
    return residuals


REDO: Final = "run it again; if it fails again, report it with the two inputs"


def evenly(layers: Sequence[T], numbers: int, budget: int, *, full: bool) -> Sequence[T]:
    """Return layers that have `numbers` numbers in all: every one with `full`, else as many of them, evenly over the
    file, as have at most `budget` together, but one at least."""
    return layers if full else layers[:: max(1, -(-numbers // budget))]


def _chosen(sources: Sources, layers: Mapping[str, Any], *, full: bool) -> Sequence[tuple[Target, Target]]:
    """Return layers with the weights that they are of."""
    written = [(whole, part) for whole in sources.targets for part in whole.stored
               if part.label in layers and not whole.values]  # fmt: skip
    return evenly(written, sum(_count(part) for _, part in written), BUDGET, full=full)


def _nbytes(layer: tuple[Target, Target]) -> int:
    """Return about how many bytes the comparison of a layer takes at most."""
    return 8 * 4 * _count(layer[0])


def _nbytes_of_method(layer: tuple[Target, Target]) -> int:
    """Return that number for a method that needs all changes of a weight at once."""
    return 8 * (4 + 2 * len(layer[0].uses)) * _count(layer[0])


def _count(target: Target) -> int:
    out, cols = flat(target.shape)
    return out * cols


def _is_column(target: Target) -> bool:
    """Return whether a bias has several axes: methods take it for a vector, which the second ones do not know."""
    return target.vector and len(target.shape) > 1


class Squares(NamedTuple):
    """The numbers of the comparison of a layer, in float64."""

    size: float  # ‖Δ‖²
    off: float  # ‖Δ − Δ̂‖²; NaN for a layer that the file lacks
    unsure: float = 0.0  # ‖…‖² of how far entries may be from those of another computation in float64


def _squares_of_method(
    how: Combining, whole: Target, target: Target, again: Recomputation, stored: StoredRows | None
) -> Squares | None:
    """Return the comparison of a layer whose changes a method combines; None where a formula has no second one."""
    if any(u.patch.algorithm not in REFERENCE for u in whole.uses):
        return None
    key, rows = whole.uses[0].piece.key, flat(target.shape)[0]
    shaped = OutputTensor(key, key, "F64", again.plan.weights[key], 0, 0, whole.uses, how.method, combining=how)
    taking, tensors = together([u for u in whole.uses if u.strength]), Made(shaped, key)
    if not taking:
        return None
    result = of_weight(shaped, taking, np.arange(shaped.matrix[0]), lambda p, some: again.whole(p, some, tensors))
    order = np.concatenate([np.arange(*run) for run in target.runs or ((0, rows),)])
    delta, slack = (part.reshape(flat(whole.shape))[order] for part in (result.total, result.slack))
    size = float(np.vdot(delta, delta))
    delta -= 0.0 if stored is None else stored(slice(0, rows))
    return Squares(size, nan if stored is None else float(np.vdot(delta, delta)), float(np.vdot(slack, slack)))


def _squares(
    job: AdapterJob, whole: Target, target: Target, again: Recomputation, stored_rows: StoredRows | None
) -> Squares | None:  # fmt: skip
    """Return the comparison of a layer whose changes are added; None where a formula has no second one.

    Rows are taken a few at a time, where the formulas allow that: whole matrices would be new memory from the system
    each time, which takes longer than the arithmetic.
    """
    rows, cols = flat(target.shape)
    if any(u.patch.algorithm not in REFERENCE for u in target.uses):
        return None
    key = target.uses[0].piece.key
    shaped = OutputTensor(key, key, "F64", again.plan.weights[key], 0, 0, target.uses, METHODS[SUM])
    strengths = {u.patch.adapter: u.strength for u in whole.uses}  # of those that change any row of the weight
    scale = job.numbers.scale / (sum(strengths.values()) if job.method == MEAN else 1.0)
    width = together(target.uses)[0].cols  # stacked experts have rows of their own
    step = rows if width != cols or any(map(costs_all, target.uses)) else max(1, BLOCK // max(cols, 1))
    order = np.concatenate([np.arange(*run) for run in target.runs or ((0, rows),)])
    squares = off = 0.0
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        right, tensors = np.zeros((part.stop - first, cols)), Made(shaped, key)
        for patch_rows in together(target.uses):
            stored = (
                order[part]
                if patch_rows.cols == cols
                else np.arange(first * cols // patch_rows.cols, part.stop * cols // patch_rows.cols)
            )
            right += again.whole(patch_rows, stored, tensors).reshape(right.shape)
        right *= scale
        squares += float(np.vdot(right, right))
        if stored_rows is not None:
            right -= stored_rows(part)
            off += float(np.vdot(right, right))
    return Squares(squares, off if stored_rows is not None else nan)


StoredRows: TypeAlias = Callable[[slice], Array]
"""Function of a range of rows that returns the Δ that a file's tensors mean there."""


def _stored_rows(module: Any, reader: Reader, shape: tuple[int, int]) -> StoredRows | None:
    """Return the Δ that the file's tensors mean; None for a module that it lacks."""
    if module is None:
        return None

    def read(info: StoredTensor) -> Array:
        return decode(bytes(reader.read(info, 0, info.nbytes)), info.dtype).reshape(info.shape or (1,))

    if "diff" in module.slots:
        info, (_, cols) = module.slots["diff"], shape
        width = cols * ITEM_BYTES[info.dtype]

        def some(rows: slice) -> Array:
            raw = reader.read(info, rows.start * width, (rows.stop - rows.start) * width)
            return decode(raw, info.dtype).reshape(-1, cols)

        return some
    up, down = read(module.slots["up"]), read(module.slots["down"])
    rank = down.shape[0]
    alpha = float(read(module.shared["alpha"])[0]) if "alpha" in module.shared else float(rank)
    left, right = alpha / rank * up.reshape(shape[0], rank), down.reshape(rank, shape[1])
    return lambda rows: np.asarray(left[rows] @ right)
