"""The table of the values of `--method`: the rules by which several adapters change one weight.

The arithmetic of each rule is in engine/fold.py, and a second time, for the proof, in proof/recompute.py.

In every rule a strength multiplies the change of its formula, F(W) − W, also where the library that trains the formula
has no strength (PEFT's OFT, BOFT, HRA, RoAd and (IA)³) or applies it elsewhere (LyCORIS's BOFT, in every stage).

PEFT 0.21.2 treats several adapters at once differently for each formula. It composes OFT, BOFT, HRA, RoAd and (IA)³ in
the order given, but OFT's forward pass uses the reverse order of its merge. Forward passes of HiRA and GLoRA add the
changes. DoRA adapters are composed with the norms of the unchanged weight, which is neither rule. If one adapter is
merged into the result of another, `compose` is the rule for all formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Method:
    """One value of `--method`."""

    name: str
    rule: str  # the formula of the new weight
    in_turn: bool  # whether a formula reads the weight that the adapters before it have changed


SUM: Final = "sum"
"""The default. Recipes do not record it, so that files made before there were other methods keep their bytes."""

METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Method(SUM, "W' = W + Σ sᵢ · (Fᵢ(W) − W): adapters commute", in_turn=False),
            Method("compose", "Wᵢ = Wᵢ₋₁ + sᵢ · (Fᵢ(Wᵢ₋₁) − Wᵢ₋₁), in the order given", in_turn=True),
        )
    }
)


@dataclass(frozen=True)
class Combination:
    """One rule by which several changes of one weight become one change, before they meet the base."""

    name: str
    rule: str
    linear: bool = False  # whether the result is Σ cᵢ τᵢ with numbers cᵢ, so that factors stay factors
    keeps: str = ""  # how each change is thinned out first: by magnitude, at random …
    elects: bool = False  # whether only entries with the sign of the sum are kept
    own: tuple[str, ...] = ()  # numbers that only this rule takes

    @property
    def takes(self) -> tuple[str, ...]:
        """The names of the numbers that the rule takes."""
        further = {"largest": (), "random": ("seed",), "ranked": ("epsilon", "seed"), "middle": ("gamma",)}
        thin = ("density", *further[self.keeps]) if self.keeps else ()
        return (*thin, *(("elect", "normalise") if self.elects else ()), *self.own)


COMBINATIONS: Final[Mapping[str, Combination]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Combination(SUM, "Σ sᵢτᵢ", linear=True),
            Combination("mean", "Σ sᵢτᵢ / Σ sᵢ", linear=True),
            Combination("ties", "the largest entries, of the elected sign", keeps="largest", elects=True),
            Combination("dare", "random entries, divided by density", keeps="random"),
            Combination("dare_ties", "dare, of the elected sign", keeps="random", elects=True),
            Combination("della", "random entries, large ones more often", keeps="ranked"),
            Combination("della_ties", "della, of the elected sign", keeps="ranked", elects=True),
            Combination("breadcrumbs", "neither the largest nor the smallest", keeps="middle"),
            Combination("breadcrumbs_ties", "breadcrumbs, of the elected sign", keeps="middle", elects=True),
            Combination("prune", "the largest entries", keeps="largest"),
            Combination("slerp", "on the arc between two", linear=True, own=("t",)),
            Combination("karcher", "the mean direction on the sphere, times the mean norm"),
            Combination("model_stock", "mean, scaled by the agreement of directions", linear=True),
            Combination("consensus", "entries on whose sign enough adapters agree", own=("agree",)),
        )
    }
)
"""The values of `--method` for `combine`. The arithmetic is in engine/combining.py."""

SAME_COMBINATION: Final = {"cat": SUM, "svd": SUM, "task_arithmetic": SUM, "linear": SUM, "magnitude_prune": "prune"}
"""Name in other programs → row of COMBINATIONS."""
