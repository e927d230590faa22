"""Tensors that several formulas store alike, as `Algorithm.tensors` describes them.

The shapes differ from formula to formula: each has n in front of what its `fitted_shapes` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Scalar


class FactorPair(NamedTuple):
    """Two factors with a scale."""

    up: Tensor  # B
    down: Tensor  # A
    scale: Scalar  # α / r


class ScaledPair(NamedTuple):
    """Two factors with a diagonal matrix between them, and a scale."""

    up: Tensor  # B, [n, out, r]
    down: Tensor  # A, [n, r, cols]
    values: Tensor  # the diagonal, [n, r, 1]
    scale: Scalar


class PairWithoutAlpha(NamedTuple):
    """Two factors whose file stores no α."""

    up: Tensor  # B
    down: Tensor  # A
    lora_alpha: float  # α
    over_rank: bool = True  # whether the scale is α / r, not α
