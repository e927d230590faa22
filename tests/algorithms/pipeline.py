"""What the plan and the kernel do with one module, in a few lines: from stored tensors to ΔW.

The tests of formulas use it, so that they exercise exactly what a merge does: suffixes, the slots rule,
fit, checks, numbers, settings, delta. Whole files are the business of the end-to-end tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_merge.adapters.suffixes import SHARED_SLOTS, split
from lora_merge.algorithms import ALGORITHMS, Algorithm, DoesNotFit, Shape, dora

Stored = Mapping[str, Tensor]  # slot → tensor as stored


@dataclass(frozen=True)
class Stacked:
    """n layers ready for a formula."""

    row: Algorithm
    base: Tensor  # [n, out, cols]
    tensors: Any

    def delta(self) -> Tensor:
        return self.row.delta(self.base, self.row.prepared(self.tensors))


def stack(
    row: Algorithm,
    layers: Sequence[tuple[Tensor, Stored]],
    alpha: float | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Stacked:
    """n equal layers as the plan and the kernel would hand them to the row's formula."""
    target = tuple(layers[0][0].shape)
    shapes = row.fitted_shapes({s: tuple(t.shape) for s, t in layers[0][1].items()}, target)
    given = dict(settings or {})
    missing = row.missing_settings(given)
    if missing:
        raise DoesNotFit(f"settings {missing} are missing")
    row.checks.check_settings(given, shapes, target)
    for _, stored in layers:
        integers = {s: stored[s].long().reshape(shapes[s]) for s in row.integer_slots & stored.keys()}
        row.checks.check_integers(integers, shapes, target)
    dtype, device = layers[0][0].dtype, layers[0][0].device
    fields: dict[str, Any] = {k: v for k, v in given.items() if k in row.settings}
    for slot, shape in shapes.items():
        kind = torch.int64 if slot in row.integer_slots else dtype
        fields[slot] = torch.stack([stored[slot].to(kind).reshape(shape) for _, stored in layers])
    if row.derive and any(slot not in fields for slot in row.slots):
        for slot, tensor in row.derive(shapes, target, given).items():
            kind = torch.int64 if slot in row.integer_slots else dtype
            fields[slot] = torch.stack([tensor.to(kind)] * len(layers))
    for name, value in row.scalars_from(alpha, shapes, target).items():
        fields[name] = torch.full((len(layers), 1, 1), value, dtype=dtype, device=device)
    rows = target[0] if target else 1
    base = torch.stack([w.reshape(rows, -1) for w, _ in layers])
    return Stacked(row, base, row.tensors(**fields))


def candidates(slots: Mapping[str, Any], algorithms: Sequence[str]) -> list[str]:
    """Rows whose required slots are here and that know every slot that is, in the table's order."""
    return [
        name
        for name, row in ALGORITHMS.items()
        if name in algorithms
        and all(slot in slots for slot, required in row.slots.items() if required)
        and all(slot in row.slots for slot in slots)
    ]


def merge_module(adapter: Mapping[str, Tensor], target: Tensor, parameter: str = "weight", **settings: Any) -> Tensor:
    """W' of one parameter in its own dtype, from the adapter's keys of one module, as saved."""
    slots: dict[str, Tensor] = {}
    shared: dict[str, tuple[str, Tensor]] = {}
    algorithms: list[str] | None = None
    for key, tensor in adapter.items():
        found = split(key)
        assert found is not None, key
        _, row = found
        if row.slot in SHARED_SLOTS:
            shared[row.slot] = (row.ending, tensor)
        elif row.parameter == parameter:
            slots[row.slot] = tensor
            algorithms = [a for a in row.algorithms if algorithms is None or a in algorithms]
    reasons = []
    for name in candidates(slots, algorithms or []):
        alpha = float(shared["alpha"][1]) if "alpha" in shared else None
        try:
            stacked = stack(ALGORITHMS[name], [(target, slots)], alpha, settings)
        except DoesNotFit as e:
            reasons.append(f"{name}: {e}")
            continue
        change = stacked.delta()
        if "magnitude" in shared:
            ending, magnitude = shared["magnitude"]
            axis, shape = dora.fit(tuple(magnitude.shape), tuple(target.shape), ending)
            turned = magnitude.to(target.dtype).reshape(1, *shape)
            change = dora.rescale(stacked.base, change, turned, axis)
        return (stacked.base + change).reshape(target.shape)
    raise DoesNotFit("; ".join(reasons) or f"no row takes {sorted(slots)}")


def shapes_of(stored: Stored) -> dict[str, Shape]:
    return {slot: tuple(tensor.shape) for slot, tensor in stored.items()}
