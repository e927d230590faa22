"""How several adapters meet on one weight: what `--method` may be. A table; no torch.

The arithmetic of each row is in engine/fold.py, and a second time, for the proof, in proof/recompute.py.

A strength multiplies the change of its formula, F(W) − W, in all of them, also where the library that trains the
formula has no strength (PEFT's OFT, BOFT, HRA, RoAd and (IA)³) or puts it elsewhere (LyCORIS's BOFT, into every stage).

What PEFT 0.21.2 does with several adapters at once depends on the formula. OFT, BOFT, HRA, RoAd and (IA)³ are composed
in the order given, but OFT's forward pass takes them the other way round than its merge does. Forward passes of HiRA
and GLoRA add differences. DoRA's are composed with the norms of the untouched weight, which is neither rule. One
adapter merged into the result of another is `compose` for all of them.
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
    rule: str  # the new weight, as a formula
    in_turn: bool  # whether a formula reads the weight as the adapters before it have left it


SUM: Final = "sum"
"""The default. Recipes say nothing of it, so that files made before there were others stay as they are."""

METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    {
        row.name: row
        for row in (
            Method(SUM, "W' = W + Σ sᵢ · (Fᵢ(W) − W): adapters commute", in_turn=False),
            Method("compose", "Wᵢ = Wᵢ₋₁ + sᵢ · (Fᵢ(Wᵢ₋₁) − Wᵢ₋₁), in the order given", in_turn=True),
        )
    }
)
