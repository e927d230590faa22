"""Singular triples of one ΔW. Their vectors are formed when a rank is chosen, and only so many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Triples:
    """Singular triples of one ΔW [out, cols], the largest first: U = bases[0] · turns[0], V = turns[1] · bases[1]."""

    bases: tuple[Tensor, Tensor]  # [out, d] and [d, cols], in fp64 or fp32
    turns: tuple[Tensor, Tensor]  # [d, k] and [k, d], in fp64
    values: Tensor  # σ, [k], in fp64
    squares: float  # ‖ΔW‖², also of what the triples leave out

    def pair(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return B = U√σ [out, rank] and A = √σV [rank, cols] in fp64. Of each row of A the largest entry is
        positive."""
        root = self.values[:rank].sqrt()
        right = product(self.turns[1][:rank] * root[:, None], self.bases[1])
        left = product(self.bases[0], self.turns[0][:, :rank] * root)
        return positive(left, right)

    def first(self, count: int) -> Triples:
        """Return the first `count` triples."""
        left, right = self.turns
        return Triples(self.bases, (left[:, :count], right[:count]), self.values[:count], self.squares)

    @property
    def lost(self) -> float:
        """‖ΔW‖² without that of all triples."""
        return max(0.0, self.squares - float(self.values.square().sum()))


def positive(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors [..., out, rank] and [..., rank, cols] of the same product, whose signs are changed in place; of
    each row of the right one the largest entry is positive."""
    if not right.shape[-2]:
        return left, right
    largest = right.gather(-1, right.abs().argmax(-1, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(right.dtype)
    return left.mul_(signs.mT), right.mul_(signs)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product in fp64; a basis in fp32 has no digits that a product in fp64 would keep."""
    if left.dtype == right.dtype:
        return left @ right
    return (left.float() @ right.float()).double()


def numeric_rank(values: Sequence[float], share: float) -> int:
    """Return how many singular values, the largest first, are more than rounding errors, which are at most a share of
    the largest value; 0 for a matrix of zeros."""
    return sum(v > values[0] * share for v in values) if values and values[0] > 0 else 0
