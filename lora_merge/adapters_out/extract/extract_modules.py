"""The difference of one weight → its stored tensors. On a device, parameters of one shape are decomposed together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ...algorithms.lokr import LOKR
from ...errors import FitError, InputError
from ...models.experts import is_stack
from ...models.part_factors import or_leave_out
from ...models.tied_weights import TiedPair
from ...text import Note
from ..combined_change import Delta, Storage, expect_finite, spectra
from ..copied_tensors import ModuleTensors, in_memory, rounded_change, rounded_value
from ..decomposition.factors import Triples, decomposing
from ..decomposition.matrix_svd import of_stack
from ..decomposition.stored_factors import Cut
from ..dialects import COPIED_ENDINGS, Dialect
from ..form import NO_FACTORS_OF_STACKS, Form, form_of_difference, vector_ending
from ..groups import Filled, Place, Target
from ..job import AUTO, ERROR, FACTORS, IN_FULL, SKIP, WHOLE, AdapterJob
from ..module_tensors import Layer, StoredModule
from ..peft.completion import as_table
from ..peft.config import TABLE_NAMES, is_table
from ..rank_rules import EXACT, NOISE, LayerSpectrum, Rule, choose
from .difference import Difference, Side, difference, differences
from .kronecker import kronecker
from .pairs import Pair

BYTES_ON_HOST: Final = 10
"""Bytes on the host for each number of a weight under way: Δ in fp32, both weights in 16 bits, bases of a search."""

BYTES_ON_DEVICE: Final = 16
"""Bytes on a device for each number of a Δ: fp32, its bases, and fp64 where one is searched again."""

Batch: TypeAlias = tuple[Pair, ...]


def batches(pairs: Sequence[Pair], room: int, bound: int) -> Iterator[Batch]:
    """Yield the pairs, matrices of one shape together, in the order of the first of each batch.

    Parameters:
        pairs: All pairs.
        room: Bytes of the device's memory that a batch may use; 0: each pair is alone.
        bound: Bytes of the host's memory that a batch may use.
    """
    open_batches: dict[tuple[int, ...], list[Pair]] = {}
    for pair in pairs:
        shape = pair.place.view.shape
        numbers = prod(shape)
        count = min(room // BYTES_ON_DEVICE, bound // BYTES_ON_HOST) // max(numbers, 1)
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


def measured(module: ModuleTensors, difference: Difference) -> ModuleTensors:
    """Return the tensors of a parameter with the numbers of its change and of its weight, and the share that rounding
    errors have in the change, where it is known."""
    known = replace(
        module.layer, noise=difference.share_of_noise, effect=difference.scanned[0].effect, weight=difference.weight
    )
    return replace(module, layer=known)


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

    def nbytes(self, group: Sequence[Filled]) -> int:
        """Return about how many bytes the differences of modules take, with both weights as they are stored."""
        return sum(prod(filled.place.view.shape) for filled in group) * BYTES_ON_HOST

    def spectra(self, group: Sequence[Filled]) -> list[LayerSpectrum]:
        """Return the singular values of the matrices that changed, for the rule `size`."""
        return [*spectra(self._deltas(group), self.storage.dtype.itemsize, self.storage.noise)]

    def _deltas(self, group: Sequence[Filled]) -> Iterator[tuple[str, Delta]]:
        """Yield label and difference of each matrix that changed."""
        for pair in (self.pairs[id(filled.place)] for filled in group):
            matrix = not (pair.place.vector or pair.fresh)
            changed = difference(pair, *self.sides, self.job.compute_dtype) if matrix else None
            if changed is not None:
                yield pair.name, Delta(None, None, changed.change, 0, known=changed.scanned[0])

    def modules(self, group: Sequence[Filled], ranks: Mapping[str, int]) -> list[Sequence[StoredModule]]:
        """Return what each module becomes, with its bytes in memory: () if it did not change or is not to be written,
        embeddings with the head that shares their weight. `ranks`: label → the rank that the rule `size` gave."""
        batch = [self.pairs[id(filled.place)] for filled in group]
        changed = differences(batch, *self.sides, self.job.compute_dtype)
        some = [c for c in changed if c is not None]
        with decomposing(batch[0].name):
            modules = iter(
                [self.tensors_of(c, ranks.get(c.pair.name)) for c in some]
                if ranks
                else self.tensors_of_batch(some, alone=len(batch) == 1)
            )
        return [() if c is None else self._stored(c, next(modules)) for c in changed]

    def _stored(self, difference: Difference, module: ModuleTensors | None) -> Sequence[StoredModule]:
        """Return a changed parameter as it is stored; () for a vector that is left out."""
        if module is None:
            self.skipped.add(id(difference.pair.place))
            return ()
        module = measured(module, difference)
        expect_finite(module.tensors.values(), difference.pair.name)
        stored = as_table(in_memory(module), self.to, table=is_table(module.place))
        return stored, *map(in_memory, self._head(difference.pair, module))

    def _head(self, pair: Pair, module: ModuleTensors) -> Iterator[ModuleTensors]:
        """Yield the factors or the value of the embeddings once more for the head that shares their weight: PEFT adds
        each to one layer."""
        head, view = self.head, pair.before or pair.place.view
        if head is not None and (module.layer.rank or pair.fresh) and view.row_slices[0].key == head.info.name:
            yield replace(module, place=module.place._replace(module=head.head))

    def tensors_of_batch(self, differences: Sequence[Difference], *, alone: bool) -> list[ModuleTensors | None]:
        """Return the tensors of the changed parameters of a batch, all of one shape. `alone`: the batch is one pair."""
        triples = [None] * len(differences) if alone else self.together(differences)
        return [
            self.tensors_of(difference, triples=known) for difference, known in zip(differences, triples, strict=True)
        ]

    def together(self, differences: Sequence[Difference | None]) -> list[Triples | None]:
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
    ) -> ModuleTensors | None:
        """Return the tensors of one parameter; None for a vector that `--others skip` leaves out.

        `rank`: what the rule `size` gave it. `triples`: its singular triples, where they are known. FitError where the
        dialect cannot hold it.
        """
        where, shape = difference.pair.place, difference.pair.place.view.shape
        form = self._form(difference.pair)
        if form.kind == "value":
            return rounded_value(where, difference.value, difference.change, self.storage.dtype)
        if form.kind == "vector":
            return self._vector(difference)
        if self.storage.algorithm == LOKR.name:
            return self._product(difference)
        target = Target(where.name, where.parameter, shape, (), (), "")
        layer = self._layer(target, difference, rank, triples)
        if layer.algorithm == WHOLE and "diff" not in self.to.endings:
            raise FitError("the format cannot store whole matrices", where.name,
                           "use --algorithm lora, or --format kohya")  # fmt: skip
        return self._spelled(where, layer)

    def _form(self, pair: Pair) -> Form:
        return form_of_difference(self.job, self.to, pair.place, fresh=pair.fresh)

    def _spelled(self, where: Place, layer: Layer) -> ModuleTensors:
        tensors = {self.to.endings[slot]: value for slot, value in layer.tensors.items()}
        if layer.rank and self.to.alpha:
            tensors[".alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
        return ModuleTensors(where, tensors, layer)

    def _product(self, difference: Difference) -> ModuleTensors:
        """Return the nearest Kronecker product."""
        where, rule = difference.pair.place, self.rule(difference).of_inputs(0)
        if not self.to.copies:
            raise FitError(f"{self.to.name} cannot hold lokr", where.name, "use --format kohya, lycoris or comfy")
        _expect_one_matrix(difference)
        layer = kronecker(difference.change, where.view.shape, self.job.factor, self.storage.dtype,
                          lambda values, squares: choose(rule, values, total=squares))  # fmt: skip
        tensors = {COPIED_ENDINGS[LOKR.name, where.parameter, slot]: value for slot, value in layer.tensors.items()}
        if layer.rank:
            tensors[".alpha"] = torch.tensor(layer.alpha, dtype=torch.float32)
        return ModuleTensors(where, tensors, layer)

    @property
    def alpha(self) -> float | None:
        """α of every layer; None where each has its own."""
        return None if isinstance(self.job.alpha, str) or not self.to.alpha else float(self.job.alpha)

    def _layer(self, target: Target, difference: Difference, rank: int | None, triples: Triples | None) -> Layer:
        delta = Delta(None, None, difference.change, 0, known=difference.scanned[0])
        if self.storage.algorithm != WHOLE:
            _expect_one_matrix(difference)
        if (rows := self._few_rows(difference)) is not None:
            moved = difference.change.of_rows(rows).dense()
            ones = torch.zeros(target.matrix[0], len(rows), dtype=moved.dtype)
            ones[rows, torch.arange(len(rows))] = 1
            rows_alone = Delta(ones, moved, None, 0)
            return self.storage.layer(target, rows_alone, Cut(Rule(EXACT), None, self.alpha))
        rule = self.rule(difference)
        return self.storage.layer(target, delta, Cut(rule, rank, self.alpha), triples)

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
                             f"--rank noise: {difference.pair.name}",
                             "use --rank 32 or --rank energy:0.99")  # fmt: skip
        out, cols = view.matrix
        return replace(rule, name="above", value=math.sqrt(noise) * (math.sqrt(out) + math.sqrt(cols)))

    def _vector(self, difference: Difference) -> ModuleTensors | None:
        """Return the change of a bias, a norm or another vector, as `--others` says."""
        where = difference.pair.place
        if self.job.others == SKIP:
            return None
        if self.job.others == ERROR:
            raise FitError(
                "a bias, norm or other vector changed, which has no factors",
                where.name,
                "write it with --others diff, or drop it with --others skip",
            )
        ending = vector_ending(where, self.to)
        if ending is None and self.to.whole and not where.bare:
            return rounded_value(where, difference.value, difference.change, self.storage.dtype)
        if ending is None:
            raise FitError(f"{self.to.name} cannot store biases and norms", where.name,
                           "drop them with --others skip, or use --format kohya")  # fmt: skip
        return rounded_change(where, ending, difference.change, self.storage.dtype)
