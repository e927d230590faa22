"""Makes the layers of `combine` and `resize`: on each weight, changes are computed, combined and cut to a rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite, prod
from threading import local
from typing import Final

import numpy as np
import torch

from ..algorithms import ALGORITHMS
from ..dtypes import ITEM_BYTES
from ..engine.by_rows.rows import Rows
from ..engine.devices import places
from ..engine.placement import FILE_DTYPES, HOST, Placement
from ..methods import ADDED, COMBINATIONS, SUM, UNDIRECTED
from ..planning.combining import Combining
from ..progress import Counting
from ..proof.stored import Stored
from ..text import Note
from .changes import SINGLE, Evaluator, norms_of
from .job import FACTORS, WHOLE, AdapterJob
from .joining.targets import Target, is_plain
from .layers import Cut, Storage, Wanted, beyond_fp64, combine, expect_finite, shared_out
from .outcome.layer import Layer, without_bytes
from .outcome.planned import most_rank, ranks, weights_of
from .rank_rules import EXACT
from .side_by_side import side_by_side
from .sources import Sources
from .truncation.effect import LARGE, SMALL
from .truncation.factored import STORED_IN_16
from .written import Spelling

LOOKED_AT: Final = 2**14
"""The numbers of a weight of the base from which its norm is estimated, at least, in whole rows."""


@dataclass
class Maker:
    """Makes the layers of one job. `base`: reads weights of the base, if there is one."""

    job: AdapterJob
    sources: Sources
    evaluator: Callable[[Placement], Evaluator]
    dtype: torch.dtype
    base: Stored | None = None

    def __post_init__(self) -> None:
        self._here = local()
        self.at = places(self.job.inputs.device, "F32")[0]
        stored = [i.dtype for a in self.sources.adapters for m in a.modules for i in m.slots.values()]
        self.noise = STORED_IN_16 if stored and all(ITEM_BYTES.get(d, 4) <= 2 for d in stored) else 0.0
        self.combining = Combining(COMBINATIONS[self.job.method], self.job.numbers, self.sources.adapters)
        self.stores_alpha = Spelling.of(self.sources.adapters[0]).alpha
        self.notes: dict[Note, None] = {}
        self.weights = weights_of(self.job, self.sources, FILE_DTYPES[self.dtype])

    def layers(self, begin: Counting, keep: Callable[[str, Layer], object]) -> tuple[dict[str, Layer], list[str]]:
        """Return the layers by label, without their tensors, which `keep` is given; and the labels of those whose
        change is zero."""
        told = begin("make", self.weights)
        chosen = self._shared_out(told) if self.job.rules.together else {}
        found: dict[str, Layer] = {}
        zeros = []
        targets = self.sources.targets
        bound = self.job.inputs.max_memory // 2  # the rest: torch, and what waits
        made = side_by_side(targets, lambda target: self._made(target, chosen), self._nbytes, bound)
        for target, layers in zip(targets, made, strict=True):
            for part, layer in zip(target.stored, layers, strict=True):
                if layer is None:
                    zeros.append(part.label)
                else:
                    keep(part.label, layer)
                    found[part.label] = without_bytes(layer)
            told(prod(target.shape) * self.dtype.itemsize)
        return found, zeros

    def _nbytes(self, target: Target) -> int:
        """Return about how many bytes the change of a weight takes: factors several times, or matrices."""
        out, cols = target.matrix
        factored = COMBINATIONS[self.job.method].linear and None not in ranks(target) and not target.values
        return 8 * min(6 * most_rank(target) * (out + cols) if factored else sys.maxsize,
                       (len(target.uses) + 3) * out * cols)  # fmt: skip

    def _made(self, target: Target, ranks: Mapping[str, int]) -> list[Layer | None]:
        """Return the layers that a weight is stored as; None where the change is zero."""
        wanted, found = self._wanted(target), list[Layer | None]()
        for part in target.stored:
            if wanted is None:
                found.append(None)
                continue
            own = _of_part(wanted, part, target)
            layer = self._layer(part, own, ranks.get(part.label))
            if not isfinite(layer.squares):
                raise beyond_fp64(part.name)
            where = f"{self.job.output}: {part.label}"
            expect_finite(layer.tensors.values(), where, "write it with --dtype fp32 or bf16")
            zero = not layer.squares or (layer.algorithm == FACTORS and not layer.rank)
            found.append(None if zero else replace(
                layer, effect=layer.effect or own.effect, norms=wanted.norms[part.label], weight=self._weight(part),
            ))  # fmt: skip
        return found

    def _weight(self, part: Target) -> float | None:
        """Return ‖W‖² of the rows of the base's weight that a layer changes, from some of them that are spread evenly;
        None without a base, and of a weight that is not stored whole."""
        weight = self.sources.weights.get(part.key)
        if self.base is None or weight is None or weight.padded:
            return None
        _, cols = part.matrix
        shape = (prod(weight.shape) // max(cols, 1), cols)
        rows = np.concatenate([np.arange(*run) for run in part.runs or ((0, shape[0]),)])
        some = rows[:: max(1, len(rows) // max(1, -(-LOOKED_AT // max(cols, 1))))]
        values = self.base(weight.stored, shape, some)
        return float(np.vdot(values, values)) * len(rows) / max(len(some), 1)

    def _wanted(self, target: Target) -> Wanted | None:
        """Return Δ of a weight: in fp32 where that loses nothing that the output could hold, else in fp64. Factors
        that are decomposed are in fp64, however they were computed."""
        if self.job.compute_dtype == "fp32":
            found = self._combined(target, SINGLE)[0]
            return found and (found if found.whole is not None else replace(
                found, left=found.factors[0].double(), right=found.factors[1].double()))  # fmt: skip
        if self.job.compute_dtype is None and self._is_concatenated(target):
            found, columns = self._combined(target, SINGLE)
            if found is not None and found.factors[0].shape[1] == columns and SMALL < found.squares < LARGE:
                return found
        return self._combined(target, HOST)[0]

    def _is_concatenated(self, target: Target) -> bool:
        """Return whether a weight's factors are put side by side, scaled, and rounded to 16 bits."""
        job, rule = self.job, self.job.rules.of_layer(target.name, kernel=_has_kernel(target))
        plain = all(is_plain(u.patch) and not u.patch.reads_base for u in target.uses) and not target.values
        return (self.dtype.itemsize <= 2 and not target.vector and plain and rule.name == EXACT
                and job.algorithm != WHOLE and job.method in (SUM, "mean") and job.command != "resize")  # fmt: skip

    def _combined(self, target: Target, at: Placement) -> tuple[Wanted | None, int]:
        """Return Δ of a weight and the columns of its factors; each thread reads with evaluators of its own."""
        own = self._here.__dict__.setdefault("evaluators", {})
        if at not in own:
            own[at] = self.evaluator(at)
        changes = [c for c in own[at].changes(target) if c.strength]
        own[at].forget()
        uses = [[u for u in target.uses if u.patch.adapter == c.adapter] for c in changes]
        seeds = [self.combining.seed(c.adapter, own) for c, own in zip(changes, uses, strict=True)]
        if target.vector and self.job.method in UNDIRECTED:
            self.notes[Note(f"{self.job.method}: {ADDED}")] = None
        columns = sum(c.rank or 0 for c in changes)
        if not changes:
            return None, 0
        found = combine(self.job, target, changes, seeds)
        apart = at is SINGLE and self.job.method == SUM and found.left is not None and not target.parts
        if apart and found.factors[0].shape[1] == columns:  # the changes stand side by side
            return replace(found, norms={target.label: found.norms_of(changes)}, products=found.grams), columns
        return replace(found, norms=norms_of(changes, target)), columns

    def _layer(self, target: Target, wanted: Wanted, rank: int | None) -> Layer:
        rule = self.job.rules.of_layer(target.name, kernel=_has_kernel(target))
        if self.job.command == "resize" and rule.name == EXACT:
            rule = replace(rule, name="energy", value=1.0)
        storage = Storage(self.job.algorithm, self.dtype, self.noise, self.at)
        alpha = float(self.job.alpha) if self.stores_alpha and not isinstance(self.job.alpha, str) else None
        cut = Cut(rule, rank, alpha, self._scale(target))
        if target.turned:
            return storage.layer(replace(target, shape=target.shape[::-1], uses=()), _turned(wanted), cut)
        return storage.layer(target, wanted, cut)

    def _scale(self, target: Target) -> float:
        """Return α / rank of a layer, where α is not a number that the user gave."""
        if self.job.alpha == "rank" or len(target.uses) != 1 or not self.stores_alpha:
            return 1.0
        patch = target.uses[0].patch
        scale = patch.numbers.get("scale")
        plain = ALGORITHMS[patch.algorithm].rank is not None and {"up", "down"} <= patch.shapes.keys()
        return scale if plain and scale and scale > 0 and patch.magnitude is None else 1.0

    def _shared_out(self, told: Callable[[int], object]) -> dict[str, int]:
        """Return the rank of every layer for the rule `size`."""
        return shared_out(self.job.rules.linear, self._matrices(told), self.dtype.itemsize, self.noise)

    def _matrices(self, told: Callable[[int], object]) -> Iterator[tuple[str, Wanted]]:
        for target in self.sources.targets:
            wanted = self._wanted(target) if not target.vector else None
            if wanted is not None:
                yield from ((part.label, _of_part(wanted, part, target)) for part in target.stored)
            told(prod(target.shape) * self.dtype.itemsize)


def _turned(wanted: Wanted) -> Wanted:
    """Return the transposed Δ."""
    whole = None if wanted.whole is None else Rows.of(wanted.dense().mT.contiguous())
    left, right = (None if t is None else t.mT for t in (wanted.right, wanted.left))
    return Wanted(left, right, whole, wanted.before)


def _of_part(wanted: Wanted, part: Target, target: Target) -> Wanted:
    """Return the rows of a weight's change that a layer stores."""
    return wanted if part is target else wanted.part(part.runs)


def _has_kernel(target: Target) -> bool:
    return any(n > 1 for n in target.shape[2:])
