"""Where the scale of a module goes whose tensors are copied: into α, or where no α can hold it into a factor.

LyCORIS reads LoKr of two whole factors at scale 1 whatever its α, but asks for one (lycoris/modules/lokr.py); PEFT
reads them at α / r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite, log2
from typing import Final

import torch
from torch import Tensor

from ..adapter_options import KEEP
from ..algorithms import ALGORITHMS
from ..disk.files import StoredTensor
from ..dtypes import FLOATS
from ..matching.patch import Patch
from ..text import Note
from .change import Evaluator, squares_between, whole_change
from .dialects import Dialect
from .groups import PlaceChange
from .rounding import squares_of_rows

IN_A_FACTOR: Final = Note(
    "the scale of some modules is in one of their factors: their algorithm has no other place for it"
)
ALPHA_TOLERANCE: Final = 1e-9
"""The share of a change by which two ways to compute it in fp64 may differ."""


@dataclass(frozen=True)
class Scales:
    """The scales of modules as a dialect stores them."""

    evaluator: Evaluator
    to: Dialect

    def alpha(self, share: PlaceChange) -> Mapping[str, Tensor] | None:
        """Return the α that gives a copy the scale of the original, {} where it needs none; None where no α can."""
        patch = share.patch
        alpha, unchanged = self.unchanged(patch)
        if "scale" not in patch.numbers:
            return unchanged if share.strength == 1 else None
        scale = patch.numbers["scale"] * share.strength
        if _scale(patch, alpha) == scale:
            return unchanged
        alpha_of_scale = _alpha_of(patch, scale)
        return None if alpha_of_scale is None or not self.strength_in(share) else self._named(alpha_of_scale)

    def unchanged(self, patch: Patch) -> tuple[float | None, dict[str, Tensor]]:
        """Return the α of a module, and the tensor that keeps it. Where none is stored, a dialect with α gets the one
        that means the same: LyCORIS loads nothing without one."""
        info = patch.module.shared.get("alpha")
        if info is not None:
            alpha = float(self.evaluator.cache.fetch(info).float())
            rows, limit = patch.view.shape[0], patch.numbers.get("limit", inf)
            if self.to.name != KEEP and isfinite(limit) and limit != alpha * rows:
                alpha = limit / rows  # other names, with which α times the number of outputs is the limit
            return alpha, self._named(alpha)
        if self.to.name == KEEP or not self.to.alpha or "scale" not in patch.numbers:
            return None, {}
        alpha = _alpha_of(patch, _scale(patch, None)) or 1.0
        return alpha, self._named(alpha)

    def strength_in(self, share: PlaceChange) -> bool:
        """Return whether the formula at a scale that holds the strength gives the change times the strength."""
        patch, strength = share.patch, share.strength
        if strength == 1:
            return True
        scaled = replace(patch, numbers={**patch.numbers, "scale": patch.numbers["scale"] * strength})
        scaled_change, change = whole_change(scaled, self.evaluator), whole_change(patch, self.evaluator)
        return squares_between(scaled_change, change, strength) <= ALPHA_TOLERANCE**2 * strength**2 * squares_of_rows(
            change
        )

    def _named(self, alpha: float) -> dict[str, Tensor]:
        return {self.to.endings.get("alpha", ".alpha"): torch.tensor(alpha, dtype=torch.float32)}


def _scale(patch: Patch, alpha: float | None) -> float:
    """Return the scale of a module that has this α."""
    return float(ALGORITHMS[patch.algorithm].scalars_from(alpha, patch.shapes, patch.view.shape)["scale"])


def _alpha_of(patch: Patch, scale: float) -> float | None:
    """Return the α of a scale; None where no α gives it."""
    once, two = _scale(patch, 1.0), _scale(patch, 2.0)
    power = log2(two / once) if two != once else 0.0
    if not power or (scale / once <= 0 and power != 1):
        return None
    return scale / once if power == 1 else (scale / once) ** (1 / power)


@dataclass(frozen=True)
class Moved:
    """The slot whose tensor holds the scale, and what it is multiplied by; ‖Δ‖² and ‖Δ − Δ̂‖² of the stored tensors."""

    slot: str
    factor: float
    squares: float
    lost: float

    def times(self, value: Tensor) -> Tensor:
        """Return the tensor as it is written."""
        return (value.double() * self.factor).to(value.dtype)


def in_a_factor(
    share: PlaceChange, alpha: float | None, evaluator: Evaluator, dtype: torch.dtype | None
) -> Moved | None:
    """Return which factor can hold the scale of a share with its strength; None where the change is linear in none.

    `alpha`: that of the output. `dtype`: of the output; None: as stored.
    """
    patch = share.patch
    scale, read = patch.numbers.get("scale", 1.0) * share.strength, 1.0
    if "scale" in patch.numbers:
        read = _scale(patch, alpha)
        patch = replace(patch, numbers={**patch.numbers, "scale": read})
    strength, whole = share.strength, whole_change(share.patch, evaluator)
    squares = strength**2 * squares_of_rows(whole)
    for slot, info in patch.module.slots.items() if read and squares else ():
        moved = Moved(slot, scale / read, squares, 0.0)

        def exactly(other: StoredTensor, value: Tensor, moved: Moved = moved, info: StoredTensor = info) -> Tensor:
            return value.double() * moved.factor if other is info else value

        def stored(other: StoredTensor, value: Tensor, moved: Moved = moved, info: StoredTensor = info) -> Tensor:
            real = value.is_floating_point()
            rounded = value if dtype is None or not real else value.to(dtype)
            return (moved.times(rounded) if other is info else rounded).to(value.dtype)

        def off(alter: Callable[[StoredTensor, Tensor], Tensor], patch: Patch = patch) -> float:
            return squares_between(whole_change(patch, evaluator.altered(alter)), whole, strength)

        if info.dtype in FLOATS and off(exactly) <= ALPHA_TOLERANCE**2 * squares:
            return replace(moved, lost=off(stored))
    return None
