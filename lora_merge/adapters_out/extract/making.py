"""One weight of both checkpoints → its difference, and the stored tensors of that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ...algorithms.lokr import LOKR
from ...disk.files import StoredTensor
from ...disk.reader import Reader
from ...dtypes import ITEM_BYTES
from ...engine.placement import finite, odd, pieces
from ...engine.tensors import as_bytes, stored_numbers, view_bytes, weight_values
from ...errors import FitError, InputError
from ...files.checkpoint import Index
from ...models.weights import RowSlice, Weight, WeightView
from ..conversion.made import Made, value_made, vector_ending, whole_made
from ..dialects import COPIED
from ..job import AUTO, FACTORS, WHOLE
from ..joining.targets import Target
from ..layers import Cut, Layer, Storage, Wanted, beyond_fp64
from ..peft.complete import TABLE
from ..places import Place
from ..rank_rules import EXACT, NOISE, Rule, choose
from ..truncation.dense import of_stack, squares_of_matrix
from ..truncation.effect import effect_of_matrix
from ..truncation.tiny import factors_of
from ..truncation.triples import Triples
from .batches import tiny
from .kronecker import kronecker
from .pair import Pair
from .rounding import DIGITS, NARROW, SAMPLE, mean_square
from .task import ERROR, SKIP, Extraction

STACKED: Final = "the weights of stacked experts have no factors in these formats"


@dataclass(frozen=True)
class Side:
    """One checkpoint: reads rows of its weights, from any thread."""

    index: Index
    reader: Reader

    def rows(self, view: WeightView) -> Tensor:
        """Return [rows, cols] of a view in the dtype that is stored, decoded where numbers are quantised."""
        pieces = [self._piece(piece) for piece in view.row_slices]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece(self, piece: RowSlice) -> Tensor:
        weight = self.weight(piece.key)
        if weight.packed is None:
            found = stored_numbers(weight, piece.start * piece.cols, piece.size, self._read).reshape(-1, piece.cols)
        else:
            found = weight_values(weight, self._read).reshape(-1, piece.cols)[piece.start : piece.stop]
        return found.mT if piece.transposed else found

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
            plain = info.dtype == dtype and dtype in DIGITS and piece.key not in self.index.packed
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
    change: Tensor
    value: Tensor  # of the tuned weight, in its own dtype
    dtypes: frozenset[str]  # of the tuned weight, "" for quantised numbers
    narrow: bool  # whether both weights are stored in 16 bits
    weight: float  # ‖W‖² of the base's weight

    @property
    def noise(self) -> float | None:
        """v, the mean square of the tuned weight's rounding errors; None where it is not known."""
        return mean_square(self.value, self.dtypes)

    @property
    def share_of_noise(self) -> float | None:
        """√(v · numbers) / ‖Δ‖, with v of some of the numbers; None where it is not known."""
        if not self.narrow or self.pair.fresh:
            return None
        some = self.value.reshape(-1)[:: -(-self.value.numel() // SAMPLE)]
        mean = mean_square(some, self.dtypes)
        return None if mean is None else math.sqrt(mean * self.change.numel()) / float(self.change.norm())


def difference(pair: Pair, base: Side, tuned: Side, computed: str | None = None) -> Difference | None:
    """Return tuned − base in the dtype that was asked for; None where both are equal. InputError for NaN or infinite
    numbers."""
    there = pair.before if pair.fresh else pair.place.view
    dtypes = tuned.dtypes(pair.tuned) | (set() if there is None else base.dtypes(there))
    new = tuned.rows(pair.tuned)
    old = new[:0] if there is None else base.rows(there)
    if pair.fresh:
        old = _with_rows(old, len(new))
    elif len(dtypes) == 1 and torch.equal(as_bytes(old), as_bytes(new)):
        return None
    change = _subtracted(old, new, dtypes, computed)
    if odd(change) and not bool(torch.isfinite(change).all()):
        side, view = (tuned, pair.tuned) if bool(finite(old).all()) else (base, there or pair.tuned)
        raise InputError("a weight holds NaN or infinite values", f"{side.index.path}: {view.row_slices[0].key}",
                         "use another checkpoint of the training, or leave it out: --exclude re:REGEX")  # fmt: skip
    moved = bool(change.any())
    if moved and "F64" in dtypes and not 0 < (squares := float(change.double().square().sum())) < math.inf:
        raise beyond_fp64(pair.name, "large" if squares else "small")
    own = frozenset(tuned.dtypes(pair.tuned))
    if not (pair.fresh or moved):
        return None
    return Difference(pair, change, new, own, dtypes <= NARROW, squares_of_matrix(old))


def _with_rows(old: Tensor, rows: int) -> Tensor:
    """Return a matrix with other rows: the first of its own, and zeros."""
    found = old.new_zeros(rows, old.shape[1])
    found[: len(old)] = old[:rows]
    return found


def _subtracted(old: Tensor, new: Tensor, dtypes: set[str], computed: str | None) -> Tensor:
    wide = computed == "fp64" or (computed is None and dtypes & {"F32", "F64"})
    change = torch.empty(old.shape, dtype=torch.float64 if wide else torch.float32)
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
        dtypes = {*base.dtypes(batch[0].place.view), *(own := tuned.dtypes(batch[0].tuned))}
        change = _subtracted(old, new, dtypes, computed)
        if "F64" not in dtypes and bool(torch.isfinite(change).all()):
            held, narrow, moved = frozenset(own), dtypes <= NARROW, change.flatten(1).any(1).tolist()
            sizes = torch.linalg.vector_norm(old, dim=(1, 2), dtype=torch.float64).square().tolist()
            found = zip(batch, change.unbind(), new.unbind(), sizes, moved, strict=True)
            return [Difference(p, d, value, held, narrow, size) if any_ else None for p, d, value, size, any_ in found]
    return [difference(pair, base, tuned, computed) for pair in batch]


def measured(made: Made | None, found: Difference) -> Made | None:
    """Return the tensors of a parameter with the numbers of its change and of its weight, and the share that rounding
    errors have in the change, where it is known."""
    if made is None:
        return None
    known = replace(made.layer, noise=found.share_of_noise, effect=effect_of_matrix(found.change),
                    weight=found.weight)  # fmt: skip
    return replace(made, layer=known)


@dataclass(frozen=True)
class Extractor:
    """Makes the tensors of one extraction."""

    task: Extraction
    storage: Storage
    endings: Mapping[str, str]

    def all_made(self, found: Sequence[Difference], *, alone: bool) -> list[Made | None]:
        """Return the tensors of the changed parameters of a batch, all of one shape. `alone`: the batch is one pair."""
        few = any(self._few_rows(one) is not None for one in found)
        if len(found) > 1 and tiny(found[0].pair) and self.storage.algorithm == FACTORS and not few:
            return self._tiny(found)
        triples = [None] * len(found) if alone else self.together(found)
        return [self.made(one, triples=known) for one, known in zip(found, triples, strict=True)]

    def _tiny(self, found: Sequence[Difference]) -> list[Made | None]:
        """Return the factors of tiny matrices of one shape."""
        shape, matrix = found[0].pair.place.view.shape, found[0].pair.place.view.matrix
        if matrix[0] != shape[0]:
            raise FitError(STACKED, found[0].pair.name, "use --algorithm full, or leave them out: --exclude re:REGEX")
        alpha = self.alpha

        def chosen(number: int, values: Sequence[float], squares: float) -> tuple[int, float]:
            rule = self.rule(found[number])
            rank = choose(rule, values, total=squares)
            return rank, Cut(rule, rank, alpha).alpha_of(rank)

        made: list[Made | None] = []
        stack = torch.stack([one.change for one in found])
        for one, own in zip(found, factors_of(stack, self.storage.noise, chosen, self.storage.dtype), strict=True):
            layer = self.storage.pair(shape, 0, (own.up, own.down), own.alpha, (own.squares, own.lost))
            made.append(self._spelled(one.pair.place, layer))
        return made

    def together(self, found: Sequence[Difference | None]) -> list[Triples | None]:
        """Return the singular triples of differences of one shape, which are decomposed at once; None for those that
        need none."""
        found = [f if f is not None and self._few_rows(f) is None else None for f in found]
        some = [f for f in found if f is not None]
        if not some or self.storage.algorithm not in (FACTORS, AUTO):
            return [None] * len(found)
        rules = [self.rule(f).of_inputs(0) for f in some]
        made = iter(of_stack([f.change for f in some], rules, self.storage.noise, self.storage.at))
        return [None if f is None else next(made) for f in found]

    def made(self, found: Difference, rank: int | None = None, triples: Triples | None = None) -> Made | None:
        """Return the tensors of one parameter; None for a vector that `--others skip` leaves out.

        `rank`: what the rule `size` gave it. `triples`: its singular triples, where they are known. FitError where the
        dialect cannot hold it.
        """
        where, shape = found.pair.place, found.pair.place.view.shape
        if found.pair.fresh:
            return value_made(where, found.value.reshape(shape), found.change, self.storage.dtype)
        if where.vector:
            return self._vector(found)
        if self.storage.algorithm == LOKR.name:
            return self._product(found)
        target = Target(where.name, where.parameter, shape, (), (), "")
        layer = self._layer(target, found, rank, triples)
        if layer.algorithm == WHOLE and "diff" not in self.endings:
            raise FitError("the format has no place for whole matrices", where.name, "use --algorithm lora")
        return self._spelled(where, layer)

    def _spelled(self, where: Place, layer: Layer) -> Made:
        tensors = {self.endings[slot]: value for slot, value in layer.tensors.items()}
        if layer.rank and self.alpha_stored:
            tensors[".alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
        return Made(where, tensors, layer)

    def _product(self, found: Difference) -> Made:
        """Return the nearest Kronecker product."""
        where, rule = found.pair.place, self.rule(found)
        assert self.task.to is not None, "it is chosen when the files are opened"
        if not self.task.to.copies:
            raise FitError(f"{self.task.to.name} cannot hold lokr", where.name, "use --format kohya, lycoris or comfy")
        if found.change.shape[0] != where.view.shape[0]:
            raise FitError(STACKED, where.name, "leave them out: --exclude re:REGEX")
        layer = kronecker(found.change, where.view.shape, self.task.factor, self.storage.dtype,
                          lambda values, squares: choose(rule, values, total=squares))  # fmt: skip
        tensors = {COPIED[LOKR.name, where.parameter, slot]: value for slot, value in layer.tensors.items()}
        if layer.rank:
            tensors[".alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
        return Made(where, tensors, layer)

    @property
    def alpha_stored(self) -> bool:
        """Whether the dialect stores α."""
        assert self.task.to is not None, "it is chosen when the files are opened"
        return self.task.to.alpha

    @property
    def alpha(self) -> float | None:
        """α of every layer; None where each has its own."""
        return None if isinstance(self.task.job.alpha, str) or not self.alpha_stored else float(self.task.job.alpha)

    def _layer(self, target: Target, found: Difference, rank: int | None, triples: Triples | None) -> Layer:
        wanted = Wanted(None, None, found.change, 0)
        if found.pair.place.view.matrix != target.matrix and self.storage.algorithm != WHOLE:
            raise FitError(STACKED, target.name,
                           "use --algorithm full, or leave them out: --exclude re:REGEX")  # fmt: skip
        if (rows := self._few_rows(found)) is not None:
            ones = torch.zeros(target.matrix[0], len(rows), dtype=found.change.dtype)
            ones[rows, torch.arange(len(rows))] = 1
            held = Wanted(ones, found.change[rows], None, 0)
            return self.storage.layer(target, held, Cut(Rule(EXACT), None, self.alpha))
        rule = self.rule(found)
        return self.storage.layer(target, wanted, Cut(rule, rank, self.alpha), triples)

    def _few_rows(self, found: Difference) -> Tensor | None:
        """Return the rows of a table of embeddings that changed, where there are at most twice as many as its rule
        gives ranks: then its factors are these rows and their places."""
        place = found.pair.place
        factored = len(place.view.shape) == 2 and self.storage.algorithm in (FACTORS, AUTO)
        rule = self.rule(found) if factored and TABLE.search(place.module) else None
        if rule is None or rule.ceiling is None:
            return None
        rows = found.change.any(1).nonzero().flatten()
        most = min(2 * rule.ceiling, rule.most or len(rows), *place.view.matrix)
        return rows if len(rows) <= most else None

    def rule(self, found: Difference) -> Rule:
        """Return the rule of a layer; `noise` becomes the largest singular value that rounding errors have."""
        view = found.pair.place.view
        rule = self.task.job.rules.of_layer(found.pair.name, kernel=found.pair.place.kernel)
        if rule.name == EXACT:
            return replace(rule, name="energy", value=1.0)
        if rule.name != NOISE:
            return rule
        noise = found.noise
        if noise is None:
            raise InputError("the rounding errors of quantised weights and of whole numbers are not known",
                             f"--rank noise: {found.pair.name}", "use --rank 32 or --rank energy:0.99")  # fmt: skip
        out, cols = view.matrix
        return replace(rule, name="above", value=math.sqrt(noise) * (math.sqrt(out) + math.sqrt(cols)))

    def _vector(self, found: Difference) -> Made | None:
        """Return the change of a bias, a norm or another vector, as `--others` says."""
        where = found.pair.place
        if self.task.others == SKIP:
            return None
        if self.task.others == ERROR:
            raise FitError(
                "a bias, norm or other vector changed, which has no factors",
                where.name,
                "write it with --others diff, or drop it with --others skip",
            )
        assert self.task.to is not None, "it is chosen when the files are opened"
        shape = where.view.shape
        ending = vector_ending(where, self.task.to)
        if ending is None and self.task.to.whole and not where.bare:
            return value_made(where, found.value.reshape(shape), found.change, self.storage.dtype)
        if ending is None:
            raise FitError(f"{self.task.to.name} has no place for biases and norms", where.name,
                           "drop them with --others skip, or use --format kohya")  # fmt: skip
        return whole_made(where, ending, found.change.reshape(shape), self.storage.dtype)
