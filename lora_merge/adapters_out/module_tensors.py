"""One layer of an output: its tensors, and what is reported of it. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from ..disk.draft import Draft, Heap
from ..dtypes import Shape
from ..survival import TARGETS, survived
from ..text import Note
from .dialects import Dialect
from .groups import Place, Runs, Target
from .job import FACTORS
from .metadata import HeaderEntry
from .output_file import Entry
from .rank_rules import Rule, known_rank
from .values import Effect

AdapterNorms: TypeAlias = Mapping[int, float]
"""Adapter → the norm of its change of a layer at its strength, if it changes it."""


class _OfAdapter(Protocol):
    @property
    def adapter(self) -> int: ...

    @property
    def strength(self) -> float: ...


C = TypeVar("C", bound=_OfAdapter)


def layer_norms(
    target: Target, changes: Sequence[C], squares: Callable[[C, slice], float]
) -> dict[Runs, AdapterNorms]:  # fmt: skip
    """Return the norms of the changes of a weight by each adapter at its strength, in each layer. `squares`: returns
    ‖ΔW‖² of some rows."""
    norms = dict[Runs, AdapterNorms]()
    for layer in target.layers:
        rows = [slice(*run) for run in layer] or [slice(0, target.matrix[0])]
        of_adapters = ((c.adapter, abs(c.strength) * sqrt(sum(squares(c, some) for some in rows))) for c in changes)
        norms[layer] = {adapter: norm for adapter, norm in of_adapters if norm}
    return norms


ROUNDING_SHARE: Final = 1e-9
"""A share of ‖Δ‖² that is rounding alone."""


class Spectrum(NamedTuple):
    """The singular values of a layer's change that a run computed to choose its rank."""

    values: Sequence[float]  # the largest first; all of them, or the beginning
    squares: float  # ‖Δ‖²

    def left_out(self, rank: int) -> float:
        """Return the share of ‖Δ‖² that a rank leaves out."""
        return max(0.0, 1 - math.fsum(s * s for s in self.values[:rank]) / self.squares) if self.squares else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether no singular value is missing that is more than rounding."""
        return self.left_out(len(self.values)) < ROUNDING_SHARE

    @property
    def rank_for_energy(self) -> dict[str, int | None]:
        """Share of ‖Δ‖² → the least rank that holds it; None where more values are needed than were computed."""
        rules = {f"{share:.0%}": Rule("energy", share) for share in TARGETS}
        return {name: known_rank(rule, self.values, self.squares) for name, rule in rules.items()}


@dataclass(frozen=True)
class Layer:
    """The facts of one layer as it is stored, and what was lost."""

    algorithm: str
    rank: int
    before: int
    alpha: float | None
    squares: float  # ‖Δ‖²
    lost: float  # ‖Δ − Δ̂‖² of the stored tensors
    notes: tuple[Note, ...] = field(default_factory=tuple)
    noise: float | None = None  # the share of ‖Δ‖ that rounding errors of two checkpoints have, where it is known
    effect: Effect | None = None  # the values of Δ, where they were looked at
    norms: AdapterNorms = field(default_factory=dict)
    weight: float | None = None  # ‖W‖² of the base's weight, where it was read
    spectrum: Spectrum | None = None  # of a layer that was cut to its rank

    @property
    def residual(self) -> float:
        """‖Δ − Δ̂‖ / ‖Δ‖; 0 for a Δ of zeros, and for one that was not measured."""
        return sqrt(self.lost / self.squares) if self.squares else 0.0


def numbers_of(layer: Layer, adapters: int) -> dict[str, Any]:
    """Return a layer's facts for the report; `adapters`: the number of inputs."""
    share = layer.lost / layer.squares if layer.squares else 0.0
    facts: dict[str, Any]
    facts = {"algorithm": layer.algorithm, "rank": layer.rank, "rank_before": layer.before, "alpha": layer.alpha,
             "norm": sqrt(layer.squares), "energy": survived(1 - share, share),
             "residual": layer.residual}  # fmt: skip
    facts |= {} if layer.noise is None else {"noise": layer.noise}
    if (spectrum := layer.spectrum) is not None:
        facts |= {"left_out": spectrum.left_out(layer.rank), "rank_for_energy": spectrum.rank_for_energy}
    if layer.weight is not None:
        size = sqrt(layer.weight)
        facts |= {"weight": size, "ratio": facts["norm"] / size if size else None}
    if layer.norms:
        facts["adapters"] = [{"change": layer.norms[n]} if n in layer.norms else None for n in range(adapters)]
    return facts if layer.effect is None else {**facts, **layer.effect.facts}


def curve(layers: Iterable[Layer]) -> list[list[float]]:
    """Return pairs of a rank and the share of the change that survives if all layers that were cut have that rank, up
    to the largest rank for which the run computed enough singular values; [] if no layer was cut."""
    layers = [*layers]
    spectra = [layer.spectrum for layer in layers if layer.spectrum is not None and layer.spectrum.squares]
    if not spectra:
        return []
    squares = math.fsum(layer.squares for layer in layers)
    partial = [len(spectrum.values) for spectrum in spectra if not spectrum.is_complete]
    most = min(partial, default=max(len(spectrum.values) for spectrum in spectra))
    steps = {int(2**n * factor) for n in range(most.bit_length()) for factor in (1, 1.5)}
    ranks = sorted(rank for rank in {*steps, most} if 1 <= rank <= most)
    return [
        [rank, 1 - math.fsum(s.left_out(rank) * s.squares for s in spectra) / squares] for rank in ranks
    ]  # fmt: skip


def waiting_entry(entry: Entry, put: Heap | Draft) -> Entry:
    """Return a tensor that is in memory as it waits, or as it is in the draft."""
    assert isinstance(entry.data, memoryview), "it was just made"
    return entry._replace(data=put.put(entry.data))


class PlannedModule(NamedTuple):
    """The tensors of one module as far as headers show them."""

    place: Place
    tensors: Mapping[str, tuple[str, Shape]]  # ending → dtype and shape
    rank: int = 0  # 0 for a whole matrix

    def rows(self, to: Dialect) -> list[HeaderEntry]:
        """Return them as in the header of a file."""
        return [(to.key(self.place.prefix, self.place.module, end), *tensor) for end, tensor in self.tensors.items()]


class StoredModule(NamedTuple):
    """The stored tensors of one module by their ending, and the facts of its layer."""

    place: Place
    tensors: Mapping[str, Entry]
    layer: Layer
    copied: bool = False  # whether the tensors are those of the input: nothing is known of the size of its change

    @property
    def rank(self) -> int:
        """The rank of its factors; 0 for a whole matrix."""
        return self.layer.rank


def with_change(module: StoredModule, *, measured: bool) -> tuple[StoredModule, ...]:
    """Return a module, () if it changes nothing. `measured`: whether that is known of copies and whole matrices too."""
    factored = module.layer.algorithm == FACTORS and not module.copied
    zero = not module.layer.squares and (measured or factored)
    return () if zero or (factored and not module.layer.rank) else (module,)


def waiting(module: StoredModule, put: Heap | Draft) -> StoredModule:
    """Return a module with its tensors in the order of their endings, whose bytes wait or are in the draft."""
    return module._replace(
        tensors={ending: waiting_entry(module.tensors[ending], put) for ending in sorted(module.tensors)}
    )
