"""Factors as they are stored, and how far products of factors are from each other."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

CANCELS: Final = {torch.float64: 1e-9, torch.float32: 1e-2}
"""Dtype → the share of the squares of all columns from which on the square of their sum has digits enough."""


FINE: Final = 1e-10
"""The share of ‖Δ‖² from which on a difference that is formed in fp32 has digits enough."""

PIECE: Final = 2**18
"""Numbers of a matrix that are worked at together."""

ROOM: Final = 8.0
"""By how much numbers of usual size are inside the range of a dtype, so that most of a column is."""

SMALL, LARGE = 1e-20, 1e20
"""Bounds of ‖L R‖² between which fp32 holds the squares of all numbers."""


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
    again = torch.cholesky_solve(rounded @ right.mT @ left.mT, solved).mT
    return (again if bool(sound.all()) else torch.where(sound[..., None, None], again, left)).to(dtype), down


def in_range(left: Tensor, right: Tensor, scale: float, dtype: torch.dtype, rows: Tensor | None) -> Tensor | None:
    """Return powers of two by which columns of L are multiplied, and rows of R divided, so that a narrow dtype holds
    the digits of both; None where it does already. Rows of R that need none keep their bits.

    `scale`: by which L is divided before it is stored. `rows`: R Rᵀ, where it is known.
    """
    known = torch.finfo(dtype)
    if known.tiny <= torch.finfo(torch.float32).tiny or not left.numel():
        return None  # of the range of fp32
    squares = right.square().sum(1) if rows is None else rows.diagonal()
    one = left.square().sum(0).double().div(len(left)).sqrt() / abs(scale)
    other = squares.double().div(right.shape[1]).sqrt()
    bad = (torch.minimum(one, other) < ROOM * known.tiny) | (torch.maximum(one, other) > known.max / ROOM)
    bad &= (one > 0) & (other > 0)
    if not bool(bad.any()):
        return None
    half = torch.where(bad, (torch.log2(other / one) / 2).round(), torch.zeros_like(one))
    return torch.exp2(half).to(left.dtype)


def apart(left: Tensor, right: Tensor, up: Tensor, down: Tensor, rows: Tensor | None = None) -> float:
    """Return ‖L R − B A‖² for factors that are nearly those of B A: (L − B) R + B (R − A), so that nothing cancels.
    `rows`: R Rᵀ, where it is known."""
    first = left - up
    if torch.equal(right, down):
        if first.dtype == torch.float32:  # squares that it cannot hold are nothing beside ‖L R‖² > SMALL
            return _gram(first, right, rows)
        size = float(first.abs().max()) if first.numel() else 0.0
        first = (first / size).float() if size else first  # nothing cancels: fp32 does
        return size**2 * _gram(first, right.float(), None if rows is None else rows.float()) if size else 0.0
    second, rows = right - down, right @ right.mT if rows is None else rows
    off = (first.mT @ first) * rows + 2 * (first.mT @ up) * (right @ second.mT) + (up.mT @ up) * (second @ second.mT)
    return max(0.0, float(off.sum(dtype=torch.float64)))


def apart_from(whole: Tensor, up: Tensor, down: Tensor, squares: float) -> float:
    """Return ‖Δ − B A‖² of a matrix Δ, number by number, some rows at a time, which stay in the caches. In fp32 that is
    exact to a thousandth from FINE · ‖Δ‖² on; for less it is computed in fp64."""
    rows, off = max(1, PIECE // max(whole.shape[1], 1)), 0.0
    left, right = up.to(whole.dtype), down.to(whole.dtype)
    for at in range(0, len(whole), rows):
        rest = torch.addmm(whole[at : at + rows], left[at : at + rows], right, alpha=-1)
        off += float(rest.square_().sum(dtype=torch.float64))
    return off if off > FINE * squares or whole.dtype == torch.float64 else apart_from(
        whole.double(), up, down, squares)  # fmt: skip


def squares_of(left: Tensor, right: Tensor, rows: Tensor | None = None) -> float:
    """Return ‖L R‖². Where columns cancel, triangles from QR replace the products that lose half of the digits. `rows`:
    R Rᵀ, where it is known."""
    out, cols = left.shape[0], right.shape[1]
    if left.shape[1] * (out + cols) > out * cols:  # the product itself takes less than the products of pairs
        return float((left @ right).square().sum())
    found = _gram(left, right, rows)
    whole = float((left.square().sum(0) * right.square().sum(1)).sum())
    if found > CANCELS[left.dtype] * whole or not whole:
        return found
    left, right = left.double(), right.double()
    return float((torch.linalg.qr(left).R @ torch.linalg.qr(right.mT).R.mT).square().sum())


def inner(left: Tensor, right: Tensor, up: Tensor, down: Tensor) -> float:
    """Return ⟨L R, B A⟩."""
    return float(((left.mT @ up) * (right @ down.mT)).sum())


def _gram(left: Tensor, right: Tensor, rows: Tensor | None = None) -> float:
    rows = right @ right.mT if rows is None else rows
    return max(0.0, float(((left.mT @ left) * rows).sum(dtype=torch.float64)))
