"""From ΔW itself: the leading triples by a search, or all of them from the Gram matrix of the shorter side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ...engine.devices import precise
from ...engine.placement import HOST, Placement, host, stage
from ..rank_rules import Rule, choose, reached
from .krylov import WIDTH, Found, searched
from .storing import PIECE
from .triples import Triples, numeric_rank

WORTH: Final = 8
"""The least number of blocks of a search in the shorter side, where it is searched: otherwise the exact way is as
fast."""

TINY: Final = 128
"""The shorter side up to which a matrix is decomposed without its Gram matrix, with all digits."""

DIGITS: Final = 1e-4
"""The share of the largest singular value from which on vectors from a Gram matrix are exact: it holds squares."""


def of_dense(change: Tensor, rule: Rule | None = None, noise: float = 0.0, at: Placement = HOST) -> Triples:
    """Return the triples of one ΔW [out, cols], as many as a rule chooses or more, on the host; without a rule, all.

    The error of those that a rule chooses is at most 1 + EXCESS times the optimum. `noise` as for `of_factors`; `at`:
    where products of the size of ΔW are computed.
    """
    return of_stack([change], [rule], noise, at)[0]


def of_stack(
    changes: Sequence[Tensor], rules: Sequence[Rule | None], noise: float = 0.0, at: Placement = HOST
) -> list[Triples]:
    """Return what `of_dense` returns for each of several ΔW of one shape; each product is computed for all at once."""
    squares = [squares_of_matrix(change) for change in changes]
    width = max(_width(rule) for rule in rules)
    found = [Found() for _ in changes]
    if width and width * WORTH <= min(changes[0].shape) and all(squares):
        reaches = [partial(_reach, rule) for rule in rules]
        found = searched(_stacked(changes, at), squares, reaches, width)
        for i, one in enumerate(found):
            if one.start is not None:
                fine = stage([changes[i]], precise(at))
                found[i] = searched(fine, squares[i : i + 1], reaches[i : i + 1], width, one.start)[0]
    bound = max(max(changes[0].shape) * 2.0**-52, noise)
    made = []
    for one, change, rule, size in zip(found, changes, rules, squares, strict=True):
        triples = one.triples or exactly(change, rule, size, at)
        made.append(triples.first(numeric_rank(triples.values.tolist(), bound)))
    return made


def _stacked(changes: Sequence[Tensor], at: Placement) -> Tensor:
    """Return the matrices [n, out, cols] in fp32 on the device."""
    if len(changes) == 1 and changes[0].dtype == torch.float32 and at.device == changes[0].device:
        return changes[0][None]
    return stage(changes, Placement(at.device, torch.float32))


def _width(rule: Rule | None) -> int:
    """Return how many columns a block of the search has for a rule; 0 for one that needs all singular values."""
    if rule is None or not rule.leading:
        return 0
    most = rule.ceiling
    return WIDTH if most is None else most + max(8, most // 8)


def _reach(rule: Rule | None, values: Sequence[float], total: float) -> int | None:
    assert rule is not None, "a search has a rule"
    return reached(rule, values, total)


def exactly(change: Tensor, rule: Rule | None, squares: float, at: Placement = HOST) -> Triples:
    """Return the triples by the Gram matrix of the shorter side; all of them by a decomposition of ΔW where the squares
    in that matrix have too few digits for the rule."""
    matrix = stage([change], precise(at))[0]
    if min(matrix.shape) <= TINY or rule is None:
        return _decomposed(matrix, squares)
    wide = matrix.shape[0] <= matrix.shape[1]
    found, vectors = torch.linalg.eigh(matrix @ matrix.mT if wide else matrix.mT @ matrix)
    values = host(found.flip(0).clamp_min(0).sqrt())
    rank = choose(rule, values.tolist(), total=squares)
    if not rank or values[rank - 1] < DIGITS * values[0]:
        return _decomposed(matrix, squares)
    own = vectors.flip(1)[:, :rank]
    other = host(own.mT @ matrix if wide else matrix @ own) / (values[:rank, None] if wide else values[:rank])
    own, one = host(own), torch.eye(rank, dtype=torch.float64)
    return Triples((own, other) if wide else (other, own.mT), (one, one), values[:rank], squares)


def _decomposed(matrix: Tensor, squares: float) -> Triples:
    """Return all triples: QR brings a long matrix to a square one first."""
    long = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    q, r = torch.linalg.qr(long)
    u, s, v = torch.linalg.svd(r)
    q, u, s, v = map(host, (q, u, s, v))
    one = torch.eye(len(s), dtype=torch.float64)
    if long is matrix:
        return Triples((q, v), (u, one), s, squares)
    return Triples((v.mT, q.mT), (one, u.mT), s, squares)


def values_of(change: Tensor) -> Tensor:
    """Return all singular values of ΔW in fp64, without vectors; small ones have half of the digits."""
    matrix = change.double()
    if min(matrix.shape) <= TINY:
        values: Tensor = torch.linalg.svdvals(matrix)
        return values
    gram = matrix @ matrix.mT if matrix.shape[0] <= matrix.shape[1] else matrix.mT @ matrix
    squares: Tensor = torch.linalg.eigvalsh(gram)
    return squares.flip(0).clamp_min(0).sqrt()


def squares_of_matrix(matrix: Tensor) -> float:
    """Return ‖ΔW‖², summed in fp64."""
    rows = max(1, PIECE // max(matrix.shape[-1], 1))
    return sum(float(matrix[at : at + rows].double().square().sum()) for at in range(0, len(matrix), rows))
