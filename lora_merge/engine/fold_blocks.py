"""Folds the changed blocks of one window: blocks of equal kind are stacked into one batched call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from threading import local
from typing import Any, Final

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, DoesNotFit, dora
from ..errors import FULL, ResourceError, ShapeMismatch, device_full
from ..matching.patch import Patch
from ..models.weights import Weight, WeightView
from ..planning.plan import OutputTensor
from .blocks import BLOCK_ELEMENTS, Block, BlockPart, blocks
from .devices import precise, release
from .fold import RULES, StackedPatch
from .overflow import settle, settled, sum_too_large
from .parallelism import DeviceMemory, stack_size
from .placement import DeviceStream, Placement, finite, host, land, move, numbers, odd, stage, stage_indices, whole
from .rebuilding import Kin, from_base
from .tensors import DeviceCache, Fetch, decoded, encoded, weight_values
from .torch_state import exact_products

KEPT_WHOLE: Final = BLOCK_ELEMENTS // 2
KEPT_PART: Final = BLOCK_ELEMENTS // 4
"""Numbers of one factor, or of the part that a block needs, that may be kept while a window is made."""

HOST: Final = Placement(torch.device("cpu"), torch.float64)


@dataclass(frozen=True)
class Item:
    """A block with its stored base values and the place for its result, both on the host."""

    block: Block
    base: Tensor  # [rows, cols], or as many numbers as are stored of a padded weight's rows
    into: Tensor  # [rows, cols], output dtype


@dataclass(frozen=True)
class BlockMerger:
    """Folds blocks at one placement, or at several. `fetch` gives stored tensors, of the adapters and of `base`."""

    at: tuple[Placement, ...]
    fetch: Fetch
    base: Mapping[str, Weight]
    pool: ThreadPoolExecutor | None = None  # for blocks side by side; `fetch` is then called from its threads
    max_vram: int | None = None
    kept: DeviceCache | None = None  # whoever gave it empties it
    notes: list[str] = field(default_factory=list)  # what the user should know
    saturate: bool = False  # whether numbers that the output's dtype has no room for are cut
    fallback_device: Placement | None = None  # for what does not fit, even alone
    room: DeviceMemory = field(default_factory=DeviceMemory)
    kin: Kin = field(default_factory=dict)  # what is rebuilt for all layers of a kind
    _own: local = field(default_factory=local)  # each thread's lane
    _lanes: Iterator[int] = field(default_factory=count)

    def fold(self, items: Sequence[Item]) -> Counter[str]:
        """Fold every item in place, equal kinds together. No autograd; nothing but `into` is written.

        Returns tensor → how many of its numbers were cut; TooLarge where they may not be.
        """
        return settled(list(self.begin(items)))

    def begin(self, items: Sequence[Item]) -> Iterator[Future[Counter[str]]]:
        """As `fold`, side by side where there is a pool: what is yielded goes to `settled`."""
        for group in list(_groups(items, self._most)):
            if self.pool is None:
                done: Future[Counter[str]] = Future()
                done.set_result(self._fold(group))
                yield done
            else:
                yield self.pool.submit(self._fold, group)

    def _most(self, block: Block) -> int:
        """How many of these may go into one call."""
        return stack_size(_precise(self.at[0], block), self.max_vram, block.last - block.first, block.cols)

    def _fold(self, group: Sequence[Item]) -> Counter[str]:
        """Fold blocks of one kind in one call, or in as many as the device's memory needs."""
        name, numbers = group[0].block.target.name, sum(i.into.numel() for i in group)
        if len(group) == 1 or numbers <= self.room.most:
            with self.room.shared():
                found = self._attempt(group)
            if isinstance(found, str) and len(group) == 1:
                with self.room.alone():
                    self._relieve()  # of what other lanes have left
                    found = self._attempt(group)
                note = "a block did not fit beside others' work"
                if isinstance(found, str) and self.fallback_device is not None:
                    found = self._attempt(group, DeviceStream(self.fallback_device))
                    note = "a block was folded on the CPU"
                if isinstance(found, str):
                    raise ResourceError("the device is out of memory", f"{name}: {found}", FULL)
                self._note(note)
            if not isinstance(found, str):
                return found
            self.room.most = min(self.room.most, numbers // 2)
            self._note("smaller batches were used")
        half = len(group) // 2
        return self._fold(group[:half]) + self._fold(group[half:])

    def _attempt(self, group: Sequence[Item], lane: DeviceStream | None = None) -> Counter[str] | str:
        """Fold them in one call: tensor → numbers cut; what the device says where it is short of memory."""
        try:
            lane = lane or self._lane()
            with torch.no_grad(), exact_products(), lane.turn():
                merged = self._fold_at(group, _precise(lane.at, group[0].block), lane)
        except DoesNotFit as e:  # what only values tell: indices that point outside, …
            raise ShapeMismatch("adapter tensors do not fit the base", f"{group[0].block.target.name}: {e}",
                                "merge into the checkpoint that the adapter was trained on") from e  # fmt: skip
        except RuntimeError as e:
            short = device_full(e)
            if not short:
                raise
        else:
            return Counter() if merged is None else self._cut(group, merged)
        self._relieve()  # outside `except`: while an exception is handled, its frames hold the memory that is missing
        return short

    def _relieve(self) -> None:
        """Give back what is not in use at the moment."""
        if self.kept is not None:
            self.kept.clear()
        release(self.at)

    def _fold_at(self, group: Sequence[Item], at: Placement, lane: DeviceStream) -> Tensor | None:
        """Fold them and write the results; gives these back, as computed, if some of them need a closer look."""
        blocks = [i.block for i in group]
        stacks = self._stacks(blocks, at)
        base = self._base(group, at, lane)
        merged = RULES[blocks[0].target.method.name](base, stacks)
        if merged is base and _in_place(group, at):
            return merged if odd(merged) else None
        return None if land(self._encoded(group, merged), [i.into for i in group], lane) else merged

    def _encoded(self, group: Sequence[Item], merged: Tensor) -> Tensor:
        """Merged blocks as they are stored, but for the rounding."""
        target = group[0].block.target
        if target.packed is None:
            return merged
        rows = zip(merged.unbind(), group, strict=True)
        return torch.stack([encoded(values, target.packing, i.block.first, self.fetch) for values, i in rows])

    def _cut(self, group: Sequence[Item], merged: Tensor) -> Counter[str]:
        """Tensor → numbers cut; TooLarge for those of a finite base that became none, or that may not be cut."""
        found: Counter[str] = Counter()
        for item, values in zip(group, merged.unbind(), strict=True):
            name = item.block.target.name
            if self._overflown(item, values):
                raise sum_too_large(name, values.dtype)
            numbers = encoded(values, item.block.target.packing, item.block.first, self.fetch)
            found[name] += settle(name, host(numbers), item.into, saturate=self.saturate)
        return +found

    def _overflown(self, item: Item, values: Tensor) -> bool:
        """Whether a sum is NaN or infinite where the base is a number. A formula that reads other numbers of the base
        may make that of one NaN among them: the proof tells whether it did so rightly."""
        sound = finite(values)
        if sound.all() or not all(finite(weight_values(self.base[key], self.fetch)).all() for key in item.block.reads):
            return False
        known = finite(self._base([replace(item, base=self._stored(item))], HOST, DeviceStream(HOST))[0])
        return bool((known & ~sound).any())

    def _stored(self, item: Item) -> Tensor:
        """The base values of an item, read again where its result was written over them."""
        if item.base is not item.into:
            return item.base
        (first, count), weight = item.block.stored, item.block.target.weight
        size, offset = weight.packing.encoding.nbytes, weight.stored.offset
        shape = tuple(item.into.shape)
        return self.fetch(replace(weight.stored, shape=shape, offset=offset + size(first), nbytes=size(count)))

    def _values(self, item: Item) -> Tensor:
        """The base values of an item."""
        return decoded(item.base, item.block.target.weight, item.block.first, self.fetch)

    def _lane(self) -> DeviceStream:
        """The calling thread's lane; threads share the placements out among them."""
        if not hasattr(self._own, "lane"):
            number, which = divmod(next(self._lanes), len(self.at))
            self._own.lane = DeviceStream(self.at[which], number)
        lane: DeviceStream = self._own.lane
        return lane

    def leave(self) -> None:
        """Give up the calling thread's lane, with its memory."""
        self._own.__dict__.clear()

    def _note(self, text: str) -> None:
        text = f"{','.join(str(p.device) for p in self.at)} was short of memory: {text}"
        if text not in self.notes:
            self.notes.append(text)

    def _base(self, group: Sequence[Item], at: Placement, lane: DeviceStream) -> Tensor:
        """[n, rows, cols] in the compute dtype, to be overwritten; padded bases stand in the low corner of zeros."""
        block = group[0].block
        if not block.target.weight.padded:
            return group[0].base.unsqueeze(0) if _in_place(group, at) else stage([*map(self._values, group)], at, lane)
        out = torch.zeros((len(group), block.last - block.first, block.cols), dtype=at.dtype, device=at.device)
        for rows, item in zip(out, group, strict=True):
            if item.base.numel():
                weight = item.block.target.weight
                corner = stage([item.base.reshape(-1, *weight.stored.shape[1:])], at)[0]
                rows.view(-1, *weight.shape[1:])[tuple(slice(0, d) for d in corner.shape)] = corner
        return out

    def _stacks(self, blocks: Sequence[Block], at: Placement) -> list[StackedPatch]:
        """What is done to blocks of one kind, in order."""
        return [self.stack([b.slices[k] for b in blocks], at) for k in range(len(blocks[0].slices))]

    def stack(self, slices: Sequence[BlockPart], at: Placement) -> StackedPatch:
        """The same slice of n blocks as one StackedPatch."""
        first = slices[0]
        patch = first.use.patch
        row = ALGORITHMS[patch.algorithm]
        to = at if row.prepare is None else precise(at)
        fields: dict[str, Any] = dict(patch.settings)
        for s in slices:
            self._check(s.use.patch)
        for slot in patch.shapes:
            parts = [self._factor(s, slot, to) for s in slices]
            fields[slot] = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
        for name in row.scalars:
            fields[name] = self._numbers([s.use.patch.numbers.get(name, 1.0) for s in slices], to)
        derived = row.derived(patch.shapes, patch.view.shape, dict(patch.settings))
        made = [{**derived, **from_base(s.use.patch, self.base, self.fetch, self.kin)} for s in slices]
        for slot in made[0]:
            fields[slot] = (stage_indices if slot in row.integer_slots else stage)([one[slot] for one in made], to)
        tensors = row.prepared(row.tensors(**fields))
        return StackedPatch(
            row,
            tensors if to == at else move(tensors, at),
            self._numbers([s.use.strength for s in slices], at),
            slice(first.low, first.high),
            patch.adapter,
            first.use.piece.transposed,
            torch.stack([self._view(s, s.use.patch.view, at) for s in slices]) if first.needs_view else None,
            slice(*first.taken) if first.taken is not None else None,
            (first.formed[1] - first.formed[0], patch.view.matrix[1]) if first.taken is not None else None,
            self._magnitude(slices, at),
        )

    def _check(self, patch: Patch) -> None:
        """DoesNotFit if integers point to where the weight has nothing; a formula would read or write there."""
        row = ALGORITHMS[patch.algorithm]
        stored = {slot: self.fetch(patch.module.slots[slot]) for slot in row.integer_slots & patch.shapes.keys()}
        integers = {slot: whole(tensor.reshape(patch.shapes[slot])) for slot, tensor in stored.items()}
        row.check_integers(integers, patch.shapes, patch.view.shape)

    def _factor(self, s: BlockPart, slot: str, at: Placement) -> Tensor:
        """One slot of one use as the formula wants it, at the placement, cut to the slice's rows where it has rows."""
        patch = s.use.patch
        if slot in patch.beside:
            return self._view(s, patch.beside[slot], at).reshape(patch.shapes[slot])
        info = patch.module.slots[slot]
        row, shape = ALGORITHMS[patch.algorithm], patch.shapes[slot]
        cut = None
        if patch.grain < patch.view.matrix[0] and row.sliced is not None and slot in row.sliced:
            axis = row.sliced[slot]
            cut = (axis, *s.entries(shape[axis]))
        put = stage_indices if slot in row.integer_slots else stage

        def staged(cut: tuple[int, int, int] | None) -> Tensor:
            tensor = self.fetch(info).reshape(shape)
            return put([tensor if cut is None else tensor.narrow(*cut)], at).squeeze(0)

        key = (info.file, info.name, shape, at)
        if prod(shape) <= KEPT_WHOLE:  # one for all blocks
            whole = self._keep(key, lambda: staged(None))
            return whole if cut is None else whole.narrow(*cut).contiguous()
        count = prod(shape) if cut is None else prod(shape) // shape[cut[0]] * cut[2]
        return self._keep((*key, cut), lambda: staged(cut)) if count <= KEPT_PART else staged(cut)

    def _numbers(self, values: Sequence[float], at: Placement) -> Tensor:
        return self._keep((tuple(values), at), lambda: numbers(values, at))

    def _keep(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """What was made for this key before, or is made now."""
        if self.kept is None:
            return make()
        lane = self._lane()
        return lane.hold(self.kept.get(key, make, lane.settle))

    def _magnitude(self, slices: Sequence[BlockPart], at: Placement) -> tuple[dora.Axis, Tensor] | None:
        if slices[0].use.patch.magnitude is None:
            return None
        axis, shape = slices[0].use.patch.magnitude
        tensors = []
        for s in slices:
            tensor = self.fetch(s.use.patch.module.shared["magnitude"]).reshape(shape)
            tensors.append(tensor if axis == "in" else tensor.narrow(0, s.formed[0], s.formed[1] - s.formed[0]))
        return axis, stage(tensors, at)

    def _view(self, s: BlockPart, view: WeightView, at: Placement) -> Tensor:
        """[out, cols] a whole weight as the slice's formula reads it, gathered from its pieces: the base's, with what
        the adapters before have made of it where adapters act in turn."""
        parts = []
        for piece in view.pieces:
            weight, target = self.base[piece.key], s.target
            rows = weight_values(weight, self.fetch).reshape(-1, piece.cols)
            before = tuple(u for u in target.others.get(piece.key, ()) if u.patch.adapter < s.use.patch.adapter)
            if before:
                rows = self._changed(rows, target._replace(name=piece.key, weight=weight, uses=before), at)
            rows = rows[piece.start : piece.stop]
            parts.append(stage([rows.t() if piece.transposed else rows], at)[0])
        return torch.cat(parts)

    def _changed(self, values: Tensor, target: OutputTensor, at: Placement) -> Tensor:
        """[rows, cols] a whole tensor of the base with all uses of the target made of it, at the placement."""
        found = stage([values.reshape(target.matrix)], at)[0].clone()
        for block in blocks(target):
            if block.slices:
                rows = found[block.first : block.last]
                rows.copy_(RULES[target.method.name](rows.unsqueeze(0), self._stacks([block], at))[0])
        return found.reshape(values.shape)


def _precise(at: Placement, block: Block) -> Placement:
    """The placement, in fp64 where a formula factorises or inverts."""
    rows = [ALGORITHMS[s.use.patch.algorithm] for s in block.slices]
    return precise(at) if any(r.decomposes for r in rows) else at


def _in_place(group: Sequence[Item], at: Placement) -> bool:
    """Whether the base values lie where the result goes, in the compute dtype: no copy is needed in or out."""
    one = group[0]
    return len(group) == 1 and one.base is one.into and (at.device.type, at.dtype) == ("cpu", one.into.dtype)


def _groups(items: Sequence[Item], most: Callable[[Block], int]) -> Iterator[list[Item]]:
    kinds: dict[Any, list[Item]] = {}
    for item in items:
        kinds.setdefault(item.block.kind, []).append(item)
    for same in kinds.values():
        n = most(same[0].block)
        for first in range(0, len(same), n):
            yield same[first : first + n]
