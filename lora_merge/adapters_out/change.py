"""The change of one weight by one adapter: as factors where the formula has them, else as a whole matrix; in fp64. With
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS, DoesNotFit
from ..disk.reader import Reader
from ..dtypes import StoredTensor
from ..engine.combination import total
from ..engine.module_change import ModuleChange, change_of_patch
from ..engine.patch_tensors import PatchTensors
from ..engine.row_matrix import RowMatrix
from ..engine.tensor_moves import Placement, stage
from ..engine.tensors import TensorCache, weight_values
from ..errors import UsageError, misfit
from ..matching.patch import Patch, PatchPart
from ..models.weights import RowSlice
from .factors import placed, shortest, spread, squares_of
from .groups import Place, Target, is_stored_pair, rank_of_change
from .input_adapters import NOWHERE, InputAdapters, reshaped, without_values
from .job import GIVE_BASE, AdapterJob
from .values import squares_of_rows


class WithoutBase(TensorCache):
    """Reads an adapter's tensors, and refuses the base's."""

    def fetch(self, info: StoredTensor) -> Tensor:
        """Return the tensor as stored; UsageError for one of the base."""
        if info.file == NOWHERE:
            raise UsageError("a formula reads the weights of the base", info.name, GIVE_BASE)
        return super().fetch(info)


def cache_of(job: AdapterJob, reader: Reader, inputs: InputAdapters) -> TensorCache:
    """Return the reader of tensors; without a base, one that refuses those of the base."""
    files = frozenset(p for a in inputs.adapters for p in a.index.files)
    return (WithoutBase if job.base is None else TensorCache)(reader, files)


SINGLE: Final = Placement(torch.device("cpu"), torch.float32)


@dataclass(frozen=True, kw_only=True)
class Change(ModuleChange):
    """ΔW [out, cols] of one adapter at strength 1."""

    adapter: int
    strength: float

    @property
    def rank(self) -> int | None:
        """The number of columns of the left factor; None for a whole matrix."""
        return None if self.left is None else self.left.shape[1]

    def wide(self) -> Change:
        """Return the change in fp64."""
        left, right = (None if t is None else t.double() for t in (self.left, self.right))
        whole = self.whole
        wide = None if whole is None else RowMatrix(whole.shape, lambda rows: whole.read(rows).double())
        return replace(self, left=left, right=right, whole=wide)

    @property
    def rows(self) -> RowMatrix:
        """ΔW by rows; a small product is computed once."""
        return super().rows.cached() if self.whole is None else self.whole


class Evaluator:
    """Computes changes from the stored tensors of the inputs. `wide`: they are brought to fp64 after that. `fetch`
    returns a tensor of the adapters, if not as it is stored."""

    def __init__(
        self, inputs: InputAdapters, cache: TensorCache, at: Placement, *, wide: bool = False,
        fetch: Callable[[StoredTensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.inputs, self.cache, self.at, self.wide = inputs, cache, at, wide
        self.tensors = PatchTensors(fetch or cache.fetch, inputs.weights)

    def changes(self, target: Target) -> list[Change]:
        """Return one change for each adapter that changes the weight, in the order of the adapters."""
        try:
            parts = [self._of_use(target, use) for use in target.uses]
        except DoesNotFit as e:
            raise misfit(target.label, e) from e
        parts += [self._of_value(target, number, info, s) for number, info, s in target.values]
        changes = []
        for number in sorted({p.adapter for p in parts}):
            changes.append(joined([p for p in parts if p.adapter == number]))
        return [c.wide() for c in changes] if self.wide else changes

    def altered(self, alter: Callable[[StoredTensor, Tensor], Tensor]) -> Evaluator:
        """Return an evaluator that reads every tensor of the adapters as a function gives it."""
        fetch = self.cache.fetch
        return Evaluator(self.inputs, self.cache, self.at, wide=self.wide, fetch=lambda info: alter(info, fetch(info)))

    def forget(self) -> None:
        """Drop the tensors that were read."""
        self.cache.forget()
        self.tensors.cache.clear()

    def _of_use(self, target: Target, use: PatchPart) -> Change:
        """Return the change by one patch, in the rows of the target."""
        patch, piece = use.patch, use.piece
        cut, (out, width) = slice(use.start, use.start + piece.rows), target.matrix
        row, of_adapter = ALGORITHMS[patch.algorithm], partial(Change, adapter=patch.adapter, strength=use.strength)
        if row.stores == "change" and not patch.scalars and patch.magnitude is None and not piece.transposed:
            stored = _of_width(self._stored(patch)[cut], width)
            return of_adapter(whole=in_place(stored, piece.start, out, self.at))
        factors = rank_of_change(patch) is not None
        if factors and is_stored_pair(patch):
            computed = ModuleChange(*self._pair(patch))
        else:
            weight = self.inputs.weights.get(piece.key) or without_values(target.key, target)
            computed = change_of_patch(patch, weight, self.tensors, self.at, factors=factors)
        if factors:
            left, right = shortest(*computed.factors)
            left = left[cut]
            if piece.transposed:
                left, right = right.mT, spread(left.mT, piece)
            return of_adapter(*_in_rows(left, right, piece.start, out, width))
        whole = computed.dense()[cut]
        whole = spread(whole.mT, piece) if piece.transposed else whole
        whole = _of_width(whole, width)
        return of_adapter(whole=RowMatrix.of(placed(whole, piece.start, out)))

    def _stored(self, patch: Patch) -> Tensor:
        """Return a whole change [rows, cols] as it is stored: its rows are widened when they are read, as all of them
        take several times the memory."""
        (slot,) = patch.shapes
        return self.tensors.fetch(patch.module.slots[slot]).reshape(patch.view.matrix)

    def _pair(self, patch: Patch) -> tuple[Tensor, Tensor]:
        """Return both factors of a plain LoRA, the most frequent patch by far, without the ways of the others."""
        up, down = (
            stage([self.tensors.fetch(patch.module.slots[slot]).reshape(patch.shapes[slot])], self.at)[0]
            for slot in ("up", "down")
        )
        return up.mul_(patch.scalars.get("scale", 1.0)), down

    def _of_value(self, target: Target, number: int, info: StoredTensor, strength: float) -> Change:
        """Return the change of a weight that an adapter replaces: X − W. FitError if X has another shape."""
        if prod(info.shape) != prod(self.inputs.weights[target.key].shape):
            raise reshaped(target.key)
        value, base = self.cache.fetch(info).reshape(target.matrix), self.stored_values(target.key)
        base = base.reshape(target.matrix)

        def read(rows: slice) -> Tensor:
            return stage([value[rows]], self.at)[0].sub_(stage([base[rows]], self.at)[0])

        return Change(adapter=number, strength=strength, whole=RowMatrix(target.matrix, read))

    def stored_values(self, key: str) -> Tensor:
        """Return the values of a weight of the base, in the dtype in which they are stored."""
        return weight_values(self.inputs.weights[key], self.cache.fetch)

    def values(self, key: str) -> Tensor:
        """Return the values of a weight of the base."""
        return stage([self.stored_values(key)], self.at)[0]


def _in_rows(left: Tensor, right: Tensor, start: int, out: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the factors of a change that has zeros outside its rows."""
    right = right.reshape(right.shape[0], width)
    return (left if left.shape[0] == out else placed(left, start, out)), right


def in_place(stored: Tensor, start: int, out: int, at: Placement) -> RowMatrix:
    """Return stored rows at a placement, in a matrix that has zeros outside of them."""

    def read(rows: slice) -> Tensor:
        values = torch.zeros(rows.stop - rows.start, stored.shape[1], dtype=at.dtype, device=at.device)
        low, high = max(rows.start, start), min(rows.stop, start + len(stored))
        if low < high:
            values[low - rows.start : high - rows.start] = stage([stored[low - start : high - start]], at)[0]
        return values

    return RowMatrix((out, stored.shape[1]), read)


def _of_width(values: Tensor, width: int) -> Tensor:
    return values.reshape(values.numel() // max(width, 1), width)  # -1 is ambiguous where the width is 0


def joined(parts: Sequence[Change]) -> Change:
    """Return the sum of the parts of one adapter's change, such as those of q, k and v of a fused weight."""
    parts = [p for p in parts if p.strength] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    ratios = [p.strength / first.strength for p in parts]
    if all(p.left is not None for p in parts):
        left = torch.cat([r * p.left for r, p in zip(ratios, parts, strict=True) if p.left is not None], 1)
        right = torch.cat([p.right for p in parts if p.right is not None], 0)
        return Change(left, right, adapter=first.adapter, strength=first.strength)
    all_rows = [p.rows for p in parts]

    def read(rows: slice) -> Tensor:
        return total([part.read(rows).mul_(r) for r, part in zip(ratios, all_rows, strict=True)])

    return Change(whole=RowMatrix(all_rows[0].shape, read), adapter=first.adapter, strength=first.strength)


def largest_rank(changes: Sequence[Change]) -> int:
    """Return the largest rank of the changes; 0 where one of them has no factors."""
    ranks = [c.rank for c in changes if c.rank is not None]
    return max(ranks) if len(ranks) == len(changes) else 0


def change_of(patch: Patch, evaluator: Evaluator) -> Change:
    """Return the whole change of a patch at strength 1, in its own rows."""
    rows, cols = patch.view.matrix
    piece = RowSlice(patch.view.row_slices[0].key, 0, rows, cols)
    place, use = Place("", patch.module.name, "weight", patch.view), PatchPart(patch, piece, 0, 1.0)
    target = Target(piece.key, patch.view.shape, (use,), places=(place,))
    return evaluator.changes(target)[0]


def whole_change(patch: Patch, evaluator: Evaluator) -> RowMatrix:
    """Return that change as a matrix [out, cols] by rows."""
    return change_of(patch, evaluator).rows


def sum_of(shape: tuple[int, int], terms: Sequence[tuple[float, RowMatrix]]) -> RowMatrix:
    """Return the sum of matrices times a number each."""

    def read(rows: slice) -> Tensor:
        zero = torch.zeros(rows.stop - rows.start, shape[1], dtype=torch.float64)
        return total([zero, *(term.read(rows).mul_(factor) for factor, term in terms)])

    return RowMatrix(shape, read)


def squares_between(first: RowMatrix, other: RowMatrix, factor: float = 1.0) -> float:
    """Return ‖A − factor · B‖²."""
    blocks = zip(first.blocks(), other.blocks(), strict=True)
    return sum(float((a - factor * b).square().sum()) for (_, a), (_, b) in blocks)


def squares_of_part(change: Change, rows: slice) -> float:
    """Return ‖ΔW‖² of some rows."""
    if change.whole is not None:
        return squares_of_rows(change.whole.part(rows))
    left, right = change.factors
    return squares_of(left[rows], right)
