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
from ..methods import COMBINATIONS, SUM, UNDIRECTED
from .placement import Placement, stage

STEPS: Final = 100
"""The most steps of the Karcher mean; it usually takes fewer than ten."""

PART: Final = 2**20
"""The number of entries that are looked at together, where that needs further memory."""

SAMPLE: Final = 2**14
"""The number of sampled entries that tell about where the n-th largest one lies."""

OPPOSITE: Final = 1e-12
"""Directions whose sum has a smaller square cancel each other: the search for their mean begins at the first one."""

PARALLEL: Final = 0.9995
"""The cosine above which slerp is a straight line, as sin θ would divide by almost nothing."""


def coefficients(
    method: str, products: Sequence[Sequence[float]], strengths: Sequence[float], n: Numbers
) -> list[float]:
    """Return cᵢ with Δ = Σ cᵢτᵢ, for a method that gives such a sum. `products[i][j]`: ⟨τᵢ, τⱼ⟩, without strengths."""
    count = len(strengths)
    if method == "mean":
        if abs(total := sum(strengths)) < SMALLEST:
            raise UsageError("the strengths on one weight add up to 0", "--method mean", "use sum, or other strengths")
        own = [s / total for s in strengths]
    elif method == "slerp" and count == 2:
        own = _slerp(products, strengths, n.t or 0.0)
    elif method == "karcher":
        own = _karcher(products, strengths)
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
    """Return Δ of one weight from τᵢ [out, cols] in fp64, one of each adapter that changes it; they are overwritten.

    `seeds`: a text for each adapter from which its random numbers follow. `vector`: for biases and norms, which
    slerp and karcher add, and which are one row for della.
    """
    row = COMBINATIONS[method]
    if row.linear or method == "karcher" or (len(changes) == 1 and not row.keeps):
        added = vector and method in UNDIRECTED
        weights = coefficients(SUM if added else method, () if added else gram(changes), strengths, n)
        for weight, t in zip(weights, changes, strict=True):
            t.mul_(weight)
        return total(changes)
    for t, strength, seed in zip(changes, strengths, seeds, strict=True):
        if row.keeps:
            thin(row.keeps, t.view(1, -1) if vector else t, n, seed)
        t.mul_(strength)
    found = changes[0]
    step = max(1, PART // max(found.shape[-1], 1))
    for first in range(0, len(found), step):
        scaled = torch.stack([t[first : first + step] for t in changes])
        if method == "consensus":
            made = _consensus(scaled, n.agree)
        else:
            made = _elected(scaled, strengths, n) if row.elects else scaled.sum(0)
        found[first : first + step] = n.scale * made
    return found


def total(changes: Sequence[Tensor]) -> Tensor:
    """Return the sum; the first of the changes is overwritten."""
    for t in changes[1:]:
        changes[0].add_(t)
    return changes[0]


def gram(changes: Sequence[Tensor]) -> list[list[float]]:
    """Return ⟨τᵢ, τⱼ⟩."""
    flat = [t.flatten() for t in changes]
    return [[float((a @ b).item()) for b in flat] for a in flat]


def thin(how: str, change: Tensor, n: Numbers, seed: str) -> None:
    """Set some entries of a change to 0, and for random choices scale the others up."""
    count, flat = change.numel(), change.view(-1)
    kept = math.floor(n.density * count)
    if how == "largest":
        change.mul_(largest(change, kept))
        return
    if how == "middle":
        top = math.floor(n.gamma * count)
        change.mul_(largest(change, min(count, top + kept)).logical_and_(largest(change, top).logical_not_()))
        return
    draw, chances = draws(n.seed), None if how == "random" else _by_rank(change, n.density, n.epsilon).view(-1)
    for first in range(0, count, PART):
        part = flat[first : first + PART]
        drawn = _like(draw(seed, first, len(part)), part)
        chance = torch.full_like(part, n.density) if chances is None else chances[first : first + PART]
        part.mul_(torch.where(drawn < chance, 1 / chance, torch.zeros_like(part)))


def largest(change: Tensor, count: int) -> Tensor:
    """Return whether each entry is one of the largest `count` in magnitude; of equal ones the earlier are."""
    if count <= 0 or count >= change.numel():
        return torch.full_like(change, count > 0, dtype=torch.bool)
    size = change.abs()
    least = nth(size.view(-1), size.numel() - count)
    kept = size >= least
    surplus = int(kept.sum().item()) - count
    if surplus:
        equal = (size == least).view(-1).nonzero().view(-1)
        kept.view(-1)[equal[len(equal) - surplus :]] = False
    return kept


def nth(values: Tensor, place: int) -> Tensor:
    """Return the number at a place of the numbers in rising order, from 0 on.

    A sample of the numbers tells two bounds; only numbers between them are sorted. Where the number is not between
    them, all are.
    """
    count = len(values)
    if count > 16 * SAMPLE:
        sample = values[:: count // SAMPLE].sort().values
        near, margin = place * len(sample) // count, len(sample) // 64
        low, high = sample[max(0, near - margin)], sample[min(len(sample) - 1, near + margin)]
        below = int((values < low).sum().item())
        inside = values[(values >= low) & (values <= high)]
        if below <= place < below + len(inside):
            return inside.kthvalue(place - below + 1).values
    return values.kthvalue(place + 1).values


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return the tensor on the device and in the dtype of another one."""
    return stage([tensor], Placement(other.device, other.dtype))[0]


def _by_rank(change: Tensor, density: float, epsilon: float) -> Tensor:
    """Return the chance of each entry to be kept: within a row from density − ε for the smallest to density + ε."""
    width = change.shape[-1]
    chance = torch.linspace(-epsilon, epsilon, width, dtype=change.dtype, device=change.device).add_(density)
    order = change.abs().argsort(dim=-1, stable=True)
    return torch.empty_like(change).scatter_(-1, order, chance.expand_as(change))


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


def _karcher(products: Sequence[Sequence[float]], strengths: Sequence[float]) -> list[float]:
    """Return cᵢ of the Karcher mean of the directions, times the mean of the norms; a change of zeros has no direction.

    The mean and every tangent at it are weighted sums of the changes, so the scalar products of all pairs are enough.
    """
    norms = [abs(s) * math.sqrt(products[i][i]) for i, s in enumerate(strengths)]
    there = [i for i, size in enumerate(norms) if size > 0]
    if not there:
        return [0.0] * len(strengths)
    scale = [strengths[i] / norms[i] for i in there]
    cosines = torch.tensor([[p * q * products[i][j] for j, q in zip(there, scale, strict=True)]
                            for i, p in zip(there, scale, strict=True)], dtype=torch.float64)  # fmt: skip
    at = torch.ones(len(there), dtype=torch.float64)
    if float(at @ cosines @ at) < OPPOSITE:
        at = torch.eye(len(there), dtype=torch.float64)[0]
    for _ in range(STEPS):
        at /= (at @ cosines @ at).clamp_min(0).sqrt()
        seen = (cosines @ at).clamp(-1, 1)
        angles = seen.acos()
        sines = angles.sin()
        turn = torch.where(
            (angles > 1e-12) & (sines > 1e-12), angles / sines.clamp_min(1e-12), torch.zeros_like(angles)
        )
        step = (turn - at * (turn @ seen)) / len(there)
        size = float((step @ cosines @ step).clamp_min(0).sqrt())
        if size < 1e-10:
            break
        at = math.cos(size) * at + math.sin(size) / size * step
    found = dict(zip(there, (at * (sum(norms) / len(norms))).tolist(), strict=True))
    return [found.get(i, 0.0) * s / norms[i] if i in found else 0.0 for i, s in enumerate(strengths)]
