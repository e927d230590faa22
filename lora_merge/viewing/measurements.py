"""Norms, stable ranks and energies of ΔW, how much of a merge the base's dtype keeps, and sizes of weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, inf, isfinite, sqrt
from typing import Any, Final

import torch
from torch import Tensor

from ..adapters.modules import AdapterFile, Module, rank_of
from ..change_statistics import RETAINED, Measure, Measures, Share, total
from ..disk.reader import Reader
from ..dtypes import FLOATS
from ..engine.change_norms import measure
from ..engine.devices import place
from ..engine.module_change import ModuleChange
from ..engine.patch_tensors import PatchTensors
from ..engine.requantisation import Codes, read_back, refitted
from ..engine.row_blocks import Block
from ..engine.tensor_moves import TORCH_DTYPES, convert, stage
from ..engine.tensors import TensorCache, stored_values, weight_values
from ..engine.torch_state import undisturbed
from ..files.checkpoint import Index
from ..models.blocks import groups, in_order
from ..models.names import names
from ..models.weights import Weight
from ..paths import input_name
from ..planning.plan import OutputTensor, Plan
from ..progress import Progress, counted, unwatched
from ..proof.proof_report import remedy
from ..report import too_large
from ..survival import spoken
from ..text import listed, plural
from .adapter import kind_of, module_groups, spread
from .module_changes import ModuleChanges, merged_blocks, replaced_by
from .pictures import evenly, matrix_pictures, merge_pictures
from .pictures import pictures as pictured

SUMMED_VALUES: Final = 2**20  # values that are added up in fp32

MOST_RANKS: Final = 256  # for which the share that is kept is shown

ENERGIES: Final = {"90%": 0.9, "99%": 0.99}
"""Shares of ‖ΔW‖² for which the least rank is shown: the adapter can be resized to it."""


@undisturbed()
def adapter_numbers(file: AdapterFile, *, pictures: bool = False, progress: Progress = unwatched) -> dict[str, Any]:
    """Return norm, stable rank ‖ΔW‖²/σ₁² and the rank that holds most of the energy of each module, at strength 1.

    Products of two factors never become a matrix of ΔW's size. `pictures`: also the largest singular values, and a
    histogram of the elements of some rows.
    """
    modules: dict[str, Any] = {}
    matrices: list[dict[str, Any]] = []
    left = 0
    by_block: dict[str, float] = defaultdict(float)
    model, energies = module_groups(file), Energies()
    with Reader([file.index]) as reader:
        advance = counted(progress, "look", str(file.path), sum(map(_stored, file.modules)))
        for module, delta in ModuleChanges(file, reader).each():
            advance(_stored(module))
            if delta is None:
                left += 1
                continue
            block, values = model.block(module.name), delta.singular_values()
            row = modules[module.where] = {"block": block, **_numbers(delta, values, rank_of(module))}
            row |= pictured(delta) if pictures else {}
            if delta.matrix[1] > 1:  # a vector has one direction
                matrices.append(row)
                energies.add(values, known=len(values) > 1 or delta.whole is None)
            by_block[block] += row["norm"] * row["norm"]
    return {
        "norm": sqrt(sum(by_block.values())), "measured": len(modules), "unmeasured": left,
        "stable_rank": spread([r["stable_rank"] for r in matrices if r["stable_rank"]]),
        "rank_for_energy": {
            name: row for name in ENERGIES
            if (row := spread([r["rank_for_energy"][name] for r in matrices if r["rank_for_energy"]]))
        },
        "curve": energies.curve(),
        "blocks": {name: sqrt(by_block[name]) for name in sorted(by_block, key=model.place)}, "modules": modules,
    }  # fmt: skip


def _stored(module: Module) -> int:
    """Return the bytes of a module's tensors."""
    return sum(tensor.nbytes for tensor in module.slots.values())


class Energies:
    """The share of ‖ΔW‖² that is kept if all modules are cut to one rank."""

    def __init__(self) -> None:
        self._squares = torch.zeros(MOST_RANKS, dtype=torch.float64, device="cpu")  # Σ σ², by the place of σ
        self._total, self._known = 0.0, True

    def add(self, values: Tensor, *, known: bool) -> None:
        """Add the singular values of a module; `known`: whether these are all of them."""
        squares = stage([values], place("cpu", "F64"))[0].square()
        self._known &= known
        self._total += float(squares.sum())
        count = min(len(squares), MOST_RANKS)
        self._squares[:count] += squares[:count]

    def curve(self) -> list[list[float]]:
        """Return pairs of a rank and the share that is kept, until all is; [] if they are not known."""
        if not self._known or not 0 < self._total < inf:
            return []
        shares = [min(float(share), 1.0) for share in (self._squares.cumsum(0) / self._total)]
        most = next((rank for rank, share in enumerate(shares, 1) if share > 1 - 1e-9), len(shares))
        return [[rank, share] for rank, share in enumerate(shares[:most], 1)]


def _numbers(delta: ModuleChange, values: Tensor, rank: int) -> dict[str, Any]:
    """Return the numbers of one module, from its change and the singular values of it."""
    norm = sqrt(max(delta.inner(delta), 0.0))
    largest = float(values[0]) if len(values) else 0.0
    energy = (values**2).cumsum(0) / (values**2).sum().clamp_min(1e-30)
    enough = largest > 0 and len(values) > 1
    return {
        "norm": norm, "rank": rank, "largest": largest, "stable_rank": (norm / largest) ** 2 if largest else 0.0,
        "rank_for_energy": {
            name: min(int((energy < share).sum()) + 1, len(values)) for name, share in ENERGIES.items()
        } if enough else {},
    }  # fmt: skip


@undisturbed()
def merge_numbers(plan: Plan, *, pictures: bool = False, progress: Progress = unwatched) -> dict[str, Any]:
    """Return the size of a planned change compared with the weights, and how much of it the output's dtypes keep: what
    `numbers` of a merge's report are, of every number, and `warnings`.

    Computed tensor by tensor; nothing is written. `pictures`: also the spectrum and the histogram of each change.
    """
    shown = merge_pictures(plan) if pictures else {}
    measures = Measures()
    indexes = [plan.base, *(m.adapter.index for m in plan.adapters)]
    with Reader(indexes) as reader, torch.no_grad():
        factors = TensorCache(reader, frozenset(plan.adapter_files))
        tensors = PatchTensors(factors.fetch, plan.weights)
        whole = {replaced.target.name: replaced for replaced in replaced_by(plan)}
        targets = [t for t in plan.targets if t.uses or t.name in whole]
        advance = counted(progress, "look", str(plan.base.path), sum(t.nbytes for t in targets))
        for target in targets:
            advance(target.nbytes)
            replaced = whole.get(target.name)
            result = _measured(target, tensors) if replaced is None else measure(replaced, factors.read, 1)
            measures.tensors[target.name] = result
            factors.forget()
            tensors.cache.clear()
    values = measures.to_dict(len(plan.adapters), groups(plan.names))
    for name, row in values.get("tensors", {}).items():
        row |= shown.get(name, {})
    return {**values, "warnings": [*too_large(values), *_warnings(plan, measures)]} if values else {}


def _warnings(plan: Plan, measures: Measures) -> Iterator[str]:
    """Yield a warning if too little of the change survives in the storage of the output."""
    every, below = total(measures.tensors.values()).all, measures.below
    if not every.fails:
        return
    shares = {name: measured.all.survives or 0.0 for name, measured in below.items()}
    adapters = listed(input_name(ref.path) for ref in plan.job.adapters)
    least = listed(f"{name} ({spoken(shares[name])})" for name in sorted(shares, key=lambda name: shares[name]))
    few = f"; {len(below)} of {plural(len(measures.tensors), 'weight')} keep less than {spoken(RETAINED)}: {least}"
    yield every.lost(adapters, *remedy(plan, bf16=False)) + few * bool(below)


def _measured(target: OutputTensor, tensors: PatchTensors, *, refit: bool = True) -> Measure:
    """Return the measure of one weight. `refit`: whether a scale of the whole weight that is too small is replaced."""
    total, largest, covered = Measure(), 0.0, True
    for block, rows, merged in merged_blocks(target, tensors):
        written = _written(target, block, merged, tensors)
        largest, covered = max(largest, float(merged.abs().max())), covered and written is not None
        known = written is not None and not (target.packed is not None and target.weight.padded)
        stored = stage([written], place("cpu", "F64"))[0].view(rows.shape) if written is not None and known else None
        total += _sums(rows, merged, stored)
    if covered or not refit or not isfinite(largest):
        return total
    return _measured(refitted(target, largest, tensors.fetch), tensors, refit=False)


def _sums(rows: Tensor, merged: Tensor, stored: Tensor | None) -> Measure:
    """Return the sums over values before and after a merge; `stored`: as the output holds them, where it is known."""
    delta, applied, error, changed, cut = merged - rows, None, 0.0, 0, 0
    if stored is not None:
        rest, cut = stored - rows, int((merged.isfinite() & ~stored.isfinite()).sum())
        applied, changed = float((rest * delta).sum(dtype=torch.float64)), int(rest.count_nonzero())
        error = _squared((stored - merged).masked_fill_(delta == 0, 0.0))
    squares, count = _squared(delta), rows.numel()
    whole = Share(squares, squares, applied, error)
    return Measure(count, count, changed, cut, _squared(rows), float(delta.abs().max()), whole, {0: whole})


def _written(target: OutputTensor, block: Block, merged: Tensor, tensors: PatchTensors) -> Tensor | None:
    """Return the values of a merged block as the output would hold them; None where the scale of the whole weight does
    not cover them, and a new one is needed."""
    if target.packed is not None:
        base = stored_values(target.weight, *block.stored, tensors.fetch)
        if target.weight.padded:
            return merged
        return read_back(target, block.stored[0], merged[0], Codes(base, None), tensors.fetch)
    written = torch.empty(merged.shape, dtype=TORCH_DTYPES[target.dtype])
    convert(merged, written)
    return written


@dataclass
class WeightSums:
    """Sums over the values of some weights."""

    of: int = 0
    norm: float = 0.0
    largest: float = 0.0
    zeros: int = 0
    broken: int = 0

    def __add__(self, other: WeightSums) -> WeightSums:
        return WeightSums(self.of + other.of, hypot(self.norm, other.norm), max(self.largest, other.largest),
                    self.zeros + other.zeros, self.broken + other.broken)  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of `sizes`."""
        sound = max(self.of - self.broken, 1)
        return {"of": self.of, "norm": self.norm, "rms": self.norm / sqrt(sound), "largest": self.largest,
                "zeros": self.zeros, "broken": self.broken}  # fmt: skip


@undisturbed()
def base_sizes(index: Index, *, pictures: bool = False, progress: Progress = unwatched) -> dict[str, Any]:
    """Return how large the weights of a model are: in all, by part, by block, by kind of layer and by tensor.

    One tensor is in memory at a time. Values that are NaN or infinite are counted, and left out of the sums.
    `pictures`: also spectrum and histogram of matrices.
    """
    model = groups(names(index))
    kinds: dict[str, dict[str, WeightSums]] = {"components": {}, "blocks": {}, "kinds": {}, "tensors": {}}
    every, pictured = WeightSums(), dict[str, dict[str, Any]]()
    shown = evenly([n for n, t in index.parameters.items() if len(t.shape) > 1]) if pictures else frozenset()
    with Reader([index]) as reader, torch.no_grad():
        cache = TensorCache(reader, frozenset())
        advance = counted(progress, "look", str(index.path), sum(info.nbytes for info in index.parameters.values()))
        numeric = (name for name, info in index.parameters.items() if info.dtype in FLOATS or name in index.packed)
        for name in numeric:  # others are positions and counts, whose sizes mean nothing
            info = index.tensors[name]
            advance(info.nbytes)
            values = weight_values(Weight(info.shape, info, index.packed.get(name)), cache.fetch)
            sizes = _size(values.reshape(-1))
            every += sizes
            for kind, group in (*model.of(name), ("kinds", kind_of(name)), ("tensors", name)):
                kinds[kind][group] = kinds[kind].get(group, WeightSums()) + sizes
            if name in shown:
                pictured[name] = matrix_pictures(values)
            del values  # before the next one is read
            cache.forget()
    orders = {"components": model.place, "blocks": model.place}
    tables = {
        kind: {name: rows[name].to_dict() for name in sorted(rows, key=orders.get(kind, in_order))}
        for kind, rows in kinds.items()
    }
    for name, row in tables["tensors"].items():
        row |= {"block": model.block(name), "dimensions": len(index.tensors[name].shape), **pictured.get(name, {})}
    return {"all": every.to_dict(), **tables}


def _size(values: Tensor) -> WeightSums:
    """Return the sums of the values of a tensor, some at a time: in fp32 where the parts are small, then in fp64."""
    total = WeightSums()
    for part in torch.split(values, SUMMED_VALUES) if values.numel() else ():
        floats = stage([part], place("cpu", "F64" if part.dtype in (torch.float64, torch.int64) else "F32"))[0]
        norm = float(floats.norm())
        if not isfinite(norm):
            broken = int((~floats.isfinite()).sum())
            floats = floats.nan_to_num(0.0, 0.0, 0.0).double()
            largest = floats.abs().amax().clamp_min(1.0)  # whose square fp64 may not hold
            total, norm = total + WeightSums(broken=broken, zeros=-broken), float((floats / largest).norm() * largest)
        low, high = floats.aminmax()
        zeros = floats.numel() - int(floats.count_nonzero())
        total += WeightSums(part.numel(), norm, max(-float(low), float(high)), zeros)
    return total


def _squared(values: Tensor) -> float:
    return float((values * values).sum(dtype=torch.float64))
