"""From factors of ΔW: their triangles and a small SVD.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa and Fukaya 2015, doi:10.1137/140990450) takes products of matrices where
QR takes reflections, which use a processor half as well. It is as exact where no column nearly repeats the others.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from .triples import Triples, numeric_rank

STORED_IN_16: Final = 1e-7
"""Singular values below this share of the largest one are rounding noise, where the inputs have 16-bit numbers."""

DEFECT: Final = 0.1
"""By how much columns may be from orthonormal after the first of two turns; from then on, reflections are taken."""


def of_factors(left: Tensor, right: Tensor, noise: float = 0.0) -> list[Triples]:
    """Return the triples of n products L R, [n, out, R] and [n, R, cols], without forming them: R×R cores
    are decomposed.

    `noise`: singular values up to this share of the largest one are left out, besides those that are rounding errors.
    """
    left, right = _balanced(left.double(), right.double())
    q_left, r_left = triangular(left)
    q_right, r_right = triangular(right.mT)
    u, s, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    bound = max(left.shape[1], right.shape[2]) * 2.0**-52 * math.sqrt(max(left.shape[2], 1))
    found = []
    for q, inner, values, turned, other in zip(q_left, u, s, v, q_right, strict=True):
        whole = Triples((q, other.mT), (inner, turned), values, float(values.square().sum()))
        found.append(whole.first(numeric_rank(values, max(bound, noise))))
    return found


def triangular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q [n, m, r] with orthonormal columns and R [n, r, r], whose product is the matrix; r is the shorter of
    both sides."""
    if matrix.shape[1] <= matrix.shape[2]:
        return _reflected(matrix)
    once, first = _turned(matrix)
    if first is not None:
        twice, second = _turned(once)
        if second is not None and float((second - _one(second)).abs().max()) < DEFECT:
            return twice, second @ first
    return _reflected(matrix)


def _reflected(matrix: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(matrix)
    return q, r


def _turned(matrix: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return M R⁻¹ and R with RᵀR = MᵀM; None for R where M has no such triangle."""
    lower, info = torch.linalg.cholesky_ex(matrix.mT @ matrix)
    if bool(info.any()):
        return matrix, None
    inverse = torch.linalg.solve_triangular(lower, _one(lower), upper=False)
    found = matrix @ inverse.mT
    return (found, lower.mT) if bool(torch.isfinite(inverse).all()) else (matrix, None)


def _one(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors with columns of L and rows of R of equal length: badly scaled pairs would lose digits."""
    a, b = left.norm(dim=1, keepdim=True), right.norm(dim=2, keepdim=True).mT
    ratio = torch.where((a > 0) & (b > 0), (b / a).sqrt(), torch.ones_like(a))
    return left * ratio, right / ratio.mT
