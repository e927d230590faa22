"""Factors as they are stored, and how far products of factors are from each other."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...engine.row_matrix import RowMatrix
from ..rounding import CANCELS as SINGLE
from ..rounding import NOTHING, ROOM, Totals, squares, totals_of

CANCELS: Final = {torch.float64: 1e-9, torch.float32: SINGLE}
"""Dtype → the share of the squares of all columns from which on the square of their sum has digits enough."""


FINE: Final = 1e-10
"""The share of ‖Δ‖² from which on a difference that is formed in fp32 has digits enough."""


class Grams(NamedTuple):
    """The products of all columns of L with each other, and of all rows of R: LᵀL and R Rᵀ [R, R]."""

    columns: Tensor
    rows: Tensor

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> Grams:
        """Return those of two factors."""
        return cls(left.mT @ left, right @ right.mT)

    def squares(self) -> float:
        """Return ‖L R‖²; NaN or infinity, as the processor has it, where it is too large for fp64."""
        return max(float((self.columns * self.rows).sum(dtype=torch.float64)), 0.0)  # which keeps NaN

    def apart(self) -> float:
        """Return the sum of the squares of all pairs of a column and a row: ‖L R‖² if none had anything in common."""
        return float((self.columns.diagonal() * self.rows.diagonal()).sum())


def alike(first: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one dtype on the host have the same bits. numpy takes a fifth of the time of
    `torch.equal`."""
    if first.shape != other.shape:
        return False
    bits, others = (t.contiguous().reshape(-1).view(torch.uint8).numpy() for t in (first, other))
    return np.array_equal(bits, others)


def stored(left: Tensor, right: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return B [..., out, rank] and A [..., rank, cols] in the dtype of the file. For 16 bits, B is solved anew for the
    rounded A, which takes back A's rounding error within its rows, and is rounded after that."""
    down = right.to(dtype)
    if dtype.itemsize > 2 or not right.shape[-2]:
        return left.to(dtype), down
    rounded = down.double()
    solved, info = torch.linalg.cholesky_ex(rounded @ rounded.mT)
    sound = (info == 0) & torch.isfinite(solved).all(-1).all(-1)
    if not bool(sound.any()):
        return left.to(dtype), down
    again = left @ torch.cholesky_solve(rounded @ right.mT, solved).mT  # the small factor first, of [rank, rank]
    return (again if bool(sound.all()) else torch.where(sound[..., None, None], again, left)).to(dtype), down


def in_range(left: Tensor, right: Tensor, scale: float, dtype: torch.dtype, grams: Grams | None) -> Tensor | None:
    """Return powers of two by which columns of L are multiplied, and rows of R divided, so that a narrow dtype holds
    the digits of both; None where it does already. Rows of R that need none keep their bits.

    `scale`: by which L is divided before it is stored. `grams`: those of L and R, where they are known.
    """
    known = torch.finfo(dtype)
    if known.tiny <= torch.finfo(torch.float32).tiny or not left.numel():
        return None  # of the range of fp32
    ups = left.square().sum(0) if grams is None else grams.columns.diagonal()
    downs = right.square().sum(1) if grams is None else grams.rows.diagonal()
    lengths = ups.double().div(len(left)).sqrt() / abs(scale)
    other = downs.double().div(right.shape[1]).sqrt()
    bad = (torch.minimum(lengths, other) < ROOM * known.tiny) | (torch.maximum(lengths, other) > known.max / ROOM)
    bad &= (lengths > 0) & (other > 0)
    if not bool(bad.any()):
        return None
    half = torch.where(bad, (torch.log2(other / lengths) / 2).round(), torch.zeros_like(lengths))
    return torch.exp2(half).to(left.dtype)


def apart(left: Tensor, right: Tensor, up: Tensor, down: Tensor, rows: Tensor | None = None) -> float:
    """Return ‖L R − B A‖² for factors that are nearly those of B A: (L − B) R + B (R − A), so that nothing cancels.
    `rows`: R Rᵀ, where it is known."""
    rows = right @ right.mT if rows is None else rows
    first = left - up
    if alike(right, down):
        if first.dtype == torch.float32:  # squares that it cannot hold are nothing against ‖L R‖² > SMALL
            return Grams(first.mT @ first, rows).squares()
        size = float(first.abs().max()) if first.numel() else 0.0
        first = (first / size).float() if size else first  # nothing cancels: fp32 does
        return size**2 * Grams(first.mT @ first, rows.float()).squares() if size else 0.0
    second = right - down
    off = (first.mT @ first) * rows + 2 * (first.mT @ up) * (right @ second.mT) + (up.mT @ up) * (second @ second.mT)
    return max(float(off.sum(dtype=torch.float64)), 0.0)


def apart_from(whole: RowMatrix, up: Tensor, down: Tensor, total: float, dtype: torch.dtype | None = None) -> float:
    """Return ‖Δ − B A‖² of a matrix Δ, number by number, some rows at a time, which stay in the caches. In fp32 that is
    exact to a thousandth from FINE · ‖Δ‖² on; for less it is computed in fp64. `total`: ‖Δ‖². `dtype`: default: that of
    Δ."""
    off, wide = 0.0, torch.float64
    dtype_of_sums = dtype or whole.read(slice(0, 0)).dtype
    left, right = up.to(dtype_of_sums), down.to(dtype_of_sums)
    for rows, block in whole.blocks(owned=False):
        off += squares(torch.addmm(block.to(dtype_of_sums), left[rows], right, alpha=-1))
    return off if off > FINE * total or dtype_of_sums == wide else apart_from(whole, up, down, total, wide)


class Rounded(NamedTuple):
    """A matrix as it is stored, the totals of the exact one, and ‖Δ − Δ̂‖²."""

    numbers: Tensor
    totals: Totals
    lost: float  # ‖Δ − Δ̂‖²


def rounded(exact: RowMatrix, dtype: torch.dtype) -> Rounded:
    """Return a matrix that is rounded once, some rows at a time."""
    numbers = torch.empty(exact.shape, dtype=dtype)
    totals, lost = NOTHING, 0.0
    for rows, block in exact.blocks(owned=False):
        numbers[rows] = block
        totals += totals_of(block)
        lost += squares(numbers[rows].double() - block.double())
    return Rounded(numbers, totals, lost)


def squares_of(left: Tensor, right: Tensor, grams: Grams | None = None) -> float:
    """Return ‖L R‖². Where columns cancel, triangles from QR replace the products that lose half of the digits.
    `grams`: those of L and R, where they are known."""
    out, cols = left.shape[0], right.shape[1]
    if left.shape[1] * (out + cols) > out * cols:  # the product itself takes less than the products of pairs
        return float((left @ right).square().sum())
    grams = grams or Grams.of(left, right)
    squares, whole = grams.squares(), grams.apart()
    if squares > CANCELS[left.dtype] * whole or not whole:
        return squares
    left, right = left.double(), right.double()
    return float((torch.linalg.qr(left).R @ torch.linalg.qr(right.mT).R.mT).square().sum())


def inner(left: Tensor, right: Tensor, up: Tensor, down: Tensor) -> float:
    """Return ⟨L R, B A⟩."""
    return float(((left.mT @ up) * (right @ down.mT)).sum())
