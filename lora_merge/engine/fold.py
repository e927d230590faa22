"""Computes merged weights, n blocks of equal shape at once, by the rules of `--method`.

The default is W' = W + Σ sᵢ ΔWᵢ, with every ΔWᵢ computed from the unchanged W. Observers record what happens on the
way: the sample of a report, terms that cancel. They compute no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import torch

from ..algorithms import Algorithm, dora
from ..grouping import by_key
from .combination import combined, combined_rows
from .row_matrix import RowMatrix
from .tensor_moves import strided

if TYPE_CHECKING:
    from torch import Tensor

    from ..merge_methods import MethodParameters
    from .row_blocks import Block

SampleOf: TypeAlias = Callable[[range], "Tensor"]
"""Function that returns rows [n, k, cols] of a change of n weights."""


@dataclass(frozen=True)
class StackedPatch:
    """One formula for n weights: its tensors on the compute device, and the rows that it changes."""

    algorithm: Algorithm
    tensors: Any  # the algorithm's dataclass, stacked and prepared
    strength: Tensor  # [n, 1, 1]
    rows: slice  # rows of the block that the formula changes
    adapter: int = 0  # number of its adapter; stacks are in the order of their adapters
    transposed: bool = False  # whether the formula has these rows as columns
    view: Tensor | None = None  # [n, out, cols] the base weight that the formula reads, where that is more than `rows`
    taken: slice | None = None  # rows of the computed ΔW that are in this block; None: all
    whole: tuple[int, int] | None = None  # (out, cols) of ΔW, where that is more than `rows`
    magnitude: tuple[dora.Axis, Tensor] | None = None  # DoRA: axis, [n, out, 1] or [n, 1, in]
    across: slice = field(default_factory=lambda: slice(None))  # columns of these rows, for a transposed formula

    @property
    def reads_base(self) -> bool:
        """Whether ΔW depends on W."""
        return self.algorithm.reads_base or self.magnitude is not None

    def in_units(self, units: Tensor) -> StackedPatch:
        """Return the formula, which does not read the base, for weights in units [n, 1, 1]."""
        return replace(self, strength=self.strength / units)

    def part(self, rows: slice) -> StackedPatch | None:
        """Return the formula for some rows of a block that is changed by rows, which become a block; None if it does
        not change them."""
        low, high = max(self.rows.start, rows.start), min(self.rows.stop, rows.stop)
        if low >= high:
            return None
        cut = {}
        for slot, axis in (self.algorithm.row_axes or {}).items():
            if (tensor := getattr(self.tensors, slot)) is not None:
                cut[slot] = _cut(tensor, axis if axis < 0 else axis + 1, low - self.rows.start, high - low)
        magnitude = self.magnitude
        if magnitude is not None:
            magnitude = magnitude[0], _cut(magnitude[1], 1, low - self.rows.start, high - low)
        return replace(self, tensors=self.tensors._replace(**cut), rows=slice(low - rows.start, high - rows.start),
                       magnitude=magnitude)  # fmt: skip

    def region(self, block: Tensor) -> Tensor:
        """Return the part of a block [n, rows, cols] that the formula changes, transposed if the formula is."""
        part = block.narrow(1, self.rows.start, self.rows.stop - self.rows.start)
        return part[:, :, self.across].transpose(1, 2) if self.transposed else part


def _cut(tensor: Tensor, axis: int, first: int, count: int) -> Tensor:
    return tensor.narrow(axis, first, count).contiguous()


class FoldObserver(Protocol):
    """An object that records values of blocks while they are folded. It is made with their base values."""

    def note_sum(self, adapter: int, merged: Tensor) -> None:
        """Record blocks to which all changes up to those of an adapter are added; of several adapters alone."""

    def note_change(self, adapter: int, change: SampleOf, strengths: Sequence[float]) -> None:
        """Record a change that becomes one change with others."""

    def note_merged(self, merged: Tensor) -> None:
        """Record the merged blocks [n, rows, cols]."""


def fold(base: Tensor, stacks: Sequence[StackedPatch], *observers: FoldObserver) -> Tensor:
    """Return W + Σ sᵢ ΔWᵢ [n, rows, cols]. `base` is overwritten unless a formula after the first one reads it; ΔW of
    the first one is computed before anything is added."""
    merged = base.clone() if any(s.reads_base and s.view is None for s in stacks[1:]) else base
    for number, s in enumerate(stacks):
        _add(s, s.region(merged), s.strength, base, read=not (s.algorithm.reads_base and number))
        if observers and s.adapter not in {later.adapter for later in stacks[number + 1 :]}:
            for observer in observers:
                observer.note_sum(s.adapter, merged)
    return merged


def _add(s: StackedPatch, target: Tensor, strength: Tensor, base: Tensor, *, read: bool) -> None:
    """Add strength · ΔW to the rows that a stack changes. `read`: whether these rows are still the base's, or the
    formula does not read them."""
    plain = s.magnitude is None and s.view is None and s.taken is None
    if plain and s.algorithm.accumulate is not None and read:
        s.algorithm.accumulate(target, s.tensors, strength)
    else:
        target.addcmul_(strength, change(s, base))


def in_turn(base: Tensor, stacks: Sequence[StackedPatch], *observers: FoldObserver) -> Tensor:
    """Return Wₙ [n, rows, cols] of Wᵢ = Wᵢ₋₁ + sᵢ ΔWᵢ, adapter by adapter, with every ΔWᵢ computed from Wᵢ₋₁. `base` is
    overwritten as by `fold`."""
    for _, of_adapter in groupby(stacks, key=lambda s: s.adapter):
        base = fold(base, tuple(of_adapter), *observers)
    return base


def new_weights(
    blocks: Sequence[Block], base: Tensor, stacks: Sequence[StackedPatch], *observers: FoldObserver
) -> Tensor:
    """Return the merged weights [n, rows, cols] of blocks of one kind by their method. `base` is overwritten as by
    `fold`."""
    first = blocks[0]
    if first.target.combines:
        merged = _combined(blocks, base, stacks, observers)
    else:
        # What each adapter changes is asked for only if there are several: else it is the whole change.
        of_each = observers if first.several else ()
        merged = FOLD_RULES[first.target.combination.method.name](base, stacks, *of_each)
    for observer in observers:
        observer.note_merged(merged)
    return merged


def _combined(
    blocks: Sequence[Block], base: Tensor, stacks: Sequence[StackedPatch], observers: Sequence[FoldObserver]
) -> Tensor:
    """Return W + the one change [n, rows, cols] that the changes of all adapters become (ties, dare …), in `base`."""
    method = blocks[0].target.combination.method.name
    # The change of each adapter: computed whole, or some rows at a time for a block that is large.
    patches = by_key((s.adapter, k) for k, s in enumerate(stacks))
    by_adapter = [[stacks[k] for k in numbers] for numbers in patches.values()]
    if blocks[0].by_rows and base.device.type == "cpu":
        (block,) = blocks
        row_changes = [_rows_of_adapter(base, of_adapter) for of_adapter in by_adapter]
        _note_changes(observers, blocks, patches, [partial(_sampled, c) for c in row_changes])
        arguments = _combination_arguments(block, patches)
        for rows, part in combined_rows(method, row_changes, *arguments).blocks():
            base[0, rows] += part
        return base
    changes = [_of_adapter(base, of_adapter, of_adapter[0].strength) for of_adapter in by_adapter]
    _note_changes(observers, blocks, patches, [partial(strided, c) for c in changes])
    # Block by block: each has strengths and seeds of its own.
    for n, block in enumerate(blocks):
        base[n] += combined(method, [c[n] for c in changes], *_combination_arguments(block, patches),
                            vector=len(block.target.shape) < 2)  # fmt: skip
    return base


def _combination_arguments(
    block: Block, patches: Mapping[int, Sequence[int]]
) -> tuple[list[float], MethodParameters, list[str]]:
    """Return the strengths, the numbers and the seeds with which the changes of a block become one. `patches`: adapter
    → the numbers of its patches."""
    combination = block.target.combination
    uses = [[block.slices[k].use for k in numbers] for numbers in patches.values()]
    seeds = [combination.seed(adapter, of_adapter) for adapter, of_adapter in zip(patches, uses, strict=True)]
    return [of_adapter[0].strength for of_adapter in uses], combination.parameters, seeds


def _note_changes(
    observers: Sequence[FoldObserver],
    blocks: Sequence[Block],
    patches: Mapping[int, Sequence[int]],
    samples: Sequence[SampleOf],
) -> None:
    """Let the observers record the change of each adapter."""
    for observer in observers:
        for (adapter, numbers), sample in zip(patches.items(), samples, strict=True):
            observer.note_change(adapter, sample, [b.slices[numbers[0]].use.strength for b in blocks])


def _of_adapter(base: Tensor, stacks: Sequence[StackedPatch], strength: Tensor) -> Tensor:
    """Return the change by one adapter [n, rows, cols], at strength 1 in the rows of its first formula, which has this
    strength; if others have another strength, their rows are scaled by the ratio."""
    change_of_adapter = torch.zeros_like(base)
    for s in stacks:
        _add(s, s.region(change_of_adapter), s.strength / strength, base, read=not s.algorithm.reads_base)
    return change_of_adapter


def _rows_of_adapter(base: Tensor, stacks: Sequence[StackedPatch]) -> RowMatrix:
    """Return the same change of one weight, by rows. Those of `base` [1, rows, cols] may change once they were read."""

    def read(rows: slice) -> Tensor:
        parts = [part for s in stacks if (part := s.part(rows)) is not None]
        return _of_adapter(base[:, rows], parts, stacks[0].strength)[0]

    return RowMatrix((base.shape[1], base.shape[2]), read)


def _sampled(change: RowMatrix, rows: range) -> Tensor:
    """Return rows [1, k, cols] of a change."""
    return change.of_rows(torch.tensor(rows)).dense().unsqueeze(0)


class FoldRule(Protocol):
    """Function of base values, which it may overwrite, and stacks, that returns merged values."""

    def __call__(self, base: Tensor, stacks: Sequence[StackedPatch], *observers: FoldObserver) -> Tensor:
        """Return [n, rows, cols]."""
        ...


FOLD_RULES: Final[Mapping[str, FoldRule]] = MappingProxyType({"sum": fold, "compose": in_turn})
"""Name of a row of METHODS that combines no changes → its function."""


def change(s: StackedPatch, base: Tensor) -> Tensor:
    """Return F(W) − W for the rows that the stack changes, at strength 1, transposed if the formula is."""
    weight = s.region(base) if s.view is None else s.view
    if s.view is None and s.whole is not None:  # the formula may read the shape, but not the values
        weight = base.new_zeros(()).expand(len(base), *s.whole)
    change = s.algorithm.delta(weight, s.tensors)
    if s.magnitude is not None:
        axis, magnitude = s.magnitude
        change = dora.rescale(weight, change, magnitude, axis)
    return change if s.taken is None else change.narrow(1, s.taken.start, s.taken.stop - s.taken.start)
