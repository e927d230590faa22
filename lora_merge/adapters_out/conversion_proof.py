"""What is expected of modules of a dialect: each weight's change by the input of `convert`, or by the method over those
of several inputs. The output is read as an adapter of the same base.

Factors that have the bytes of the input's, at the same scale and on the same rows, mean the same change. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np

from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import Shape, flat
from ..job import Adapter
from ..progress import Counting
from ..proof.combination_methods import PatchRows, RowChanges, together
from ..proof.recomputation import Recomputation
from ..proof.reference import REFERENCE
from ..proof.reference.floats import Array
from ..proof.weights import WeightReader
from .combination_proof import Expectation
from .groups import Target, is_plain
from .job import AdapterJob
from .module_tensors import StoredModule
from .output_file import Proof
from .parallel import PerThread
from .proof import (
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
    untouched,
)
from .sources import NOWHERE, Sources, same_base

FORMED: Final = 8
"""Multiplications that take as long as to form one number of a whole matrix."""

PROBES: Final = 8
"""Random vectors x of a comparison of factors. ‖E x‖² has the mean ‖E‖², so an error that all of them miss is one of
probability 0; the estimate is larger than half of ‖E‖ in all but one of 10⁴ cases."""

BYTES_AT_ONCE: Final = 2**18
"""Bytes of two tensors that are compared at once."""


class ConversionClaims(NamedTuple):
    """The claims of a run about its output."""

    job: AdapterJob
    sources: Sources
    modules: Sequence[StoredModule]  # that change something, and what is lost in each


def prove_conversion(claim: ConversionClaims, reader: Reader, path: Path, begin: Counting) -> Proof:
    """Return what was proven of the output at `path`; VerificationFailed if a weight's change is not the one that the
    inputs' changes become."""
    job, sources, modules = claim
    assert sources.inputs is not None, "a conversion has a base"
    of_output = replace(job, inputs=replace(job.inputs, adapters=(Adapter(path),)))
    again = same_base(sources.inputs, of_output)
    base, lost = sources.inputs.base, _lost(modules)
    worst = max((m.layer.residual for m in modules), default=0.0)

    def computed(of: Sources, source: Reader) -> Recomputation:
        return recomputation(of_output, base, of.weights, source, _Drawn(source, base))

    with Reader(again.indexes) as file:
        confirm(job, sources, reader)
        confirm(of_output, again, file)
        before, after = (PerThread(partial(computed, *side)) for side in ((sources, reader), (again, file)))
        sides = BothSides(reader, file, {t.key: t for t in again.targets}, before, after)
        expected, comparisons = Expectation(job, sources), list[Comparison]()
        for target in sources.targets:
            stated = Stated(worst, lost.get(target.key, 0.0), at_most=True)
            if not job.combines:
                numbers, nbytes = _cost(target, sides.outputs.get(target.key))
                squares = partial(_converted, target, stated, sides)
                comparisons.append(Comparison(target.key, numbers, nbytes, stated, squares))
            elif expected.has(target):
                whole = replace(target, parts=(), turned=False)
                numbers, nbytes = (2 + len(target.uses)) * prod(target.shape), expected.nbytes(target)
                squares = partial(_combined, whole, expected, sides)
                comparisons.append(Comparison(target.key, numbers, nbytes, stated, squares))
        changed = {target.key for target in sources.targets}
        comparisons += untouched((t for t in again.targets if t.key not in changed), after, lost)
        return prove(comparisons, of_output, path, begin, layers=len(sources.targets))


class BothSides(NamedTuple):
    """The inputs and the output of a conversion, with what computes their changes."""

    reader: Reader
    file: Reader
    outputs: Mapping[str, Target]  # weight → its change by the output
    before: PerThread[Recomputation]
    after: PerThread[Recomputation]


def _converted(target: Target, stated: Stated, both: BothSides) -> Squares | None:
    """Return the comparison of a weight's change by one input with that by the output."""
    output = both.outputs.get(target.key)
    pairs = same_factors(target, output)
    if pairs and all(_alike(both.reader, old, both.file, new) for old, new in pairs):
        return Squares(0.0, 0.0)
    if not all(known(side) for side in (target, output) if side):
        return None
    sides = (target, both.before.get()), (output, both.after.get())
    if not all(map(_is_factored, (target, output))):
        return _formed(target, sides)
    estimate = _projected(target, sides, _random(target))
    return estimate if stated.holds(estimate) else _projected(target, sides, _basis(target, sides))


def _combined(target: Target, expected: Expectation, both: BothSides) -> Squares | None:
    """Return the comparison of a weight's combined change with that by the output."""
    output, (rows, cols) = both.outputs.get(target.key), flat(target.shape)
    if output is not None and not known(output):
        return None

    def stored(some: slice) -> Array:
        lines = np.arange(rows)[some]
        return np.zeros((len(lines), cols)) if output is None else added(output, both.after.get(), lines, cols)

    return expected.squares(target, target, both.before.get(), stored)


class _Drawn(WeightReader):
    """Reads tensors in float64. Those of a base that was not given are drawn at random.

    An equation between two formulas that holds for random weights holds for all weights.
    """

    def __call__(self, info: StoredTensor, shape: Shape, entries: Array | None = None) -> Array:
        """Return the tensor in `shape`, or these entries of its first axis."""
        if info.file != NOWHERE:
            return super().__call__(info, shape, entries)
        values = np.random.default_rng(crc32(info.name.encode())).standard_normal(shape)
        return values if entries is None else values[entries]


def _lost(modules: Sequence[StoredModule]) -> dict[str, float]:
    """Return weight of the base → ‖Δ − Δ̂‖² of all modules that have rows of it."""
    squares: dict[str, float] = {}
    for module in modules:
        for key in {piece.key for piece in module.place.view.row_slices}:
            squares[key] = squares.get(key, 0.0) + module.layer.lost
    return squares


TensorPairs = list[tuple[StoredTensor, StoredTensor]]
"""Tensors of an input and of an output that must be alike."""


def same_factors(target: Target, output: Target | None) -> TensorPairs:
    """Return the factors of a weight's change in the input and in the output, if these mean the same change where their
    bytes are alike: one pair of factors each with one scale, in one dtype. [] otherwise."""
    if output is None or target.values or output.values or len(target.uses) != 1 or len(output.uses) != 1:
        return []
    (use,), (again,) = target.uses, output.uses
    old, new = use.patch, again.patch
    facts = [
        (u.patch.algorithm, u.patch.numbers, u.patch.magnitude, u.piece, u.start, u.strength) for u in (use, again)
    ]
    if not is_plain(old) or not is_plain(new) or facts[0] != facts[1] or old.view != new.view:
        return []
    pairs = [(old.module.slots[slot], new.module.slots[slot]) for slot in ("up", "down")]
    return pairs if all(info.dtype == other.dtype for info, other in pairs) else []


def _alike(reader: Reader, info: StoredTensor, other_reader: Reader, other: StoredTensor) -> bool:
    """Return whether two tensors have the same bytes."""
    if info.nbytes != other.nbytes:
        return False
    spans = [(first, min(BYTES_AT_ONCE, info.nbytes - first)) for first in range(0, info.nbytes, BYTES_AT_ONCE)]
    return all(bytes(reader.read(info, *span)) == bytes(other_reader.read(other, *span)) for span in spans)


def _is_factored(target: Target | None) -> bool:
    """Return whether a weight's change has products with vectors without being formed."""
    return target is None or (not target.values and all(
        is_plain(u.patch) and u.patch.magnitude is None and not u.piece.transposed
        and u.piece.cols == target.matrix[1] and REFERENCE[u.patch.algorithm].linear for u in target.uses))  # fmt: skip


def _cost(target: Target, output: Target | None) -> tuple[int, int]:
    """Return how many numbers the comparison of one weight forms, and about how many bytes it takes."""
    (out, cols), sides = target.matrix, [side for side in (target, output) if side is not None]
    if pairs := same_factors(target, output):
        return 0, 2 * sum(min(new.nbytes, BYTES_AT_ONCE) for _, new in pairs)
    numbers = sum(len(side.uses) + len(side.values) for side in sides) * out * cols
    nbytes = 8 * 4 * out * cols
    if known(target) and all(map(_is_factored, sides)):
        ranks = sum(use.patch.shapes["down"][0] for side in sides for use in side.uses)
        numbers = min(numbers, PROBES * ranks * (out + cols) // FORMED)
        nbytes = min(nbytes, 8 * 2 * ranks * (out + cols))
    return numbers, nbytes


Sides = tuple[tuple[Target, Recomputation], tuple[Target | None, Recomputation]]
"""A weight's change by the input and by the output, with what computes each."""


def _random(target: Target) -> Array:
    """Return random vectors [cols, n] that give an estimate of the norms."""
    return np.random.default_rng(0).standard_normal((target.matrix[1], PROBES)) / sqrt(PROBES)


def _basis(target: Target, sides: Sides) -> Array:
    """Return orthonormal vectors [cols, n] of which the rows of both changes are sums: they give the norms exactly."""
    vectors = [again.spanning(part, cache) for side, again in sides for part, cache in _parts(side, again)]
    return np.linalg.qr(np.concatenate([np.zeros((0, target.matrix[1])), *vectors]).T)[0]


def _projected(target: Target, sides: Sides, vectors: Array) -> Squares:
    """Return the comparison of the products of both changes with vectors."""
    before, after = (_products(side, again, target.matrix[0], vectors) for side, again in sides)
    return Squares(float(np.vdot(before, before)), float(np.vdot(before - after, before - after)))


def _parts(target: Target | None, again: Recomputation) -> Iterator[tuple[PatchRows, RowChanges]]:
    """Yield the changes that are added to a weight."""
    if target is not None:
        tensor = shaped(target, again)
        yield from ((part, RowChanges(tensor, tensor.name)) for part in together(target.uses))


def _products(target: Target | None, again: Recomputation, out: int, vectors: Array) -> Array:
    """Return Σ s ΔW x for all rows of a weight."""
    products, rows = np.zeros((out, vectors.shape[1])), np.arange(out)
    for part, cache in _parts(target, again):
        products += again.projected(part, rows, vectors, cache)
    return products


def _formed(target: Target, sides: Sides) -> Squares:
    """Return the comparison of all numbers of both changes."""
    rows, cols = target.matrix
    (first, before), (output, after) = sides
    step = max(rows_at_once(side, (rows, cols)) for side in (first, output) if side)
    every = np.arange(rows)

    def stored(some: slice) -> Array:
        return np.zeros(()) if output is None else added(output, after, every[some], cols)

    return squares_of(lambda some: added(first, before, every[some], cols), stored, rows, step)
