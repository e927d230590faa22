"""Compares merged rows of a finished file with the reference formulas, in float64, without the production kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from math import prod, sqrt
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from ..algorithms import ALGORITHMS
from ..change_statistics import Checked
from ..disk.reader import Reader
from ..disk.remote import RemoteFile
from ..disk.system import read_at
from ..dtypes import ITEM_BYTES, spoken
from ..matching.layer_order import basis_weights
from ..matching.patch import Patch, PatchPart
from ..models.weights import Weight, WeightView
from ..planning.plan import OutputTensor, Plan
from .combination_methods import of_weight, uniform
from .grids import ROUNDING, UNDERFLOW, Grid, plain_grid
from .patch_rows import PatchRows, RowChanges, costs_all, gathered, together
from .proof_report import Bound, Exact, Findings, coarse, measure
from .reference import REFERENCE, FormulaInput
from .reference.floats import Array, as_dtype, decode
from .sample import runs, sample, shuffled
from .weights import CodedWeight, WeightReader

TENSOR_STRIDE: Final = 20  # if a row costs as much as all rows, one tensor in 20 is recomputed
Written: TypeAlias = int | RemoteFile
"""The written file: an open descriptor, or a file of another machine."""

ELEMENTS_AT_ONCE: Final = 2**18
"""Elements that are recomputed at once with --full; more do not fit the caches and take twice the time."""

LEAST_DRAWN: Final = 4  # bytes of values that are not rounded stochastically: those of the sum itself
DORA_FLOOR: Final = 2.0**-23  # smallest norm, as every trainer has it
UNASKED: Final = (
    "earlier versions cut values that are too large for a dtype without a warning; merge with another --dtype, or "
    "with --on-overflow saturate"
)


class Recomputation:
    """The recomputation of one output.

    `outputs`: the merged weights in the written files that are not plain values. `recorded`: what the merge recorded
    of some rows of some tensors. `judged`: the compute dtype whose rounding is allowed; "": that of the job. `stored`:
    reads the inputs' tensors, if not as their files hold them.
    """

    def __init__(  # noqa: PLR0913  # one output, its inputs, how far
        self, plan: Plan, reader: Reader, pool: Executor | None = None, *, full: bool,
        outputs: Mapping[str, CodedWeight] = MappingProxyType({}),
        recorded: Mapping[str, Checked] = MappingProxyType({}), judged: str = "", stored: WeightReader | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.reader, self.pool, self.full = plan, reader, pool, full
        self.stored = stored or WeightReader(reader, plan.base)
        self.outputs, self.recorded = outputs, recorded
        merged = (t.packed for t in plan.targets if t.packed and not t.copied)
        self.scales = frozenset[str]().union(*(packing.changing for packing in merged))
        self.saturate = plan.job.on_overflow == "saturate"
        self.stochastic = plan.job.rounding == "stochastic"
        self.steps = 1.0 if self.stochastic else 0.5
        self.judged, self.asked = judged or plan.job.compute_dtype, not judged
        self.rounding, self.underflow = (table[self.judged] for table in (ROUNDING, UNDERFLOW))
        self.findings = Findings()
        self.unconfirmed: list[str] = []  # tensors of which the merge recorded other values
        self._sampled: dict[str, Array] = {}
        self._by_patch: dict[int, Sequence[PatchRows]] = {}
        self._slots: dict[Any, Mapping[str, Array]] = {}  # rebuilt slots, by patch
        targets = [t for t in plan.targets if t.uses]
        self.coarse = any(coarse(t.packing.encoding) for t in targets)
        costly = sorted((t.name for t in targets if self._costly(t)), key=shuffled)
        self.left_out = set() if full else set(costly[max(1, len(costly) // TENSOR_STRIDE) :])
        self.left_out |= {t.name for t in targets if any(u.patch.algorithm not in REFERENCE for u in t.uses)}

    def expected(self, target: OutputTensor) -> Iterator[tuple[int, int]]:
        """Yield (first byte, bytes) of the rows of a merged tensor that `check` and `confirm` will read."""
        if target.name not in self.left_out:
            cols, size, rows = target.matrix[1], target.packing.encoding.nbytes, self._chosen(target)
            if (recorded := self.recorded.get(target.name)) is not None:
                rows = np.array(sorted({*rows.tolist(), *recorded.rows}))
            yield from ((size(first * cols), size(count * cols)) for first, count in runs(rows))

    def _chosen(self, target: OutputTensor) -> Array:
        if self.full:
            return np.arange(target.matrix[0])
        if target.name not in self._sampled:
            self._sampled[target.name] = sample(target)
        return self._sampled[target.name]

    def _costly(self, target: OutputTensor) -> bool:
        return target.combines or any(costs_all(u) for u in target.uses)

    def check(self, target: OutputTensor, fd: Written, report: Callable[[int], object]) -> None:
        """Recompute rows of one merged tensor and compare them with the file behind `fd`.

        `report` is called with parts of the tensor's bytes, as their rows, or the samples for them, have been compared.
        """
        if target.name in self.left_out:
            report(target.nbytes)
            return
        (rows, cols), chosen = target.matrix, self._chosen(target)
        size = len(chosen) if self._costly(target) else max(1, ELEMENTS_AT_ONCE // max(cols, 1))
        parts = [chosen[first : first + size] for first in range(0, len(chosen), size)]
        find = partial(self._findings_of, target, fd, rows / max(len(chosen), 1))
        self.findings.count(tensors=1)
        for n, findings in enumerate(self.pool.map(find, parts) if self.pool and len(parts) > 1 else map(find, parts)):
            self.findings.add(findings)
            before, after = (target.nbytes * done // len(parts) for done in (n, n + 1))
            report(after - before)

    @np.errstate(over="ignore", invalid="ignore")
    def confirm(self, target: OutputTensor, fd: Written) -> None:
        """Compute again what the merge recorded of some rows of a tensor, and note the tensor if it differs."""
        recorded = self.recorded.get(target.name)
        if recorded is None or target.name in self.left_out or target.combines:
            return
        rows = np.array(recorded.rows)
        (stored, grid), exact = self._output(target, fd, rows), self._exact(target, rows)
        measured = measure(stored, exact, grid.rounded, 1.0)
        if not np.isfinite(stored).all() or grid.beyond(exact.value).any():
            return  # such values are not recorded
        under = self.underflow * exact.growth * sqrt(stored.size)
        slack = exact.loss * (self.rounding * float(np.linalg.norm(exact.terms)) + under)
        pairs = ((recorded.weight, measured.weight), (recorded.change, measured.all.change))
        same = all(abs(sqrt(max(a, 0.0)) - sqrt(b)) <= 1e-3 * sqrt(b) + slack for a, b in pairs)
        dtypes = target.dtype, target.weight.stored.dtype
        wide = max(ITEM_BYTES.get(dtype, 0) for dtype in dtypes) > 4  # than what is recorded
        counted = (
            recorded.changed is None or target.name in self.outputs or wide or recorded.changed == measured.changed
        )
        if not (same and counted):
            self.unconfirmed.append(target.name)

    @np.errstate(over="ignore", invalid="ignore")  # absurd values overflow here as they did in the merge
    def _findings_of(self, target: OutputTensor, fd: Written, weight: float, rows: Array) -> Findings:
        """Return the findings of some rows; each counts for `weight` rows of its tensor."""
        (stored, grid), exact = self._output(target, fd, rows), self._exact(target, rows)
        if grid.turn is not None:
            stored, exact = grid.turn(stored), exact.turned(grid.turn)
        findings = self._compared(target, rows, stored, grid, exact)
        measured = measure(stored, exact, grid.rounded, weight)
        findings.measures.tensors[target.name] = replace(measured, cut=findings.cut) if findings.cut else measured
        if self.coarse:
            rounded = plain_grid("BF16").rounded
            findings.in_bf16.update(measure(rounded(exact.value), exact, rounded, weight).adapters)
        return findings

    def _exact(self, target: OutputTensor, rows: Array) -> Exact:
        """Return the exact rows."""
        base = self._base(target.weight, rows, target.matrix[1])
        if target.combines:
            return self._combined(target, rows, base)
        row_changes, value, terms = RowChanges(target), base.copy(), np.abs(base)
        changes: dict[int, Array] = {}
        losses = [1.0]
        for part in self._parts(target.uses):
            placed = self._change(part, rows, row_changes.on(target.name))
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
            target, self._parts(target.uses), rows, lambda p, some: self.whole(p, some, RowChanges(target))
        )
        value, terms = base + combined.total, np.abs(base)
        for part in (value, *combined.parts.values()):
            terms = np.maximum(terms, np.abs(part))
        loss = sum(REFERENCE[u.patch.algorithm].loss for u in target.uses)
        return Exact(base, value, terms, loss, changes=combined.parts, slack=combined.slack)

    def _compared(self, target: OutputTensor, rows: Array, got: Array, grid: Grid, exact: Exact) -> Findings:
        """Find the elements that are further from the exact value than rounding explains.

        The unit of the worst error is that of the element's largest term if the output is coarser than the sum (16
        bits after fp32): if terms cancel, the unit of the result itself can be arbitrarily small. Otherwise it is
        the unit of the row's largest term, on which the rounding of the sum depends.
        """
        # The error of each element.
        value, largest = grid.saturated(exact.value) if self.saturate else exact.value, exact.largest
        units = grid.step(value)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(got - value)
        if not np.isfinite(got).all():
            error[(got == value) | (np.isnan(got) & np.isnan(value))] = 0.0
        # What rounding of the sums explains, in the dtype of the arithmetic.
        parts = len(self._parts(target.uses))
        rounding = ROUNDING["fp64"] if target.combines else self.rounding
        if not target.weight.packing.encoding.plain:
            rounding = max(rounding, ROUNDING["fp32"])  # codes are decoded in fp32, whatever the sum is made in
        rounding *= max(1.0, parts / 16)
        lost = exact.loss * (rounding * largest + self.underflow * exact.growth) + exact.slack
        # Errors above rounding to the output's dtype: all of an error if the draws choose another number.
        above, drawn = error - 1.0000002 * self.steps * units, self._draws(target, rows)

        def beyond(lost: Array) -> Array:
            """Return how far errors are above rounding, even for an exact value that is off by `lost`."""
            chosen = True if drawn is None else _as_drawn(got, grid, value, lost, drawn)
            return np.asarray(np.where(chosen, above, error))

        over = beyond(lost)
        # The worst error, in units of the output.
        bad = ~(over <= lost)
        coarse = 2.0**-grid.levels.digits > self.rounding
        worst = float(np.max(error / grid.step(exact.terms if coarse else largest), initial=0.0))
        findings = Findings(
            rows=len(rows), elements=got.size, worst=worst, worst_tensor=target.name,
            broken=int(np.count_nonzero(~np.isfinite(got))),
            cut=int(np.count_nonzero(grid.beyond(exact.value))) if self.saturate else 0,
            bounds={target.name: Bound.of(over, lost, exact, value)},
        )  # fmt: skip
        # A failure; it is no fault of the file if products that cancel explain it.
        if bad.any():
            products = self._products(target, rows).max(axis=1, initial=0.0, keepdims=True)
            more = lost + exact.loss * rounding * products
            explained = beyond(more) <= more
            cancelled = self.rounding > ROUNDING["fp64"] and bool(explained[bad].all())
            row, col = np.argwhere(bad)[0]
            where = (
                f"row {int(rows[row])}, column {int(col)}: {got[row, col]:.8g} was written, {value[row, col]:.8g} is "
                f"right, {error[row, col] / units[row, col]:.3g} units in the last place of {spoken(target.dtype)} away"
                f"{f'; {UNASKED}' if grid.beyond(value)[row, col] else ''}"
            )
            findings.fail(target.name, where, cancelled=cancelled)
        return findings

    def _draws(self, target: OutputTensor, rows: Array) -> Array | None:
        """Return the draws of stochastic rounding for rows of a tensor; None if it is not rounded so."""
        if not self.stochastic or target.name in self.outputs or ITEM_BYTES[target.dtype] >= LEAST_DRAWN:
            return None
        cols = target.matrix[1]
        return uniform(target.stored, self.plan.job.seed, rows[:, None] * cols + np.arange(cols))

    def _output(self, target: OutputTensor, fd: Written, rows: Array) -> tuple[Array, Grid]:
        """Return the rows of the written tensor, and the values that it could hold instead."""
        cols = target.matrix[1]
        if target.name in self.outputs:
            return self.outputs[target.name].rows(rows, cols)
        width = cols * ITEM_BYTES[target.dtype]
        raw = b"".join(read_exactly(fd, count * width, target.offset + first * width) for first, count in runs(rows))
        return decode(raw, target.dtype).reshape(len(rows), cols), plain_grid(target.dtype)

    def values(self, key: str, rows: Array, cols: int) -> Array:
        """Return rows of a weight of the base as a matrix `cols` wide."""
        return self._base(self.plan.weights[key], rows, cols)

    def _base(self, weight: Weight, rows: Array, cols: int) -> Array:
        """Return rows of a weight as a matrix `cols` wide; zeros if the weight is padded."""
        info = weight.stored
        if not weight.padded:
            return self.stored(info, (prod(info.shape) // max(cols, 1), cols), rows)
        values, stored = np.zeros((len(rows), *weight.shape[1:])), rows < info.shape[0]
        corner: tuple[Any, ...] = (stored, *map(slice, info.shape[1:]))
        values[corner] = self.stored(info, info.shape, rows[stored])
        return values.reshape(len(rows), cols)

    def _parts(self, uses: Sequence[PatchPart]) -> Sequence[PatchRows]:
        """Return the changes of a tensor, those of one patch together. The plan keeps the uses."""
        if id(uses) not in self._by_patch:
            self._by_patch[id(uses)] = together(uses)
        return self._by_patch[id(uses)]

    def whole(self, part: PatchRows, rows: Array, row_changes: RowChanges) -> Array:
        """Return s ΔW for rows of the stored tensor, zeros if the part changes none."""
        placed = self._change(part, rows, row_changes)
        change = np.zeros((len(rows), part.cols))
        if placed is not None:
            change[placed[0]] = placed[1]
        return change

    def projected(self, part: PatchRows, rows: Array, vectors: Array, row_changes: RowChanges) -> Array:
        """Return s ΔW x for vectors x [cols, n] and rows of the stored tensor, of a formula that is linear in one slot:
        the formula is computed with the slot's products with x in its place."""
        (at, rows_of), formula = part.find(rows), REFERENCE[part.patch.algorithm]
        products = np.zeros((len(rows), vectors.shape[1]))
        if len(rows_of):
            g = self._formula_input(part.patch, rows_of, row_changes)

            def read(slot: str, entries: Array | None) -> Array:
                return g.read(slot, entries) @ vectors if slot == formula.linear else g.read(slot, entries)

            products[at] = part.strength * formula.formula(replace(g, read=read))
        return products

    def spanning(self, part: PatchRows, row_changes: RowChanges) -> Array:
        """Return vectors [r, cols] of which the rows of such a ΔW are sums."""
        return self._formula_input(part.patch, np.arange(0), row_changes)[REFERENCE[part.patch.algorithm].linear]

    def _change(self, part: PatchRows, rows: Array, row_changes: RowChanges) -> tuple[Array | slice, Array] | None:
        """Return which of some rows of the stored tensor change, and s ΔW for them, in the tensor's own orientation;
        None if none changes."""
        at, rows_of = part.find(rows)
        if not len(rows_of):
            return None
        key = part, rows.tobytes()
        if key not in row_changes.changes:
            row_changes.changes[key] = part.strength * self._inside(
                part, rows[at], rows_of, partial(self._delta, row_changes=row_changes)
            )
        return at, row_changes.changes[key]

    def _inside(self, part: PatchRows, rows: Array, rows_of: Array, delta: Callable[[Patch, Array], Array]) -> Array:
        """Return ΔW at strength 1 for rows of the stored tensor, seen by the patch as `rows_of`; `delta` makes it."""
        first = part.first
        if first.piece.transposed:
            rows_of = np.arange(first.start, first.start + first.piece.rows)
            change = np.zeros((len(rows), part.cols))
            change[:, first.piece.across] = delta(part.patch, rows_of).T[rows - first.piece.start]
            return change
        return delta(part.patch, rows_of)

    def _products(self, target: OutputTensor, rows: Array) -> Array:
        """Return Σ |s| · |B| |A| for rows of a tensor, of formulas that are sums of products of stored tensors: far
        above |ΔW| if products cancel."""
        products = np.zeros((len(rows), target.matrix[1]))
        for part in self._parts(target.uses):
            row, (at, rows_of) = ALGORITHMS[part.patch.algorithm], part.find(rows)
            if len(rows_of) and not (row.reads_base or row.prepare or row.decomposes or part.patch.magnitude):
                change = self._inside(part, rows[at], rows_of, partial(self._unsigned, RowChanges(target)))
                products[at] += np.abs(part.strength * change)
        return products

    def _unsigned(self, row_changes: RowChanges, patch: Patch, rows: Array) -> Array:
        """Return ΔW of an adapter whose stored values have no signs."""
        g = self._formula_input(patch, rows, row_changes)
        return REFERENCE[patch.algorithm].formula(replace(g, read=lambda *slot: np.abs(g.read(*slot))))

    def _delta(self, patch: Patch, rows: Array, row_changes: RowChanges) -> Array:
        """Return ΔW for rows of the weight as the adapter saw it."""
        if patch.magnitude is None:
            return REFERENCE[patch.algorithm].formula(self._formula_input(patch, rows, row_changes))
        axis, shape = patch.magnitude
        magnitude = self.stored(patch.module.shared["magnitude"], shape)
        g = self._formula_input(patch, rows if axis == "out" else np.arange(prod(patch.view.shape[:1])), row_changes)
        v = g.w + REFERENCE[patch.algorithm].formula(g)
        if axis == "out":
            norm = np.sqrt(np.sum(v * v, axis=1, keepdims=True))
            return np.asarray(v * row_changes.enlarged(magnitude[rows] / _divisor(norm)) - g.w)
        blocks = v.reshape(len(v), shape[1], -1)
        norm = np.sqrt(np.sum(blocks * blocks, axis=(0, 2), keepdims=True))
        turned = blocks * row_changes.enlarged(magnitude.reshape(norm.shape) / _divisor(norm))
        return np.asarray((turned.reshape(v.shape) - g.w)[rows])

    def _formula_input(self, patch: Patch, rows: Array, row_changes: RowChanges) -> FormulaInput:
        row = ALGORITHMS[patch.algorithm]
        settings: dict[str, Any] = {**row.settings, **dict(patch.settings)}
        derived = {
            **row.derived(patch.shapes, patch.view.shape, dict(patch.settings)),
            **self._rebuilt(patch, row_changes),
        }

        def read(slot: str, entries: Array | None) -> Array:
            if slot in derived:
                whole = np.asarray(derived[slot])
                whole = whole.astype(np.int64 if slot in row.integer_slots else np.float64)
                return whole if entries is None else whole[entries]
            if slot in patch.base_slots:
                near = patch.base_slots[slot]
                whole = self._view(near, patch.adapter, row_changes.on(near.row_slices[0].key), None).reshape(
                    patch.shapes[slot]
                )
                return whole if entries is None else whole[entries]
            return self.stored(patch.module.slots[slot], patch.shapes[slot], entries)

        slots = frozenset(patch.module.slots) | frozenset(derived) | frozenset(patch.base_slots)
        base = partial(self._view, patch.view, patch.adapter, row_changes)
        return FormulaInput(read, base, slots, patch.scalars, settings, patch.view.shape, rows, patch.view.matrix)

    def _rebuilt(self, patch: Patch, row_changes: RowChanges) -> Mapping[str, Array]:
        """Return the slots that are computed from the untouched base: once for all rows, as it may take long."""
        of = basis_weights(patch) or id(patch)
        if of not in self._slots:
            from .peft_initialisation import rebuilt_slots

            self._slots[of] = rebuilt_slots(patch, partial(self._as_loaded, patch, row_changes))
        return self._slots[of]

    def _as_loaded(self, patch: Patch, row_changes: RowChanges, slot: str) -> Array:
        """Return a slot that the base or the file holds, or the weight, before the first adapter."""
        view = patch.view if not slot else patch.base_slots.get(slot)
        if view is None:
            return as_dtype(self.stored(patch.module.slots[slot], patch.shapes[slot]), "F32")
        wide = any(self.plan.weights[piece.key].stored.dtype == "F64" for piece in view.row_slices)
        return as_dtype(self._view(view, 0, row_changes, None), "F64" if wide else "F32")

    def _view(self, view: WeightView, adapter: int, row_changes: RowChanges, rows: Array | None) -> Array:
        """Return the rows of a weight that an adapter's formula reads, gathered from its pieces: the base's, changed by
        the adapters before it where adapters act in turn."""

        def read(key: str, lines: Array, cols: int) -> Array:
            on = row_changes if len(view.row_slices) == 1 else row_changes.on(key)
            return self._after(adapter, self.values(key, lines, cols), lines, on)

        return gathered(view, np.arange(view.matrix[0]) if rows is None else rows, read)

    def _after(self, adapter: int, values: Array, rows: Array, row_changes: RowChanges) -> Array:
        """Return the rows of a tensor with the changes of all adapters before this one, where adapters act in turn."""
        for part in self._parts(row_changes.uses):
            placed = self._change(part, rows, row_changes) if part.patch.adapter < adapter else None
            if placed is not None:
                values = values.copy()
                values[placed[0]] += placed[1]
        return values


def _as_drawn(stored: Array, grid: Grid, value: Array, lost: Array, drawn: Array) -> Array:
    """Return which values are the neighbour of the exact value that the draws choose; either one if rounding in the
    compute dtype may decide."""
    units, side = grid.step(value), np.where(value < 0, -1.0, 1.0)
    unsure = np.minimum(lost / units + 2.0 ** (grid.levels.digits - 23), 1.0)  # a draw has the bits that are cut
    low, high = (
        grid.saturated(side * np.floor(np.abs(value) / units + drawn + more) * units) * side
        for more in (-unsure, unsure)
    )
    return np.asarray((low <= stored * side) & (stored * side <= high))


def _divisor(norm: Array) -> Array:
    """Return DoRA's divisor: NaN if the norm is infinite, as a row with an infinite number has no direction."""
    return np.where(np.isinf(norm), np.nan, np.maximum(norm, DORA_FLOOR))


def read_exactly(fd: Written, count: int, offset: int) -> bytes:
    """Return the bytes of an open file; fewer only at its end."""
    raw, done = memoryview(bytearray(count)), 0
    if isinstance(fd, RemoteFile):
        return bytes(raw[: fd.read_into(raw, offset)])
    while done < count and (got := read_at(fd, raw[done:], offset + done)):
        done += got
    return bytes(raw[:done])
