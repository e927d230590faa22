"""One weight of both checkpoints → its difference, formed by rows where the weight is large; and the rounding errors of
stored numbers that it holds in addition to what was trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from ...disk.files import StoredTensor
from ...disk.reader import Reader
from ...dtypes import ITEM_BYTES
from ...engine.row_matrix import RowMatrix
from ...engine.tensor_moves import finite, pieces
from ...engine.tensors import as_bytes, stored_numbers, view_bytes, weight_values
from ...errors import InputError, beyond_fp64
from ...files.checkpoint import Index
from ...models.part_factors import or_leave_out
from ...models.weights import RowSlice, Weight, WeightView
from ..rounding import ZERO_TOTALS, Totals, squares_of_rows, totals_of
from .pairs import Pair

SIGNIFICANDS: Final[Mapping[str, tuple[int, int]]] = {
    "F64": (53, -1021),
    "F32": (24, -125),
    "F16": (11, -13),
    "BF16": (8, -125),
}
"""Dtype → (bits of its significand, the exponent that `frexp` gives its smallest normal number)."""

NARROW_DTYPES: Final = frozenset({"F16", "BF16"})
"""Dtypes of 16 bits, in which a difference may be mostly rounding."""

SAMPLED_NUMBERS: Final = 2**16
"""The most numbers of a weight by which its rounding errors are estimated."""


def mean_square(values: RowMatrix, dtypes: frozenset[str]) -> float | None:
    """Return the mean square of the rounding errors: step² / 12, where a number's step is 2^(exponent − digits)."""
    if len(dtypes) != 1 or not dtypes <= SIGNIFICANDS.keys():
        return None
    digits, least = SIGNIFICANDS[next(iter(dtypes))]
    total = 0.0
    for _, some in values.blocks():
        wide = some.double() if some.dtype == torch.float64 else some.float()
        steps = torch.frexp(wide).exponent.clamp_min(least) - least  # counted by size, as there are few sizes
        counts = torch.bincount(steps.reshape(-1)).double()
        total += float((counts * 4.0 ** (torch.arange(len(counts), dtype=torch.float64) + least - digits)).sum())
    return total / max(values.numel(), 1) / 12


READ_ONCE_NUMBERS: Final = 2**24
"""Numbers up to which a weight is read once; those of a larger one are read by rows each time they are looked at."""


@dataclass(frozen=True)
class Side:
    """One checkpoint: reads rows of its weights, from any thread."""

    index: Index
    reader: Reader

    def rows(self, view: WeightView) -> Tensor:
        """Return [rows, cols] of a view in the dtype that is stored, decoded where numbers are quantised."""
        pieces = [self._piece(piece) for piece in view.row_slices]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def by_rows(self, view: WeightView) -> RowMatrix:
        """Return the same by rows; those of a large weight are read when they are asked for."""
        (piece, *others) = view.row_slices
        plain = not others and not piece.transposed and piece.key not in self.index.packed
        if piece.size <= READ_ONCE_NUMBERS or not plain:
            return RowMatrix.of(self.rows(view))

        def read(rows: slice) -> Tensor:
            return self._piece(piece._replace(start=piece.start + rows.start, stop=piece.start + rows.stop))

        return RowMatrix((piece.rows, piece.cols), read)

    def _piece(self, piece: RowSlice) -> Tensor:
        weight = self.weight(piece.key)
        if weight.packed is None:
            count = (piece.stop - piece.start) * piece.cols
            rows = stored_numbers(weight, piece.start * piece.cols, count, self._read).reshape(-1, piece.cols)
        else:
            rows = weight_values(weight, self._read).reshape(-1, piece.cols)[piece.start : piece.stop]
        return rows[:, piece.across].mT if piece.transposed else rows

    def _read(self, info: StoredTensor) -> Tensor:
        return view_bytes(self.reader.view(info), info.dtype, info.shape)

    def weight(self, key: str) -> Weight:
        """Return a stored weight."""
        info = self.index.tensors[key]
        return Weight(info.shape, info, self.index.packed.get(key))

    def stack(self, views: Sequence[WeightView]) -> Tensor | None:
        """Return [n, rows, cols] of several views of one shape; None where they are not whole rows of one dtype that
        lie side by side in the files' own words."""
        (first, *_), read = views, []
        dtype = self.index.tensors[first.row_slices[0].key].dtype
        for view in views:
            (piece, *others), info = view.row_slices, self.index.tensors[view.row_slices[0].key]
            plain = info.dtype == dtype and dtype in SIGNIFICANDS and piece.key not in self.index.packed
            if others or piece.transposed or not plain:
                return None
            row = piece.cols * ITEM_BYTES[dtype]
            read.append(self.reader.view(info)[piece.start * row : piece.stop * row])
        return view_bytes(memoryview(bytearray().join(read)), dtype, (len(views), *first.matrix))

    def dtypes(self, view: WeightView) -> set[str]:
        """Return the dtypes of the rows of a view; "" for numbers that are not stored plainly."""
        return {"" if p.key in self.index.packed else self.index.tensors[p.key].dtype for p in view.row_slices}


@dataclass(frozen=True)
class Difference:
    """Δ of one parameter, [rows, cols] in fp32 or fp64."""

    pair: Pair
    change: RowMatrix
    value: RowMatrix  # of the tuned weight, in its own dtype
    dtypes: frozenset[str]  # of the tuned weight, "" for quantised numbers
    narrow: bool  # whether both weights are stored in 16 bits
    weight: float  # ‖W‖² of the base's weight

    @cached_property
    def scanned(self) -> tuple[Totals, Tensor]:
        """The totals of Δ, and which of its rows are not zero: it is read once for both."""
        totals, moved = ZERO_TOTALS, list[Tensor]()
        for _, block in self.change.blocks(owned=False):
            totals += totals_of(block)
            moved.append(block.abs().amax(1) != 0 if block.numel() else block.any(1))  # any() takes four times as long
        return totals, torch.cat(moved)

    @property
    def noise(self) -> float | None:
        """v, the mean square of the tuned weight's rounding errors; None where it is not known."""
        return mean_square(self.value, self.dtypes)

    @property
    def share_of_noise(self) -> float | None:
        """√(v · numbers) / ‖Δ‖, with v of some of the numbers; None where it is not known."""
        if not self.narrow or self.pair.fresh:
            return None
        step, cols = -(-self.value.numel() // SAMPLED_NUMBERS), self.value.shape[1]
        some = [block.reshape(-1)[-rows.start * cols % step :: step] for rows, block in self.value.blocks(owned=False)]
        mean = mean_square(RowMatrix.of(torch.cat(some)[:, None]), self.dtypes)
        return None if mean is None else math.sqrt(mean * self.change.numel() / self.scanned[0].squares)


def difference(pair: Pair, base: Side, tuned: Side, computed: str | None = None) -> Difference | None:
    """Return tuned − base in the dtype that was asked for; None where both are equal. InputError for NaN or infinite
    numbers."""
    view = pair.before if pair.fresh else pair.place.view
    dtypes = tuned.dtypes(pair.tuned) | (set() if view is None else base.dtypes(view))
    new = tuned.by_rows(pair.tuned)
    old = RowMatrix.of(new.read(slice(0, 0))) if view is None else base.by_rows(view)
    if pair.fresh:
        old = RowMatrix.of(_with_rows(old.dense(), new.shape[0]))
    elif len(dtypes) == 1 and _alike(old, new):
        return None
    change = _subtracted(old, new, dtypes, computed)
    dtypes_of_tuned = frozenset(tuned.dtypes(pair.tuned))
    result = Difference(pair, change, new, dtypes_of_tuned, dtypes <= NARROW_DTYPES, squares_of_rows(old))
    totals, moved = result.scanned
    if not math.isfinite(totals.squares) and any(not bool(finite(block).all()) for _, block in change.blocks()):
        sound = all(bool(finite(block).all()) for _, block in old.blocks())
        side, view = (tuned, pair.tuned) if sound else (base, view or pair.tuned)
        fix = or_leave_out("use another checkpoint of the training", pair.place.keys)
        raise InputError(
            "a weight contains NaN or infinite values", f"{side.index.path}: {view.row_slices[0].key}", fix
        )
    if bool(moved.any()) and "F64" in dtypes and not 0 < totals.squares < math.inf:
        raise beyond_fp64(pair.name, "large" if totals.squares else "small")
    return result if pair.fresh or bool(moved.any()) else None


def _alike(rows: RowMatrix, other: RowMatrix) -> bool:
    """Return whether two matrices of one dtype have the same bytes."""
    if rows.memory is not None and other.memory is not None:
        return torch.equal(as_bytes(rows.memory), as_bytes(other.memory))
    blocks = zip(rows.blocks(), other.blocks(), strict=True)
    return rows.shape == other.shape and all(torch.equal(as_bytes(a), as_bytes(b)) for (_, a), (_, b) in blocks)


def _with_rows(old: Tensor, rows: int) -> Tensor:
    """Return a matrix with other rows: the first of its own, and zeros."""
    whole = old.new_zeros(rows, old.shape[1])
    whole[: len(old)] = old[:rows]
    return whole


def _computed_in(dtypes: set[str], computed: str | None) -> torch.dtype:
    """Return the dtype of a difference: that which was asked for, else fp64 where 32 bits or more are stored."""
    wide = computed == "fp64" or (computed is None and dtypes & {"F32", "F64"})
    return torch.float64 if wide else torch.float32


def _subtracted(old: RowMatrix, new: RowMatrix, dtypes: set[str], computed: str | None) -> RowMatrix:
    """Return new − old; of large weights that are read by rows, by rows."""
    dtype = _computed_in(dtypes, computed)
    if old.memory is not None and new.memory is not None:
        return RowMatrix.of(_at_once(old.memory, new.memory, dtype))
    return RowMatrix(new.shape, lambda rows: _at_once(old.read(rows), new.read(rows), dtype))


def _at_once(old: Tensor, new: Tensor, dtype: torch.dtype) -> Tensor:
    change = torch.empty(old.shape, dtype=dtype)
    for into, other in pieces(change, new):
        into.copy_(other)
    for into, other in pieces(change, old):
        into -= other.to(into.dtype)
    return change


def differences(
    batch: Sequence[Pair], base: Side, tuned: Side, computed: str | None = None
) -> list[Difference | None]:  # fmt: skip
    """Return what `difference` returns for each of several parameters of one shape; plain numbers are subtracted at
    once."""
    old = base.stack([pair.place.view for pair in batch]) if len(batch) > 1 else None
    new = None if old is None else tuned.stack([pair.tuned for pair in batch])
    if old is not None and new is not None:
        dtypes = {*base.dtypes(batch[0].place.view), *(of_tuned := tuned.dtypes(batch[0].tuned))}
        change = _at_once(old, new, _computed_in(dtypes, computed))
        if "F64" not in dtypes and bool(torch.isfinite(change).all()):
            tuned_dtypes, narrow, moved = (
                frozenset(of_tuned),
                dtypes <= NARROW_DTYPES,
                change.flatten(1).any(1).tolist(),
            )
            sizes = torch.linalg.vector_norm(old, dim=(1, 2), dtype=torch.float64).square().tolist()
            parts = zip(
                batch, map(RowMatrix.of, change.unbind()), map(RowMatrix.of, new.unbind()), sizes, moved, strict=True
            )
            return [
                Difference(p, d, value, tuned_dtypes, narrow, size) if any_ else None
                for p, d, value, size, any_ in parts
            ]
    return [difference(pair, base, tuned, computed) for pair in batch]
