"""From factors of ΔW: their triangles and a small SVD.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa and Fukaya 2015, doi:10.1137/140990450) takes products of matrices where
QR takes reflections, which use a processor half as well. It is as exact where no column nearly repeats the others.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...engine.tensor_moves import host
from ...engine.tensors import beside
from .singular_triples import Triples, numeric_rank

STORED_IN_16: Final = 1e-7
"""Singular values below this share of the largest one are rounding noise, where the inputs have 16-bit numbers."""

CLEAN: Final = 1e3
"""The condition of a matrix in fp64 up to which one turn leaves its columns orthonormal to 1e-10: its square counts."""

EVEN: Final = 2.0
"""The condition of a matrix in fp32, for each of its columns, up to which one turn leaves these orthonormal to 1e-6."""

DEFECT: Final = 0.1
"""By how much columns may be from orthonormal after the first of two turns; from then on, reflections are taken."""


class Triangle(NamedTuple):
    """A matrix as a product: Q = basis · turn has orthonormal columns, and R is triangular."""

    basis: Tensor  # [n, m, r]
    turn: Tensor  # [n, r, r]
    r: Tensor  # [n, r, columns of the matrix]


def of_factors(left: Tensor, right: Tensor, noise: float = 0.0) -> list[Triples]:
    """Return the triples of n products L R, [n, out, R] and [n, R, cols], without forming them: R×R cores
    are decomposed.

    `noise`: singular values up to this share of the largest one are left out, and rounding errors in any case.
    """
    left, right = _balanced(left.double(), right.double())
    first, other = triangle(left), triangle(right.mT)
    u, s, v = torch.linalg.svd(first.r @ other.r.mT, full_matrices=False)
    bound = max(left.shape[1], right.shape[2]) * 2.0**-52 * math.sqrt(max(left.shape[2], 1))
    columns = []
    for i, values in enumerate(s):
        bases, turns = (first.basis[i], other.basis[i].mT), (first.turn[i] @ u[i], v[i] @ other.turn[i].mT)
        whole = Triples(bases, turns, values, float(values.square().sum()))
        columns.append(whole.first(numeric_rank(values.tolist(), max(bound, noise))))
    return columns


def orthonormal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q [n, m, r] with orthonormal columns and R, whose product is the matrix; r is its shorter side. R is in
    fp64 on the host, as is all that is decomposed."""
    basis, turn, r = triangle(matrix)
    return basis @ turn, r


def triangle(matrix: Tensor) -> Triangle:
    """Return Q and R of a matrix: by one turn or two where its columns are independent, else by reflections."""
    if matrix.shape[1] > matrix.shape[2] and (first := _turned(matrix)) is not None:
        bound = CLEAN if matrix.dtype == torch.float64 else EVEN * matrix.shape[2]
        if bool((clean := _condition(first) < bound).all()):
            return first
        second = _turned(first.basis @ first.turn)
        if second is not None and float((second.r - _identity(second.r)).abs().max()) < DEFECT:
            second = second._replace(r=second.r @ first.r)
            return Triangle(*(chosen(clean, part, other) for part, other in zip(first, second, strict=True)))
    q, r = torch.linalg.qr(host(matrix, torch.float64))
    identity = _identity(r[..., : r.shape[-2]]).expand(len(q), -1, -1)
    return Triangle(beside(q.to(matrix.dtype), matrix), beside(identity.to(matrix.dtype), matrix), r)


def _turned(matrix: Tensor) -> Triangle | None:
    """Return M, R⁻¹ and R with RᵀR = MᵀM; None where M has no such triangle."""
    lower, info = torch.linalg.cholesky_ex(host(matrix.mT @ matrix, torch.float64))
    if bool(info.any()):
        return None
    inverse = torch.linalg.solve_triangular(lower, _identity(lower), upper=False)
    if not bool(torch.isfinite(inverse).all()):
        return None
    return Triangle(matrix, beside(inverse.mT.to(matrix.dtype), matrix), lower.mT)


def chosen(which: Tensor, first: Tensor, other: Tensor) -> Tensor:
    """Return of each pair of matrices the one that a truth value [n] on the host says."""
    return torch.where(beside(which, first)[:, None, None], first, other) if bool(which.any()) else other


def _condition(factor: Triangle) -> Tensor:
    """Return a bound of the condition of each matrix."""
    sizes: list[Tensor] = [torch.linalg.vector_norm(t, dim=(1, 2)) for t in (factor.r, host(factor.turn))]
    return sizes[0] * sizes[1]


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors with columns of L and rows of R of equal length: badly scaled pairs would lose digits."""
    a, b = left.norm(dim=1, keepdim=True), right.norm(dim=2, keepdim=True).mT
    ratio = torch.where((a > 0) & (b > 0), (b / a).sqrt(), torch.ones_like(a))
    return left * ratio, right / ratio.mT
