"""The basis that FRoD computes from the layers that share it, where the file does not store it
(`save_projection=False`).

The steps are those of PEFT (0.21.2, tuners/frod/model.py), in fp32 on the CPU, which PEFT uses whatever the device.
LAPACK determines the signs of the eigenvectors. Where eigenvalues are so close that rounding determines the vectors,
machines do not agree, and the layers are refused; the same steps in fp64 show this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from .base import expect

if TYPE_CHECKING:
    from torch import Tensor

BASIS_TOLERANCE: Final = 0.05
"""The largest relative distance between the bases in fp32 and fp64. With four layers of 2048 inputs it is 0.02: eleven
vectors are so close that rounding rotates them, which alters the change of a weight by 2 %. With one layer, or equal
layers, all eigenvalues are equal, and the basis is undetermined.
"""
UNDETERMINED: Final = (
    "the basis that its layers share is not stored, and for this base it depends on rounding; save the adapter again "
    "with save_projection=True"
)


def joint_basis(weights: Sequence[Tensor], ridge: float, cast: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Return V [in, in] in fp32, from weights [out, in] in fp32; raise DoesNotFit where rounding determines V.

    The order of the weights matters. `cast` is that of Loaded.
    """
    import torch

    basis, _ = _basis(weights, ridge)
    exact, upper = _basis([cast(weight, "F64") for weight in weights], ridge)
    single, double = (torch.cat([v, _left(upper, v)]) for v in (cast(basis, "F64"), exact))
    distance = torch.minimum((single - double).norm(dim=0), (single + double).norm(dim=0))
    expect(holds=not bool(distance.norm() > BASIS_TOLERANCE * double.norm()), otherwise=UNDETERMINED)
    return basis


def _basis(weights: Sequence[Tensor], ridge: float) -> tuple[Tensor, Tensor]:
    """Return V, and a matrix with the same right singular vectors as the stacked weights: R of their QR, or themselves.

    With Qᵢ the rows of Q that belong to weight i, V is Rᵀ times the eigenvectors of the mean of (Qᵢᵀ Qᵢ + ridge · I)⁻¹.
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
    """Return U of all weights in the basis Q, its columns as long as those of V, so that both count alike."""
    import torch

    turned: Tensor = torch.linalg.lstsq(basis, upper.T).solution.T
    length = turned.norm(dim=0)
    scaled: Tensor = turned / length.where(length > 0, length.new_ones(())) * basis.norm(dim=0)
    return scaled


def drawn_places(widths: Sequence[int], share: float, seed: int) -> Tensor:
    """Return the rows and columns of S, [2, m], for the last of these widths; all draw in order from one generator."""
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
