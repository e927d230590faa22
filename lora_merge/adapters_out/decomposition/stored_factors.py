"""Factors as they are stored: rounded once, with what the rounding and the cut lose. In numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, Protocol

import numpy as np

from ...dtypes import DTYPE_ROWS, ITEM_BYTES
from ..groups import Target
from ..module_tensors import Norms, Spectrum
from ..rank_rules import Rule, choose
from ..rounding import HEADROOM, Array, Effect, as_stored, widened
from .factors import Grams, Triples, effect_of_product, inner, of_factors, root_of, squares_of

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
    """Both factors as a file has to hold them, if the numbers of the inputs give them without a sum."""

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
    norms: Mapping[str, Norms] = field(default_factory=dict)  # of each layer that the weight is stored as
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
        """The numbers of Δ, by some of its rows."""
        return effect_of_product(self.left, self.right)

    @property
    def turned(self) -> FactoredDelta:
        """The transposed Δ."""
        return FactoredDelta(self.right.T, self.left.T, self.before)

    def apart(self, other: FactoredDelta) -> float:
        """Return ‖Δ − Δ'‖²."""
        return squares_of(np.concatenate((self.left, -other.left), 1), np.concatenate((self.right, other.right)))

    def of(self, part: Target) -> FactoredDelta:
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
        numbers then."""
        return of_factors(self.left, self.right, noise) if self.left.shape[1] <= min(self.matrix) else None


class StoredFactors(NamedTuple):
    """B [out, rank] and A [rank, cols] in the bits of a dtype; α, ‖Δ‖² and ‖Δ − α/rank · B A‖²."""

    up: Array
    down: Array
    alpha: float
    squares: float
    lost: float
    spectrum: Spectrum | None = None  # of Δ, if it was decomposed

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
    return StoredFactors(up, down, alpha, delta.squares, lost)


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
        first = first[first.any(1)]  # few rows, where the dtype holds most numbers
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
