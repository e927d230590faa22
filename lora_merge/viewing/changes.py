"""The change of a weight by a plan, computed as in a merge, one weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, DoesNotFit
from ..disk.reader import Reader
from ..engine.blocks import Block, block
from ..engine.blocks import blocks as cut_into_blocks
from ..engine.devices import place
from ..engine.fold import new_weights
from ..engine.measuring.factors import factored
from ..engine.measuring.replaced import Replaced, replaced, runs, values
from ..engine.patch_tensors import PatchTensors
from ..engine.placement import DeviceStream, stage
from ..engine.tensors import Fetch, TensorCache, weight_values
from ..errors import misfit
from ..planning.plan import OutputTensor, Plan
from .deltas import Delta


def changes(plan: Plan, reader: Reader) -> Callable[[OutputTensor], Delta]:
    """Return a function that computes the change of a weight that a plan changes: as two factors where the patches tell
    them, else whole, from the base; of a weight that an adapter replaces the difference."""
    exchanged = {one.target.name: one for one in replaced_by(plan)}
    factors = TensorCache(reader, frozenset(p for m in plan.adapters for p in m.adapter.index.files))
    tensors = PatchTensors(factors.fetch, plan.weights)

    def change(target: OutputTensor) -> Delta:
        if (one := exchanged.get(target.name)) is not None:
            return Delta(full=_difference(one, factors.read))
        try:
            with torch.no_grad():
                found = _factors(target, tensors) or Delta(full=_whole(target, tensors))
        except DoesNotFit as e:
            raise misfit(target.name, e) from e
        factors.forget()
        tensors.kept.clear()
        return found

    return change


def replaced_by(plan: Plan) -> Iterator[Replaced]:
    """Yield the tensors of a plan's output that its adapters store whole."""
    return replaced((t for f in plan.files for t in f.targets), plan.base, plan.adapters)


def _difference(one: Replaced, read: Fetch) -> Tensor:
    """Return V − W [rows, cols] of a weight that an adapter replaces."""
    found = torch.empty(prod(one.target.shape))
    for first, count in runs(one, 1):
        found[first : first + count] = values(one.target.weight, first, count, read) - values(
            one.own, first, count, read
        )
    return found.view(one.target.matrix)


def _whole(target: OutputTensor, tensors: PatchTensors) -> Tensor:
    """Return the change of a weight [rows, cols]."""
    found = torch.zeros(target.matrix)
    for one, rows, merged in merged_blocks(target, tensors):
        found[one.first : one.last] = (merged - rows)[0]
    return found


def _factors(target: OutputTensor, tensors: PatchTensors) -> Delta | None:
    """Return the change of a whole weight as two factors; None where it is not such a product."""
    (rows, cols), at = target.matrix, place("cpu", "F32")
    whole = all((u.piece.start, u.piece.stop) == (0, rows) for u in target.uses)
    if target.combining is not None or not whole or not all(map(factored, target.uses)):
        return None
    left, right = [], []
    for s in tensors.stacks([block(target, 0, rows)], at, DeviceStream(at)):
        if s.taken is not None or s.view is not None or s.algorithm.low_rank is None:
            return None
        one, other = s.algorithm.low_rank.factors(torch.zeros(()).expand(1, rows, cols), s.tensors)
        left.append(one[0] * s.strength[0])
        right.append(other[0])
    found = Delta(torch.cat(left, 1), torch.cat(right))
    return found if sum(part.shape[1] for part in left) < min(rows, cols) else None


def merged_blocks(target: OutputTensor, tensors: PatchTensors) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield each changed block of a weight with its numbers before and after the merge, both [1, rows, cols]."""
    wide = target.combining is not None or any(ALGORITHMS[u.patch.algorithm].decomposes for u in target.uses)
    at = place("cpu", "F64" if wide else "F32")
    lane = DeviceStream(at)
    base = weight_values(target.weight, tensors.fetch).reshape(target.matrix)
    for one in (b for b in cut_into_blocks(target) if b.slices and base.numel()):
        rows = stage([base[one.first : one.last]], at)
        try:
            merged = new_weights([one], rows.clone(), tensors.stacks([one], at, lane))
        except DoesNotFit as e:
            raise misfit(target.name, e) from e
        yield one, rows, merged
