"""From ΔW itself: the leading triples by a search, or all of them from the Gram matrix of the shorter side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ...engine.devices import precise
from ...engine.row_matrix import CACHED, RowMatrix
from ...engine.tensor_moves import HOST, Placement, host, stage
from ..rank_rules import Rule, choose, reached
from ..rounding import squares_of_rows
from .factors import Triples, numeric_rank
from .krylov import BLOCK_COLUMNS, SearchEnd, searched

LEAST_BLOCKS: Final = 8
"""The least number of blocks of a search in the shorter side, where it is searched: otherwise the exact way is as
fast."""

TINY_SIDE: Final = 128
"""The shorter side up to which a matrix is decomposed without its Gram matrix, with all digits."""

NUMBERS_OF_COLUMNS: Final = 2**23
"""Numbers of some columns that are held at a time."""

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
    return reached(rule, values, total)


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
