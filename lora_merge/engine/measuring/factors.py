"""Norms of ΔW from its factors: ‖L R‖² = Σ (LᵀL) ∘ (R Rᵀ), and ⟨L₁ R₁, L₂ R₂⟩ = Σ (L₁ᵀL₂) ∘ (R₁ R₂ᵀ)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...algorithms import ALGORITHMS
from ...matching.patch import PatchPart
from ...measure import WHOLE
from ...planning.plan import OutputTensor
from ..blocks import block
from ..placement import DeviceStream, Placement
from .placement import widened

if TYPE_CHECKING:
    from ..fold import StackedPatch
    from ..patch_tensors import PatchTensors

WORTH: Final = 3
"""The products of the factors with themselves take at most 1 / WORTH of the operations of L R; else a sample of rows
tells the norm."""


def factor_norms(
    target: OutputTensor, tensors: PatchTensors, at: Placement, lane: DeviceStream
) -> Mapping[int, Tensor]:
    """Return ‖s ΔW‖² [1] of each adapter in a weight, and under `WHOLE` that of their sum; {} where no factors tell it,
    or where rows tell it at less cost."""
    (rows, cols), uses = target.matrix, target.uses
    parts = sorted({(u.piece.start, u.piece.stop) for u in uses})
    apart = all(a[1] <= b[0] for a, b in pairwise(parts))
    if target.combining is not None or not apart or not all(map(factored, uses)):
        return {}
    for part in parts:
        rank = sum(map(_rank, (u for u in uses if (u.piece.start, u.piece.stop) == part)))
        if WORTH * rank * (part[1] - part[0] + cols) > (part[1] - part[0]) * cols:
            return {}
    found: dict[int, Tensor] = {}
    stacks = tensors.stacks([block(target, 0, rows)], at, lane)
    if any(s.taken is not None or s.view is not None for s in stacks):
        return {}
    for _, some in groupby(sorted(stacks, key=_rows), key=_rows):
        own = [*some]
        table, widths = _products(own, cols)
        _add(found, WHOLE, table)
        at_column = 0
        for adapter, same in groupby(zip(own, widths, strict=True), key=lambda pair: pair[0].adapter):
            width = sum(w for _, w in same)
            _add(found, adapter, table.narrow(1, at_column, width).narrow(2, at_column, width))
            at_column += width
    return found


def _products(stacks: Sequence[StackedPatch], cols: int) -> tuple[Tensor, list[int]]:
    """Return (LᵀL) ∘ (R Rᵀ) [1, r, r] of patches of the same rows, side by side, and the width of each."""
    left, right = [], []
    for s in stacks:
        assert s.algorithm.low_rank is not None
        unread = s.strength.new_zeros(()).expand(1, s.rows.stop - s.rows.start, cols)
        first, second = s.algorithm.low_rank.factors(unread, s.tensors)
        left.append(widened(first))
        right.append(widened(second))
    widths = [part.shape[-1] for part in left]
    if len(stacks) == 1:  # the small product is scaled, not the factor
        strength = widened(stacks[0].strength)
        return (left[0].mT @ left[0]) * (right[0] @ right[0].mT) * (strength * strength), widths
    wide = torch.cat([part * s.strength for part, s in zip(left, stacks, strict=True)], -1)
    tall = torch.cat(right, 1)
    return (wide.mT @ wide) * (tall @ tall.mT), widths


def _add(found: dict[int, Tensor], adapter: int, products: Tensor) -> None:
    more = products.sum((1, 2))
    found[adapter] = found[adapter] + more if adapter in found else more


def _rows(s: StackedPatch) -> tuple[int, int]:
    return s.rows.start, s.rows.stop


def _rank(use: PatchPart) -> int:
    row = ALGORITHMS[use.patch.algorithm].low_rank
    assert row is not None
    return row.rank(use.patch.shapes, use.patch.view.shape)


def factored(use: PatchPart) -> bool:
    """Return whether ΔW of the rows is the product of two factors."""
    row = ALGORITHMS[use.patch.algorithm]
    return row.low_rank is not None and not row.reads_base and use.patch.magnitude is None and not use.piece.transposed
