"""Numbers of adapters: norms, stable ranks and energies of ΔW, and how much of a merge the base's dtype keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any, Final

import torch
from torch import Tensor

from ..adapters.file import AdapterFile
from ..disk.reader import Reader
from ..engine.blocks import Block
from ..engine.devices import place
from ..engine.patch_tensors import PatchTensors
from ..engine.placement import TORCH_DTYPES, convert, stage
from ..engine.storing.recoding import Codes, read_back, refitted
from ..engine.tensors import TensorCache, stored_numbers
from ..engine.torch_state import undisturbed
from ..measure import RETAINED
from ..models.blocks import blocks
from ..models.names import names
from ..planning.plan import OutputTensor, Plan
from ..proof.findings import remedy
from ..text import listed
from .adapter import block_name, in_order, rank_of, spread
from .changes import merged_blocks
from .deltas import Delta, Deltas
from .pictures import merge_pictures
from .pictures import pictures as pictured

ENERGIES: Final = {"90%": 0.9, "99%": 0.99}
"""Shares of ‖ΔW‖² for which the least rank is shown: the adapter can be resized to it."""


@undisturbed()
def adapter_numbers(file: AdapterFile, *, pictures: bool = False) -> dict[str, Any]:
    """Return norm, stable rank ‖ΔW‖²/σ₁² and the rank that holds most of the energy of each module, at strength 1.

    Products of two factors never become a matrix of ΔW's size. `pictures`: also the largest singular values, and a
    histogram of the elements of some rows.
    """
    modules: dict[str, Any] = {}
    left = 0
    by_block: dict[str, float] = defaultdict(float)
    with Reader([file.index]) as reader:
        for module, delta in Deltas(file, reader).each():
            if delta is None:
                left += 1
                continue
            found = modules[module.name] = _numbers(delta, rank_of(module))
            found |= pictured(delta) if pictures else {}
            by_block[block_name(module.name)] += found["norm"] ** 2
    rows = modules.values()
    return {
        "norm": sqrt(sum(by_block.values())), "measured": len(modules), "unmeasured": left,
        "stable_rank": spread([r["stable_rank"] for r in rows if r["stable_rank"]]),
        "rank_for_energy": {
            name: found for name in ENERGIES
            if (found := spread([r["rank_for_energy"][name] for r in rows if r["rank_for_energy"]]))
        },
        "blocks": {name: sqrt(by_block[name]) for name in sorted(by_block, key=in_order)}, "modules": modules,
    }  # fmt: skip


def _numbers(delta: Delta, rank: int) -> dict[str, Any]:
    """Return the numbers of one module."""
    norm, values = sqrt(max(delta.inner(delta), 0.0)), delta.singular_values()
    largest = float(values[0]) if len(values) else 0.0
    energy = (values**2).cumsum(0) / (values**2).sum().clamp_min(1e-30)
    told = largest > 0 and len(values) > 1
    return {
        "norm": norm, "rank": rank, "largest": largest, "stable_rank": (norm / largest) ** 2 if largest else 0.0,
        "rank_for_energy": {
            name: min(int((energy < share).sum()) + 1, len(values)) for name, share in ENERGIES.items()
        } if told else {},
    }  # fmt: skip


@dataclass
class Sums:
    """Sums over the elements of weights: squares of W and ΔW, and what of ΔW is left after rounding."""

    weight: float = 0.0
    delta: float = 0.0
    applied: float | None = (
        0.0  # ⟨applied, intended⟩; None where the weight is padded, and its storage is not looked at
    )
    noise: float = 0.0  # ‖applied − intended‖²
    largest: float = 0.0

    def add(self, other: Sums) -> None:
        """Add the sums of another weight."""
        self.weight, self.delta = self.weight + other.weight, self.delta + other.delta
        self.applied = None if self.applied is None or other.applied is None else self.applied + other.applied
        self.noise, self.largest = self.noise + other.noise, max(self.largest, other.largest)

    @property
    def retained(self) -> float | None:
        """⟨applied, intended⟩ / ‖intended‖²; None where it is not known, or nothing is intended."""
        return None if self.applied is None or not self.delta else self.applied / self.delta

    def to_dict(self) -> dict[str, Any]:
        """Return norms, the largest element, the share that is retained, and ‖applied − intended‖ / ‖intended‖."""
        return {
            "weight": sqrt(self.weight), "delta": sqrt(self.delta), "largest": self.largest, "retained": self.retained,
            "noise": None if self.retained is None else sqrt(self.noise / self.delta),
        }  # fmt: skip


@dataclass
class Measured:
    """The numbers of a merge that is not written: in all, by component, by block, by tensor."""

    total: Sums = field(default_factory=Sums)
    components: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    blocks: dict[str, Sums] = field(default_factory=lambda: defaultdict(Sums))
    tensors: dict[str, Sums] = field(default_factory=dict)


@undisturbed()
def merge_numbers(plan: Plan, *, pictures: bool = False) -> dict[str, Any]:
    """Return the size of a planned change beside the weights, and how much of it the dtypes of the output keep.

    Computed tensor by tensor; nothing is written. `pictures`: also the spectrum and the histogram of each change.
    """
    shown = merge_pictures(plan) if pictures else {}
    lookup = names(plan.base, plan.job.map)
    block_of, found = blocks(lookup).of, Measured()
    indexes = [plan.base, *(m.adapter.index for m in plan.adapters)]
    with Reader(indexes) as reader, torch.no_grad():
        factors = TensorCache(reader, frozenset(p for m in plan.adapters for p in m.adapter.index.files))
        tensors = PatchTensors(factors.fetch, plan.weights)
        for target in (t for f in plan.files for t in f.targets if t.uses):
            sums = found.tensors[target.name] = _measured(target, tensors)
            component = lookup.component(target.name)
            found.total.add(sums)
            found.components[component].add(sums)
            found.blocks[f"{component} {block_of(target.name)}".strip()].add(sums)
            factors.forget()
            tensors.kept.clear()
    return {"total": found.total.to_dict(), "warnings": list(_warnings(plan, found)), **{
        kind: {name: table[name].to_dict() for name in sorted(table, key=in_order)}
        for kind, table in (("components", found.components), ("blocks", found.blocks))
    }, "tensors": {
        name: sums.to_dict() | shown.get(name, {}) for name, sums in found.tensors.items()
    }}  # fmt: skip


def _warnings(plan: Plan, found: Measured) -> Iterator[str]:
    """Yield a warning if the storage of the output loses more of the change than a tenth."""
    shares = {name: share for name, sums in found.tensors.items() if (share := sums.retained) is not None}
    below = sorted((name for name, share in shares.items() if share < RETAINED), key=lambda name: shares[name])
    if found.total.retained is None or found.total.retained >= RETAINED:
        return
    stored, _, fix = remedy(plan)
    names = listed(f"{name} ({max(shares[name], 0):.0%})" for name in below)
    yield (
        f"only {max(found.total.retained, 0):.0%} of the change would be in the output: it is smaller than "
        f"{stored} can hold beside the weights; {fix}; {len(below)} of {len(found.tensors)} weights keep less than "
        f"90%: {names}"
    )


def _measured(target: OutputTensor, tensors: PatchTensors, *, refit: bool = True) -> Sums:
    """Return the sums of one weight. `refit`: whether a scale of the whole weight that is too small is replaced."""
    sums, largest, covered = Sums(), 0.0, True
    for block, rows, merged in merged_blocks(target, tensors):
        delta, applied, noise = merged - rows, None, 0.0
        written = _written(target, block, merged, tensors)
        largest, covered = max(largest, float(merged.abs().max())), covered and written is not None
        if written is not None and not (target.packed is not None and target.weight.padded):
            rest = stage([written], place("cpu", "F64"))[0].view(rows.shape) - rows
            applied, noise = float((rest * delta).sum(dtype=torch.float64)), _squared(rest - delta)
        sums.add(Sums(_squared(rows), _squared(delta), applied, noise, float(delta.abs().max())))
    if covered or not refit or not isfinite(largest):
        return sums
    return _measured(refitted(target, largest, tensors.fetch), tensors, refit=False)


def _written(target: OutputTensor, block: Block, merged: Tensor, tensors: PatchTensors) -> Tensor | None:
    """Return the numbers of a merged block as the output would hold them; None where the scale of the whole weight does
    not cover them, and a new one is needed."""
    if target.packed is not None:
        base = stored_numbers(target.weight, *block.stored, tensors.fetch)
        if target.weight.padded:
            return merged
        return read_back(target, block.stored[0], merged[0], Codes(base, None), tensors.fetch)
    written = torch.empty(merged.shape, dtype=TORCH_DTYPES[target.dtype])
    convert(merged, written)
    return written


def _squared(values: Tensor) -> float:
    return float((values * values).sum(dtype=torch.float64))
