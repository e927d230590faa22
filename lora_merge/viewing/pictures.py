"""Spectra and histograms of ΔW, which pages show for each weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from ..adapters.file import group
from ..disk.reader import Reader
from ..engine.torch_state import undisturbed
from ..files.checkpoint import open_checkpoint
from ..planning.plan import Plan
from .changes import changes
from .deltas import NOISE, Delta, Deltas

SHOWN: Final = 64  # singular values in a picture
ROWS: Final = 64  # of ΔW, whose elements a histogram counts
BINS: Final = 31
REACH: Final = 4.0  # of a histogram, in units of the root mean square
MOST: Final = 2000  # weights of a merge that have pictures


def pictures(delta: Delta) -> dict[str, Any]:
    """Return the largest singular values, and how the elements of evenly spaced rows are distributed: counts by size in
    units of their root mean square; those beyond ±REACH are counted at the ends. A large ΔW that is not a product of
    two factors has no spectrum."""
    every = delta.full if delta.full is not None else delta.left
    assert every is not None
    chosen = torch.linspace(0, len(every) - 1, min(len(every), ROWS)).long()
    rows = (every[chosen] if delta.right is None else every[chosen] @ delta.right).float()
    scaled = rows / rows.square().mean().sqrt().clamp_min(1e-30)
    counts = torch.histc(scaled.clamp(-REACH, REACH), BINS, -REACH, REACH).int().tolist()
    centres = [round(REACH * (2 * n + 1 - BINS) / BINS, 3) for n in range(BINS)]
    values = [float(f"{v:.4g}") for v in delta.singular_values()[:SHOWN].tolist()]
    told = len(values) > 1 or min(delta.shape) == 1
    return {**({"spectrum": values} if told else {}), "histogram": {"centres": centres, "counts": counts}}


@undisturbed()
def merge_pictures(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return weight → `spectrum` and `histogram` of what a plan adds to it. Of more than `MOST` weights, some that are
    spread evenly have them."""
    targets = [t for f in plan.files for t in f.targets if t.uses and min(t.matrix) > 0]
    found: dict[str, dict[str, Any]] = {}
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader, torch.no_grad():
        change = changes(plan, reader)
        for target in targets[:: max(1, -(-len(targets) // MOST))]:
            delta = change(target)
            if torch.isfinite(torch.tensor(delta.size)):
                found[target.name] = pictures(delta) | _rank(delta)
    return found


def _rank(delta: Delta) -> dict[str, int]:
    """Return the numeric rank of ΔW; {} where not all singular values are known."""
    values = delta.singular_values()
    known = len(values) > 1 or min(delta.shape) == 1
    return {"rank": int((values > NOISE * values[0]).sum())} if known else {}


@undisturbed()
def made_pictures(path: Path) -> dict[str, dict[str, Any]]:
    """Return layer → `spectrum` and `histogram` of the change that the adapter at `path` makes, at strength 1. Layers
    whose formulas read a base have none."""
    file = group(open_checkpoint(path))
    found: dict[str, dict[str, Any]] = {}
    with Reader([file.index]) as reader, torch.no_grad():
        for module, delta in Deltas(file, reader).each():
            if delta is not None:
                found[module.name] = pictures(delta)
    return found
