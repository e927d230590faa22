"""Changes as products of two factors L R, in numpy: norms, inner products, sums, and a small SVD of their triangles.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa and Fukaya 2015, doi:10.1137/140990450) takes products of matrices where
QR takes reflections, which use a processor a tenth as well. It is as exact where no column nearly repeats the others.
Torch's tensors on the host are arrays too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from ...errors import beyond_fp64
from ..rounding import CANCELLED_SHARE_OF_FP32 as SINGLE
from ..rounding import LEAST_ROWS, PRODUCT_WORK, Array, Distinct, Effect

STORED_IN_16: Final = 1e-7
"""Singular values below this share of the largest one are rounding noise, where the inputs have 16-bit numbers."""

CLEAN: Final = 1e3
"""The condition of a matrix in fp64 up to which one turn leaves its columns orthonormal to 1e-10: its square counts."""

DEFECT: Final = 0.1
"""By how much columns may be from orthonormal after the first of two turns; from then on, reflections are taken."""

TRIANGLE_ROWS: Final = 32
"""Rows of a triangle that is inverted at once."""

CANCELLED_SHARES: Final = MappingProxyType({np.dtype(np.float64): 1e-9, np.dtype(np.float32): SINGLE})
"""Dtype → the share of the squares of all columns from which on the square of their sum has digits enough."""


@dataclass(frozen=True)
class Triples:
    """Singular triples of one ΔW [out, cols], the largest first: U = bases[0] · turns[0], V = turns[1] · bases[1]."""

    bases: tuple[Array, Array]  # [out, d] and [d, cols], in fp64 or fp32
    turns: tuple[Array, Array]  # [d, k] and [k, d], in fp64
    values: Array  # σ, [k], in fp64
    squares: float  # ‖ΔW‖², also of what the triples leave out

    def pair(self, rank: int) -> tuple[Array, Array]:
        """Return B = U√σ [out, rank] and A = √σV [rank, cols] in fp64. Of each row of A the largest entry is
        positive."""
        root = np.sqrt(self.values[:rank])
        right = product(self.turns[1][:rank] * root[:, None], self.bases[1])
        left = product(self.bases[0], self.turns[0][:, :rank] * root)
        if len(right):
            largest = np.take_along_axis(right, np.abs(right).argmax(1, keepdims=True), 1)
            signs = np.where(largest < 0, -1.0, 1.0)
            left *= signs.T
            right *= signs
        return left, right

    def first(self, count: int) -> Triples:
        """Return the first `count` triples."""
        left, right = self.turns
        return Triples(self.bases, (left[:, :count], right[:count]), self.values[:count], self.squares)


def product(left: Array, right: Array) -> Array:
    """Return the product in fp64; a basis in fp32 has no digits that a product in fp64 would keep."""
    if left.dtype == right.dtype:
        result: Array = left @ right
        return result
    return (left.astype(np.float32) @ right.astype(np.float32)).astype(np.float64)


def numeric_rank(values: Sequence[float], share: float) -> int:
    """Return how many singular values, the largest first, are more than rounding errors, which are at most a share of
    the largest value; 0 for a matrix of zeros."""
    return sum(v > values[0] * share for v in values) if values and values[0] > 0 else 0


Like: TypeAlias = Any
"""An array, or a tensor of torch on the host."""


class Grams(NamedTuple):
    """The products of all columns of L with each other, and of all rows of R: LᵀL and R Rᵀ [R, R]."""

    columns: Array
    rows: Array

    @classmethod
    @np.errstate(all="ignore")  # numbers that are too large are seen in their sum
    def of(cls, left: Array, right: Array) -> Grams:
        """Return those of two factors."""
        return cls(left.T @ left, right @ right.T)

    def squares(self) -> float:
        """Return ‖L R‖²; NaN or infinity where it is too large for fp64."""
        return max(float(np.einsum("ij,ij->", self.columns, self.rows, dtype=np.float64)), 0.0)  # which keeps NaN

    def apart(self) -> float:
        """Return the sum of the squares of all pairs of a column and a row: ‖L R‖² if none had anything in common."""
        return float(np.vdot(self.columns.diagonal().astype(np.float64), self.rows.diagonal()))


@np.errstate(all="ignore")
def squares_of(left: Like, right: Like, grams: Grams | None = None) -> float:
    """Return ‖L R‖². Where columns cancel, triangles from QR replace the products that lose half of the digits.
    `grams`: those of L and R, where they are known."""
    left, right = np.asarray(left), np.asarray(right)
    out, cols = left.shape[0], right.shape[1]
    if left.shape[1] * (out + cols) > out * cols:  # the product itself takes less than the products of pairs
        return float(np.square(left @ right).sum())
    grams = grams or Grams.of(left, right)
    squares, whole = grams.squares(), grams.apart()
    if squares > CANCELLED_SHARES[left.dtype] * whole or not whole or not math.isfinite(squares):
        return squares
    first, other = (np.linalg.qr(t.astype(np.float64)).R for t in (left, right.T))
    return float(np.square(first @ other.T).sum())


def inner(left: Array, right: Array, up: Array, down: Array) -> float:
    """Return ⟨L R, B A⟩."""
    return float(np.vdot(left.T @ up, right @ down.T))


def inner_products(changes: Sequence[tuple[Array, Array]]) -> list[list[float]]:
    """Return the inner products of all pairs of changes."""
    return [[inner(*a, *b) for b in changes] for a in changes]


@np.errstate(all="ignore")
def effect_of_product(left: Like, right: Like) -> Effect:
    """Return the effect of the product of two factors, by some of its rows."""
    left, right = np.asarray(left), np.asarray(right)
    step = max(1, len(left) // max(LEAST_ROWS, PRODUCT_WORK // max(right.size, 1)))
    some = left[::step] @ right
    return Effect(len(left) * right.shape[1], some.size, None, float(np.abs(some).max(initial=0)))


def stacked(factors: Iterable[tuple[Like, Like]]) -> tuple[Array, Array]:
    """Return pairs of factors side by side; those with the same right factor become one."""
    distinct, rights, lefts = Distinct(), list[Array](), list[Array]()
    for left, right in factors:
        left, right = np.asarray(left), np.ascontiguousarray(right)
        first = distinct.first(len(rights), right.reshape(-1).view(np.uint8).data, right.shape)
        if first == len(rights):
            rights.append(right)
            lefts.append(left)
        else:
            lefts[first] = lefts[first] + left
    return np.concatenate(lefts, 1), np.concatenate(rights, 0)


def without_repeats(left: Array, right: Array) -> tuple[Array, Array]:
    """Return factors of the same product whose right one has no two equal rows."""
    distinct, rows = Distinct(), np.ascontiguousarray(right)
    first = [distinct.first(number, row.view(np.uint8).data) for number, row in enumerate(rows)]
    columns = {number: column for column, number in enumerate(dict.fromkeys(first))}
    if len(columns) == len(first):
        return left, right
    joined = np.zeros((len(left), len(columns)), left.dtype)
    for column, number in zip(left.T, first, strict=True):
        joined[:, columns[number]] += column
    return joined, rows[[*columns]]


@contextmanager
def decomposing(name: str) -> Iterator[None]:
    """Raise TooLarge, with the name of a layer, where the products of its numbers are too large for fp64."""
    try:
        yield
    except Exception as e:
        if type(e).__name__.lstrip("_") == "LinAlgError":  # numpy's or torch's, which are no relatives
            raise beyond_fp64(name) from e
        raise


class Triangle(NamedTuple):
    """A matrix as a product: Q = basis · turn has orthonormal columns, and R is triangular."""

    basis: Array  # [m, r]
    turn: Array  # [r, r]
    r: Array  # [r, columns of the matrix]


@np.errstate(all="ignore")
def of_factors(left: Like, right: Like, noise: float = 0.0) -> Triples:
    """Return the triples of a product L R, [out, R] and [R, cols], without forming it: an R×R core is decomposed.

    `noise`: singular values up to this share of the largest one are left out, and rounding errors in any case.
    """
    left, right = _balanced(np.asarray(left, np.float64), np.asarray(right, np.float64))
    first, other = triangle(left), triangle(right.T)
    u, s, v = np.linalg.svd(first.r @ other.r.T, full_matrices=False)
    bound = max(left.shape[0], right.shape[1]) * 2.0**-52 * math.sqrt(max(left.shape[1], 1))
    turns = first.turn @ u, v @ other.turn.T
    whole = Triples((first.basis, other.basis.T), turns, s, float(np.square(s).sum()))
    return whole.first(numeric_rank(s.tolist(), max(bound, noise)))


def triangle(matrix: Array) -> Triangle:
    """Return Q and R of a matrix in fp64: by one turn or two where its columns are independent, else by reflections."""
    if matrix.shape[0] > matrix.shape[1] and (first := _turned(matrix)) is not None:
        if np.linalg.norm(first.r) * np.linalg.norm(first.turn) < CLEAN:
            return first
        second = _turned(first.basis @ first.turn)
        if second is not None and np.abs(second.r - np.eye(len(second.r))).max() < DEFECT:
            return second._replace(r=second.r @ first.r)
    q, r = np.linalg.qr(matrix)
    return Triangle(q, np.eye(q.shape[1]), r)


def _turned(matrix: Array) -> Triangle | None:
    """Return M, R⁻¹ and R with RᵀR = MᵀM; None where M has no such triangle."""
    root = root_of(matrix.T @ matrix)
    return None if root is None else Triangle(matrix, root.inverse.T, root.lower.T)


class Root(NamedTuple):
    """C and C⁻¹ with C Cᵀ = M."""

    lower: Array
    inverse: Array


def root_of(gram: Array) -> Root | None:
    """Return the triangular root of a Gram matrix; None where it has none in these digits."""
    try:
        lower = np.linalg.cholesky(gram)
        inverse = inverse_of_triangle(lower)
    except np.linalg.LinAlgError:
        return None
    return Root(lower, inverse) if np.isfinite(inverse).all() else None


def inverse_of_triangle(lower: Array) -> Array:
    """Return the inverse of a lower triangle, by products of its blocks: numpy's inverse of any matrix takes three
    times as long for 128 columns, and seven times for 400."""
    if len(lower) <= TRIANGLE_ROWS:
        return np.linalg.inv(lower)
    half = len(lower) // 2
    first, last = inverse_of_triangle(lower[:half, :half]), inverse_of_triangle(lower[half:, half:])
    inverse = np.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[half:, :half] = -last @ (lower[half:, :half] @ first)
    return inverse


def _balanced(left: Array, right: Array) -> tuple[Array, Array]:
    """Return the factors with columns of L and rows of R of equal length: badly scaled pairs would lose digits."""
    a, b = np.linalg.norm(left, axis=0), np.linalg.norm(right, axis=1)
    some = (a > 0) & (b > 0)
    ratio = np.sqrt(np.divide(b, a, out=np.ones_like(a), where=some))
    return left * ratio, right / ratio[:, None]
