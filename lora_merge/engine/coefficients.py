"""The coefficients of methods that add changes: Δ = Σ cᵢτᵢ. No torch.

Sources: Model Stock, Jang et al. 2024, arXiv:2403.19522.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from ..errors import UsageError
from ..merge_methods import LEAST_DIVISOR, MEAN, SUM, MethodParameters

KARCHER_STEPS: Final = 100
"""The most steps of the Karcher mean; it usually takes fewer than ten."""

Products: TypeAlias = Callable[[], Sequence[Sequence[float]]]
"""Function that returns ⟨τᵢ, τⱼ⟩ of all pairs of changes, without strengths."""

OPPOSITE: Final = 1e-12
"""Directions whose sum has a smaller square cancel each other: the search for their mean begins at the first one."""

PARALLEL: Final = 0.9995
"""The cosine above which slerp is a straight line, as sin θ would divide by almost nothing."""


def coefficients(method: str, products: Products, strengths: Sequence[float], n: MethodParameters) -> list[float]:
    """Return cᵢ with Δ = Σ cᵢτᵢ, for a method that gives such a sum; `products` is called if they follow from them."""
    return [n.scale * c for c in COEFFICIENTS[method](products, strengths, n)]


def _strengths(_: Products, strengths: Sequence[float], __: MethodParameters) -> list[float]:
    return list(strengths)


def _mean(_: Products, strengths: Sequence[float], __: MethodParameters) -> list[float]:
    if abs(total := sum(strengths)) < LEAST_DIVISOR:
        raise UsageError("the strengths on one weight add up to 0", "`--method mean`", "use sum, or other strengths")
    return [s / total for s in strengths]


def _cosine(products: Sequence[Sequence[float]], i: int, j: int) -> float:
    size = math.sqrt(products[i][i]) * math.sqrt(products[j][j])
    return max(-1.0, min(1.0, products[i][j] / size)) if size > 0 else 0.0


def _slerp(between: Products, strengths: Sequence[float], n: MethodParameters) -> list[float]:
    if len(strengths) != 2:  # only one of the two changes this weight
        return list(strengths)
    products, t = between(), n.t or 0.0
    sign = math.copysign(1.0, strengths[0]) * math.copysign(1.0, strengths[1])
    cosine = _cosine(products, 0, 1) * sign
    if abs(cosine) > PARALLEL or 0.0 in (products[0][0], products[1][1]):
        return [(1 - t) * strengths[0], t * strengths[1]]
    angle = math.acos(cosine)
    sine = math.sin(angle)
    return [math.sin((1 - t) * angle) / sine * strengths[0], math.sin(t * angle) / sine * strengths[1]]


def _model_stock(between: Products, strengths: Sequence[float], _: MethodParameters) -> list[float]:
    """Return t · Σs / N² for each, with t = Nρ / (1 + (N−1)ρ) in [0, 1], ρ the mean cosine of all pairs."""
    count = len(strengths)
    if count == 1:
        return list(strengths)
    products, pairs = between(), list(combinations(range(count), 2))
    mean = sum(_cosine(products, i, j) for i, j in pairs) / len(pairs)
    below = 1 + (count - 1) * mean
    stock = max(0.0, min(1.0, count * mean / below)) if below > 0 else 0.0
    return [stock * sum(strengths) / count / count] * count


def _karcher(between: Products, strengths: Sequence[float], __: MethodParameters) -> list[float]:
    """Return cᵢ of the Karcher mean of the directions, times the mean of the norms; a change of zeros has no direction.

    The mean and every tangent at it are weighted sums of the changes, so the scalar products of all pairs are enough.
    """
    # Directions of the changes that are not 0, by their cosines.
    products = between()
    norms = [abs(s) * math.sqrt(products[i][i]) for i, s in enumerate(strengths)]
    nonzero = [i for i, size in enumerate(norms) if size > 0]
    if not nonzero:
        return [0.0] * len(strengths)
    scale = [strengths[i] / norms[i] for i in nonzero]
    cosines = np.array([[p * q * products[i][j] for j, q in zip(nonzero, scale, strict=True)]
                        for i, p in zip(nonzero, scale, strict=True)])  # fmt: skip
    # From their sum along the mean tangent, until the step is tiny.
    at = np.ones(len(nonzero))
    if float(at @ cosines @ at) < OPPOSITE:
        at = np.eye(len(nonzero))[0]
    for _ in range(KARCHER_STEPS):
        at /= np.sqrt(max(at @ cosines @ at, 0.0))
        cosines_at = np.clip(cosines @ at, -1, 1)
        angles = np.arccos(cosines_at)
        sines = np.sin(angles)
        turn = np.where((angles > 1e-12) & (sines > 1e-12), angles / np.maximum(sines, 1e-12), 0.0)
        step = (turn - at * (turn @ cosines_at)) / len(nonzero)
        size = math.sqrt(max(step @ cosines @ step, 0.0))
        if size < 1e-10:
            break
        at = math.cos(size) * at + math.sin(size) / size * step
    weights = dict(zip(nonzero, (at * (sum(norms) / len(norms))).tolist(), strict=True))
    return [weights.get(i, 0.0) * s / norms[i] if i in weights else 0.0 for i, s in enumerate(strengths)]


COEFFICIENTS: Final[Mapping[str, Callable[[Products, Sequence[float], MethodParameters], list[float]]]] = (
    MappingProxyType({SUM: _strengths, MEAN: _mean, "slerp": _slerp, "karcher": _karcher, "model_stock": _model_stock})
)
"""Row of COMBINATIONS that adds the changes, each times a number → the function that returns these numbers."""
