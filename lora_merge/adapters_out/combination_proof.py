"""What `combine`, `resize` and `average` of changes expect of a layer: the method over their changes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import nan, prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..adapters.modules import SCALE_SLOTS, group
from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES, flat
from ..errors import VerificationFailed
from ..files.checkpoint import open_checkpoint
from ..merge_methods import MEAN, METHODS, SUM
from ..planning.combination import Combining
from ..progress import Counting
from ..proof.combination_methods import RowChanges, of_weight, together
from ..proof.recomputation import Recomputation
from ..proof.reference.floats import Array, decode
from .groups import Target
from .job import AdapterJob
from .output_file import Proof
from .parallel import PerThread
from .proof import (
    REDO,
    Changes,
    Comparison,
    Squares,
    Stated,
    added,
    confirm,
    known,
    prove,
    recomputation,
    rows_at_once,
    shaped,
    squares_of,
)
from .sources import Sources

ADDING: Final = (SUM, MEAN)
"""Methods whose result has rows that follow from the same rows of the changes."""

OF_MODULES: Final = ("weight", "bias")
"""Parameters that belong to a module; others are named like one, such as the stacked weights of experts."""


@dataclass(frozen=True)
class CombinationClaims:
    """The claims of a run about its output."""

    job: AdapterJob
    sources: Sources
    layers: Mapping[str, Mapping[str, Any]]  # layer → its facts for the report
    nbytes: int  # of all tensors


@dataclass(frozen=True)
class Expectation:
    """What a job's method makes of the changes of a weight, in the second computation."""

    job: AdapterJob
    sources: Sources

    @cached_property
    def combining(self) -> Combining | None:
        """The method that combines changes; None for one that adds them."""
        job = self.job
        return None if job.method in ADDING else Combining(METHODS[job.method], job.numbers, self.sources.adapters)

    def has(self, whole: Target) -> bool:
        """Return whether there is a second computation for a weight, within the memory.

        Methods that choose entries choose others where changes are computed in fp32.
        """
        if whole.values or self.combining is None:
            return not whole.values
        fits = self.nbytes(whole) <= self.job.inputs.max_memory // 2
        return fits and not _is_column(whole) and self.job.compute_dtype != "fp32"

    def nbytes(self, whole: Target) -> int:
        """Return about how many bytes a comparison takes at most: a method needs all changes of a weight at once."""
        return 8 * (4 if self.combining is None else 4 + 2 * len(whole.uses)) * prod(whole.shape)

    def squares(self, whole: Target, part: Target, again: Recomputation, stored: Changes | None) -> Squares | None:
        """Return the comparison of rows of a weight with what is stored; None where a formula has no second one."""
        if self.combining is None:
            return _of_sum(self.job, whole, part, again, stored)
        return _of_method(self.combining, whole, part, again, stored)


def prove_combination(claims: CombinationClaims, reader: Reader, path: Path, begin: Counting) -> Proof:
    """Return what was proven of the file at `path`; VerificationFailed where it is not what the run says. Of layers
    without a second computation only the tensors' bytes are counted."""
    # Step 1: the tensors of the file, counted.
    job, sources, index = claims.job, claims.sources, open_checkpoint(path)
    nbytes = sum(info.nbytes for info in index.tensors.values())
    if nbytes != claims.nbytes:
        raise VerificationFailed("the file does not hold the tensors that were made", f"{path}: {nbytes} bytes", REDO)
    confirm(job, sources, reader)
    # Step 2: the layers that have a second computation, with the weights that they are of.
    expected = Expectation(job, sources)
    written = [(whole, part) for whole in sources.targets for part in whole.stored
               if part.label in claims.layers and expected.has(whole)]  # fmt: skip
    # Step 3: each is compared with the module of the file.
    modules = {(m.name, m.parameter): m for m in group(index).modules}
    again = PerThread(lambda: recomputation(job, sources.indexes[0], sources.weights, reader))
    with Reader([index]) as file:

        def compared(whole: Target, part: Target) -> Squares | None:
            name = (part.name, part.parameter) if part.parameter in OF_MODULES else (part.label, OF_MODULES[0])
            return expected.squares(whole, part, again.get(), _change_of(modules.get(name), file, part))

        comparisons = [
            Comparison(part.label, (2 + len(part.uses)) * prod(part.shape), expected.nbytes(whole),
                       Stated(float(claims.layers[part.label]["residual"])), partial(compared, whole, part))
            for whole, part in written
        ]  # fmt: skip
        return prove(comparisons, job, path, begin, layers=len(claims.layers))


def _is_column(target: Target) -> bool:
    """Return whether a bias has several axes: methods take it for a vector, which the second ones do not know."""
    return target.vector and len(target.shape) > 1


def _order(part: Target) -> Array:
    """Return the rows of the weight that are those of a part, in its order."""
    return np.concatenate([np.arange(*run) for run in part.runs or ((0, flat(part.shape)[0]),)])


def _of_method(
    how: Combining, whole: Target, part: Target, again: Recomputation, stored: Changes | None
) -> Squares | None:
    """Return the comparison of a layer whose changes a method combines; None where a formula has no second one."""
    if not known(whole):
        return None
    tensor = shaped(whole, again)._replace(method=how.method, combining=how)
    taking, cache = together([u for u in whole.uses if u.strength]), RowChanges(tensor, tensor.name)
    if not taking:
        return None
    result = of_weight(tensor, taking, np.arange(tensor.matrix[0]), lambda p, some: again.whole(p, some, cache))
    order = _order(part)
    delta, slack = (values.reshape(flat(whole.shape))[order] for values in (result.total, result.slack))
    size = float(np.vdot(delta, delta))
    delta -= 0.0 if stored is None else stored(slice(0, len(order)))
    return Squares(size, nan if stored is None else float(np.vdot(delta, delta)), float(np.vdot(slack, slack)))


def _of_sum(
    job: AdapterJob, whole: Target, part: Target, again: Recomputation, stored: Changes | None
) -> Squares | None:
    """Return the comparison of a layer whose changes are added; None where a formula has no second one."""
    if not known(part):
        return None
    strengths = {u.patch.adapter: u.strength for u in whole.uses}  # of those that change any row of the weight
    scale = job.numbers.scale / (sum(strengths.values()) if job.method == MEAN else 1.0)
    order, (rows, cols) = _order(part), flat(part.shape)

    def expected(some: slice) -> Array:
        delta = added(part, again, order[some], cols)
        delta *= scale
        return delta

    return squares_of(expected, stored, rows, rows_at_once(part, (rows, cols)))


def _change_of(module: Any, reader: Reader, part: Target) -> Changes | None:
    """Return the Δ that the file's tensors mean; None for a module that it lacks."""
    if module is None:
        return None
    shape = flat(part.shape[::-1] if part.turned else part.shape)

    def read(info: StoredTensor) -> Array:
        return decode(bytes(reader.read(info, 0, info.nbytes)), info.dtype).reshape(info.shape or (1,))

    if "diff" in module.slots:
        info, (_, cols) = module.slots["diff"], shape
        width = cols * ITEM_BYTES[info.dtype]

        def stored(rows: slice) -> Array:
            raw = reader.read(info, rows.start * width, (rows.stop - rows.start) * width)
            return decode(raw, info.dtype).reshape(-1, cols)

    else:
        up, down = read(module.slots["up"]), read(module.slots["down"])
        rank = down.shape[0]
        numbers = {slot: float(read(info)[0]) for slot, info in module.shared.items() if slot in SCALE_SLOTS}
        scale = numbers.get("scale_override", numbers.get("alpha", float(rank)) / rank)
        left, right = scale * up.reshape(shape[0], rank), down.reshape(rank, shape[1])

        def stored(rows: slice) -> Array:
            return np.asarray(left[rows] @ right)

    if not part.turned:
        return stored
    turned = stored(slice(0, shape[0])).T
    return lambda rows: turned[rows]
