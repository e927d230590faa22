"""Rows of changed weights by the reference formulas, in float64, without the production kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np

from ..algorithms import ALGORITHMS
from ..matching.layer_order import basis_weights
from ..matching.patch import Patch, PatchPart
from ..models.weights import Weight, WeightView
from ..planning.plan import OutputTensor
from .combination_methods import of_weight
from .patch_rows import PatchRows, gathered, together
from .proof_report import Exact
from .reference import REFERENCE, FormulaInput
from .reference.floats import Array, as_dtype
from .weights import WeightReader

DORA_FLOOR: Final = 2.0**-23  # smallest norm, as every trainer has it


class Recomputation:
    """The recomputation of changes of weights. `stored`: reads the inputs' tensors."""

    def __init__(self, weights: Mapping[str, Weight], stored: WeightReader) -> None:
        self.weights, self.stored = weights, stored
        self._by_patch: dict[int, Sequence[PatchRows]] = {}
        self.slots: dict[Any, Mapping[str, Array]] = {}  # rebuilt slots, by patch

    def rows(self, target: OutputTensor, rows: Array) -> Exact:
        """Return rows of a merged weight as they are before they are rounded."""
        base = self._base(target.weight, rows, target.matrix[1])
        if target.combines:
            return self._combined(target, rows, base)
        row_changes, value, terms = RowChanges(self, target, target.name), base.copy(), np.abs(base)
        changes: dict[int, Array] = {}
        losses = [1.0]
        for part in self.parts(target.uses):
            placed = row_changes.change(part, rows)
            if placed is None:
                continue
            at, change = placed
            value[at] += change
            terms[at] = np.maximum(terms[at], np.maximum(np.abs(change), np.abs(value[at])))
            changes.setdefault(part.patch.adapter, np.zeros_like(base))[at] += change
            losses.append(REFERENCE[part.patch.algorithm].loss)
        loss = sum(losses) if target.combination.method.in_turn else max(losses)
        return Exact(base, value, terms, loss, max(row_changes.growth), changes)

    def _combined(self, target: OutputTensor, rows: Array, base: Array) -> Exact:
        """Return rows of the base with the one change that all changes of the weight become."""
        combined = of_weight(
            target, self.parts(target.uses), rows, lambda p, some: RowChanges(self, target).whole(p, some)
        )
        value, terms = base + combined.total, np.abs(base)
        for part in (value, *combined.parts.values()):
            terms = np.maximum(terms, np.abs(part))
        loss = sum(REFERENCE[u.patch.algorithm].loss for u in target.uses)
        return Exact(base, value, terms, loss, changes=combined.parts, slack=combined.slack)

    def values(self, key: str, rows: Array, cols: int) -> Array:
        """Return rows of a weight of the base as a matrix `cols` wide."""
        return self._base(self.weights[key], rows, cols)

    def _base(self, weight: Weight, rows: Array, cols: int) -> Array:
        """Return rows of a weight as a matrix `cols` wide; zeros if the weight is padded."""
        info = weight.stored
        if not weight.padded:
            return self.stored(info, (prod(info.shape) // max(cols, 1), cols), rows)
        values, stored = np.zeros((len(rows), *weight.shape[1:])), rows < info.shape[0]
        corner: tuple[Any, ...] = (stored, *map(slice, info.shape[1:]))
        values[corner] = self.stored(info, info.shape, rows[stored])
        return values.reshape(len(rows), cols)

    def parts(self, uses: Sequence[PatchPart]) -> Sequence[PatchRows]:
        """Return the changes of a tensor, those of one patch together. The plan keeps the uses."""
        if id(uses) not in self._by_patch:
            self._by_patch[id(uses)] = together(uses)
        return self._by_patch[id(uses)]

    def products(self, target: OutputTensor, rows: Array) -> Array:
        """Return Σ |s| · |B| |A| for rows of a tensor, of formulas that are sums of products of stored tensors: far
        above |ΔW| if products cancel."""
        products = np.zeros((len(rows), target.matrix[1]))
        for part in self.parts(target.uses):
            row, (at, rows_of) = ALGORITHMS[part.patch.algorithm], part.find(rows)
            if len(rows_of) and not (row.reads_base or row.prepare or row.decomposes or part.patch.magnitude):
                change = _inside(part, rows[at], rows_of, RowChanges(self, target).unsigned)
                products[at] += np.abs(part.strength * change)
        return products


@dataclass(frozen=True, eq=False)
class RowChanges:
    """The changes of one weight, row by row, as far as they were computed, and the tensor that a formula reads now."""

    again: Recomputation
    target: OutputTensor
    key: str = ""  # the tensor's name
    changes: dict[tuple[Any, ...], Array] = field(default_factory=dict)  # part, rows → s ΔW
    growth: list[float] = field(default_factory=lambda: [1.0])  # by how much DoRA enlarges what underflows before it

    def _on(self, key: str) -> RowChanges:
        """Return these changes for another tensor that a formula reads."""
        return replace(self, key=key)

    def _enlarged(self, factors: Array) -> Array:
        """Record the largest factor, and return the factors."""
        self.growth.append(float(np.max(np.abs(factors[np.isfinite(factors)]), initial=1.0)))
        return factors

    def whole(self, part: PatchRows, rows: Array) -> Array:
        """Return s ΔW for rows of the stored tensor, zeros if the part changes none."""
        placed = self.change(part, rows)
        change = np.zeros((len(rows), part.cols))
        if placed is not None:
            change[placed[0]] = placed[1]
        return change

    def projected(self, part: PatchRows, rows: Array, vectors: Array) -> Array:
        """Return s ΔW x for vectors x [cols, n] and rows of the stored tensor, of a formula that is linear in one slot:
        the formula is computed with the slot's products with x in its place."""
        (at, rows_of), formula = part.find(rows), REFERENCE[part.patch.algorithm]
        products = np.zeros((len(rows), vectors.shape[1]))
        if len(rows_of):
            g = self._formula_input(part.patch, rows_of)

            def read(slot: str, entries: Array | None) -> Array:
                return g.read(slot, entries) @ vectors if slot == formula.linear else g.read(slot, entries)

            products[at] = part.strength * formula.formula(replace(g, read=read))
        return products

    def spanning(self, part: PatchRows) -> Array:
        """Return vectors [r, cols] of which the rows of such a ΔW are sums."""
        return self._formula_input(part.patch, np.arange(0))[REFERENCE[part.patch.algorithm].linear]

    def change(self, part: PatchRows, rows: Array) -> tuple[Array | slice, Array] | None:
        """Return which of some rows of the stored tensor change, and s ΔW for them, in the tensor's own orientation;
        None if none changes."""
        at, rows_of = part.find(rows)
        if not len(rows_of):
            return None
        key = part, rows.tobytes()
        if key not in self.changes:
            self.changes[key] = part.strength * _inside(part, rows[at], rows_of, self._delta)
        return at, self.changes[key]

    def unsigned(self, patch: Patch, rows: Array) -> Array:
        """Return ΔW of an adapter whose stored values have no signs."""
        g = self._formula_input(patch, rows)
        return REFERENCE[patch.algorithm].formula(replace(g, read=lambda *slot: np.abs(g.read(*slot))))

    def _delta(self, patch: Patch, rows: Array) -> Array:
        """Return ΔW for rows of the weight as the adapter saw it."""
        if patch.magnitude is None:
            return REFERENCE[patch.algorithm].formula(self._formula_input(patch, rows))
        axis, shape = patch.magnitude
        magnitude = self.again.stored(patch.module.shared["magnitude"], shape)
        g = self._formula_input(patch, rows if axis == "out" else np.arange(prod(patch.view.shape[:1])))
        v = g.w + REFERENCE[patch.algorithm].formula(g)
        if axis == "out":
            norm = np.sqrt(np.sum(v * v, axis=1, keepdims=True))
            return np.asarray(v * self._enlarged(magnitude[rows] / _divisor(norm)) - g.w)
        blocks = v.reshape(len(v), shape[1], -1)
        norm = np.sqrt(np.sum(blocks * blocks, axis=(0, 2), keepdims=True))
        turned = blocks * self._enlarged(magnitude.reshape(norm.shape) / _divisor(norm))
        return np.asarray((turned.reshape(v.shape) - g.w)[rows])

    def _formula_input(self, patch: Patch, rows: Array) -> FormulaInput:
        row = ALGORITHMS[patch.algorithm]
        settings: dict[str, Any] = {**row.settings, **dict(patch.settings)}
        derived = {
            **row.derived(patch.shapes, patch.view.shape, dict(patch.settings)),
            **self._rebuilt(patch),
        }

        def read(slot: str, entries: Array | None) -> Array:
            if slot in derived:
                whole = np.asarray(derived[slot])
                whole = whole.astype(np.int64 if slot in row.integer_slots else np.float64)
                return whole if entries is None else whole[entries]
            if slot in patch.base_slots:
                near = patch.base_slots[slot]
                whole = self._on(near.row_slices[0].key)._view(near, patch.adapter, None).reshape(patch.shapes[slot])
                return whole if entries is None else whole[entries]
            return self.again.stored(patch.module.slots[slot], patch.shapes[slot], entries)

        slots = frozenset(patch.module.slots) | frozenset(derived) | frozenset(patch.base_slots)
        base = partial(self._view, patch.view, patch.adapter)
        return FormulaInput(read, base, slots, patch.scalars, settings, patch.view.shape, rows, patch.view.matrix)

    def _rebuilt(self, patch: Patch) -> Mapping[str, Array]:
        """Return the slots that are computed from the untouched base: once for all rows, as it may take long."""
        of = basis_weights(patch) or id(patch)
        if of not in self.again.slots:
            from .peft_initialisation import rebuilt_slots

            self.again.slots[of] = rebuilt_slots(patch, partial(self._as_loaded, patch))
        return self.again.slots[of]

    def _as_loaded(self, patch: Patch, slot: str) -> Array:
        """Return a slot that the base or the file holds, or the weight, before the first adapter."""
        view = patch.view if not slot else patch.base_slots.get(slot)
        if view is None:
            return as_dtype(self.again.stored(patch.module.slots[slot], patch.shapes[slot]), "F32")
        wide = any(self.again.weights[piece.key].stored.dtype == "F64" for piece in view.row_slices)
        return as_dtype(self._view(view, 0, None), "F64" if wide else "F32")

    def _view(self, view: WeightView, adapter: int, rows: Array | None) -> Array:
        """Return the rows of a weight that an adapter's formula reads, gathered from its pieces: the base's, changed by
        the adapters before it where adapters act in turn."""

        def read(key: str, lines: Array, cols: int) -> Array:
            on = self if len(view.row_slices) == 1 else self._on(key)
            return on._after(adapter, self.again.values(key, lines, cols), lines)

        return gathered(view, np.arange(view.matrix[0]) if rows is None else rows, read)

    def _after(self, adapter: int, values: Array, rows: Array) -> Array:
        """Return the rows of a tensor with the changes of all adapters before this one, where adapters act in turn."""
        uses = self.target.combination.uses.get(self.key, ())  # none if differences are added
        for part in self.again.parts(uses):
            placed = self.change(part, rows) if part.patch.adapter < adapter else None
            if placed is not None:
                values = values.copy()
                values[placed[0]] += placed[1]
        return values


def _inside(part: PatchRows, rows: Array, rows_of: Array, delta: Callable[[Patch, Array], Array]) -> Array:
    """Return ΔW at strength 1 for rows of the stored tensor, seen by the patch as `rows_of`; `delta` makes it."""
    first = part.first
    if first.piece.transposed:
        rows_of = np.arange(first.start, first.start + first.piece.rows)
        change = np.zeros((len(rows), part.cols))
        change[:, first.piece.across] = delta(part.patch, rows_of).T[rows - first.piece.start]
        return change
    return delta(part.patch, rows_of)


def _divisor(norm: Array) -> Array:
    """Return DoRA's divisor: NaN if the norm is infinite, as a row with an infinite number has no direction."""
    return np.where(np.isinf(norm), np.nan, np.maximum(norm, DORA_FLOOR))
