"""The proof of an extracted adapter: it is read as an adapter of the base, and its changes are compared with
tuned − base in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...disk.reader import Reader
from ...engine.devices import place
from ...engine.row_matrix import Rows
from ...engine.tensors import TensorCache, view_bytes
from ...errors import VerificationFailed
from ...files.checkpoint import Index
from ...job import Adapter
from ...models.weights import RowSlice, WeightView, whole
from ...planning.checkpoint_cache import CheckpointCache
from ...progress import Counting
from ..change import Change, Evaluator
from ..groups import Target
from ..job import WHOLE, AdapterJob
from ..module_tensors import StoredModule
from ..parallel import PerThread, side_by_side
from ..proof import FLOOR, TOLERANCE, evenly
from ..sources import open_sources
from .difference import Side
from .pairs import Pair, Pairs

BUDGET: Final = 2**27
"""Numbers of ΔW that are formed for a proof that is not full."""

REPORT: Final = "report it with the two checkpoints"


class Claim(NamedTuple):
    """The file that a run has written, the layers that it says are in it, and the checkpoints that it has open."""

    part: Path
    modules: Sequence[StoredModule]
    cache: CheckpointCache


def prove(job: AdapterJob, pairs: Pairs, sides: Sequence[Side], claim: Claim, begin: Counting) -> dict[str, Any]:
    """Return what was proven of the file; VerificationFailed where it is not what the run says."""
    (base, tuned), (part, modules, cache) = sides, claim
    check = replace(job, inputs=replace(job.inputs, adapters=(Adapter(part),), base=job.base or part, method="sum"),
                    include=(), exclude=())  # fmt: skip
    pair_of = {id(p.place): p for p in pairs.pairs}
    fresh = [module for module in modules if pair_of[id(module.place)].fresh]
    if fresh:  # the base has no place for a module that it lacks
        check = replace(check, inputs=replace(check.inputs, unmatched="skip"))
    again = open_sources(check, cache)
    targets = {t.key: t for t in again.targets}
    modules = [module for module in modules if not pair_of[id(module.place)].fresh]
    chosen = evenly(modules, sum(prod(m.place.view.matrix) for m in modules), BUDGET, full=job.full)
    worst, name, advance = 0.0, "", begin("prove", sum(pair_of[id(m.place)].nbytes for m in chosen))
    with Reader(again.indexes) as reader:
        for module in fresh:
            _expect_value(pair_of[id(module.place)], tuned, again.adapters[0].index, reader)
        files = frozenset(f for a in again.adapters for f in a.index.files)
        after = PerThread(lambda: Evaluator(again, TensorCache(reader, files), place("cpu", "F64")))

        def work(module: StoredModule) -> float:
            pair = pair_of[id(module.place)]
            evaluator = after.get()
            off = _off(base.by_rows(pair.place.view), tuned.by_rows(pair.tuned), _stored_rows(pair, targets, evaluator))
            evaluator.forget()
            return off

        bound = job.inputs.max_memory // 2
        for module, off in zip(chosen, side_by_side(chosen, work, _nbytes, bound), strict=True):
            pair, stated = pair_of[id(module.place)], sqrt(module.layer.lost / module.layer.squares)
            if not abs(off - stated) <= TOLERANCE * max(off, stated) + FLOOR:
                where = f"{pair.name}: residual {off:.6g}, stated {stated:.6g}"
                raise VerificationFailed("the written layer is not what the report says", where, REPORT)
            worst, name = max((worst, name), (off, pair.name))
            advance(pair.nbytes)
    count = len(fresh)
    return {"ok": True, "layers": len(modules) + count, "recomputed": len(chosen) + count, "worst_residual": worst,
            "worst_layer": name}  # fmt: skip


def _expect_value(pair: Pair, tuned: Side, file: Index, reader: Reader) -> None:
    """Raise VerificationFailed unless the file holds the tuned value of a parameter, rounded once."""
    key = f"{pair.place.prefix}{pair.place.module}.{pair.place.parameter}"
    info = file.tensors[key]
    stored = view_bytes(reader.view(info), info.dtype, info.shape)
    if not torch.equal(stored.reshape(-1), tuned.rows(pair.tuned).reshape(-1).to(stored.dtype)):
        raise VerificationFailed("a written value is not that of the tuned checkpoint", pair.name, REPORT)


def _nbytes(module: StoredModule) -> int:
    """Return about how many bytes a comparison takes at most: both weights as stored, and the file's change."""
    return prod(module.place.view.matrix) * 16


StoredRows: TypeAlias = Callable[[slice], Tensor]
"""Function of a range of rows that returns what the file adds to them."""


def _off(old: Rows, new: Rows, stored: StoredRows) -> float:
    """Return ‖Δ − Δ̂‖ / ‖Δ‖ in float64. Rows are taken a few at a time: whole matrices would be new memory from the
    system each time, which takes longer than the arithmetic."""
    size = off = 0.0
    for (rows, before), (_, after) in zip(old.blocks(), new.blocks(), strict=True):
        difference = after.double() - before.double()
        size += float(difference.square().sum())
        off += float(difference.sub_(stored(rows)).square().sum())
    return sqrt(off) / sqrt(size)


def _stored_rows(pair: Pair, targets: Mapping[str, Target], after: Evaluator) -> StoredRows:
    """Return what the file adds to the rows of a parameter."""
    view = whole(pair.head, pair.place.view.shape) if pair.head else pair.place.view
    if len(view.row_slices) == 1 and view.row_slices[0].key in targets and not view.row_slices[0].transposed:
        target, piece = targets[view.row_slices[0].key], view.row_slices[0]
        if (stored := _stored(target, piece, after)) is not None:
            return lambda rows: stored[rows].double()
        change, *others = after.changes(target)
        if (
            not others
            and change.left is not None
            and change.right is not None
            and target.matrix == (piece.rows, piece.cols)
        ):
            left, right = change.strength * change.left, change.right
            return lambda rows: left[rows] @ right
    whole_change = _whole(view, targets, after)
    return lambda rows: whole_change[rows]


def _stored(target: Target, piece: RowSlice, after: Evaluator) -> Tensor | None:
    """Return the matrix that the file stores as the change of a whole weight; None where it stores none. Its rows are
    widened when they are compared: all at once they take several times the memory of the weight."""
    if target.values or len(target.uses) != 1:
        return None
    (use,) = target.uses
    patch = use.patch
    is_whole = patch.view.row_slices == (piece,) and target.matrix == (piece.rows, piece.cols)
    if patch.algorithm != WHOLE or patch.numbers or patch.magnitude is not None or use.strength != 1 or not is_whole:
        return None
    return after.cache.fetch(patch.module.slots["diff"]).reshape(target.matrix)


def added(changes: Sequence[Change]) -> Tensor:
    """Return the sum of changes at their strengths as a matrix, without a copy of a change that is alone."""
    first, *others = (c.dense() if c.strength == 1 else c.strength * c.dense() for c in changes)
    return sum(others, first) if others else first


def _whole(view: WeightView, targets: Mapping[str, Target], after: Evaluator) -> Tensor:
    """Return what the file adds to all rows of a view."""
    parts = []
    for piece in view.row_slices:
        target = targets.get(piece.key)
        change = torch.zeros(1, dtype=torch.float64)
        if target is not None:
            change = added(after.changes(target))
        rows = change.reshape(-1, piece.cols)[piece.start : piece.stop] if target is not None else change.expand(
            piece.stop - piece.start, piece.cols)  # fmt: skip
        parts.append(rows[:, piece.across].mT if piece.transposed else rows)
    return torch.cat(parts)
