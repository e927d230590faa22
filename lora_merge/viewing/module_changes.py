"""ΔW of the modules of an adapter alone, unless a formula reads the base's weight, and of the weights of a plan, as a
merge computes it. One is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Final

import torch
from torch import Tensor

from ..adapters.modules import AdapterFile, Module
from ..adapters.network_settings import rules_of
from ..adapters.tensor_values import FileValues
from ..adapters_out.groups import rank_of_change
from ..algorithms import ALGORITHMS, DoesNotFit
from ..disk.reader import Reader
from ..dtypes import Shape, StoredTensor
from ..engine.change_norms import Replacement, factored, replacements, runs, values
from ..engine.devices import place
from ..engine.fold import new_weights
from ..engine.module_change import ModuleChange, change_of_patch
from ..engine.patch_tensors import PatchTensors
from ..engine.row_blocks import Block, block
from ..engine.row_blocks import blocks as cut_into_blocks
from ..engine.tensor_moves import DeviceStream, stage
from ..engine.tensors import Fetch, TensorCache, weight_values
from ..errors import MergeError, TooLarge, misfit
from ..matching.formula import AdapterContext, choose
from ..models.weights import absent_weight, whole
from ..planning.plan import OutputTensor, Plan

LARGEST_NORM: Final = 1e18  # of the norm of ΔW, whose square is a number of fp32 then


class ModuleChanges:
    """The ΔW of one adapter's modules. `reader` reads its file."""

    def __init__(self, file: AdapterFile, reader: Reader) -> None:
        self.file = file
        rules = rules_of(file)
        self._factors = TensorCache(reader, frozenset(file.index.files))
        self._context = AdapterContext(0, file, rules, FileValues(reader))

    def each(self) -> Iterator[tuple[Module, ModuleChange | None]]:
        """Yield every module with its ΔW; None where that takes a base or more tensors."""
        for module in self.file.modules:
            yield module, self.of(module)

    def of(self, module: Module) -> ModuleChange | None:
        """Return ΔW of a module at strength 1; None as in `each`."""
        shape = shape_of(module)
        if not shape or "magnitude" in module.shared:
            return None
        view = whole("weight", shape)
        try:
            patch = choose(module, view, self._context, {"weight": view}).patch
        except MergeError:
            return None
        if patch.reads_base or patch.base_slots:
            return None
        first: StoredTensor = next(iter(module.slots.values()))
        weight = absent_weight("weight", shape, first)
        tensors, rank = PatchTensors(self._factors.fetch, {"weight": weight}), rank_of_change(patch)
        smaller = rank is not None and rank < min(patch.view.matrix)  # the factors than ΔW
        try:
            with torch.no_grad():
                delta = change_of_patch(patch, weight, tensors, factors=smaller)
        except DoesNotFit as e:
            raise misfit(f"{self.file.path}: {module.where}", e) from e
        self._factors.forget()
        if not delta.size < LARGEST_NORM:
            fix = "the training diverged; use an earlier checkpoint of the adapter"
            raise TooLarge("a change is too large to be measured", f"{self.file.path}: {module.where}", fix)
        return delta


def shape_of(module: Module) -> Shape:
    """Return the shape of the weight that a module changes, if its tensors show it; () otherwise, and for the table of
    an embedding, whose changes are not measured."""
    table = any(ALGORITHMS[name].layout == "table" for name in module.complete[:1])
    return () if table else module.parameter_shape or ()


def changes(plan: Plan, reader: Reader) -> Callable[[OutputTensor], ModuleChange]:
    """Return a function that computes the change of a weight that a plan changes: as two factors if the patches have
    them, else whole, from the base; of a weight that an adapter replaces the difference."""
    exchanged = {r.target.name: r for r in replaced_by(plan)}
    factors = TensorCache(reader, frozenset(plan.adapter_files))
    tensors = PatchTensors(factors.fetch, plan.weights)

    def change(target: OutputTensor) -> ModuleChange:
        if (replacement := exchanged.get(target.name)) is not None:
            return ModuleChange.in_memory(_difference(replacement, factors.read))
        try:
            with torch.no_grad():
                delta = _factors(target, tensors) or ModuleChange.in_memory(_whole(target, tensors))
        except DoesNotFit as e:
            raise misfit(target.name, e) from e
        factors.forget()
        tensors.cache.clear()
        return delta

    return change


def replaced_by(plan: Plan) -> Iterator[Replacement]:
    """Yield the tensors of a plan's output that its adapters store whole."""
    return replacements(plan.targets, plan.base, plan.adapters)


def _difference(replacement: Replacement, read: Fetch) -> Tensor:
    """Return V − W [rows, cols] of a weight that an adapter replaces."""
    difference = torch.empty(prod(replacement.target.shape))
    for first, count in runs(replacement, 1):
        difference[first : first + count] = values(replacement.target.weight, first, count, read) - values(
            replacement.before, first, count, read
        )
    return difference.view(replacement.target.matrix)


def _whole(target: OutputTensor, tensors: PatchTensors) -> Tensor:
    """Return the change of a weight [rows, cols]."""
    delta = torch.zeros(target.matrix)
    for piece, rows, merged in merged_blocks(target, tensors):
        delta[piece.first : piece.last] = (merged - rows)[0]
    return delta


def _factors(target: OutputTensor, tensors: PatchTensors) -> ModuleChange | None:
    """Return the change of a whole weight as two factors; None where it is not such a product."""
    (rows, cols), at = target.matrix, place("cpu", "F32")
    whole = all((u.piece.start, u.piece.stop) == (0, rows) for u in target.uses)
    if target.combines or not whole or not all(map(factored, target.uses)):
        return None
    left, right = [], []
    for s in tensors.stacks([block(target, 0, rows)], at, DeviceStream(at)):
        if s.taken is not None or s.view is not None or s.algorithm.low_rank is None:
            return None
        first, other = s.algorithm.low_rank.factors(torch.zeros(()).expand(1, rows, cols), s.tensors)
        left.append(first[0] * s.strength[0])
        right.append(other[0])
    delta = ModuleChange(torch.cat(left, 1), torch.cat(right))
    return delta if sum(part.shape[1] for part in left) < min(rows, cols) else None


def merged_blocks(target: OutputTensor, tensors: PatchTensors) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """Yield each changed block of a weight with its values before and after the merge, both [1, rows, cols]."""
    wide = target.combines or any(ALGORITHMS[u.patch.algorithm].decomposes for u in target.uses)
    at = place("cpu", "F64" if wide else "F32")
    lane = DeviceStream(at)
    base = weight_values(target.weight, tensors.fetch).reshape(target.matrix)
    for piece in (b for b in cut_into_blocks(target) if b.slices and base.numel()):
        rows = stage([base[piece.first : piece.last]], at)
        try:
            merged = new_weights([piece], rows.clone(), tensors.stacks([piece], at, lane))
        except DoesNotFit as e:
            raise misfit(target.name, e) from e
        yield piece, rows, merged
