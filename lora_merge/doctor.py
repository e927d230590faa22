"""Whether this machine can merge, and how fast: versions, devices, a test of every formula, the disk."""

from __future__ import annotations

import torch

from .algorithms import ALGORITHMS
from .examples import Example, tensors
from .placement import Placement, host, numbers, stage, stage_indices
from .reference.floats import Array


def computed(name: str, example: Example, base: Array, at: Placement) -> Array:
    """The production formula's ΔW [out, cols] for an example, computed at a placement."""
    row = ALGORITHMS[name]
    stored = {slot: torch.from_numpy(value) for slot, value in tensors(name, example).items()}
    if row.derive is not None:
        stored |= row.derive({slot: tuple(t.shape) for slot, t in stored.items()}, example.shape, example.settings)
    fields = {slot: (stage_indices if slot in row.integer_slots else stage)([t], at) for slot, t in stored.items()}
    scalars = {n: numbers([example.numbers.get(n, 1.0)], at) for n in row.scalars}
    with torch.no_grad():
        change = row.delta(stage([torch.from_numpy(base)], at), row.tensors(**fields, **scalars, **example.settings))
    found: Array = host(change[0], torch.float64).numpy()
    return found
