"""The best factors of a given rank: from factors of ΔW (QR and a small SVD), or from ΔW itself.

Eckart and Young 1936: the sum of the k largest singular triples has the smallest ‖Δ − Δ̂‖ of all matrices of rank k.
The randomised search is that of Halko, Martinsson and Tropp 2009, arXiv:0909.4061, section 4.5; here its error is
computed, and where it is not within `EXCESS` of a lower bound of the optimum, the exact decomposition replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

SMALL_SIDE: Final = 768
"""The shorter side up to which a dense ΔW is decomposed exactly: then the exact way is as fast."""

EXCESS: Final = 1e-3
"""By how much the error of a dense truncation may exceed the optimum, as a share of the optimum."""

ROUNDS: Final = (2, 4, 8, 16)
"""After how many power iterations the error is judged; flat spectra, such as those of rounding errors, need most."""
STORED_IN_16: Final = 1e-7
"""Singular values below this share of the largest one are rounding noise, where the inputs have 16-bit numbers."""


@dataclass(frozen=True)
class Triples:
    """Singular triples of one ΔW [out, cols], the largest first, in fp64."""

    left: Tensor  # U, [out, k]
    values: Tensor  # σ, [k]
    right: Tensor  # V, [k, cols]
    squares: float  # ‖ΔW‖², also of what the triples leave out

    def pair(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return B = U√σ [out, rank] and A = √σV [rank, cols]. Of each row of A the largest entry is positive."""
        root = self.values[:rank].sqrt()
        right = self.right[:rank]
        if not rank:
            return self.left[:, :0], right
        largest = right.gather(1, right.abs().argmax(1, keepdim=True))
        signs = torch.where(largest[:, 0] < 0, -1.0, 1.0).to(root.dtype)
        return self.left[:, :rank] * (root * signs), right * (root * signs)[:, None]


def of_factors(left: Tensor, right: Tensor, noise: float = 0.0) -> list[Triples]:
    """Return the triples of n products L R, [n, out, R] and [n, R, cols], without forming them: R×R cores
    are decomposed.

    `noise`: singular values up to this share of the largest one are left out, besides those that are rounding errors.
    """
    left, right = _balanced(left.double(), right.double())
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.mT)
    u, s, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    bound = max(left.shape[1], right.shape[2]) * 2.0**-52 * math.sqrt(max(left.shape[2], 1))
    found = []
    for q, inner, values, turned, other in zip(q_left, u, s, v, q_right, strict=True):
        k = _numeric_rank(values, max(bound, noise))
        found.append(Triples(q @ inner[:, :k], values[:k], turned[:k] @ other.mT, float(values.square().sum())))
    return found


def _balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors with columns of L and rows of R of equal length: badly scaled pairs would lose digits."""
    a, b = left.norm(dim=1, keepdim=True), right.norm(dim=2, keepdim=True).mT
    ratio = torch.where((a > 0) & (b > 0), (b / a).sqrt(), torch.ones_like(a))
    return left * ratio, right / ratio.mT


def _numeric_rank(values: Tensor, share: float) -> int:
    """Return how many singular values are more than rounding errors; 0 for a matrix of zeros."""
    return int((values > values[0] * share).sum()) if len(values) and values[0] > 0 else 0


def of_dense(change: Tensor, ceiling: int | None = None, noise: float = 0.0) -> Triples:
    """Return the triples of one ΔW [out, cols]; at most about `ceiling` of them, if only so many are wanted.

    With a ceiling below a quarter of the shorter side, a randomised search finds them; its error is computed and is at
    most 1 + EXCESS times the optimum.
    """
    short = min(change.shape)
    if ceiling is not None and short > SMALL_SIDE and ceiling <= short // 4:
        found = _searched(change, ceiling)
        if found is not None:
            return _without_noise(found, noise)
    return _without_noise(_decomposed(change), noise)


def _without_noise(found: Triples, noise: float) -> Triples:
    k = _numeric_rank(found.values, max(noise, max(found.left.shape[0], found.right.shape[1]) * 2.0**-52))
    return Triples(found.left[:, :k], found.values[:k], found.right[:k], found.squares)


def _decomposed(change: Tensor) -> Triples:
    """Return all triples: QR brings a long matrix to a square one first."""
    matrix = change.double()
    squares = float(matrix.square().sum())
    if matrix.shape[0] >= matrix.shape[1]:
        q, r = torch.linalg.qr(matrix)
        u, s, v = torch.linalg.svd(r)
        return Triples(q @ u, s, v, squares)
    q, r = torch.linalg.qr(matrix.mT)
    u, s, v = torch.linalg.svd(r.mT)
    return Triples(u, s, v @ q.mT, squares)


def _searched(change: Tensor, rank: int) -> Triples | None:
    """Return the leading triples by random projection, or None if they are not within EXCESS of the optimum.

    With P = QᵀΔ the error is known: ‖Δ − QP‖² = ‖Δ‖² − ‖P‖². With e = ‖Δ − QP‖₂ no rank-k matrix can be nearer than
    √(‖Δ‖² − Σ_{i≤k}(σᵢ²(P) + e²)). Where the spectrum is flat that bound is loose; there another iteration
    must gain little.
    """
    matrix = change.float()
    squares = float(change.double().square().sum())
    count = min(rank + max(8, rank // 8), *matrix.shape)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(matrix.shape[1], count, generator=generator)
    basis = torch.linalg.qr(matrix @ start).Q
    reached = 0.0
    for turn in range(1, ROUNDS[-1] + 1):
        before = reached
        basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
        reached = float((basis.mT @ matrix).double().square().sum())
        if turn in ROUNDS:
            settled = reached - before < EXCESS / 4 * max(squares - reached, 0.0)
            if (found := _judged(change, basis, rank, squares, settled=settled)) is not None:
                return found
    return None


def _judged(change: Tensor, basis: Tensor, rank: int, squares: float, *, settled: bool) -> Triples | None:
    """Return the triples of Δ within a basis, or None if they are not near enough to the optimum."""
    matrix = change.float()
    q = torch.linalg.qr(basis.double()).Q
    small = (q.float().mT @ matrix).double() if matrix.dtype == change.dtype else q.mT @ change.double()
    other, core = torch.linalg.qr(small.mT)
    u, s, v = torch.linalg.svd(core.mT)
    found = Triples(q @ u, s, v @ other.mT, squares)
    kept = float(s[:rank].square().sum())
    error = max(0.0, squares - kept)
    if settled or error <= squares * 1e-12:
        return found
    rest = _largest(lambda x: matrix.mT @ (matrix @ x) - small.float().mT @ (small.float() @ x), matrix.shape[1])
    lower = max(0.0, squares - kept - rank * rest)
    return found if error <= (1 + EXCESS) ** 2 * lower else None


def _largest(apply: Callable[[Tensor], Tensor], size: int) -> float:
    """Return about the largest eigenvalue of a symmetric map, from five power steps, and a tenth more."""
    x = torch.randn(size, 1, generator=torch.Generator().manual_seed(1))
    value = 0.0
    for _ in range(5):
        x = x / x.norm().clamp_min(1e-30)
        x = apply(x)
        value = float(x.norm())
    return 1.1 * value


def stored(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return B and A in the dtype of the file. For 16 bits, B is solved anew for the rounded A, which takes back A's
    rounding error within its rows, and is rounded after that."""
    down = right.to(dtype)
    if dtype.itemsize > 2 or not right.shape[0]:
        return left.to(dtype), down
    rounded = down.double()
    gram = rounded @ rounded.mT
    solved, info = torch.linalg.cholesky_ex(gram)
    if int(info) or not bool(torch.isfinite(solved).all()):
        return left.to(dtype), down
    return torch.cholesky_solve(rounded @ right.mT @ left.mT, solved).mT.to(dtype), down


def apart(left: Tensor, right: Tensor, up: Tensor, down: Tensor) -> float:
    """Return ‖L R − B A‖² for factors that are nearly those of B A: (L − B) R + B (R − A), so that nothing cancels."""
    first, second = left - up, right - down
    if not bool(second.any()):
        return _gram(first, right) if bool(first.any()) else 0.0
    return _gram(torch.cat((first, up), 1), torch.cat((right, second), 0))


def squares_of(left: Tensor, right: Tensor) -> float:
    """Return ‖L R‖². Where columns cancel, triangles from QR replace the products that lose half of the digits."""
    out, cols = left.shape[0], right.shape[1]
    if left.shape[1] * (out + cols) > out * cols:  # the product itself takes less than the products of pairs
        return float((left @ right).square().sum())
    found = _gram(left, right)
    whole = float((left.square().sum(0) * right.square().sum(1)).sum())
    if found > 1e-9 * whole or not whole:
        return found
    return float((torch.linalg.qr(left).R @ torch.linalg.qr(right.mT).R.mT).square().sum())


def inner(left: Tensor, right: Tensor, up: Tensor, down: Tensor) -> float:
    """Return ⟨L R, B A⟩."""
    return float(((left.mT @ up) * (right @ down.mT)).sum())


def _gram(left: Tensor, right: Tensor) -> float:
    return max(0.0, inner(left, right, left, right))
