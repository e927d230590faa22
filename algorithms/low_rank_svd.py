"""Leading singular triples by random projection. Halko et al. 2009, arXiv:0909.4061, algorithms 4.4 and 5.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def low_rank_svd(weight: Tensor, rank: int, rounds: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [out, rank], S [rank], V [cols, rank] of a weight [out, cols], as torch.svd_lowrank gives them after
    torch.manual_seed(seed), without changing torch's global generator."""
    import torch

    wide = weight.shape[0] < weight.shape[1]
    matrix = weight.mT if wide else weight
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(matrix.shape[1], rank, dtype=matrix.dtype, generator=random)
    basis = torch.linalg.qr(matrix @ start).Q
    for _ in range(rounds):
        basis = torch.linalg.qr(matrix.mT @ basis).Q
        basis = torch.linalg.qr(matrix @ basis).Q
    small, values, right = torch.linalg.svd(basis.mT @ matrix, full_matrices=False)
    left, right = basis @ small, right.mT
    return (right, values, left) if wide else (left, values, right)
