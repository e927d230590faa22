"""Measures changes outside of a fold: by their factors, or if an adapter stores a tensor whole.

Norms of ΔW follow from its factors: ‖L R‖² = Σ (LᵀL) ∘ (R Rᵀ), and ⟨L₁ R₁, L₂ R₂⟩ = Σ (L₁ᵀL₂) ∘ (R₁ R₂ᵀ). If a
stored tensor V takes the place of the base's W, V − W is the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from math import isfinite, lcm, prod
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from ..algorithms import ALGORITHMS
from ..change_statistics import ALL_ADAPTERS, Measure, Measurement, Norms, Share
from ..dtypes import FLOATS
from ..files.checkpoint import Index
from ..matching.patch import Match, PatchPart
from ..models.weights import Weight, absent_weight
from ..planning.plan import OutputTensor
from .change_sample import WHOLE_BELOW
from .row_blocks import block, groups
from .tensor_moves import HOST, TORCH_DTYPES, DeviceStream, Placement, as_stored, stage
from .tensors import Fetch, decoded, stored_values

if TYPE_CHECKING:
    from .fold import StackedPatch
    from .patch_tensors import PatchTensors

SAMPLE_STRIDE: Final = 1024
"""About one number in so many of a large tensor is read, from the base and from the adapter."""

READ_RUN: Final = 2**12
"""Values that are read at once from a large tensor."""

WHOLE_PIECE: Final = 2**20
"""Values that are read at once if a tensor is read whole."""

GRAM_SHARE: Final = 3
"""The products of the factors with themselves take at most 1 / GRAM_SHARE of the operations of L R; else the norm is
that of a sample."""


class Replacement(NamedTuple):
    """An output tensor that is an adapter's own, and what the base has in its place."""

    target: OutputTensor
    before: Weight  # of the base; all padding if it has nothing
    adapter: int


def replacements(targets: Iterable[OutputTensor], base: Index, matched: Sequence[Match]) -> Iterator[Replacement]:
    """Yield the targets that are tensors of adapters, and that no formula changes too. Whole numbers are positions
    and counts, whose sizes say nothing."""
    owners: dict[str, int] = {}
    for number, match in enumerate(matched):
        owners |= dict.fromkeys((*match.replaced, *match.bases), number)
    if not owners:
        return
    started = {key: info for match in matched for key, info in match.separated.items()}
    for target in targets:
        adapter, new = owners.get(target.name), target.weight.stored
        if adapter is None or target.uses or new.dtype not in FLOATS:
            continue
        info = base.tensors.get(target.name) or started.get(target.name)
        before = absent_weight(target.name, target.shape, new)
        if info is not None:
            before = Weight(info.shape, info, base.packed.get(info.name))
        if before.packed is not None or before.stored.dtype in FLOATS:
            yield Replacement(target, before, adapter)


def replaced_measures(every: Iterable[Replacement], read: Fetch) -> Iterator[Measurement]:
    """Yield the measure of each tensor, of all its values or of runs that are spread evenly over it."""
    for tensor in every:
        yield Measurement(tensor.target.name, measure(tensor, read))


def measure(tensor: Replacement, read: Fetch, every: int = SAMPLE_STRIDE) -> Measure:
    """Return the measure of a tensor. `every`: of a large one, one number in about so many is read; 1: all of them.

    Tensors may have other numbers of rows: rows that the base lacks are zeros there, as in weights that an adapter
    makes larger. What codes hold of the change is not known.
    """
    sums = Measure()
    for first, some in runs(tensor, every):
        sums += _sums(tensor, values(tensor.before, first, some, read), values(tensor.target.weight, first, some, read))
    return sums.scaled(prod(tensor.target.shape))


def runs(tensor: Replacement, every: int = SAMPLE_STRIDE) -> Iterator[tuple[int, int]]:
    """Yield (first number, count) of the runs of a tensor that are read, as for `measure`."""
    count, weight, group = prod(tensor.target.shape), tensor.before, 1
    if weight.packed is not None:  # whole rows are decoded together
        group = lcm(weight.packing.encoding.group, max(prod(weight.shape[1:]), 1))
    size = -(-(WHOLE_PIECE if every == 1 else READ_RUN) // group) * group
    whole, enough = -(-count // size), -(-max(WHOLE_BELOW, count // every) // size)
    for number in range(0, whole, 1 if every == 1 else max(whole // enough, 1)):
        yield number * size, min(size, count - number * size)


def values(weight: Weight, first: int, count: int, read: Fetch) -> Tensor:
    """Return values of a weight from `first` on, in fp64; zeros after the stored ones."""
    padded = torch.zeros(count, dtype=HOST.dtype)
    if (stored_count := min(count, prod(weight.shape if weight.packed else weight.stored.shape) - first)) > 0:
        stored = decoded(stored_values(weight, first, stored_count, read), weight, first, stored_count, read)
        padded[:stored_count] = stage([stored.reshape(-1)], HOST)[0]
    return padded


def _sums(tensor: Replacement, before: Tensor, after: Tensor) -> Measure:
    """Return the sums over some values, without NaN and infinite ones."""
    change, stored, unchanged = after - before, after, before
    if known := tensor.target.packed is None:
        stored, unchanged = (as_stored(x, TORCH_DTYPES[tensor.target.dtype]) for x in (after, before))
    sound = change.isfinite() & stored.isfinite() & unchanged.isfinite()
    change, error, weight = change[sound], (stored - after)[sound], before[sound]
    size, off = float(change @ change), error[change != 0]
    whole = Share(size, size, size + float(error @ change) if known else None, float(off @ off))
    return Measure(
        of=before.numel(), elements=before.numel(), changed=int((stored != unchanged)[sound].count_nonzero()),
        weight=float(weight @ weight), largest=float(change.abs().max()) if change.numel() else 0.0,
        all=whole, adapters={tensor.adapter: whole},
    )  # fmt: skip


def factor_norms(targets: Iterable[OutputTensor], tensors: PatchTensors, lane: DeviceStream) -> Norms:
    """Return weight → adapter → ‖s ΔW‖², and under `ALL_ADAPTERS` that of their sum, where the changes are added up.

    Left out are weights whose changes have no factors, those whose rows give the norm at less cost, and norms that
    overflow.
    """
    # Weights whose factors give the norm at less cost than their rows, those of one kind in one call.
    at = Placement(lane.at.device, torch.promote_types(lane.at.dtype, torch.float32))
    of_factors = [block(t, 0, t.matrix[0]) for t in targets if t.uses and _from_factors(t)]
    every: Norms = {}
    for alike in groups(of_factors, lambda b: b, lambda _: len(of_factors)):
        norms = _norms(tensors.stacks(alike, at, lane), len(alike), alike[0].cols)
        rows = zip(*(norm.clamp_min(0).tolist() for norm in norms.values()), strict=True)
        for whole, row in zip(alike, rows, strict=False):
            if all(map(isfinite, row)):
                known = dict(zip(norms, row, strict=True))
                if whole.target.combines:
                    del known[ALL_ADAPTERS]
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
        if GRAM_SHARE * rank * (part[1] - part[0] + cols) > (part[1] - part[0]) * cols:
            return False
    return True


def _norms(stacks: Sequence[StackedPatch], count: int, cols: int) -> dict[int, Tensor]:
    """Return adapter → ‖s ΔW‖² [n] of n weights, from their patches."""
    norms: dict[int, Tensor] = {}
    if any(s.taken is not None or s.view is not None for s in stacks):
        return norms
    for _, some in groupby(sorted(stacks, key=_rows), key=_rows):
        of_rows = [*some]
        table, widths = _products(of_rows, count, cols)
        _add(norms, ALL_ADAPTERS, table)
        at_column = 0
        for adapter, same in groupby(zip(of_rows, widths, strict=True), key=lambda pair: pair[0].adapter):
            width = sum(w for _, w in same)
            _add(norms, adapter, table.narrow(1, at_column, width).narrow(2, at_column, width))
            at_column += width
    return norms


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


def _add(norms: dict[int, Tensor], adapter: int, products: Tensor) -> None:
    more = products.sum((1, 2))
    norms[adapter] = norms[adapter] + more if adapter in norms else more


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
