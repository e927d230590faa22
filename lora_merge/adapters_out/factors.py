"""Changes as products of two factors L R, in numpy: norms, inner products, sums, a small SVD of their triangles; and
how such a change is stored: all of its columns, or cut to a rank, rounded once.

CholeskyQR2 (Yamamoto, Nakatsukasa, Yanagisawa and Fukaya 2015, doi:10.1137/140990450) takes products of matrices where
QR takes reflections, which use a processor a tenth as well. It is as exact where no column nearly repeats the others.
Torch's tensors on the host are arrays too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from ..dtypes import DTYPE_ROWS, ITEM_BYTES
from ..errors import beyond_fp64
from ..models.weights import RowSlice
from .groups import PlacePart, Runs
from .module_tensors import AdapterNorms, Spectrum
from .rank_rules import Rule, choose
from .values import CANCELLED_SHARE_OF_FP32 as SINGLE
from .values import HEADROOM, LEAST_ROWS, PRODUCT_WORK, Array, Distinct, Effect, as_stored, widened

STORED_IN_16: Final = 1e-7
"""Singular values below this share of the largest one are rounding noise, where the inputs have 16-bit values."""

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

Rows = TypeVar("Rows", bound=Any)
"""An array, or a tensor of torch."""


class Grams(NamedTuple):
    """The products of all columns of L with each other, and of all rows of R: LᵀL and R Rᵀ [R, R]."""

    columns: Array
    rows: Array

    @classmethod
    @np.errstate(all="ignore")  # values that are too large are seen in their sum
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


# Factors and rows of one slice of a weight, as arrays or as tensors.


def _zeros(like: Rows, rows: int, cols: int) -> Rows:
    zeros = like.new_zeros(rows, cols) if hasattr(like, "new_zeros") else np.zeros((rows, cols), like.dtype)
    return cast("Rows", zeros)


def shortest(left: Rows, right: Rows) -> tuple[Rows, Rows]:
    """Return factors of the same product with no more columns than the product can have ranks."""
    out, cols = left.shape[0], math.prod(right.shape[1:])
    if left.shape[1] <= (most := min(out, cols)):
        return left, right
    product = left @ right.reshape(right.shape[0], cols)
    identity, diagonal = _zeros(left, most, most), [*range(most)]
    identity[diagonal, diagonal] = 1
    return (identity, product) if out <= cols else (product, identity)


def spread(values: Rows, piece: RowSlice) -> Rows:
    """Return rows of a change of a transposed slice as wide as the stored rows, with zeros in other columns."""
    if piece.columns is None:
        return values
    whole = _zeros(values, values.shape[0], piece.cols)
    whole[:, piece.across] = values
    return whole


def placed(rows: Rows, start: int, out: int) -> Rows:
    """Return rows of a weight from `start` on as all its rows, with zeros in the others."""
    if rows.shape[0] == out:
        return rows
    whole = _zeros(rows, out, rows.shape[1])
    whole[start : start + rows.shape[0]] = rows
    return whole


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
    """Raise TooLarge, with the name of a layer, where the products of its values are too large for fp64."""
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


LEAST_SCALE: Final = 2.0**-126
"""The smallest number that fp32 holds with all its digits."""

LEFT_OUT_BY_SQUARES: Final = 1e-3
"""The share of ‖Δ‖² that is left out is a difference of squares from this size on, where fp32 is exact enough too."""


class Cut(NamedTuple):
    """The cut of a layer: its rule, or a rank that is decided already; and its α, or α / rank where that is kept."""

    rule: Rule
    rank: int | None = None
    alpha: float | None = None
    scale: float = 1.0

    def alpha_of(self, rank: int) -> float:
        """Return α of a layer of this rank: the rank, where the α that is kept would be too small for fp32."""
        if self.alpha is not None:
            return self.alpha
        return rank * self.scale if abs(self.scale) >= LEAST_SCALE else float(rank)

    def chosen(self, triples: Triples, before: int) -> int:
        """Return the rank. `before`: that of the inputs, 0 for one without factors."""
        if self.rank is not None:
            return self.rank
        return choose(self.rule.of_inputs(before), triples.values.tolist(), total=triples.squares)


class InputBits(Protocol):
    """Both factors as a file has to hold them, if the values of the inputs give them without a sum."""

    @property
    def up(self) -> Array:
        """B [out, R]."""
        ...

    @property
    def down(self) -> Array:
        """A [R, cols]."""
        ...


@dataclass(frozen=True)
class FactoredDelta:
    """Δ = L R of one layer, both factors in fp64 or both in fp32."""

    left: Array  # [out, R]
    right: Array  # [R, cols]
    before: int  # the largest rank of the inputs
    norms: Mapping[Runs, AdapterNorms] = field(default_factory=dict)  # of each layer of the weight
    bits: InputBits | None = None

    @property
    def matrix(self) -> tuple[int, int]:
        """(rows, cols) of Δ."""
        return len(self.left), self.right.shape[1]

    @cached_property
    def grams(self) -> Grams:
        """LᵀL and R Rᵀ."""
        return Grams.of(self.left, self.right)

    @cached_property
    def squares(self) -> float:
        """‖Δ‖²."""
        return squares_of(self.left, self.right, self.grams)

    @property
    def effect(self) -> Effect:
        """The values of Δ, by some of its rows."""
        return effect_of_product(self.left, self.right)

    @property
    def turned(self) -> FactoredDelta:
        """The transposed Δ."""
        return FactoredDelta(self.right.T, self.left.T, self.before)

    def apart(self, other: FactoredDelta) -> float:
        """Return ‖Δ − Δ'‖²."""
        return squares_of(np.concatenate((self.left, -other.left), 1), np.concatenate((self.right, other.right)))

    def of(self, part: PlacePart) -> FactoredDelta:
        """Return the rows of Δ that a layer stores, without the columns of L that are zero there."""
        if not part.runs:
            return self
        left = self.left[np.concatenate([np.arange(*run) for run in part.runs])]
        used = left.any(0)
        if not used.any():
            used[:1] = True
        before = min(max((rank or 0 for rank in part.ranks), default=0), *part.matrix)
        return FactoredDelta(left[:, used], self.right[used], before)

    def triples(self, noise: float) -> Triples | None:
        """Return the singular triples; None where L and R have more columns than Δ has rank: the matrix has fewer
        values then."""
        return of_factors(self.left, self.right, noise) if self.left.shape[1] <= min(self.matrix) else None


class StoredFactors(NamedTuple):
    """B [out, rank] and A [rank, cols] in the bits of a dtype; α, ‖Δ‖² and ‖Δ − α/rank · B A‖²."""

    up: Array
    down: Array
    alpha: float
    squares: float
    lost: float
    spectrum: Spectrum | None = None  # of Δ, if it was decomposed
    finite: bool = False  # whether all values are known to be finite

    @property
    def rank(self) -> int:
        """The columns of B."""
        return len(self.down)

    def of_shape(self, shape: Sequence[int]) -> dict[str, tuple[Array, tuple[int, ...]]]:
        """Return the bits and the shape of both factors of a linear layer or of a convolution."""
        return {"down": (self.down, (self.rank, *shape[1:])),
                "up": (self.up, (*self.up.shape, *(1 for _ in shape[2:])))}  # fmt: skip


@np.errstate(all="ignore")
def exact(delta: FactoredDelta, cut: Cut, dtype: str) -> StoredFactors:
    """Return the factors side by side; where they have more columns than the weight has rank, one becomes the
    identity."""
    # Step 1: the factors, and their scale.
    left, right, bits, grams = delta.left, delta.right, delta.bits, delta.grams
    out, cols = delta.matrix
    if left.shape[1] > min(out, cols):
        identity, bits = np.eye(min(out, cols), dtype=left.dtype), None
        left, right = (identity, left @ right) if out <= cols else (left @ right, identity)
        grams = Grams.of(left, right)
    rank = left.shape[1]
    alpha = cut.alpha_of(rank)
    scale = alpha / rank if rank else 1.0  # rank 0: no change
    # Step 2: both rounded, in the range of the dtype.
    if (shift := in_range(left, right, scale, dtype, grams)) is not None:
        left, right, bits = left * shift, right / shift[:, None], None
        grams = grams._replace(rows=grams.rows / shift[:, None] / shift)
    up = bits.up if bits and scale == 1 else as_stored(left if scale == 1 else left / scale, dtype)
    down = bits.down if bits else as_stored(right, dtype)
    # Step 3: what that loses.
    real = widened(up, dtype, left.dtype)
    real = real if scale == 1 else real * scale
    lost = apart(left, right, real, right if bits else widened(down, dtype, left.dtype), grams.rows)
    return StoredFactors(up, down, alpha, delta.squares, lost, finite=bits is not None and scale == 1)


class RoundedPair(NamedTuple):
    """Factors as they are stored: their bits, and the values of these with the scale."""

    bits: tuple[Array, Array]
    real: tuple[Array, Array]
    alpha: float


@np.errstate(all="ignore")
def rounded_pair(leading: tuple[Array, Array], cut: Cut, dtype: str) -> RoundedPair:
    """Return the leading triples, which are factors in fp64, rounded once."""
    left, right = leading
    alpha = cut.alpha_of(rank := len(right))
    scale = alpha / rank if rank else 1.0
    up, down = rounded(left if scale == 1 else left / scale, right, dtype)
    wide = widened(up, dtype, left.dtype), widened(down, dtype, left.dtype)
    real = wide if scale == 1 else (wide[0] * scale, wide[1])
    return RoundedPair((up, down), real, alpha)


@np.errstate(all="ignore")
def truncated(delta: FactoredDelta, triples: Triples, cut: Cut, dtype: str) -> StoredFactors:
    """Return the leading triples as factors, as many as the cut says."""
    leading = triples.pair(cut.chosen(triples, delta.before))
    pair = rounded_pair(leading, cut, dtype)
    lost = max(0.0, _left_out(delta, triples, leading, pair.real))
    return StoredFactors(*pair.bits, pair.alpha, triples.squares, lost, spectrum_of(triples))


def spectrum_of(triples: Triples) -> Spectrum:
    """Return the singular values, as far as they are known, for the report."""
    return Spectrum(triples.values.tolist(), triples.squares)


def rounded(left: Array, right: Array, dtype: str) -> tuple[Array, Array]:
    """Return the bits of B [out, rank] and A [rank, cols]. For 16 bits, B is solved anew for the rounded A, which takes
    back A's rounding error within its rows, and is rounded after that."""
    down = as_stored(right, dtype)
    if ITEM_BYTES[dtype] <= 2 and len(right):
        turn = _turn(right, widened(down, dtype, left.dtype))
        left = left if turn is None else left @ turn
    return as_stored(left, dtype), down


def _turn(right: Array, stored: Array) -> Array | None:
    """Return T [rank, rank], so that L T A is as near as can be to L R for the rounded A; None where rows of A depend
    on others."""
    root = root_of(stored @ stored.T)
    return None if root is None else (root.inverse.T @ (root.inverse @ (stored @ right.T))).T


def in_range(left: Array, right: Array, scale: float, dtype: str, grams: Grams) -> Array | None:
    """Return powers of two by which columns of L are multiplied, and rows of R divided, so that a narrow dtype holds
    the digits of both; None where it does already. Rows of R that need none keep their bits.

    `scale`: by which L is divided before it is stored. `grams`: those of L and R.
    """
    row = DTYPE_ROWS[dtype]
    tiny = 2.0 ** (row.smallest + row.significand - 1)  # the smallest number with all its digits
    if tiny <= LEAST_SCALE or not left.size:
        return None  # of the range of fp32
    lengths = np.sqrt(grams.columns.diagonal().astype(np.float64) / len(left)) / abs(scale)
    other = np.sqrt(grams.rows.diagonal().astype(np.float64) / right.shape[1])
    bad = (np.minimum(lengths, other) < HEADROOM * tiny) | (np.maximum(lengths, other) > row.largest / HEADROOM)
    bad &= (lengths > 0) & (other > 0)
    if not bad.any():
        return None
    ratios = np.where(bad, other, 1.0) / np.where(bad, lengths, 1.0)
    shift: Array = np.exp2(np.round(np.log2(ratios) / 2)).astype(left.dtype)
    return shift


def apart(left: Array, right: Array, up: Array, down: Array, rows: Array | None = None) -> float:
    """Return ‖L R − B A‖² for factors that are nearly those of B A: (L − B) R + B (R − A), so that nothing cancels.
    `rows`: R Rᵀ, where it is known."""
    rows = right @ right.T if rows is None else rows
    first = left - up
    if down is right or np.array_equal(right, down):
        first = first[first.any(1)]  # few rows, where the dtype holds most values
        size = 1.0
        if first.dtype == np.float64:  # nothing cancels: fp32 does
            size = float(np.abs(first).max(initial=0)) or 1.0
            first, rows = (first / size).astype(np.float32), rows.astype(np.float32)
        return size**2 * Grams(first.T @ first, rows).squares()
    second = right - down
    off = (first.T @ first) * rows + 2 * (first.T @ up) * (right @ second.T) + (up.T @ up) * (second @ second.T)
    return max(float(off.sum(dtype=np.float64)), 0.0)


def _left_out(
    delta: FactoredDelta, triples: Triples, leading: tuple[Array, Array], pair: tuple[Array, Array]
) -> float:  # fmt: skip
    """Return ‖Δ − Δ̂‖² for factors of Δ, the triples that are kept, and the stored pair.

    Where it is too small for a difference of squares, it is that of the triples left out, plus that of the rounding,
    less twice what Δ̂ has in common with the triples left out.
    """
    tail = max(0.0, triples.squares - float(np.square(triples.values[: leading[0].shape[1]]).sum()))
    if tail > LEFT_OUT_BY_SQUARES * triples.squares:
        off = triples.squares - 2 * inner(delta.left, delta.right, *pair) + inner(*pair, *pair)
        if off > LEFT_OUT_BY_SQUARES * triples.squares:
            return off
    off = apart(*leading, *pair)
    if tail > 1e-20 * triples.squares:
        off += tail - 2 * (inner(delta.left, delta.right, *pair) - inner(*leading, *pair))
    return off
