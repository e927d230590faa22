"""Factors as they are stored, and how far products of factors are from each other."""

from __future__ import annotations

import torch
from torch import Tensor


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
        size = float(first.abs().max()) if first.numel() else 0.0
        return size**2 * _gram((first / size).float(), right.float()) if size else 0.0  # nothing cancels: fp32 does
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
