"""Layers of `combine`, `resize` and `average` whose changes are stored as factors, in numpy: summed, cut and rounded.

No torch: its import takes as long as all of this. A change of another kind, and a sum with more columns than its weight
has rank, are matrices (combine_modules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite

import numpy as np

from ..algorithms import ALGORITHMS
from ..disk.reader import Reader
from ..dtypes import ITEM_BYTES
from ..errors import beyond_dtype, beyond_fp64
from .decomposition.factors import STORED_IN_16, decomposing
from .decomposition.stored_factors import Cut, FactoredDelta, StoredFactors, exact, truncated
from .factored_sums import FactoredSums, read_numbers
from .form import Form
from .groups import Target
from .job import AUTO, FACTORS, WHOLE, AdapterJob
from .module_tensors import Layer, LayerTensors, Norms
from .output_file import Entry
from .rank_rules import EXACT, LayerSpectrum
from .rounding import all_finite, data_of
from .sources import Sources


def cut_of(job: AdapterJob, target: Target, form: Form, rank: int | None, *, stores_alpha: bool) -> Cut:
    """Return the cut of a layer. `rank`: what the rule `size` gave it."""
    alpha = float(job.alpha) if stores_alpha and not isinstance(job.alpha, str) else None
    scale: float | None = None
    if job.alpha != "rank" and len(target.uses) == 1 and stores_alpha:  # α / rank is kept, where α is not a number
        patch = target.uses[0].patch
        plain = ALGORITHMS[patch.algorithm].rank is not None and {"up", "down"} <= patch.shapes.keys()
        scale = patch.numbers.get("scale") if plain and patch.magnitude is None else None
    return Cut(form.rule, rank, alpha, scale if scale and scale > 0 else 1.0)


def noise_of(sources: Sources) -> float:
    """Return the share of the largest singular value below which others are noise of the inputs."""
    stored = [i.dtype for a in sources.adapters for m in a.modules for i in m.slots.values()]
    return STORED_IN_16 if stored and all(ITEM_BYTES.get(d, 4) <= 2 for d in stored) else 0.0


@dataclass
class FactoredMaker:
    """Makes the layers of one job from factors. `weight`: as for `GeneralMaker`."""

    job: AdapterJob
    sources: Sources
    forms: Mapping[str, Form]  # by the label of the layer
    reader: Reader
    dtype: str  # of the output, as files name it
    weight: Callable[[Target], float | None]

    def __post_init__(self) -> None:
        self.stores_alpha = self.sources.spelling.alpha
        self.noise, self.sums = noise_of(self.sources), FactoredSums(self.job, partial(read_numbers, self.reader))

    def layers_of(self, target: Target, ranks: Mapping[str, int]) -> list[LayerTensors | None] | None:
        """Return the layers that a weight is stored as, None for one whose change is zero; None for a weight whose
        change is computed as a matrix. `ranks`: see `shared_out`."""
        delta = self._delta(target)
        if delta is None:
            return None
        layers = list[LayerTensors | None]()
        for part in target.stored:
            some, form = delta.of(part), self.forms[part.label]
            factors = self._stored(part, some, form, ranks.get(part.label))
            if factors is None or (form.algorithm == AUTO and factors.rank * sum(some.matrix) >= np.prod(some.matrix)):
                return None
            if not isfinite(factors.squares):
                raise beyond_fp64(part.name)
            if not all_finite(factors.up, self.dtype) or not all_finite(factors.down, self.dtype):
                raise beyond_dtype(f"{self.job.output}: {part.label}")
            layers.append(self._layer(part, some, delta.norms[part.label], factors))
        return layers

    def spectra(self, target: Target) -> list[LayerSpectrum] | None:
        """Return the singular values of the layers that a weight is stored as, for the rule `size`; None as above."""
        delta, spectra = self._delta(target), list[LayerSpectrum]()
        if delta is None:
            return None
        for part in target.stored:
            some = delta.of(part)
            with decomposing(part.label):
                triples = some.triples(self.noise)
            if triples is None:
                return None
            if triples.squares > 0:
                spectra.append(
                    LayerSpectrum(part.label, triples.values.tolist(), sum(some.matrix) * ITEM_BYTES[self.dtype])
                )
        return spectra

    def _delta(self, target: Target) -> FactoredDelta | None:
        forms = [self.forms[part.label] for part in target.stored]
        if any(form.algorithm == WHOLE for form in forms):
            return None
        exactly = len(forms) == 1 and forms[0].rule.name == EXACT
        return self.sums.delta(target, self.dtype if exactly else None)

    def _stored(self, part: Target, delta: FactoredDelta, form: Form, rank: int | None) -> StoredFactors | None:
        """Return the stored factors of a layer; None where Δ has more columns than a rank that is cut."""
        delta = delta.turned if part.turned else delta
        cut = cut_of(self.job, part, form, rank, stores_alpha=self.stores_alpha)
        if form.rule.name == EXACT and rank is None:
            return exact(delta, cut, self.dtype)
        with decomposing(part.name):
            triples = delta.triples(self.noise)
        return None if triples is None else truncated(delta, triples, cut, self.dtype)

    def _layer(self, part: Target, delta: FactoredDelta, norms: Norms, factors: StoredFactors) -> LayerTensors | None:
        if not factors.squares or not factors.rank:
            return None
        shape = part.shape[::-1] if part.turned else part.shape
        facts = Layer({}, FACTORS, factors.rank, delta.before, factors.alpha, factors.squares, factors.lost,
                      effect=delta.effect, norms=norms, weight=self.weight(part),
                      spectrum=factors.spectrum)  # fmt: skip
        return LayerTensors(facts, {slot: Entry(slot, self.dtype, stored, data_of(bits))
                                    for slot, (bits, stored) in factors.of_shape(shape).items()})  # fmt: skip
