"""Norms of ΔW from its factors: ‖L R‖² = Σ (LᵀL) ∘ (R Rᵀ), and ⟨L₁ R₁, L₂ R₂⟩ = Σ (L₁ᵀL₂) ∘ (R₁ R₂ᵀ)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...algorithms import ALGORITHMS
from ...matching.patch import PatchPart
from ...measure import WHOLE, Norms
from ...planning.plan import OutputTensor
from ..blocks import block, groups
from ..placement import DeviceStream, Placement

if TYPE_CHECKING:
    from ..fold import StackedPatch
    from ..patch_tensors import PatchTensors

WORTH: Final = 3
"""The products of the factors with themselves take at most 1 / WORTH of the operations of L R; else the norm is that of
a sample."""


def factor_norms(targets: Iterable[OutputTensor], tensors: PatchTensors, lane: DeviceStream) -> Norms:
    """Return weight → adapter → ‖s ΔW‖², and under `WHOLE` that of their sum, where the changes are added up.

    Left out are weights whose changes have no factors, those whose rows give the norm at less cost, and norms that
    overflow.
    """
    at = Placement(lane.at.device, torch.promote_types(lane.at.dtype, torch.float32))
    of_factors = [block(t, 0, t.matrix[0]) for t in targets if t.uses and _from_factors(t)]
    every: Norms = {}
    for alike in groups(of_factors, lambda b: b, lambda _: len(of_factors)):
        found = _norms(tensors.stacks(alike, at, lane), len(alike), alike[0].cols)
        rows = zip(*(norm.clamp_min(0).tolist() for norm in found.values()), strict=True)
        for whole, own in zip(alike, rows, strict=False):
            if all(map(isfinite, own)):
                known = dict(zip(found, own, strict=True))
                if whole.target.combining is not None:
                    del known[WHOLE]
                every[whole.target.name] = known
    return every


def _from_factors(target: OutputTensor) -> bool:
    """Return whether the norm of a weight's change costs less by its factors than by its rows."""
    cols, uses = target.matrix[1], target.uses
    if not all(map(factored, uses)):
        return False
    parts = sorted({(u.piece.start, u.piece.stop) for u in uses})
    if not all(a[1] <= b[0] for a, b in pairwise(parts)):
        return False
    for part in parts:
        rank = sum(map(_rank, (u for u in uses if (u.piece.start, u.piece.stop) == part)))
        if WORTH * rank * (part[1] - part[0] + cols) > (part[1] - part[0]) * cols:
            return False
    return True


def _norms(stacks: Sequence[StackedPatch], count: int, cols: int) -> dict[int, Tensor]:
    """Return adapter → ‖s ΔW‖² [n] of n weights, from their patches."""
    found: dict[int, Tensor] = {}
    if any(s.taken is not None or s.view is not None for s in stacks):
        return found
    for _, some in groupby(sorted(stacks, key=_rows), key=_rows):
        own = [*some]
        table, widths = _products(own, count, cols)
        _add(found, WHOLE, table)
        at_column = 0
        for adapter, same in groupby(zip(own, widths, strict=True), key=lambda pair: pair[0].adapter):
            width = sum(w for _, w in same)
            _add(found, adapter, table.narrow(1, at_column, width).narrow(2, at_column, width))
            at_column += width
    return found


def _products(stacks: Sequence[StackedPatch], count: int, cols: int) -> tuple[Tensor, list[int]]:
    """Return (LᵀL) ∘ (R Rᵀ) [n, r, r] of patches of the same rows, side by side, and the width of each."""
    left, right = [], []
    for s in stacks:
        assert s.algorithm.low_rank is not None
        unread = s.strength.new_zeros(()).expand(count, s.rows.stop - s.rows.start, cols)
        first, second = s.algorithm.low_rank.factors(unread, s.tensors)
        left.append(first)
        right.append(second)
    widths = [part.shape[-1] for part in left]
    if len(stacks) == 1:  # the small product is scaled, not the factor
        strength = stacks[0].strength
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
