"""Makes the input tensors of formulas.

They are the adapters' tensors, cut to a block's rows and kept while several blocks need them, weights of the base that
formulas read, and tensors that an adapter's file lacks. PEFT computes these from the base when it loads the adapter.
Each algorithm has its own function for that (`Algorithm.rebuild`); `from_base` calls it with the base's values in
PEFT's precision, on the CPU, whatever the device of the merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, LoadedModule, dora
from ..dtypes import Memory, Shape, StoredTensor
from ..matching.layer_order import basis_weights
from ..matching.patch import Patch
from ..models.weights import RowSlice, Weight, WeightView
from ..planning.plan import OutputTensor
from .block_values import base_values, stored_base
from .devices import load_decompositions, precise
from .fold import FOLD_RULES, StackedPatch
from .gpu_adapters import AdaptersOnDevice
from .row_blocks import BLOCK_ELEMENTS, WIDENED_PER_BLOCK, Block, BlockPart, blocks
from .tasks import BlockTask, FoldTask
from .tensor_moves import (
    HOST,
    TORCH_DTYPES,
    DeviceStream,
    Placement,
    as_scalars,
    finite,
    host,
    move,
    one_number,
    stage,
    stage_indices,
    whole,
)
from .tensors import DeviceCache, Fetch, gathered, weight_values

CACHED_WHOLE: Final = WIDENED_PER_BLOCK
CACHED_PART: Final = BLOCK_ELEMENTS // 4
"""The most values of a tensor, and of the part of it that a block needs, that are kept while a window is merged."""

Task = TypeVar("Task", bound=BlockTask)

Stack: TypeAlias = Callable[[list[Tensor]], Tensor]
"""Function that returns n tensors of equal shape as one [n, …]."""

SharedTensors: TypeAlias = MutableMapping[tuple[WeightView, ...], Mapping[str, Tensor]]
"""The weights of all layers of one kind → the tensors that these layers share, computed from the weights."""

AS_LOADED: Final = Placement(torch.device("cpu"), torch.float32)
WIDE: Final = Placement(torch.device("cpu"), torch.float64)


@dataclass(frozen=True)
class PatchTensors:
    """Makes the input tensors of formulas. `fetch` returns stored tensors of the adapters and of `weights`."""

    fetch: Fetch
    weights: Mapping[str, Weight]
    cache: DeviceCache = field(default_factory=DeviceCache)
    shared: SharedTensors = field(default_factory=dict)
    adapters_on_device: AdaptersOnDevice | None = None  # tensors that are on the device already

    def whole(self, key: str) -> Tensor:
        """Return all values of a weight of the base."""
        return weight_values(self.weights[key], self.fetch)

    def untouched(self, task: Task) -> Task:
        """Return a task with base values of its own, read again if the result may have overwritten them."""
        target = task.block.target
        if not isinstance(task, FoldTask) or task.base is not task.into or target.packed is not None:
            return task
        return replace(task, base=stored_base(task.block, self.fetch))

    def overflown(self, task: BlockTask, values: Tensor) -> bool:
        """Return whether a sum of a merged block is NaN or infinite where the base is finite.

        False if a formula reads a base tensor that holds a NaN or infinite number, as sums may then rightly be NaN; the
        proof checks those.
        """
        finite_sums = finite(values)
        if finite_sums.all() or not all(finite(self.whole(key)).all() for key in task.block.reads):
            return False
        finite_base = finite(base_values([self.untouched(task)], HOST, DeviceStream(HOST), self.fetch)[0])
        return bool((finite_base & ~finite_sums).any())

    def stacks(
        self, blocks: Sequence[Block], at: Placement, lane: DeviceStream, stacked: Stack = torch.stack
    ) -> list[StackedPatch]:
        """Return the patches of blocks of one kind, stacked, in the order of the adapters."""
        return [self.stack([b.slices[k] for b in blocks], at, lane, stacked) for k in range(len(blocks[0].slices))]

    def stack(
        self, slices: Sequence[BlockPart], at: Placement, lane: DeviceStream, stacked: Stack = torch.stack
    ) -> StackedPatch:
        """Return the same slice of n blocks as one StackedPatch. `stacked` may leave the values for later."""
        first = slices[0]
        patch = first.use.patch
        row = ALGORITHMS[patch.algorithm]
        to = at if row.prepare is None else precise(at)
        if row.decomposes:
            load_decompositions(at.device)  # here, where the error of a full device is handled
        # The adapter's tensors.
        fields: dict[str, Any] = dict(patch.settings)
        for s in slices:
            self._check(s.use.patch)
        for slot in patch.shapes:
            parts = [self._factor(s, slot, to, lane) for s in slices]
            later = stacked if row.prepare is None else torch.stack
            fields[slot] = parts[0].unsqueeze(0) if len(parts) == 1 else later(parts)
        # Scalars of the formula, such as its scale; equal ones stay one number if `accumulate` takes that.
        added = first.taken is None and patch.magnitude is None and not first.target.combines
        alike = row.takes_one_number and added
        for name in row.scalars:
            values = [s.use.patch.scalars.get(name, 1.0) for s in slices]
            fields[name] = self._scalars(values, to, lane, stacked if row.prepare is None else torch.stack, alike=alike)
        # Tensors that the file lacks: from shapes and settings, or computed from the base as PEFT does.
        derived = row.derived(patch.shapes, patch.view.shape, dict(patch.settings))
        computed = [{**derived, **from_base(s.use.patch, self.weights, self.fetch, self.shared)} for s in slices]
        for slot in computed[0]:
            fields[slot] = (stage_indices if slot in row.integer_slots else stage)([m[slot] for m in computed], to)
        tensors = row.prepared(row.tensors(**fields))
        return StackedPatch(
            row,
            tensors if to == at else move(tensors, at),
            self._scalars([s.use.strength for s in slices], at, lane, stacked, alike=alike),
            slice(first.low, first.high),
            patch.adapter,
            first.use.piece.transposed,
            torch.stack([self._view(s, s.use.patch.view, at, lane) for s in slices]) if first.needs_view else None,
            slice(*first.taken) if first.taken is not None else None,
            (first.formed[1] - first.formed[0], patch.view.matrix[1]) if first.taken is not None else None,
            self._magnitude(slices, at),
            first.use.piece.across,
        )

    def _check(self, patch: Patch) -> None:
        """Raise DoesNotFit if stored indices are outside the weight: a formula would read or write there."""
        row = ALGORITHMS[patch.algorithm]
        stored = {slot: self.fetch(patch.module.slots[slot]) for slot in row.integer_slots & patch.shapes.keys()}
        integers = {slot: whole(tensor.reshape(patch.shapes[slot])) for slot, tensor in stored.items()}
        row.checks.check_integers(integers, patch.shapes, patch.view.shape)

    def _factor(self, s: BlockPart, slot: str, at: Placement, lane: DeviceStream) -> Tensor:
        """Return the tensor of one slot at the placement, cut to the slice's rows if it has an axis of rows."""
        patch = s.use.patch
        if slot in patch.base_slots:
            return self._view(s, patch.base_slots[slot], at, lane).reshape(patch.shapes[slot])
        info = patch.module.slots[slot]
        # The block's entries, where the tensor has an axis of rows.
        row, shape = ALGORITHMS[patch.algorithm], patch.shapes[slot]
        cut = None
        if patch.row_group < patch.view.matrix[0] and row.row_axes is not None and slot in row.row_axes:
            axis = row.row_axes[slot]
            cut = (axis, *s.entries(shape[axis]))
        put = stage_indices if slot in row.integer_slots else stage

        def staged(cut: tuple[int, int, int] | None) -> Tensor:
            tensor = self._rows(info, shape, cut) if cut is not None else self.fetch(info).reshape(shape)
            return put([tensor], at).squeeze(0)

        # From the adapters that are on the device, from the cache, or from the file, in this order.
        on_device = self._uploaded(info, at, lane)
        if on_device is not None:
            whole = on_device.view(shape)
            return whole if cut is None else whole.narrow(*cut).contiguous()
        key = (info.file, info.name, shape, at)
        if prod(shape) <= CACHED_WHOLE:  # kept once for all blocks
            whole = self._keep(key, lane, lambda: staged(None))
            return whole if cut is None else whole.narrow(*cut).contiguous()
        count = prod(shape) if cut is None else prod(shape) // shape[cut[0]] * cut[2]
        return self._keep((*key, cut), lane, lambda: staged(cut)) if count <= CACHED_PART else staged(cut)

    def _rows(self, info: StoredTensor, shape: Shape, cut: tuple[int, int, int]) -> Tensor:
        """Return entries of a large tensor along one axis, `cut`; of the first one, no others are read from a file."""
        axis, first, count = cut
        if axis or count == shape[0] or isinstance(info.source, Memory):
            return self.fetch(info).reshape(shape).narrow(axis, first, count)
        row = info.nbytes // shape[0]
        part = replace(info, shape=(count, *shape[1:]), offset=info.offset + first * row, nbytes=count * row)
        return self.fetch(part)

    def _uploaded(self, tensor: StoredTensor | float, at: Placement, lane: DeviceStream) -> Tensor | None:
        """Return what is at the placement already, see `AdaptersOnDevice.get`."""
        if self.adapters_on_device is None or at != lane.at or at.device.type == "cpu":
            return None
        return self.adapters_on_device.get(tensor, lane)

    def _scalars(
        self, values: Sequence[float], at: Placement, lane: DeviceStream, stacked: Stack, *, alike: bool
    ) -> Tensor:
        """Return the values as [n, 1, 1]; `alike`: or as one number without axes, if they are equal."""
        if alike and at.device.type != "cpu" and len(set(values)) == 1:
            return one_number(values[0], at)
        on_device = [number for value in values if (number := self._uploaded(value, at, lane)) is not None]
        if len(on_device) == len(values):
            return stacked(on_device) if len(on_device) > 1 else on_device[0].unsqueeze(0)
        return self._keep((tuple(values), at), lane, lambda: as_scalars(values, at))

    def _keep(self, key: tuple[Any, ...], lane: DeviceStream, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor kept under this key, or make it."""
        return lane.hold(self.cache.get(key, make, lane.settle))

    def _magnitude(self, slices: Sequence[BlockPart], at: Placement) -> tuple[dora.Axis, Tensor] | None:
        if slices[0].use.patch.magnitude is None:
            return None
        axis, shape = slices[0].use.patch.magnitude
        tensors = []
        for s in slices:
            tensor = self.fetch(s.use.patch.module.shared["magnitude"]).reshape(shape)
            tensors.append(tensor if axis == "in" else tensor.narrow(0, s.formed[0], s.formed[1] - s.formed[0]))
        return axis, stage(tensors, at)

    def _view(self, s: BlockPart, view: WeightView, at: Placement, lane: DeviceStream) -> Tensor:
        """Return [out, cols] the whole weight that a formula reads, gathered from its pieces. With `--method compose`
        it is the base changed by the adapters before."""
        target = s.target

        def whole(piece: RowSlice) -> Tensor:
            rows, weight = self.whole(piece.key).reshape(-1, piece.cols), self.weights[piece.key]
            every = target.combination.uses.get(piece.key, ())
            before = tuple(u for u in every if u.patch.adapter < s.use.patch.adapter)
            earlier = target._replace(name=piece.key, weight=weight, uses=before)
            return self._changed(rows, earlier, at, lane) if before else rows

        return gathered(view, whole, at)

    def _changed(self, values: Tensor, target: OutputTensor, at: Placement, lane: DeviceStream) -> Tensor:
        """Return [rows, cols] a whole tensor of the base, changed by all uses of the target, at the placement."""
        changed = stage([values.reshape(target.matrix)], at)[0].clone()
        for block in blocks(target):
            if block.slices:
                rows = changed[block.first : block.last]
                block_values = rows.unsqueeze(0).clone()  # as where the block is merged
                rows.copy_(FOLD_RULES[target.combination.method.name](block_values, self.stacks([block], at, lane))[0])
        return changed.reshape(values.shape)


def from_base(
    patch: Patch, base: Mapping[str, Weight], fetch: Callable[[StoredTensor], Tensor], shared: SharedTensors
) -> Mapping[str, Tensor]:
    """Return the slots that the patch's file lacks as unstacked CPU tensors, computed from the unmerged base, as PEFT
    does for several adapters too. Tensors that several layers share are computed once and put into `shared`."""

    def read(slot: str) -> Tensor:
        view = patch.view if not slot else patch.base_slots.get(slot)
        if view is None:
            return stage([fetch(patch.module.slots[slot]).reshape(patch.shapes[slot])], AS_LOADED)[0]
        wide = any(base[piece.key].stored.dtype == "F64" for piece in view.row_slices)
        at = WIDE if wide else AS_LOADED
        return gathered(view, lambda piece: weight_values(base[piece.key], fetch).reshape(-1, piece.cols), at)

    layers = basis_weights(patch)
    if layers and layers in shared:
        return shared[layers]
    loaded = LoadedModule(read, cast, patch.shapes, patch.view.shape, dict(patch.settings))
    tensors = ALGORITHMS[patch.algorithm].rebuilt(loaded)
    if layers:
        shared[layers] = tensors
    return tensors


def cast(values: Tensor, dtype: str) -> Tensor:
    """Return the values as this dtype of files holds them, in fp64 for F64 and else in fp32."""
    return host(host(values, TORCH_DTYPES[dtype]), torch.float64 if dtype == "F64" else torch.float32)
