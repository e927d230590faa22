"""Combines several changes of one weight into one change, by the rows of COMBINATIONS.

Sources: TIES, Yadav et al. 2023, arXiv:2306.01708; DARE, Yu et al. 2023, arXiv:2311.03099; DELLA, Deep et al. 2024,
arXiv:2406.11617; Model Breadcrumbs, Davari and Belilovsky 2023, arXiv:2312.06795; Model Stock, Jang et al. 2024,
arXiv:2403.19522; Consensus TA, Wang et al. 2024, arXiv:2405.07813. All act on ΔW, never on factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Final

import torch
from torch import Tensor

from ..errors import UsageError
from ..files.codecs.draws import draws
from ..method_numbers import SMALLEST, Numbers
from ..methods import COMBINATIONS
from .placement import Placement, stage

STEPS: Final = 100
"""The most steps of the Karcher mean; it usually takes fewer than ten."""

DRAWN: Final = 2**20
"""How many random numbers are drawn at once."""

PARALLEL: Final = 0.9995
"""The cosine above which slerp is a straight line, as sin θ would divide by almost nothing."""


def coefficients(
    method: str, products: Sequence[Sequence[float]], strengths: Sequence[float], n: Numbers
) -> list[float]:
    """Return cᵢ with Δ = Σ cᵢτᵢ, for a linear method. `products[i][j]`: ⟨τᵢ, τⱼ⟩; strengths are not in them."""
    count = len(strengths)
    if method == "mean":
        if abs(total := sum(strengths)) < SMALLEST:
            raise UsageError("the strengths on one weight add up to 0", "--method mean", "use sum, or other strengths")
        own = [s / total for s in strengths]
    elif method == "slerp" and count == 2:
        own = _slerp(products, strengths, n.t or 0.0)
    elif method == "model_stock" and count > 1:
        stock = _stock(products)
        own = [stock * sum(strengths) / count / count] * count
    else:
        own = list(strengths)
    return [n.scale * c for c in own]


def _cosine(products: Sequence[Sequence[float]], i: int, j: int) -> float:
    size = math.sqrt(products[i][i]) * math.sqrt(products[j][j])
    return max(-1.0, min(1.0, products[i][j] / size)) if size > 0 else 0.0


def _slerp(products: Sequence[Sequence[float]], strengths: Sequence[float], t: float) -> list[float]:
    sign = math.copysign(1.0, strengths[0]) * math.copysign(1.0, strengths[1])
    cosine = _cosine(products, 0, 1) * sign
    if abs(cosine) > PARALLEL or 0.0 in (products[0][0], products[1][1]):
        return [(1 - t) * strengths[0], t * strengths[1]]
    angle = math.acos(cosine)
    sine = math.sin(angle)
    return [math.sin((1 - t) * angle) / sine * strengths[0], math.sin(t * angle) / sine * strengths[1]]


def _stock(products: Sequence[Sequence[float]]) -> float:
    """Return t = Nρ / (1 + (N−1)ρ) in [0, 1], ρ the mean cosine of all pairs."""
    count = len(products)
    pairs = list(combinations(range(count), 2))
    mean = sum(_cosine(products, i, j) for i, j in pairs) / len(pairs)
    below = 1 + (count - 1) * mean
    return max(0.0, min(1.0, count * mean / below)) if below > 0 else 0.0


def combined(  # noqa: PLR0913  # the method, its inputs and its numbers
    method: str,
    changes: Sequence[Tensor],
    strengths: Sequence[float],
    n: Numbers,
    seeds: Sequence[str],
    *,
    vector: bool = False,
) -> Tensor:
    """Return Δ of one weight from τᵢ [out, cols], one of each adapter that changes it.

    `seeds`: a text for each adapter from which its random numbers follow. `vector`: for biases and norms, which
    slerp and karcher add.
    """
    row = COMBINATIONS[method]
    if row.linear or (vector and method == "karcher") or (len(changes) == 1 and not row.keeps):
        if vector and method in ("slerp", "karcher"):
            weights = [n.scale * s for s in strengths]
        else:
            weights = coefficients(method, gram(changes), strengths, n)
        return sum((c * t for c, t in zip(weights, changes, strict=True)), torch.zeros_like(changes[0]))
    if method == "karcher":
        return n.scale * _karcher([s * t for s, t in zip(strengths, changes, strict=True)])
    if row.keeps:
        changes = [thinned(row.keeps, t, n, seed) for t, seed in zip(changes, seeds, strict=True)]
    scaled = torch.stack([s * t for s, t in zip(strengths, changes, strict=True)])
    if method == "consensus":
        return n.scale * _consensus(scaled, n.agree)
    return n.scale * (_elected(scaled, strengths, n) if row.elects else scaled.sum(0))


def gram(changes: Sequence[Tensor]) -> list[list[float]]:
    """Return ⟨τᵢ, τⱼ⟩ in fp64."""
    flat = [_wide(t).flatten() for t in changes]
    return [[float(a @ b) for b in flat] for a in flat]


def thinned(how: str, change: Tensor, n: Numbers, seed: str) -> Tensor:
    """Return a change with some of its entries set to 0, and for random choices the others scaled up."""
    count = change.numel()
    kept = math.floor(n.density * count)
    if how == "largest":
        return change * largest(change, kept)
    if how == "middle":
        top = math.floor(n.gamma * count)
        return change * (largest(change, min(count, top + kept)) & ~largest(change, top))
    found, draw = change.clone(), draws(n.seed)
    flat, chances = found.view(-1), None if how == "random" else _by_rank(change, n.density, n.epsilon).view(-1)
    for first in range(0, count, DRAWN):
        part = flat[first : first + DRAWN]
        drawn = _like(draw(seed, first, len(part)), part)
        chance = torch.full_like(part, n.density) if chances is None else chances[first : first + DRAWN]
        part.mul_(torch.where(drawn < chance, 1 / chance, torch.zeros_like(part)))
    return found


def largest(change: Tensor, count: int) -> Tensor:
    """Return whether each entry is one of the largest `count` in magnitude; of equal ones the earlier are."""
    if count <= 0 or count >= change.numel():
        return torch.full_like(change, count > 0, dtype=torch.bool)
    size = change.abs()
    least = size.view(-1).kthvalue(size.numel() - count + 1).values
    kept = size >= least
    surplus = int(kept.sum()) - count
    if surplus:
        equal = (size == least).view(-1).nonzero().view(-1)
        kept.view(-1)[equal[len(equal) - surplus :]] = False
    return kept


def _wide(tensor: Tensor) -> Tensor:
    """Return the tensor in fp64 on the host, where sums are made."""
    return stage([tensor], Placement(torch.device("cpu"), torch.float64))[0]


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return the tensor on the device and in the dtype of another one."""
    return stage([tensor], Placement(other.device, other.dtype))[0]


def _by_rank(change: Tensor, density: float, epsilon: float) -> Tensor:
    """Return the chance of each entry to be kept: within a row from density − ε for the smallest to density + ε."""
    ranks = change.abs().argsort(dim=-1, stable=True).argsort(dim=-1)
    width = max(change.shape[-1] - 1, 1)
    return density - epsilon + 2 * epsilon * _like(ranks, change) / width


def _elected(scaled: Tensor, strengths: Sequence[float], n: Numbers) -> Tensor:
    """Return the entries whose sign is elected: their sum, divided by how many they are, by their Σ|sᵢ|, or by 1."""
    votes = scaled if n.elect == "sum" else scaled.sign()
    agree = (scaled >= 0) == (votes.sum(0) >= 0)
    agree &= scaled != 0
    total = torch.where(agree, scaled, torch.zeros_like(scaled)).sum(0)
    if n.normalise == "none":
        return total
    weights = [1.0 if n.normalise == "count" else abs(s) for s in strengths]
    column = torch.tensor(weights, dtype=scaled.dtype, device=scaled.device).view(-1, 1, 1)
    divisor = torch.where(agree, column, torch.zeros_like(column)).sum(0)
    return torch.where(divisor > 0, total / divisor.clamp_min(1e-30), torch.zeros_like(total))


def _consensus(scaled: Tensor, agree: int | None) -> Tensor:
    """Return the sum where at least `agree` changes (default: all) have one sign, else 0."""
    wanted = min(len(scaled) if agree is None else agree, len(scaled))
    most = torch.maximum((scaled > 0).sum(0), (scaled < 0).sum(0))
    return torch.where(most >= wanted, scaled.sum(0), torch.zeros_like(scaled[0]))


def _karcher(changes: Sequence[Tensor]) -> Tensor:
    """Return the Karcher mean of the directions, times the mean of the norms; changes of zeros have no direction."""
    norms = [float(_wide(t).norm()) for t in changes]
    units = [_wide(t) / size for t, size in zip(changes, norms, strict=True) if size > 0]
    if not units:
        return torch.zeros_like(changes[0])
    mean = sum(units[1:], units[0])
    mean = mean / mean.norm() if float(mean.norm()) > 1e-12 else units[0]
    for _ in range(STEPS):
        tangent = torch.zeros_like(mean)
        for u in units:
            cosine = float((mean * u).sum().clamp(-1, 1))
            angle = math.acos(cosine)
            if angle > 1e-12:
                tangent += (u - cosine * mean) * (angle / math.sin(angle) if math.sin(angle) > 1e-12 else 0.0)
        tangent /= len(units)
        size = float(tangent.norm())
        if size < 1e-10:
            break
        mean = math.cos(size) * mean + math.sin(size) * tangent / size
    return _like(mean * (sum(norms) / len(norms)), changes[0])
