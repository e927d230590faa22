"""Combines several changes of one weight into one change, by the rows of COMBINATIONS.

Sources: TIES, Yadav et al. 2023, arXiv:2306.01708; DARE, Yu et al. 2023, arXiv:2311.03099; DELLA, Deep et al. 2024,
arXiv:2406.11617; Model Breadcrumbs, Davari and Belilovsky 2023, arXiv:2312.06795; Consensus TA, Wang et al. 2024,
arXiv:2405.07813. All act on ΔW, never on factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..files.encodings.stochastic_rounding import draws
from ..merge_methods import COMBINATIONS, SUM, MethodParameters
from .coefficients import coefficients
from .row_matrix import RowMatrix, largest
from .tensor_moves import Placement, stage


def combined(  # noqa: PLR0913  # the method, its inputs and its numbers
    method: str,
    changes: Sequence[Tensor],
    strengths: Sequence[float],
    n: MethodParameters,
    seeds: Sequence[str],
    *,
    vector: bool = False,
) -> Tensor:
    """Return Δ as `combined_rows` does, of changes that are in memory; the first one is overwritten."""
    result = changes[0]
    combination = combined_rows(method, [RowMatrix.of(t) for t in changes], strengths, n, seeds, vector=vector)
    if result.device.type != "cpu":
        return result.copy_(combination.read(slice(0, result.shape[0])))
    for rows, block in combination.blocks():
        result[rows] = block
    return result


def combined_rows(  # noqa: PLR0913  # the method, its inputs and its numbers
    method: str,
    changes: Sequence[RowMatrix],
    strengths: Sequence[float],
    n: MethodParameters,
    seeds: Sequence[str],
    *,
    vector: bool = False,
) -> RowMatrix:
    """Return Δ of one weight from τᵢ [out, cols] in fp64, one of each adapter that changes it.

    `seeds`: a text for each adapter from which its random numbers follow. `vector`: for biases and norms, which
    slerp and karcher add, and which are one row for della.
    """
    row, shape = COMBINATIONS[method], changes[0].shape
    if row.weighs:
        weights = coefficients(SUM if vector and row.directions else method, partial(gram, changes), strengths, n)
        return RowMatrix(
            shape, lambda rows: total([c.read(rows).mul_(w) for c, w in zip(changes, weights, strict=True)])
        )
    if row.keeps:
        lines = [_viewed(c, (1, -1)) if vector else c for c in changes]
        thin = [thinned(row.keeps, c, n, seed) for c, seed in zip(lines, seeds, strict=True)]
        changes = [_viewed(c, shape) for c in thin] if vector else thin

    def read(rows: slice) -> Tensor:
        scaled = torch.stack([c.read(rows).mul_(s) for c, s in zip(changes, strengths, strict=True)])
        if row.agrees:
            summed = _consensus(scaled, n.agree)
        else:
            summed = _elected(scaled, strengths, n) if row.elects else scaled.sum(0)
        return n.scale * summed

    return RowMatrix(shape, read)


def _viewed(vector: RowMatrix, shape: tuple[int, int]) -> RowMatrix:
    """Return the values of a vector in another shape: one row, or one column."""
    return RowMatrix.of(vector.dense().view(shape))


def total(changes: Sequence[Tensor]) -> Tensor:
    """Return the sum; the first of the changes is overwritten."""
    for t in changes[1:]:
        changes[0].add_(t)
    return changes[0]


def gram(changes: Sequence[RowMatrix]) -> list[list[float]]:
    """Return ⟨τᵢ, τⱼ⟩."""
    products = [[0.0 for _ in changes] for _ in changes]
    for blocks in zip(*(c.blocks() for c in changes), strict=True):
        flat = [block.reshape(-1) for _, block in blocks]
        for i, a in enumerate(flat):
            for j, b in enumerate(flat):
                products[i][j] += float((a @ b).item())
    return products


def thinned(how: str, change: RowMatrix, n: MethodParameters, seed: str) -> RowMatrix:
    """Return a change with some entries set to 0, and for random choices the others scaled up."""
    count, cols = change.numel(), change.shape[1]
    left = math.floor(n.density * count)
    top = math.floor(n.gamma * count) if how == "middle" else 0
    if how in ("largest", "middle"):
        most = largest(change, min(count, top + left))
        above = largest(change, top) if top else None

        def cut(rows: slice) -> Tensor:
            part = change.read(rows)
            mask = most.of(part, rows.start)
            return part.mul_(mask if above is None else mask.logical_and_(above.of(part, rows.start).logical_not_()))

        return RowMatrix(change.shape, cut)
    draw = draws(n.seed)

    def drawn(rows: slice) -> Tensor:
        part = change.read(rows)
        some = _like(draw(seed, rows.start * cols, part.numel()), part).view_as(part)
        chance = torch.full_like(part, n.density) if how == "random" else _by_rank(part, n.density, n.epsilon)
        return part.mul_(torch.where(some < chance, 1 / chance, torch.zeros_like(part)))

    return RowMatrix(change.shape, drawn)


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return the tensor on the device and in the dtype of another one."""
    return stage([tensor], Placement(other.device, other.dtype))[0]


def _by_rank(change: Tensor, density: float, epsilon: float) -> Tensor:
    """Return the chance of each entry to be kept: within a row from density − ε for the smallest to density + ε."""
    width = change.shape[-1]
    chance = torch.linspace(-epsilon, epsilon, width, dtype=change.dtype, device=change.device).add_(density)
    order = change.abs().argsort(dim=-1, stable=True)
    return torch.empty_like(change).scatter_(-1, order, chance.expand_as(change))


def _elected(scaled: Tensor, strengths: Sequence[float], n: MethodParameters) -> Tensor:
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
    """Return the sum if at least `agree` changes (default: all of the weight's) have one sign, else 0; of a weight
    that fewer adapters change nothing is left."""
    least = len(scaled) if agree is None else agree
    most = torch.maximum((scaled > 0).sum(0), (scaled < 0).sum(0))
    return torch.where(most >= least, scaled.sum(0), torch.zeros_like(scaled[0]))
