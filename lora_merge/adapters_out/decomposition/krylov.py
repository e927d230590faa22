"""The leading singular triples of dense ΔW by a block Krylov search, whose error is known at every step.

Golub, Luk and Overton 1981, doi:10.1145/355945.355946: from random columns Ω, blocks Uⱼ and Vⱼ with orthonormal columns
span what ΔΔᵀ and ΔᵀΔ make of Ω. Within them P = UᵀΔ = B Vᵀ, so the singular values of the small B are those of P, and
‖Δ − U_k P_k‖² = ‖Δ‖² − Σσᵢ² is exact. Musco and Musco 2015, arXiv:1504.05477: where singular values are close together,
as those of rounding errors do, such a basis needs the root of the number of steps that repeated powers need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...engine.tensor_moves import Placement, host, stage
from ...engine.tensors import beside
from .factors import CLEAN, DEFECT, Triples

EXCESS: Final = 1e-3
"""By how much the error of a dense truncation may exceed the optimum, as a share of the optimum."""

SAFE: Final = 0.7
"""The share of EXCESS that the estimate of what further steps would gain may take: it is up to a fifth too low."""

LEFT_OUT_IN_FP32: Final = 1e-3
"""The share of ‖Δ‖² that is left out is found in single precision from this size on, exact to a thousandth."""

FP64_ROUNDING: Final = 1e-12
"""A share of ‖Δ‖² that is a rounding error of fp64."""

STEADY_GAIN: Final = 0.95
"""The largest ratio of two gains that is taken for the beginning of such a series."""

GROWS: Final = 0.9
"""The power of such a ratio that is used for all later ones, which are larger."""

FAR: Final = 5.0
"""How much larger a block may be than what a basis leaves of it, so that this is orthogonal to the basis at once."""

EVEN: Final = 2.0
"""The condition of a matrix in fp32, for each of its columns, up to which one turn leaves these orthonormal to 1e-6."""

BLOCK_COLUMNS: Final = 40
"""Columns of a block where the rank is not known before."""

Reach = Callable[[Sequence[float], float], int | None]
"""Function of the singular values known so far and ‖Δ‖²: the rank, None where these do not decide it."""


@dataclass
class _Item:
    """The state of one matrix: singular values after each step, and the step at which they are near enough."""

    squares: float
    reach: Reach
    steps: list[Tensor] = field(default_factory=list)  # σ² after each step, the largest first
    rank: int | None = None
    core: Tensor | None = None  # B, once its singular values are near enough
    finer: bool = False  # whether what is left out is too little for fp32

    def look(self, core: Tensor, triples: Tensor, *, single: bool) -> None:
        """Take B and its σ² after one more step, and judge what further steps would gain.

        A step adds a block to both bases; it is judged after each half. The gain of each singular value becomes smaller
        from step to step, by a ratio that itself grows slowly: what all further steps would gain is estimated as the
        rest of a geometric series.
        """
        self.steps = [*self.steps[-4:], triples]
        self.rank = k = self.reach(triples.sqrt().tolist(), self.squares)
        if k is None:
            return
        now, *before = [s[:k] for s in self.steps[::-2] if len(s) >= k]
        left = self.squares - float(now.sum())
        self.finer = single and left <= LEFT_OUT_IN_FP32 * self.squares
        settled = self.finer or left <= FP64_ROUNDING * self.squares
        if before and not settled:
            gain = (now - before[0]).clamp_min(0)
            last = (before[0] - before[1]).clamp_min(0) if len(before) > 1 else gain  # the worst ratio
            ratios = (gain / torch.maximum(gain, last).clamp_min(1e-300)).clamp_max(STEADY_GAIN) ** GROWS
            settled = float((gain * ratios / (1 - ratios)).sum()) <= 2 * SAFE * EXCESS * left
        if settled:
            self.core = core


class _Bases:
    """The bases of n matrices, and B = UᵀΔV between them. They grow by a block in turn."""

    def __init__(self, stack: Tensor, width: int, start: Tensor | None) -> None:
        n, out, cols = stack.shape
        if start is None:
            start = torch.randn(cols, width, generator=torch.Generator().manual_seed(0))
        (start,) = stage([start], Placement(stack.device, stack.dtype))
        self.stack, self.core = stack, torch.zeros(n, width, 0, dtype=torch.float64)
        self.block, _, _ = _apart(stack @ start, stack.new_zeros(n, out, 0))
        self.lefts, self.rights = self.block, stack.new_zeros(n, cols, 0)

    def widen(self) -> None:
        """Add to V what Δᵀ makes of the last block of U: Δ is known on all of U then."""
        self.block, over, own_part = _apart((self.block.mT @ self.stack).mT, self.rights)
        self.rights = torch.cat((self.rights, self.block), 2)
        grown = self.core.new_zeros(*self.core.shape[:2], self.rights.shape[2])
        grown[:, :, : self.core.shape[2]] = self.core
        width = self.block.shape[2]
        grown[:, -width:] = torch.cat((over, own_part), 1).mT
        self.core = grown

    def heighten(self) -> None:
        """Add to U what Δ makes of the last block of V: Δ is known on all of V then."""
        self.block, _, own = _apart(self.stack @ self.block, self.lefts)
        self.lefts = torch.cat((self.lefts, self.block), 2)
        rest = self.core.new_zeros(len(own), own.shape[1], self.core.shape[2] - own.shape[2])
        self.core = torch.cat((self.core, torch.cat((rest, own), 2)), 1)

    def values(self) -> Tensor:
        """Return the squares of the singular values of B, the largest first."""
        tall = self.core.shape[1] > self.core.shape[2]
        squares: Tensor = torch.linalg.eigvalsh(self.core.mT @ self.core if tall else self.core @ self.core.mT)
        return squares.flip(1).clamp_min(0)


class SearchEnd(NamedTuple):
    """The end of a search."""

    triples: Triples | None = None  # None where the search would take longer than the exact way
    start: Tensor | None = None  # where fp32 has too few digits: columns from which a search in fp64 is to start


def searched(
    stack: Tensor,
    squares: Sequence[float],
    reaches: Sequence[Reach],
    width: int = BLOCK_COLUMNS,
    start: Tensor | None = None,
) -> list[SearchEnd]:
    """Return the leading triples of each matrix, as many as its rank says, on the host.

    Parameters:
        stack: Δ [n, out, cols], fp32 or fp64, on any device: there its products are computed.
        squares: ‖Δ‖² of each.
        reaches: The rule of each.
        width: Columns of a block: the rank and a few more where it is known.
        start: [cols, width] the columns to start from. Default: random ones.
    """
    items = [_Item(s, reach) for s, reach in zip(squares, reaches, strict=True)]
    bases = _Bases(stack, width, start)
    for _ in range(min(stack.shape[1:]) // 2 // width):
        bases.widen()
        if _near(items, bases):
            break
        bases.heighten()
        if _near(items, bases):
            break
    return [
        SearchEnd(start=bases.rights[i, :, :width]) if item.finer else
        SearchEnd(_triples(item, bases.lefts[i], bases.rights[i].mT)) for i, item in enumerate(items)
    ]  # fmt: skip


def _near(items: Sequence[_Item], bases: _Bases) -> bool:
    """Return whether all are near enough to the optimum; vectors that are stay as they are."""
    for item, core, values in zip(items, bases.core, bases.values(), strict=True):
        if item.core is None:
            item.look(core, values, single=bases.stack.dtype != torch.float64)
    return all(item.core is not None for item in items)


def _apart(block: Tensor, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block without its share of the basis, with orthonormal columns; and both its shares, in fp64 on the
    host: block = basis · first + result · second. Where much of the block is taken away, what rounding leaves of it the
    first time is taken away a second time."""
    first = basis.mT @ block
    once, outer = orthonormal(block - basis @ first)
    shares = host(first, torch.float64)
    if not basis.shape[2] or bool((near := _shrunk(block, outer) < FAR).all()):
        return once, shares, outer
    again = basis.mT @ once
    twice, inner = orthonormal(once - basis @ again)
    both = shares + host(again, torch.float64) @ outer
    return chosen(near, once, twice), chosen(near, shares, both), chosen(near, outer, inner @ outer)


def _shrunk(block: Tensor, rest: Tensor) -> Tensor:
    """Return for each matrix how much larger its columns are than the smallest singular value of what is left of them,
    whose triangle is `rest`; 1 where nothing is taken away of orthonormal columns."""
    inverse = torch.linalg.solve_triangular(
        rest, torch.eye(rest.shape[2], dtype=rest.dtype).expand_as(rest), upper=True
    )
    before: Tensor = host(torch.linalg.vector_norm(block, dim=(1, 2)), torch.float64)
    after: Tensor = torch.linalg.vector_norm(inverse, dim=(1, 2))
    return before * after / rest.shape[2]


def _triples(item: _Item, left: Tensor, right: Tensor) -> Triples | None:
    """Return the triples after the step at which they were near enough, however long others took; None where they never
    were."""
    if item.core is None or item.rank is None:
        return None
    u, s, v = torch.linalg.svd(item.core, full_matrices=False)
    bases = (host(left[:, : len(item.core)]).numpy(), host(right[: item.core.shape[1]]).numpy())
    return Triples(bases, (u.numpy(), v.numpy()), s.numpy(), item.squares).first(item.rank)


class Triangles(NamedTuple):
    """Matrices as products: Q = basis · turn has orthonormal columns, and R is triangular."""

    basis: Tensor  # [n, m, r]
    turn: Tensor  # [n, r, r]
    r: Tensor  # [n, r, columns of the matrix]


def orthonormal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q [n, m, r] with orthonormal columns and R, whose product is the matrix; r is its shorter side. R is in
    fp64 on the host, as is all that is decomposed."""
    basis, turn, r = _triangle(matrix)
    return basis @ turn, r


def _triangle(matrix: Tensor) -> Triangles:
    """Return Q and R of a matrix: by one turn or two where its columns are independent, else by reflections."""
    if matrix.shape[1] > matrix.shape[2] and (first := _turned(matrix)) is not None:
        bound = CLEAN if matrix.dtype == torch.float64 else EVEN * matrix.shape[2]
        if bool((clean := _condition(first) < bound).all()):
            return first
        second = _turned(first.basis @ first.turn)
        if second is not None and float((second.r - _identity(second.r)).abs().max()) < DEFECT:
            second = second._replace(r=second.r @ first.r)
            return Triangles(*(chosen(clean, part, other) for part, other in zip(first, second, strict=True)))
    q, r = torch.linalg.qr(host(matrix, torch.float64))
    identity = _identity(r[..., : r.shape[-2]]).expand(len(q), -1, -1)
    return Triangles(beside(q.to(matrix.dtype), matrix), beside(identity.to(matrix.dtype), matrix), r)


def _turned(matrix: Tensor) -> Triangles | None:
    """Return M, R⁻¹ and R with RᵀR = MᵀM; None where M has no such triangle."""
    lower, info = torch.linalg.cholesky_ex(host(matrix.mT @ matrix, torch.float64))
    if bool(info.any()):
        return None
    inverse = torch.linalg.solve_triangular(lower, _identity(lower), upper=False)
    if not bool(torch.isfinite(inverse).all()):
        return None
    return Triangles(matrix, beside(inverse.mT.to(matrix.dtype), matrix), lower.mT)


def chosen(which: Tensor, first: Tensor, other: Tensor) -> Tensor:
    """Return of each pair of matrices the one that a truth value [n] on the host says."""
    return torch.where(beside(which, first)[:, None, None], first, other) if bool(which.any()) else other


def _condition(factor: Triangles) -> Tensor:
    """Return a bound of the condition of each matrix."""
    sizes: list[Tensor] = [torch.linalg.vector_norm(t, dim=(1, 2)) for t in (factor.r, host(factor.turn))]
    return sizes[0] * sizes[1]


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
