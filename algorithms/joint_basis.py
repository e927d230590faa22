"""The basis that FRoD makes of all layers of a kind, where the adapter's file lacks it (`save_projection=False`).

PEFT's own steps (0.21.2, tuners/frod/model.py), in fp32 on the CPU, as it takes them when it loads the adapter on any
device. The signs of eigenvectors are what LAPACK gives. Where eigenvalues lie so near each other that the vectors are
a matter of rounding, no two machines agree, and the layers are refused: that is seen by the same steps in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from .base import expect

if TYPE_CHECKING:
    from torch import Tensor

NEAR: Final = 0.05
"""How far, of its length, the whole basis may be from the one that fp64 gives. Four layers of 2048 inputs are 0.02 off:
eleven vectors lie so near each other that they are turned, and the change of a weight is another by 2 %. Of one layer
alone nothing is settled: all eigenvalues are equal, as they would be if all layers were one, and any basis is as good.
"""
UNSETTLED: Final = (
    "the basis that its layers share is not stored, and is a matter of rounding in this base; save the adapter again "
    "with save_projection=True"
)


def joint_basis(weights: Sequence[Tensor], ridge: float, cast: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return V [in, in] in fp32 of weights [out, in] in fp32, in order; DoesNotFit where it is a matter of rounding.

    `cast`: as in Loaded.
    """
    import torch

    found, _ = _basis(weights, ridge)
    exact, upper = _basis([cast(weight, "F64") for weight in weights], ridge)
    ours, theirs = (torch.cat([v, _left(upper, v)]) for v in (cast(found, "F64"), exact))
    apart = torch.minimum((ours - theirs).norm(dim=0), (ours + theirs).norm(dim=0))
    expect(holds=not bool(apart.norm() > NEAR * theirs.norm()), otherwise=UNSETTLED)
    return found


def _basis(weights: Sequence[Tensor], ridge: float) -> tuple[Tensor, Tensor]:
    """Return V, and a matrix with the singular vectors of all weights on the right: their R, or themselves.

    V is R times the eigenvectors of a mean over the weights: of the inverse of what each has of their common row space.
    """
    import torch

    stacked = torch.cat(list(weights))
    if stacked.shape[0] < stacked.shape[1]:
        right: Tensor = torch.linalg.svd(stacked, full_matrices=True)[2]
        return right.T, stacked
    orthonormal, upper = torch.linalg.qr(stacked)
    unit, mean = ridge * torch.eye(len(upper), dtype=upper.dtype), torch.zeros_like(upper)
    for part in orthonormal.split([len(weight) for weight in weights]):
        mean += torch.linalg.inv(part.T @ part + unit)
    mean /= len(weights)
    return upper.T @ torch.linalg.eigh(mean)[1], upper


def _left(upper: Tensor, basis: Tensor) -> Tensor:
    """Return U of all weights in the basis of their Q, as long as the columns of V, so that both weigh alike."""
    import torch

    turned: Tensor = torch.linalg.lstsq(basis, upper.T).solution.T
    length = turned.norm(dim=0)
    scaled: Tensor = turned / length.where(length > 0, length.new_ones(())) * basis.norm(dim=0)
    return scaled


def drawn_places(widths: Sequence[int], share: float, seed: int) -> Tensor:
    """Return [2, m] rows and columns of S for the last of these kinds, all of which draw from one generator in
    order.
    """
    import torch

    random, places = torch.Generator().manual_seed(seed), torch.empty(2, 0, dtype=torch.long)
    for width in widths:
        off = width * (width - 1)  # entries off the diagonal, row by row
        count = min(int(width * width * share), off)
        count = max(1, count) if share > 0 and off else count
        if not count:
            places = torch.empty(2, 0, dtype=torch.long)
            continue
        chosen = torch.randperm(off, generator=random)[:count]
        row, column = chosen // (width - 1), chosen % (width - 1)
        places = torch.stack([row, column + (column >= row)])
    return places
