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
