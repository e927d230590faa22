"""Compares merged rows of a finished file with those of the recomputation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from ..change_statistics import Checked
from ..disk.reader import Reader
from ..disk.remote import RemoteFile
from ..disk.system import read_at
from ..dtypes import ITEM_BYTES, spoken
from ..planning.plan import OutputTensor, Plan
from .combination_methods import uniform
from .grids import ROUNDING, UNDERFLOW, Grid, plain_grid
from .patch_rows import costs_all
from .proof_report import Bound, Exact, Findings, coarse, measure
from .recomputation import Recomputation
from .reference import REFERENCE
from .reference.floats import Array, decode
from .sample import runs, sample, shuffled
from .weights import CodedWeight, WeightReader

TENSOR_STRIDE: Final = 20  # if a row costs as much as all rows, one tensor in 20 is recomputed
Written: TypeAlias = int | RemoteFile
"""The written file: an open descriptor, or a file of another machine."""

ELEMENTS_AT_ONCE: Final = 2**18
"""Elements that are recomputed at once with --full; more do not fit the caches and take twice the time."""

LEAST_DRAWN: Final = 4  # bytes of values that are not rounded stochastically: those of the sum itself
UNASKED: Final = (
    "earlier versions cut values that are too large for a dtype without a warning; merge with another --dtype, or "
    "with --on-overflow saturate"
)


class RowComparison:
    """The comparison of the merged rows of one output with their recomputation.

    `outputs`: the merged weights in the written files that are not plain values. `recorded`: what the merge recorded
    of some rows of some tensors. `judged`: the compute dtype whose rounding is allowed; "": that of the job.
    """

    def __init__(  # noqa: PLR0913  # one output, its inputs, how far
        self, plan: Plan, reader: Reader, pool: Executor | None = None, *, full: bool,
        outputs: Mapping[str, CodedWeight] = MappingProxyType({}),
        recorded: Mapping[str, Checked] = MappingProxyType({}), judged: str = "",
    ) -> None:  # fmt: skip
        self.plan, self.reader, self.pool, self.full = plan, reader, pool, full
        self.again = Recomputation(plan.weights, WeightReader(reader, plan.base))
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
        (stored, grid), exact = self._output(target, fd, rows), self.again.rows(target, rows)
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
        (stored, grid), exact = self._output(target, fd, rows), self.again.rows(target, rows)
        if grid.turn is not None:
            stored, exact = grid.turn(stored), exact.turned(grid.turn)
        findings = self._compared(target, rows, stored, grid, exact)
        measured = measure(stored, exact, grid.rounded, weight)
        findings.measures.tensors[target.name] = replace(measured, cut=findings.cut) if findings.cut else measured
        if self.coarse:
            rounded = plain_grid("BF16").rounded
            findings.in_bf16.update(measure(rounded(exact.value), exact, rounded, weight).adapters)
        return findings

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
        parts = len(self.again.parts(target.uses))
        rounding = ROUNDING["fp64"] if target.combines else self.rounding
        if not target.weight.packing.encoding.plain:
            rounding = max(rounding, ROUNDING["fp32"])  # codes are decoded in fp32, whatever the sum is made in
        rounding *= max(1.0, parts / 16)
        lost = exact.loss * (rounding * largest + self.underflow * exact.growth) + exact.slack
        # Errors above rounding to the output's dtype: all of an error if the draws choose another number.
        above: Array = error - 1.0000002 * self.steps * units
        drawn = self._draws(target, rows)

        def beyond(lost: Array) -> Array:
            """Return how far errors are above rounding, even for an exact value that is off by `lost`."""
            return above if drawn is None else np.where(_as_drawn(got, grid, value, lost, drawn), above, error)

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
            products = self.again.products(target, rows).max(axis=1, initial=0.0, keepdims=True)
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


def read_exactly(fd: Written, count: int, offset: int) -> bytes:
    """Return the bytes of an open file; fewer only at its end."""
    raw, done = memoryview(bytearray(count)), 0
    if isinstance(fd, RemoteFile):
        return bytes(raw[: fd.read_into(raw, offset)])
    while done < count and (got := read_at(fd, raw[done:], offset + done)):
        done += got
    return bytes(raw[:done])
