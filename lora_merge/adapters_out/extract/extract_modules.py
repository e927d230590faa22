"""Differences of two checkpoints, weight by weight, formed by rows where a weight is large, with the rounding errors of
stored values that they hold in addition to what was trained; and the modules that they become. On a device,
parameters of one shape are decomposed together.

The nearest Kronecker product: Van Loan and Pitsianis 1993. With Δ[o₁o₂, i₁i₂k] rearranged to [o₁i₁, o₂i₂k], w1 ⊗ w2
becomes the outer product of both factors' values, so the leading singular triple gives the nearest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt, prod
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ...algorithms.lokr import LOKR
from ...disk.reader import Reader
from ...dtypes import ITEM_BYTES, StoredTensor
from ...engine.row_matrix import RowMatrix
from ...engine.tensor_moves import FILE_DTYPES, finite, pieces
from ...engine.tensors import as_bytes, stored_values, view_bytes, weight_values
from ...errors import FitError, InputError, beyond_fp64
from ...files.checkpoint import Index
from ...models.experts import is_stack
from ...models.part_factors import or_leave_out
from ...models.tied_weights import TiedPair
from ...models.weights import RowSlice, Weight, WeightView
from ...text import Note
from ..delta import (
    Delta,
    Slots,
    Storage,
    expect_finite,
    rounded_change,
    rounded_value,
    spectra,
    stored_module,
    tensor_of,
)
from ..dialects import COPIED_ENDINGS, Dialect
from ..factors import Cut, Triples, decomposing, rounded
from ..form import NO_FACTORS_OF_STACKS, Form, form_of_difference, vector_ending
from ..groups import OutputModule, Place
from ..job import AUTO, ERROR, FACTORS, IN_FULL, SKIP, WHOLE, AdapterJob
from ..matrix_svd import of_dense, of_stack
from ..module_tensors import Layer, StoredModule
from ..peft.completion import as_table
from ..peft.config import TABLE_NAMES, is_table
from ..rank_rules import COUNT, EXACT, NOISE, LayerSpectrum, Rule, choose
from ..values import ZERO_TOTALS, Totals, squares_of_rows, totals_of
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

SAMPLED_VALUES: Final = 2**16
"""The most values of a weight by which its rounding errors are estimated."""


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


READ_ONCE_VALUES: Final = 2**24
"""Values up to which a weight is read once; those of a larger one are read by rows each time they are looked at."""


@dataclass(frozen=True)
class Side:
    """One checkpoint: reads rows of its weights, from any thread."""

    index: Index
    reader: Reader

    def rows(self, view: WeightView) -> Tensor:
        """Return [rows, cols] of a view in the dtype that is stored, decoded where values are quantised."""
        pieces = [self._piece(piece) for piece in view.row_slices]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def by_rows(self, view: WeightView) -> RowMatrix:
        """Return the same by rows; those of a large weight are read when they are asked for."""
        (piece, *others) = view.row_slices
        plain = not others and not piece.transposed and piece.key not in self.index.packed
        if piece.size <= READ_ONCE_VALUES or not plain:
            return RowMatrix.of(self.rows(view))

        def read(rows: slice) -> Tensor:
            return self._piece(piece._replace(start=piece.start + rows.start, stop=piece.start + rows.stop))

        return RowMatrix((piece.rows, piece.cols), read)

    def _piece(self, piece: RowSlice) -> Tensor:
        weight = self.weight(piece.key)
        if weight.packed is None:
            count = (piece.stop - piece.start) * piece.cols
            rows = stored_values(weight, piece.start * piece.cols, count, self._read).reshape(-1, piece.cols)
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
        """Return the dtypes of the rows of a view; "" for values that are not stored plainly."""
        return {"" if p.key in self.index.packed else self.index.tensors[p.key].dtype for p in view.row_slices}


@dataclass(frozen=True)
class Difference:
    """Δ of one parameter, [rows, cols] in fp32 or fp64."""

    pair: Pair
    change: RowMatrix
    value: RowMatrix  # of the tuned weight, in its own dtype
    dtypes: frozenset[str]  # of the tuned weight, "" for quantised values
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
        """√(v · values) / ‖Δ‖, with v of some of the values; None where it is not known."""
        if not self.narrow or self.pair.fresh:
            return None
        step, cols = -(-self.value.numel() // SAMPLED_VALUES), self.value.shape[1]
        some = [block.reshape(-1)[-rows.start * cols % step :: step] for rows, block in self.value.blocks(owned=False)]
        mean = mean_square(RowMatrix.of(torch.cat(some)[:, None]), self.dtypes)
        return None if mean is None else math.sqrt(mean * self.change.numel() / self.scanned[0].squares)


def difference(pair: Pair, base: Side, tuned: Side, computed: str | None = None) -> Difference | None:
    """Return tuned − base in the dtype that was asked for; None where both are equal. InputError for NaN or infinite
    values."""
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
    """Return what `difference` returns for each of several parameters of one shape; plain values are subtracted at
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


ChooseRank = Callable[[list[float], float], int]


def factored(size: int, factor: int) -> tuple[int, int]:
    """Return the two factors of a size, the smaller first, as LyCORIS chooses them (`factorization`): `factor` and the
    rest if it divides the size, else the largest divisor up to it and up to √size; -1: up to √size alone."""
    if factor > 0 and size % factor == 0:
        return min(factor, size // factor), max(factor, size // factor)
    most = isqrt(size) if factor < 0 else min(isqrt(size), factor)
    small = next(n for n in range(most, 0, -1) if size % n == 0)
    return small, size // small


def kronecker(
    change: RowMatrix, shape: tuple[int, ...], factor: int, dtype: torch.dtype, choose: ChooseRank
) -> tuple[Slots, Layer]:
    """Return the stored tensors of the nearest product, by slot, and its facts.

    Parameters:
        change: Δ [out, cols].
        shape: The shape of the weight.
        factor: As `factored`.
        dtype: Of the stored tensors.
        choose: Gives the rank of w2 for its singular values and the sum of their squares; a rank below half of the
            longer side of w2 stores it as a product.
    """
    (o1, o2), (i1, i2) = factored(shape[0], factor), factored(shape[1], factor)
    kernel = prod(shape[2:])
    turned = _turned(change, (o1, o2), (i1, i2, kernel))
    squares = squares_of_rows(turned)
    left, right = map(torch.from_numpy, of_dense(turned, Rule(COUNT, 1), squares=squares).pair(1))
    w1, w2 = left.reshape(o1, i1).to(dtype), right.reshape(o2, i2 * kernel)
    triples = of_dense(RowMatrix.of(w2))
    rank = choose(triples.values.tolist(), triples.squares)
    tensors = {"w1": w1.contiguous()}
    if rank < max(o2, i2) / 2:
        up, down = (tensor_of(bits, dtype) for bits in rounded(*triples.pair(rank), FILE_DTYPES[dtype]))
        tensors |= {"w2_a": up, "w2_b": down}
        whole = up.double() @ down.double()
    else:
        rank = 0
        tensors["w2"] = w2.reshape(o2, i2, *shape[2:]).to(dtype).contiguous()
        whole = tensors["w2"].reshape(o2, -1).double()
    lost, column, line = 0.0, w1.double().reshape(-1, 1), whole.reshape(1, -1)
    for rows, block in turned.blocks():
        lost += float((block.double() - column[rows] @ line).square().sum())
    return tensors, Layer(LOKR.name, rank, 0, float(rank) if rank else None, squares, lost)


def _turned(change: RowMatrix, outs: tuple[int, int], ins: tuple[int, int, int]) -> RowMatrix:
    """Return Δ [o₁o₂, i₁i₂k] as [o₁i₁, o₂i₂k]."""
    (o1, o2), (i1, i2, kernel) = outs, ins
    turned = torch.empty(o1 * i1, o2 * i2 * kernel, dtype=change.read(slice(0, 0)).dtype)
    for n in range(o1):
        rows = change.read(slice(n * o2, (n + 1) * o2)).reshape(o2, i1, i2 * kernel)
        turned[n * i1 : (n + 1) * i1] = rows.permute(1, 0, 2).reshape(i1, -1)
    return RowMatrix.of(turned)


BYTES_ON_HOST: Final = 10
"""Bytes on the host for each number of a weight under way: Δ in fp32, both weights in 16 bits, bases of a search."""

BYTES_ON_DEVICE: Final = 16
"""Bytes on a device for each number of a Δ: fp32, its bases, and fp64 where one is searched again."""

PairBatch: TypeAlias = tuple[Pair, ...]


def batches(pairs: Sequence[Pair], room: int, bound: int) -> Iterator[PairBatch]:
    """Yield the pairs, matrices of one shape together, in the order of the first of each batch.

    Parameters:
        pairs: All pairs.
        room: Bytes of the device's memory that a batch may use; 0: each pair is alone.
        bound: Bytes of the host's memory that a batch may use.
    """
    open_batches: dict[tuple[int, ...], list[Pair]] = {}
    for pair in pairs:
        shape = pair.place.view.shape
        elements = prod(shape)
        count = min(room // BYTES_ON_DEVICE, bound // BYTES_ON_HOST) // max(elements, 1)
        if pair.place.vector or count < 2 or pair.fresh:
            yield (pair,)
            continue
        batch = open_batches.setdefault(shape, [])
        batch.append(pair)
        if len(batch) == count:
            yield tuple(open_batches.pop(shape))
    yield from map(tuple, open_batches.values())


def _expect_one_matrix(difference: Difference) -> None:
    """Raise FitError for weights of stacked experts, which can be left out with those of every other layer.

    A model that no table knows has them by the names by which they are recognised in a merge.
    """
    place, view = difference.pair.place, difference.pair.place.view
    if view.matrix[0] != view.shape[0] or (len(view.shape) == 3 and any(map(is_stack, place.keys))):
        raise FitError(NO_FACTORS_OF_STACKS, difference.pair.name, or_leave_out(IN_FULL, place.keys, alike=True))


def measured(module: StoredModule, difference: Difference) -> StoredModule:
    """Return the tensors of a parameter with the values of its change and of its weight, and the share that rounding
    errors have in the change, where it is known."""
    known = replace(
        module.layer, noise=difference.share_of_noise, effect=difference.scanned[0].effect, weight=difference.weight
    )
    return module._replace(layer=known)


@dataclass(frozen=True)
class Extractor:
    """Makes the modules of one extraction, in all threads."""

    job: AdapterJob
    to: Dialect
    storage: Storage
    sides: tuple[Side, Side]  # the base and the tuned checkpoint
    pairs: Mapping[int, Pair]  # identity of a place → the weights that are compared
    head: TiedPair | None = None  # the head that gets the factors or the value of the embeddings too
    skipped: set[int] = field(default_factory=set)
    """Identities of the places of changed vectors that `--others skip` leaves out."""
    notes: Sequence[Note] = ()

    def nbytes(self, group: Sequence[OutputModule]) -> int:
        """Return about how many bytes the differences of modules take, with both weights as they are stored."""
        return sum(prod(output.place.view.shape) for output in group) * BYTES_ON_HOST

    def spectra(self, group: Sequence[OutputModule]) -> list[LayerSpectrum]:
        """Return the singular values of the matrices that changed, for the rule `size`."""
        return [*spectra(self._deltas(group), self.storage.dtype.itemsize, self.storage.noise)]

    def _deltas(self, group: Sequence[OutputModule]) -> Iterator[tuple[str, Delta]]:
        """Yield label and difference of each matrix that changed."""
        for pair in (self.pairs[id(output.place)] for output in group):
            matrix = not (pair.place.vector or pair.fresh)
            changed = difference(pair, *self.sides, self.job.compute_dtype) if matrix else None
            if changed is not None:
                yield pair.name, Delta(None, None, changed.change, 0, known=changed.scanned[0])

    def modules(self, group: Sequence[OutputModule], ranks: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return what each module becomes, with its bytes in memory: () if it did not change or is not to be written,
        embeddings with the head that shares their weight. `ranks`: label → the rank that the rule `size` gave."""
        batch = [self.pairs[id(output.place)] for output in group]
        changed = differences(batch, *self.sides, self.job.compute_dtype)
        some = [c for c in changed if c is not None]
        with decomposing(batch[0].name):
            modules = iter(
                [self.tensors_of(c, ranks.get(c.pair.name)) for c in some]
                if ranks
                else self.tensors_of_batch(some, alone=len(batch) == 1)
            )
        return [() if c is None else self._stored(c, next(modules)) for c in changed]

    def _stored(self, difference: Difference, module: StoredModule | None) -> Sequence[StoredModule]:
        """Return a changed parameter as it is stored; () for a vector that is left out."""
        if module is None:
            self.skipped.add(id(difference.pair.place))
            return ()
        module = measured(module, difference)
        expect_finite(module.tensors.values(), difference.pair.name)
        return as_table(module, self.to, table=is_table(module.place)), *self._head(difference.pair, module)

    def _head(self, pair: Pair, module: StoredModule) -> Iterator[StoredModule]:
        """Yield the factors or the value of the embeddings once more for the head that shares their weight: PEFT adds
        each to one layer."""
        head, view = self.head, pair.before or pair.place.view
        if head is not None and (module.layer.rank or pair.fresh) and view.row_slices[0].key == head.info.name:
            yield module._replace(place=module.place._replace(module=head.head))

    def tensors_of_batch(self, differences: Sequence[Difference], *, alone: bool) -> list[StoredModule | None]:
        """Return the tensors of the changed parameters of a batch, all of one shape. `alone`: the batch is one pair."""
        triples = [None] * len(differences) if alone else self.stack_triples(differences)
        return [
            self.tensors_of(difference, triples=known) for difference, known in zip(differences, triples, strict=True)
        ]

    def stack_triples(self, differences: Sequence[Difference | None]) -> list[Triples | None]:
        """Return the singular triples of differences of one shape, which are decomposed at once; None for one that
        needs none."""
        differences = [f if f is not None and self._few_rows(f) is None else None for f in differences]
        some = [f for f in differences if f is not None]
        if not some or self.storage.algorithm not in (FACTORS, AUTO):
            return [None] * len(differences)
        rules = [self.rule(f).of_inputs(0) for f in some]
        squares = [f.scanned[0].squares for f in some]
        triples = iter(of_stack([f.change for f in some], rules, self.storage.noise, self.storage.at, squares))
        return [None if f is None else next(triples) for f in differences]

    def tensors_of(
        self, difference: Difference, rank: int | None = None, triples: Triples | None = None
    ) -> StoredModule | None:
        """Return the tensors of one parameter; None for a vector that `--others skip` leaves out.

        `rank`: what the rule `size` gave it. `triples`: its singular triples, where they are known. FitError where the
        dialect cannot hold it.
        """
        where = difference.pair.place
        form = self._form(difference.pair)
        if form.kind == "value":
            return rounded_value(where, difference.value, difference.change, self.storage.dtype)
        if form.kind == "vector":
            return self._vector(difference)
        if form.kind == "product":
            return self._product(difference, form.algorithm)
        tensors, layer = self._layer(where, difference, rank, triples)
        if layer.algorithm == WHOLE and "diff" not in self.to.endings:
            raise FitError("the format cannot store whole matrices", where.name,
                           "use `--algorithm lora`, or `--format kohya`")  # fmt: skip
        return self._spelled(where, {self.to.endings[slot]: value for slot, value in tensors.items()}, layer)

    def _form(self, pair: Pair) -> Form:
        return form_of_difference(self.job, self.to, pair.place, fresh=pair.fresh)

    def _spelled(self, where: Place, tensors: dict[str, Tensor], layer: Layer) -> StoredModule:
        """Return a module of tensors by their endings, with its α."""
        if layer.rank and self.to.alpha:
            tensors[".alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
        return stored_module(where, tensors, layer)

    def _product(self, difference: Difference, algorithm: str) -> StoredModule:
        """Return the nearest Kronecker product."""
        where, rule = difference.pair.place, self.rule(difference).of_inputs(0)
        if not self.to.copies:
            raise FitError(
                f"{self.to.name} cannot hold {algorithm}", where.name, "use `--format kohya`, lycoris or comfy"
            )
        _expect_one_matrix(difference)
        tensors, layer = kronecker(difference.change, where.view.shape, self.job.factor, self.storage.dtype,
                                   lambda values, squares: choose(rule, values, total=squares))  # fmt: skip
        endings = {slot: COPIED_ENDINGS[algorithm, where.parameter, slot] for slot in tensors}
        return self._spelled(where, {endings[slot]: value for slot, value in tensors.items()}, layer)

    @property
    def alpha(self) -> float | None:
        """α of every layer; None where each has its own."""
        return None if isinstance(self.job.alpha, str) or not self.to.alpha else float(self.job.alpha)

    def _layer(
        self, where: Place, difference: Difference, rank: int | None, triples: Triples | None
    ) -> tuple[Slots, Layer]:
        delta = Delta(None, None, difference.change, 0, known=difference.scanned[0])
        if self.storage.algorithm != WHOLE:
            _expect_one_matrix(difference)
        if (rows := self._few_rows(difference)) is not None:
            moved = difference.change.of_rows(rows).dense()
            ones = torch.zeros(where.view.matrix[0], len(rows), dtype=moved.dtype)
            ones[rows, torch.arange(len(rows))] = 1
            rows_alone = Delta(ones, moved, None, 0)
            return self.storage.layer(where, rows_alone, Cut(Rule(EXACT), None, self.alpha))
        rule = self.rule(difference)
        return self.storage.layer(where, delta, Cut(rule, rank, self.alpha), triples)

    def _few_rows(self, difference: Difference) -> Tensor | None:
        """Return the rows of a table of embeddings that changed, where there are at most twice as many as its rule
        gives ranks: then its factors are these rows and their places."""
        place = difference.pair.place
        factored = len(place.view.shape) == 2 and self.storage.algorithm in (FACTORS, AUTO)
        rule = self.rule(difference) if factored and TABLE_NAMES.search(place.module) else None
        if rule is None or rule.ceiling is None:
            return None
        rows = difference.scanned[1].nonzero().flatten()
        most = min(2 * rule.ceiling, rule.most or len(rows), *place.view.matrix)
        return rows if len(rows) <= most else None

    def rule(self, difference: Difference) -> Rule:
        """Return the rule of a layer; `noise` becomes the largest singular value that rounding errors have."""
        view = difference.pair.place.view
        rule = self._form(difference.pair).rule
        if rule.name != NOISE:
            return rule
        noise = difference.noise
        if noise is None:
            raise InputError("the rounding errors of quantised weights and of whole numbers are not known",
                             f"`--rank noise`: {difference.pair.name}",
                             "use `--rank 32` or `--rank energy:0.99`")  # fmt: skip
        out, cols = view.matrix
        return replace(rule, name="above", value=math.sqrt(noise) * (math.sqrt(out) + math.sqrt(cols)))

    def _vector(self, difference: Difference) -> StoredModule | None:
        """Return the change of a bias, a norm or another vector, as `--others` says."""
        where = difference.pair.place
        if self.job.others == SKIP:
            return None
        if self.job.others == ERROR:
            raise FitError(
                "a bias, norm or other vector changed, which has no factors",
                where.name,
                "write it with `--others diff`, or drop it with `--others skip`",
            )
        ending = vector_ending(where, self.to)
        if ending is None and self.to.whole and not where.bare:
            return rounded_value(where, difference.value, difference.change, self.storage.dtype)
        if ending is None:
            raise FitError(f"{self.to.name} cannot store biases and norms", where.name,
                           "drop them with `--others skip`, or use `--format kohya`")  # fmt: skip
        return rounded_change(where, ending, difference.change, self.storage.dtype)
