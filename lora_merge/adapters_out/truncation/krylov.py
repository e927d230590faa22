"""The leading singular triples of dense ΔW by a block Krylov search, whose error is known at every step.

Golub, Luk and Overton 1981, doi:10.1145/355945.355946: from random columns Ω, blocks Uⱼ and Vⱼ with orthonormal columns
span what ΔΔᵀ and ΔᵀΔ make of Ω. Within them P = UᵀΔ = B Vᵀ, so the singular values of the small B are those of P, and
‖Δ − U_k P_k‖² = ‖Δ‖² − Σσᵢ² is exact. Musco and Musco 2015, arXiv:1504.05477: where singular values lie close together,
as those of rounding errors do, such a basis needs the root of the number of steps that repeated powers need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from .factored import triangular
from .triples import Triples

EXCESS: Final = 1e-3
"""By how much the error of a dense truncation may exceed the optimum, as a share of the optimum."""

SAFE: Final = 0.7
"""The share of EXCESS that the estimate of what further steps would gain may take: it is up to a quarter too low."""

SINGLE: Final = 1e-3
"""The share of ‖Δ‖² that is left out is found in single precision from this size on, exact to a thousandth."""

NOTHING: Final = 1e-12
"""A share of ‖Δ‖² that is a rounding error of fp64."""

STEADY: Final = 0.95
"""The largest ratio of two gains that is taken for the beginning of such a series."""

WIDTH: Final = 40
"""Columns of a block where the rank is not known before."""

Reach = Callable[[Sequence[float], float], int | None]
"""Function of the singular values found so far and ‖Δ‖²: the wanted rank, None where these values do not tell it."""


@dataclass
class _Item:
    """What is known of one matrix: singular values after each step, and the step at which they are near enough."""

    squares: float
    reach: Reach
    steps: list[Tensor] = field(default_factory=list)  # σ² after each step, the largest first
    rank: int | None = None
    settled: bool = False
    finer: bool = False  # whether what is left out is too little for fp32

    def look(self, found: Tensor, *, single: bool) -> None:
        """Take the σ² of one more step, and judge what another would gain.

        The gain of each singular value becomes smaller from step to step, by a ratio that itself grows slowly: what all
        further steps would gain is estimated as the rest of a geometric series.
        """
        self.steps.append(found)
        self.rank = k = self.reach(found.sqrt().tolist(), self.squares)
        if k is None:
            return
        now, *before = [s[:k] for s in reversed(self.steps[-3:]) if len(s) >= k]
        left = self.squares - float(now.sum())
        self.finer = single and left <= SINGLE * self.squares
        self.settled = self.finer or left <= NOTHING * self.squares
        if len(before) == 2 and not self.settled:
            gains = [(now - before[0]).clamp_min(0), (before[0] - before[1]).clamp_min(0)]
            ratios = (gains[0] / torch.maximum(*gains).clamp_min(1e-300)).clamp_max(STEADY)
            self.settled = float((gains[0] * ratios / (1 - ratios)).sum()) <= 2 * SAFE * EXCESS * left


def searched(
    stack: Tensor, squares: Sequence[float], reaches: Sequence[Reach], width: int = WIDTH
) -> list[Triples | None]:
    """Return the leading triples of each matrix, as many as its rank says or more; None where the search would take
    longer than the exact way.

    Parameters:
        stack: Δ [n, out, cols], fp32 or fp64, on any device.
        squares: ‖Δ‖² of each.
        reaches: The rule of each.
        width: Columns of a block: the rank and a few more where it is known.
    """
    n, out, cols = stack.shape
    start = torch.randn(cols, width, generator=torch.Generator().manual_seed(0)).to(stack).expand(n, -1, -1)
    single = stack.dtype != torch.float64
    items = [_Item(s, reach) for s, reach in zip(squares, reaches, strict=True)]
    block, _ = triangular(stack @ start)
    lefts, rights = block, stack.new_zeros(n, cols, 0)
    core = torch.zeros(n, 0, 0, dtype=torch.float64)
    for _ in range(min(out, cols) // 2 // width):
        block, over, own = _apart((block.mT @ stack).mT, rights)
        core = _grown(core, over.mT, own.mT)
        rights = torch.cat((rights, block), 2)
        values = torch.linalg.eigvalsh(core @ core.mT).flip(1).clamp_min(0)
        for item, found in zip(items, values, strict=True):
            if not item.settled:
                item.look(found, single=single)
        if all(item.settled for item in items):
            break
        block, _, _ = _apart(stack @ block, lefts)
        lefts = torch.cat((lefts, block), 2)
    found = [_triples(item, lefts[i], rights[i].mT, core[i]) for i, item in enumerate(items)]
    for i, item in enumerate(items):
        if item.finer:
            found[i] = searched(stack[i : i + 1].cpu().double(), [item.squares], [item.reach], width)[0]
    return found


def _apart(block: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block without its share of the basis, with orthonormal columns; and both its shares, in fp64 on the
    host: block = basis · first + result · second. What rounding leaves the first time is taken away the second time."""
    whole = block
    for _ in range(2):
        block, _ = triangular(block - basis @ (basis.mT @ block))
    return block, (basis.mT @ whole).double().cpu(), (block.mT @ whole).double().cpu()


def _grown(core: Tensor, over: Tensor, own: Tensor) -> Tensor:
    """Return B with the rows of one more block of U."""
    n, size, width = len(core), core.shape[1], own.shape[1]
    grown = core.new_zeros(n, size + width, size + width)
    grown[:, :size, :size] = core
    grown[:, size:, :size] = over
    grown[:, size:, size:] = own
    return grown


def _triples(item: _Item, left: Tensor, right: Tensor, core: Tensor) -> Triples | None:
    """Return the triples after the step at which they were near enough, however long others took; None where they never
    were, or in fp32 cannot be."""
    if not item.settled or item.finer or item.rank is None:
        return None
    size = len(item.steps[-1])
    u, s, v = torch.linalg.svd(core[:size, :size])
    bases = (left[:, :size].cpu(), right[:size].cpu())
    return Triples(bases, (u, v), s, item.squares).first(item.rank)
