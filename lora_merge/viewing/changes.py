"""The change of a weight by a plan, computed as in a merge, one weight at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, DoesNotFit
from ..disk.reader import Reader
from ..engine.blocks import Block
from ..engine.blocks import blocks as cut_into_blocks
from ..engine.devices import place
from ..engine.fold import new_weights
from ..engine.patch_tensors import PatchTensors
from ..engine.placement import DeviceStream, stage
from ..engine.tensors import TensorCache, weight_values
from ..errors import misfit
from ..planning.plan import OutputTensor, Plan


def changes(plan: Plan, reader: Reader) -> Callable[[OutputTensor], Tensor]:
    """Return a function that computes the change of a weight that a plan changes, [rows, cols]."""
    factors = TensorCache(reader, frozenset(p for m in plan.adapters for p in m.adapter.index.files))
    tensors = PatchTensors(factors.fetch, plan.weights)

    def change(target: OutputTensor) -> Tensor:
        found = torch.zeros(target.matrix)
        with torch.no_grad():
            for block, rows, merged in merged_blocks(target, tensors):
                found[block.first : block.last] = (merged - rows)[0]
        factors.forget()
        tensors.kept.clear()
        return found

    return change


def merged_blocks(target: OutputTensor, tensors: PatchTensors) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield every changed block of a weight, its numbers [1, rows, cols], and the merged ones."""
    wide = target.combining is not None or any(ALGORITHMS[u.patch.algorithm].decomposes for u in target.uses)
    at = place("cpu", "F64" if wide else "F32")
    lane = DeviceStream(at)
    base = weight_values(target.weight, tensors.fetch).reshape(target.matrix)
    for block in (b for b in cut_into_blocks(target) if b.slices):
        rows = stage([base[block.first : block.last]], at)
        try:
            merged = new_weights([block], rows.clone(), tensors.stacks([block], at, lane))
        except DoesNotFit as e:
            raise misfit(target.name, e) from e
        yield block, rows, merged
