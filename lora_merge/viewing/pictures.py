"""Spectra and histograms of changes and of weights, which pages show for each weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..adapters.modules import group
from ..adapters_out.report import AdapterReport
from ..disk.reader import Reader
from ..engine.module_change import NOISE_SHARE, SMALL_SIDE, ModuleChange
from ..engine.torch_state import undisturbed
from ..files.checkpoint import open_checkpoint
from ..planning.plan import Plan
from ..report import Report
from .base import recipe_of
from .module_changes import ModuleChanges, changes, replaced_by

SINGULAR_VALUES: Final = 64  # singular values in a picture
HISTOGRAM_ROWS: Final = 64  # of ΔW, whose elements a histogram counts
BINS: Final = 31
REACH: Final = 4.0  # of a histogram, in units of the root mean square
MOST_PICTURES: Final = 2000  # pictures of a page
SPECTRUM_VALUES: Final = 1 << 24  # values of a matrix that is no product of two factors and has a spectrum
OVERSAMPLING: Final = 8  # random columns more than directions are searched: else one can be lost by chance
POWER_STEPS: Final = 2  # of M Mᵀ that these columns are multiplied by


def pictures(delta: ModuleChange) -> dict[str, Any]:
    """Return the largest singular values, and how the elements of evenly spaced rows are distributed: counts by size in
    units of their root mean square; those beyond ±REACH are counted at the ends. A ΔW of more than SPECTRUM_VALUES
    values that is not a product of two factors has no spectrum."""
    out, _ = delta.matrix
    chosen = torch.linspace(0, out - 1, min(out, HISTOGRAM_ROWS)).long()
    bins = histogram(delta.factors[0][chosen] @ delta.factors[1] if delta.whole is None else delta.dense()[chosen])
    if delta.whole is None or min(delta.matrix) <= SMALL_SIDE:
        values = delta.singular_values()[:SINGULAR_VALUES]
    elif delta.whole.numel() <= SPECTRUM_VALUES:
        values = _leading(delta.dense())
    else:
        return bins
    return {"spectrum": [float(f"{v:.4g}") for v in values.tolist()], **bins}


def histogram(rows: Tensor) -> dict[str, Any]:
    """Return `histogram`: how the values of some rows are distributed."""
    scaled = rows.float() / rows.float().square().mean().sqrt().clamp_min(1e-30)
    counts = torch.histc(scaled.clamp(-REACH, REACH), BINS, -REACH, REACH).int().tolist()
    centres = [round(REACH * (2 * n + 1 - BINS) / BINS, 3) for n in range(BINS)]
    return {"histogram": {"centres": centres, "counts": counts}}


def matrix_pictures(values: Tensor) -> dict[str, Any]:
    """Return the pictures of a weight, or of a difference of two, with two or more dimensions; of others, and of many
    values, the histogram alone; {} if a value is NaN or infinite."""
    if not values.numel() or not bool(torch.isfinite(values).all()):
        return {}
    return pictures(ModuleChange.in_memory(values.float().flatten(1))) if values.dim() > 1 else histogram(values)


def evenly(names: Sequence[str], each: int = 1) -> frozenset[str]:
    """Return the names that get pictures: all, or some that are spread evenly. `each`: pictures of one."""
    return frozenset(names[:: max(1, -(-len(names) * each // MOST_PICTURES))])


def _leading(matrix: Tensor) -> Tensor:
    """Return the largest singular values of a matrix, from random columns (Halko, Martinsson and Tropp 2011,
    doi:10.1137/090771806, algorithm 4.4): a few percent too small where many are nearly equal."""
    random = torch.Generator().manual_seed(0)
    columns = matrix @ torch.randn(matrix.shape[1], SINGULAR_VALUES + OVERSAMPLING, generator=random)
    for _ in range(POWER_STEPS):
        columns = matrix @ torch.linalg.qr(matrix.T @ torch.linalg.qr(columns).Q).Q
    values: Tensor = torch.linalg.svdvals(torch.linalg.qr(columns).Q.T @ matrix)
    return values[:SINGULAR_VALUES]


@undisturbed()
def merge_pictures(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return weight → `spectrum` and `histogram` of what a plan adds to it. Of more than `MOST_PICTURES` weights, some
    that are spread evenly have them; of those that an adapter stores whole, those of at most `SPECTRUM_VALUES`
    values."""
    whole = {replaced.target.name for replaced in replaced_by(plan) if prod(replaced.target.shape) <= SPECTRUM_VALUES}
    targets = [t for t in plan.targets if (t.uses or t.name in whole) and min(t.matrix) > 0]
    drawn: dict[str, dict[str, Any]] = {}
    with Reader([plan.base, *(m.adapter.index for m in plan.adapters)]) as reader, torch.no_grad():
        change = changes(plan, reader)
        chosen = evenly([target.name for target in targets])
        for target in (t for t in targets if t.name in chosen):
            delta = change(target)
            if torch.isfinite(torch.tensor(delta.size)):
                drawn[target.name] = pictures(delta) | _rank(delta)
    return drawn


def _rank(delta: ModuleChange) -> dict[str, int]:
    """Return the numeric rank of ΔW; {} where not all singular values are known."""
    values = delta.singular_values()
    known = len(values) > 1 or min(delta.matrix) == 1
    return {"rank": int((values > NOISE_SHARE * values[0]).sum())} if known else {}


@undisturbed()
def adapter_pictures(path: Path) -> dict[str, dict[str, Any]]:
    """Return layer → `spectrum` and `histogram` of the change that the adapter at `path` makes, at strength 1. Layers
    whose formulas read a base have none."""
    file = group(open_checkpoint(path))
    drawn: dict[str, dict[str, Any]] = {}
    with Reader([file.index]) as reader, torch.no_grad():
        for module, delta in ModuleChanges(file, reader).each():
            if delta is not None:
                drawn[module.where] = pictures(delta)
    return drawn


def pictured_merge(report: Report, plan: Plan) -> dict[str, Any]:
    """Return a report with the recipe that the output holds and the paths of its inputs, and with the spectrum and the
    histogram of each weight's change, if the inputs are still there."""
    values = asdict(report)
    changes_of = merge_pictures(plan) if plan.job.output not in plan.inputs and values["numbers"] else {}
    for name, tensor in values["numbers"].get("tensors", {}).items():
        tensor |= changes_of.get(name, {})
    inputs = [str(path) for path in (plan.job.base, *(ref.path for ref in plan.job.adapters))]
    return {**values, "recipe": recipe_of(plan.job.output), "inputs": inputs}


def pictured_adapter(report: AdapterReport, inputs: Iterable[Path]) -> dict[str, Any]:
    """Return a report with the paths of its inputs, and the spectrum and the histogram of each layer of the output."""
    of_output = adapter_pictures(Path(report.output))
    layers = {name: {**layer, **of_output.get(name, {})} for name, layer in report.layers.items()}
    recipe = recipe_of(Path(report.output))
    return {**asdict(report), "layers": layers, "recipe": recipe, "inputs": [*map(str, inputs)]}
