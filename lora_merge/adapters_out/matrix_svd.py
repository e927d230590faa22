"""Singular triples of dense ΔW: the leading ones by a block Krylov search, whose error is known at every step, or all
of them from the Gram matrix of the shorter side.

Golub, Luk and Overton 1981, doi:10.1145/355945.355946: from random columns Ω, blocks Uⱼ and Vⱼ with orthonormal columns
span what ΔΔᵀ and ΔᵀΔ make of Ω. Within them P = UᵀΔ = B Vᵀ, so the singular values of the small B are those of P, and
‖Δ − U_k P_k‖² = ‖Δ‖² − Σσᵢ² is exact. Musco and Musco 2015, arXiv:1504.05477: where singular values are close together,
as those of rounding errors do, such a basis needs the root of the number of steps that repeated powers need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine.devices import precise
from ..engine.row_matrix import CACHED, RowMatrix
from ..engine.tensor_moves import HOST, Placement, host, stage
from ..engine.tensors import on_device_of
from .factors import CLEAN, DEFECT, Triples, numeric_rank
from .rank_rules import Rule, choose, known_rank
from .values import squares_of_rows

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
        self.block, _, factor = _apart(self.stack @ self.block, self.lefts)
        self.lefts = torch.cat((self.lefts, self.block), 2)
        rest = self.core.new_zeros(len(factor), factor.shape[1], self.core.shape[2] - factor.shape[2])
        self.core = torch.cat((self.core, torch.cat((rest, factor), 2)), 1)

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
    """Mark the matrices that have converged, whose vectors stay as they are; return whether all have."""
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
    return Triangles(on_device_of(q.to(matrix.dtype), matrix), on_device_of(identity.to(matrix.dtype), matrix), r)


def _turned(matrix: Tensor) -> Triangles | None:
    """Return M, R⁻¹ and R with RᵀR = MᵀM; None where M has no such triangle."""
    lower, info = torch.linalg.cholesky_ex(host(matrix.mT @ matrix, torch.float64))
    if bool(info.any()):
        return None
    inverse = torch.linalg.solve_triangular(lower, _identity(lower), upper=False)
    if not bool(torch.isfinite(inverse).all()):
        return None
    return Triangles(matrix, on_device_of(inverse.mT.to(matrix.dtype), matrix), lower.mT)


def chosen(which: Tensor, first: Tensor, other: Tensor) -> Tensor:
    """Return of each pair of matrices the one that a truth value [n] on the host says."""
    return torch.where(on_device_of(which, first)[:, None, None], first, other) if bool(which.any()) else other


def _condition(factor: Triangles) -> Tensor:
    """Return a bound of the condition of each matrix."""
    sizes: list[Tensor] = [torch.linalg.vector_norm(t, dim=(1, 2)) for t in (factor.r, host(factor.turn))]
    return sizes[0] * sizes[1]


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


LEAST_BLOCKS: Final = 8
"""The least number of blocks of a search in the shorter side, where it is searched: otherwise the exact way is as
fast."""

TINY_SIDE: Final = 128
"""The shorter side up to which a matrix is decomposed without its Gram matrix, with all digits."""

NUMBERS_OF_COLUMNS: Final = 2**23
"""Values of some columns that are held at a time."""

GRAM_LIMIT: Final = 1e-4
"""The share of the largest singular value from which on vectors from a Gram matrix are exact: it holds squares."""


def of_dense(
    change: RowMatrix, rule: Rule | None = None, noise: float = 0.0, at: Placement = HOST, squares: float | None = None
) -> Triples:
    """Return the triples of one ΔW [out, cols], as many as a rule chooses or more, on the host; without a rule, all.

    The error of the triples that a rule chooses is at most 1 + EXCESS times the optimum. `noise` as for `of_factors`;
    `at`: where products of the size of ΔW are computed; `squares`: ‖ΔW‖², where it is known.
    """
    return of_stack([change], [rule], noise, at, None if squares is None else [squares])[0]


def of_stack(
    changes: Sequence[RowMatrix], rules: Sequence[Rule | None], noise: float = 0.0, at: Placement = HOST,
    squares: Sequence[float] | None = None,
) -> list[Triples]:  # fmt: skip
    """Return what `of_dense` returns for each of several ΔW of one shape; each product is computed for all at once."""
    squares = [squares_of_rows(change) for change in changes] if squares is None else squares
    width = max(_width(rule) for rule in rules)
    searches = [SearchEnd() for _ in changes]
    if width and width * LEAST_BLOCKS <= min(changes[0].shape) and all(squares):
        reaches = [partial(_reach, rule) for rule in rules]
        single = Placement(at.device, torch.float32)
        searches = searched(_stacked(changes, single), squares, reaches, width)
        for i, search in enumerate(searches):
            if search.start is not None:
                fine = _stacked(changes[i : i + 1], precise(at))
                searches[i] = searched(fine, squares[i : i + 1], reaches[i : i + 1], width, search.start)[0]
    bound = max(max(changes[0].shape) * 2.0**-52, noise)
    results = []
    for search, change, rule, size in zip(searches, changes, rules, squares, strict=True):
        triples = search.triples or exactly(change, rule, size, at)
        results.append(triples.first(numeric_rank(triples.values.tolist(), bound)))
    return results


def _stacked(changes: Sequence[RowMatrix], at: Placement) -> Tensor:
    """Return the matrices [n, out, cols] at a placement."""
    whole = [change.dense(at.dtype) for change in changes]
    return whole[0][None] if len(whole) == 1 and at.device == whole[0].device else stage(whole, at)


def _width(rule: Rule | None) -> int:
    """Return how many columns a block of the search has for a rule; 0 for one that needs all singular values."""
    if rule is None or not rule.leading:
        return 0
    most = rule.ceiling
    return BLOCK_COLUMNS if most is None else most + max(8, most // 8)


def _reach(rule: Rule | None, values: Sequence[float], total: float) -> int | None:
    assert rule is not None, "a search has a rule"
    return known_rank(rule, values, total)


def exactly(change: RowMatrix, rule: Rule | None, squares: float, at: Placement = HOST) -> Triples:
    """Return the triples by the Gram matrix of the shorter side; all of them by a decomposition of ΔW where the squares
    in that matrix have too few digits for the rule."""
    at = precise(at)
    change = change if change.numel() > CACHED else RowMatrix.of(_stacked([change], at)[0])
    if min(change.shape) <= TINY_SIDE or rule is None:
        return _decomposed(_stacked([change], at)[0], squares)
    wide = change.shape[0] <= change.shape[1]
    eigenvalues, vectors = torch.linalg.eigh(_gram(change, at))
    values = host(eigenvalues.flip(0).clamp_min(0).sqrt())
    rank = choose(rule, values.tolist(), total=squares)
    if not rank or values[rank - 1] < GRAM_LIMIT * values[0]:
        return _decomposed(_stacked([change], at)[0], squares)
    leading = vectors.flip(1)[:, :rank]
    other = host(_times(leading, change, at)).div_(values[:rank, None] if wide else values[:rank])
    first, last, identity = host(leading).numpy(), other.numpy(), np.eye(rank)
    return Triples((first, last) if wide else (last, first.T), (identity, identity), values[:rank].numpy(), squares)


def _decomposed(matrix: Tensor, squares: float) -> Triples:
    """Return all triples: QR brings a long matrix to a square one first."""
    long = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    q, r = torch.linalg.qr(long)
    u, s, v = torch.linalg.svd(r)
    q, u, s, v = (host(t).numpy() for t in (q, u, s, v))
    identity = np.eye(len(s))
    if long is matrix:
        return Triples((q, v), (u, identity), s, squares)
    return Triples((v.T, q.T), (identity, u.T), s, squares)


def values_of(change: RowMatrix) -> Tensor:
    """Return all singular values of ΔW in fp64, without vectors; small ones have half of the digits."""
    if min(change.shape) <= TINY_SIDE:
        values: Tensor = torch.linalg.svdvals(change.dense(torch.float64))
        return values
    squares: Tensor = torch.linalg.eigvalsh(_gram(change, HOST))
    return squares.flip(0).clamp_min(0).sqrt()


def _gram(change: RowMatrix, at: Placement) -> Tensor:
    """Return the products of all pairs of rows, or of all pairs of columns where these are fewer, in fp64."""
    (out, cols), whole = change.shape, change.memory
    if whole is not None and whole.dtype == at.dtype:
        return whole @ whole.mT if out <= cols else whole.mT @ whole
    gram = torch.zeros(min(out, cols), min(out, cols), dtype=at.dtype, device=at.device)
    if out > cols:
        for _, block in change.blocks():
            (some,) = stage([block], at)
            gram.addmm_(some.mT, some)
        return gram
    step = max(1, NUMBERS_OF_COLUMNS // max(out, 1))
    for first in range(0, cols, step):  # some columns of all rows are held at a time
        (some,) = stage([torch.cat([block[:, first : first + step] for _, block in change.blocks()])], at)
        gram.addmm_(some, some.mT)
    return gram


def _times(vectors: Tensor, change: RowMatrix, at: Placement) -> Tensor:
    """Return the vectors of the other side times their singular values: Δ V, or UᵀΔ where the rows are fewer."""
    (out, cols), whole = change.shape, change.memory
    if whole is not None and whole.dtype == at.dtype:
        return vectors.mT @ whole if out <= cols else whole @ vectors
    if out > cols:
        product = vectors.new_empty(out, vectors.shape[1])
        for rows, block in change.blocks():
            product[rows] = stage([block], at)[0] @ vectors
        return product
    product = vectors.new_zeros(vectors.shape[1], cols)
    for rows, block in change.blocks():
        product.addmm_(vectors[rows].mT, stage([block], at)[0])
    return product
