"""Matrices as they are stored, and how far factors are from a matrix, by its rows."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...engine.row_matrix import RowMatrix
from ..rounding import ZERO_TOTALS, Totals, squares, totals_of

LOST_IN_FP32: Final = 1e-10
"""The share of ‖Δ‖² from which on a difference that is formed in fp32 has digits enough."""


def apart_from(whole: RowMatrix, up: Tensor, down: Tensor, total: float, dtype: torch.dtype | None = None) -> float:
    """Return ‖Δ − B A‖² of a matrix Δ, number by number, some rows at a time, which stay in the caches. In fp32 that is
    exact to a thousandth from LOST_IN_FP32 · ‖Δ‖² on; for less it is computed in fp64. `total`: ‖Δ‖². `dtype`: default:
    that of Δ."""
    off, wide = 0.0, torch.float64
    dtype_of_sums = dtype or whole.read(slice(0, 0)).dtype
    left, right = up.to(dtype_of_sums), down.to(dtype_of_sums)
    for rows, block in whole.blocks(owned=False):
        off += squares(torch.addmm(block.to(dtype_of_sums), left[rows], right, alpha=-1))
    return off if off > LOST_IN_FP32 * total or dtype_of_sums == wide else apart_from(whole, up, down, total, wide)


class Rounded(NamedTuple):
    """A matrix as it is stored, the totals of the exact one, and ‖Δ − Δ̂‖²."""

    numbers: Tensor
    totals: Totals
    lost: float  # ‖Δ − Δ̂‖²


def rounded(exact: RowMatrix, dtype: torch.dtype) -> Rounded:
    """Return a matrix that is rounded once, some rows at a time."""
    numbers = torch.empty(exact.shape, dtype=dtype)
    totals, lost = ZERO_TOTALS, 0.0
    for rows, block in exact.blocks(owned=False):
        numbers[rows] = block
        totals += totals_of(block)
        lost += squares(numbers[rows].double() - block.double())
    return Rounded(numbers, totals, lost)
