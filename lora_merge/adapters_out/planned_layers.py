"""The layers that `combine` and `resize` will write, from headers alone. No torch."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from ..algorithms import ALGORITHMS
from ..disk.destination import check_output
from ..dtypes import ITEM_BYTES, spoken
from ..errors import FitError
from ..matching.patch import Patch
from ..merge_methods import COMBINATIONS
from ..text import Note
from .decomposition.svd_memory import note
from .dialects import dialect
from .groups import Target, is_plain
from .job import AUTO, FACTORS, GIVE_RANK, IN_FULL, WHOLE, AdapterJob
from .metadata.sizes import PlannedLayer, Tensor, planned_size
from .module_tensors import NOT_LOW_RANK, STACKED
from .output_file import CONTENTS
from .pipeline import Facts, coverage, idle_alpha, output_dtype, planned
from .rank_rules import COUNT, EXACT, SAME
from .report import AdapterReport
from .sources import Sources, open_sources, ruled


def plan(job: AdapterJob, sources: Sources | None = None) -> AdapterReport:
    """Return what `run` would do, from headers: layers, and ranks where the rule alone tells them. `sources`: those of
    the job, where they are open."""
    sources = sources or open_sources(job)
    job = ruled(job, sources)
    to = dialect(job.format)
    check_output(job.output, [p for i in sources.indexes for p in i.files], overwrite=True,
                 folder=to is not None and to.folder, contents=CONTENTS)  # fmt: skip
    dtype = output_dtype(job, sources.adapters)
    layers: dict[str, dict[str, Any]] = {}
    own = planned_layers(job, sources, dtype)
    for target, layer in zip(_parts(sources), own, strict=True):
        known = 0 if target.vector or job.algorithm == WHOLE else planned_rank(job, target)
        factors = layer.rank or known is None  # auto decides when the numbers are known
        layers[target.label] = {"algorithm": FACTORS if factors else WHOLE, "rank": layer.rank and (known or 0)}
    size = planned_size(own, job.rules.linear, [a.index for a in sources.adapters])
    notes, weights = (
        (*dict.fromkeys(sources.notes), *memory_note(job, sources), *idle_alpha(job, stored=sources.spelling.alpha)),
        weights_of(job, sources, dtype),
    )
    facts = Facts(coverage(job, sources), spoken(dtype), notes, weights=weights)
    return planned(job, facts, layers, size)


def _parts(sources: Sources) -> list[Target]:
    return [part for whole in sources.targets for part in whole.stored]


def planned_layers(job: AdapterJob, sources: Sources, kind: str) -> list[PlannedLayer]:
    """Return the tensors of every layer: factors at their highest rank, where the numbers decide it. FitError for a
    layer that has no factors."""
    found, spelling = list[PlannedLayer](), sources.spelling
    for target in _parts(sources):
        (out, cols), whole = target.matrix, target.vector or job.algorithm == WHOLE
        rank = None if whole else planned_rank(job, target)
        highest = most_rank(target) if rank is None else rank  # what the disk has to hold, where numbers decide
        whole = whole or (job.algorithm == AUTO and (_is_whole(job, target) or highest * (out + cols) >= out * cols))
        if not whole:
            _expect_factors(job, target)
        shape = target.shape[::-1] if target.turned else target.shape
        slots = {"diff": shape} if whole else {
            "down": (highest, *shape[1:]), "up": (shape[0], highest, *(1 for _ in shape[2:]))}  # fmt: skip
        named: list[Tensor] = [
            (spelling.key(target.name, target.parameter, slot, norm=target.norm), kind, shape)
            for slot, shape in slots.items()
        ]
        if spelling.alpha and not whole:
            named.append((spelling.key(target.name, target.parameter, "alpha"), "F32", ()))
        found.append(PlannedLayer(named, 0 if whole else highest))
    return found


def _is_whole(job: AdapterJob, target: Target) -> bool:
    """Return whether the change of a layer is no product of factors, and no rule cuts it."""
    rule = job.rules.of_layer(target.name, kernel=len(target.shape) > 2)
    dense = None in ranks(target) or any(strength for _, _, strength in target.values)
    return rule.name == EXACT and job.command != "resize" and (dense or not COMBINATIONS[job.method].linear)


def _expect_factors(job: AdapterJob, target: Target) -> None:
    """Raise FitError for a layer whose change has no factors."""
    if _is_whole(job, target):
        raise FitError(NOT_LOW_RANK, target.name, GIVE_RANK)
    rule = job.rules.of_layer(target.name, kernel=len(target.shape) > 2)
    if target.stacked and (rule.name != EXACT or job.command == "resize"):
        raise FitError(STACKED, target.name, IN_FULL)


def memory_note(job: AdapterJob, sources: Sources) -> list[Note]:
    """Return the note about the largest change that is decomposed without factors, if it may exceed the limit."""
    tasks = []
    for target in (part for whole in sources.targets for part in whole.stored):
        rule = job.rules.of_layer(target.name, kernel=len(target.shape) > 2)
        cut = job.algorithm != WHOLE and not target.vector and (rule.name != EXACT or job.command == "resize")
        if cut and not (COMBINATIONS[job.method].linear and None not in ranks(target) and not target.values):
            tasks.append((target.label, target.matrix, rule))
    return note(tasks, job.inputs.max_memory)


def planned_rank(job: AdapterJob, target: Target) -> int | None:
    """Return the rank of a layer, or the most that it can be, where headers tell it."""
    rule = job.rules.of_layer(target.name, kernel=len(target.shape) > 2)
    most = most_rank(target)
    if rule.name == EXACT:
        return most
    if rule.name == SAME:
        return min(most, max((r or most for r in ranks(target)), default=most), rule.ceiling or most)
    return min(most, rule.ceiling or most) if rule.name == COUNT else None


def weights_of(job: AdapterJob, sources: Sources, dtype: str) -> int:
    """Return the bytes of the weights whose changes are computed, twice where a rule looks at all layers first."""
    return sum(prod(t.shape) for t in sources.targets) * ITEM_BYTES[dtype] * (1 + job.rules.together)


def most_rank(target: Target) -> int:
    """Return the highest rank that the change of a layer can have."""
    own, short = ranks(target), min(target.matrix)
    whole = None in own or any(strength for _, _, strength in target.values)
    return short if whole else min(short, sum(r or 0 for r in own))


def ranks(target: Target) -> list[int | None]:
    """Return the rank of each change of a layer; None for one that is not a product of factors."""
    return [known_rank(use.patch) for use in target.uses if use.strength]


def known_rank(patch: Patch) -> int | None:
    """Return the rank of a change; None for one that is computed as a matrix: as one without factors, or with more
    columns in them than the matrix has rank."""
    low = ALGORITHMS[patch.algorithm].low_rank
    if low is None or patch.magnitude is not None:
        return None
    rank = low.rank(patch.shapes, patch.view.shape)
    return rank if is_plain(patch) or rank <= min(patch.view.matrix) else None


def nbytes(job: AdapterJob, target: Target) -> int:
    """Return about how many bytes the change of a weight takes: factors several times, or matrices beside what is
    stored."""
    out, cols = target.matrix
    factored = COMBINATIONS[job.method].linear and None not in ranks(target) and not target.values
    read = sum(prod(shape) for use in target.uses for shape in use.patch.shapes.values())
    return 8 * min(6 * most_rank(target) * (out + cols) if factored else sys.maxsize,
                   (len(target.uses) + 3) * out * cols) + 8 * read  # fmt: skip
