"""Singular triples of one ΔW. Their vectors are formed when a rank is chosen, and only so many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..rounding import Array


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
