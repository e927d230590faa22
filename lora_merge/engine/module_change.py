"""ΔW of one module alone: as two factors or as a matrix, with inner products, singular values and spaces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS
from ..matching.patch import Patch, PatchPart
from ..models.weights import Weight
from ..planning.plan import OutputTensor
from .devices import place
from .fold import change
from .patch_tensors import PatchTensors
from .row_blocks import BlockPart
from .row_matrix import RowMatrix
from .tensor_moves import DeviceStream, Placement
from .tensors import gathered

SMALL_SIDE: Final = 512  # rows or columns of a whole ΔW whose singular values are all computed
NOISE_SHARE: Final = 1e-4
"""Share of the largest size below which a direction is rounding: a change is the difference of two weights in fp32."""
POWER_STEPS: Final = 16  # of the power iteration for the largest singular value of a larger one


@dataclass(frozen=True)
class ModuleChange:
    """ΔW [out, cols] of one module: `left` [out, r] times `right` [r, cols], or a whole matrix by its rows."""

    left: Tensor | None = None
    right: Tensor | None = None
    whole: RowMatrix | None = None

    @staticmethod
    def in_memory(matrix: Tensor) -> ModuleChange:
        """Return a change that is in memory as a matrix."""
        return ModuleChange(whole=RowMatrix.of(matrix))

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Both factors."""
        assert self.left is not None and self.right is not None, "factors come in pairs"
        return self.left, self.right

    @property
    def rows(self) -> RowMatrix:
        """ΔW by rows."""
        return RowMatrix.product(*self.factors) if self.whole is None else self.whole

    @property
    def matrix(self) -> tuple[int, int]:
        """(out, cols)."""
        return self.rows.shape

    def dense(self) -> Tensor:
        """Return ΔW as one matrix."""
        return self.rows.dense()

    @property
    def size(self) -> float:
        """An upper bound of the norm; NaN or infinite if a number is."""
        parts = self.factors if self.whole is None else (self.whole.dense(),)
        return prod(float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts)

    def inner(self, other: ModuleChange) -> float:
        """Return ⟨ΔW₁, ΔW₂⟩ = tr(ΔW₁ᵀ ΔW₂); of two products tr((L₁ᵀ L₂)ᵀ (R₁ R₂ᵀ)), without a matrix of ΔW's size."""
        if self.whole is None and other.whole is None:
            (left, right), (up, down) = self.factors, other.factors
            return float(((left.mT @ up) * (right @ down.mT)).sum(dtype=torch.float64))
        return float((self.dense() * other.dense()).sum(dtype=torch.float64))

    def singular_values(self) -> Tensor:
        """Return the singular values, the largest first; of a large matrix that is not a product, only the largest."""
        if self.whole is None:
            left, right = self.factors
            return _svdvals(torch.linalg.qr(left, mode="r").R @ torch.linalg.qr(right.T, mode="r").R.T)
        matrix = self.whole.dense()
        if min(matrix.shape, default=0) <= SMALL_SIDE:
            return _svdvals(matrix)
        vector = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0))
        for _ in range(POWER_STEPS):
            vector = matrix.T @ (matrix @ vector)
            vector = vector / vector.norm().clamp_min(1e-30)
        largest: Tensor = (matrix @ vector).norm().reshape(1)
        return largest

    def spaces(self) -> tuple[Tensor, Tensor] | None:
        """Return orthonormal bases of the column space and of the row space, [out, r] and [cols, r], without directions
        that are rounding; None if ΔW is not a product of two factors."""
        if self.whole is not None:
            return None
        (left, upper), (right, lower) = (torch.linalg.qr(factor) for factor in (self.factors[0], self.factors[1].T))
        columns, sizes, rows = torch.linalg.svd(upper @ lower.T, full_matrices=False)
        large = sizes > NOISE_SHARE * sizes[:1]
        return left @ columns[:, large], right @ rows.T[:, large]


def change_of_patch(
    patch: Patch, weight: Weight, tensors: PatchTensors, at: Placement | None = None, *, factors: bool = False
) -> ModuleChange:
    """Return ΔW of a patch at strength 1, for all rows of its view, as the view has them.

    Parameters:
        weight: The weight of the base; one of its shape if the formula does not read its values.
        at: The placement; None: the CPU in fp32, or in fp64 for a formula that decomposes weights.
        factors: Whether ΔW is returned as the two factors that its formula has, and not as a matrix.
    """
    row, (rows, cols) = ALGORITHMS[patch.algorithm], patch.view.matrix
    at = at or place("cpu", "F64" if row.decomposes else "F32")
    # The formula with its tensors, and the values of the view if it reads them.
    alone = OutputTensor(weight.stored.name, weight.stored.name, "F64", weight, 0, 0)
    part = BlockPart(PatchPart(patch, patch.view.row_slices[0], 0, 1.0), 0, rows, (0, rows), None, alone)
    stack = tensors.stack([part], at, DeviceStream(at))
    stack = replace(stack, rows=slice(0, rows), transposed=False, across=slice(None))
    base = torch.zeros((), dtype=at.dtype, device=at.device).expand(1, rows, cols)
    if patch.reads_base:
        base = gathered(patch.view, lambda piece: tensors.whole(piece.key).reshape(-1, piece.cols), at).unsqueeze(0)
    if not factors:
        return ModuleChange.in_memory(change(stack, base)[0])
    assert row.low_rank is not None, "the formula has factors"
    left, right = row.low_rank.factors(base, stack.tensors)
    return ModuleChange(left[0], right[0])


def _svdvals(matrix: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(matrix)
    return values
