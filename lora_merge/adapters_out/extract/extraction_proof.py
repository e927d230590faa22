"""What `extract` expects: tuned − base, of the values that both checkpoints store. The output is read as an adapter of
the base. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...disk.reader import Reader
from ...errors import VerificationFailed
from ...files.checkpoint import Index
from ...job import Adapter
from ...models.weights import Weight, WeightView, whole
from ...planning.checkpoint_cache import CheckpointCache
from ...progress import Counting
from ...proof.patch_rows import gathered
from ...proof.recomputation import Recomputation
from ...proof.reference.floats import Array, Floats
from ..groups import Target
from ..input_adapters import open_adapters
from ..job import AdapterJob
from ..module_tensors import StoredModule
from ..output_file import Proof
from ..parallel import PerThread
from ..proof import (
    CHANGE_VALUES,
    REDO,
    ChangeRows,
    Comparison,
    Squares,
    StatedLoss,
    added,
    confirm,
    known,
    prove,
    recomputation,
    rows_at_once,
    squares_of,
    untouched,
)
from .pairs import Pair, Pairs

MATRICES_UNDER_WAY: Final = 6
"""Matrices of rows under way: two weights, both changes and what they are made of."""

NEAREST: Final = 0.5 + 1e-9
"""Units in the last place between a number and the nearest one of a dtype, at most."""


class ExtractionClaims(NamedTuple):
    """The claims of a run about its output."""

    job: AdapterJob
    pairs: Pairs
    checkpoints: tuple[Index, Index]  # the base and the tuned one
    modules: Sequence[StoredModule]
    cache: CheckpointCache  # those that are open


def prove_extraction(claim: ExtractionClaims, reader: Reader, path: Path, begin: Counting) -> Proof:
    """Return what was proven of the file at `path`; VerificationFailed if a change is not that of the checkpoints."""
    # Step 1: the output, opened as an adapter of the base.
    job, (base, tuned) = claim.job, claim.checkpoints
    pair_by_place = {id(p.place): p for p in claim.pairs.pairs}
    pairs = [(module, pair_by_place[id(module.place)]) for module in claim.modules]
    inputs = replace(job.inputs, adapters=(Adapter(path),), base=job.base or path, method="sum")
    if any(pair.fresh for _, pair in pairs):  # the base cannot store a module that it lacks
        inputs = replace(inputs, unmatched="skip")
    check = replace(job, inputs=inputs, include=(), exclude=())
    again = open_adapters(check, claim.cache)
    targets, file = {t.key: t for t in again.targets}, again.adapters[0].index
    # Step 2: three computations: of both checkpoints' values, and of the output's changes.
    views = [(pair.place.view, pair.tuned) for _, pair in pairs]
    weights = [
        {piece.key: _weight(index, piece.key) for both in views for piece in both[side].row_slices
         if piece.key in index.tensors}
        for side, index in enumerate((base, tuned))
    ]  # fmt: skip
    with Reader(again.indexes) as written:
        confirm(check, again, written)
        before, after, stored = (
            PerThread(partial(recomputation, *of))
            for of in ((base, weights[0], reader), (tuned, weights[1], reader), (base, again.weights, written))
        )

        def squares(pair: Pair, step: int) -> Squares | None:
            if pair.fresh:
                return _of_value(pair, file, after.get(), stored.get())
            view = _changed(pair)
            changing = [targets[piece.key] for piece in view.row_slices if piece.key in targets]
            if not all(map(known, changing)):
                return None
            old, new = _values(pair.place.view, before.get()), _values(pair.tuned, after.get())
            change = _change(view, targets, stored.get())
            return squares_of(lambda rows: new(rows) - old(rows), change, view.matrix[0], step)

        # Step 3: each module is compared with its pair.
        comparisons = []
        for module, pair in pairs:
            (rows, cols), step = pair.place.view.matrix, _rows_at_once(pair, targets)
            stated = StatedLoss(module.layer.residual)
            elements, nbytes = 0 if pair.fresh else rows * cols, 8 * MATRICES_UNDER_WAY * min(rows, step) * cols
            comparisons.append(Comparison(pair.name, elements, nbytes, stated, partial(squares, pair, step)))
        compared, head = {piece.key for _, pair in pairs for piece in _changed(pair).row_slices}, claim.pairs.head
        if head is not None:  # it has the factors of the embeddings that share its weight
            compared |= {f"{name}.weight" for name in (head.head, head.key) if name}
        others = [t for t in again.targets if t.key not in compared and not _is_resized(t)]
        comparisons += untouched(others, stored, {})
        return prove(comparisons, job, path, begin, layers=len(pairs))


def _weight(index: Index, key: str) -> Weight:
    info = index.tensors[key]
    return Weight(info.shape, info, index.packed.get(key))


def _is_resized(target: Target) -> bool:
    """Return whether a table gets a value with other rows, which is that of a fresh pair."""
    return any(prod(info.shape) != prod(target.shape) for _, info, _ in target.values)


def _changed(pair: Pair) -> WeightView:
    """Return the rows that the output changes: those of the head, if the base shares its weight."""
    return whole(pair.head, pair.place.view.shape) if pair.head else pair.place.view


def _rows_at_once(pair: Pair, targets: Mapping[str, Target]) -> int:
    """Return how many rows of a parameter are compared at once."""
    matrix, pieces = pair.place.view.matrix, _changed(pair).row_slices
    if any(piece.transposed for piece in (*pieces, *pair.place.view.row_slices, *pair.tuned.row_slices)):
        return max(matrix[0], 1)
    changing = (targets[piece.key] for piece in pieces if piece.key in targets)
    return max(
        (rows_at_once(target, matrix) for target in changing), default=max(1, CHANGE_VALUES // max(matrix[1], 1))
    )


def _values(view: WeightView, of: Recomputation) -> ChangeRows:
    """Return a function of rows of a view that returns their stored values."""
    every = np.arange(view.matrix[0])
    return lambda rows: gathered(view, every[rows], of.values)


def _change(view: WeightView, targets: Mapping[str, Target], again: Recomputation) -> ChangeRows:
    """Return a function of rows of a view that returns what the output adds to them."""
    every = np.arange(view.matrix[0])

    def read(key: str, rows: Array, cols: int) -> Array:
        return added(targets[key], again, rows, cols) if key in targets else np.zeros((len(rows), cols))

    return lambda rows: gathered(view, every[rows], read)


def _of_value(pair: Pair, file: Index, tuned: Recomputation, stored: Recomputation) -> Squares:
    """Return the comparison of a parameter whose new value is stored; VerificationFailed unless each of its elements is
    the nearest one to that of the tuned checkpoint."""
    info = file.tensors[f"{pair.place.prefix}{pair.place.module}.{pair.place.parameter}"]
    (rows, cols), value = pair.tuned.matrix, _values(pair.tuned, tuned)
    at_once = max(1, CHANGE_VALUES // max(cols, 1))
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        values, expected = stored.stored(info, (rows, cols), np.arange(part.start, part.stop)), value(part)
        if not (np.abs(values - expected) <= NEAREST * Floats(info.dtype).step(expected)).all():
            raise VerificationFailed("a written value is not that of the tuned checkpoint", pair.name, REDO)
    return Squares(0.0, 0.0)
