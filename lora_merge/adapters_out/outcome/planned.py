"""The layers that `combine` and `resize` will write, from headers alone. No torch."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

from ...algorithms import ALGORITHMS
from ...disk.destination import check_output
from ...dtypes import ITEM_BYTES, spoken
from ...methods import COMBINATIONS
from ...text import Note
from ..dialects import dialect
from ..job import FACTORS, WHOLE, AdapterJob
from ..joining.targets import Target
from ..metadata.sizes import PlannedLayer, Tensor, planned_size
from ..rank_rules import COUNT, EXACT, SAME
from ..report import AdapterReport
from ..sources import Sources, open_sources
from ..truncation.need import note
from ..written import CONTENTS, Spelling
from .outcome import Facts, coverage, output_dtype, planned


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers: layers, and ranks where the rule alone tells them."""
    sources = open_sources(job)
    to = dialect(job.format)
    check_output(job.output, [p for i in sources.indexes for p in i.files], overwrite=True,
                 folder=to is not None and to.folder, contents=CONTENTS)  # fmt: skip
    dtype = output_dtype(job, sources.adapters)
    layers: dict[str, dict[str, Any]] = {}
    for target in (part for whole in sources.targets for part in whole.stored):
        whole = target.vector or job.algorithm == WHOLE
        rank = 0 if whole else planned_rank(job, target) or 0
        layers[target.label] = {"algorithm": WHOLE if whole else FACTORS, "rank": rank}
    own = planned_layers(job, sources, dtype)
    size = planned_size(own, job.rules.linear)
    notes, weights = (*dict.fromkeys(sources.notes), *memory_note(job, sources)), weights_of(job, sources, dtype)
    facts = Facts(coverage(job, sources), spoken(dtype), notes, weights=weights)
    return planned(job, facts, layers, size)


def planned_layers(job: AdapterJob, sources: Sources, kind: str) -> list[PlannedLayer]:
    """Return the tensors of every layer: factors at their highest rank, where the numbers decide it."""
    found, spelling = list[PlannedLayer](), Spelling.of(sources.adapters[0])
    for target in (part for whole in sources.targets for part in whole.stored):
        (out, cols), whole = target.matrix, target.vector or job.algorithm == WHOLE
        rank = None if whole else planned_rank(job, target)
        highest = most_rank(target) if rank is None else rank  # what the disk has to hold, where numbers decide
        slots = {"diff": (out, cols)} if whole else {"down": (highest, cols), "up": (out, highest)}
        named: list[Tensor] = [
            (spelling.key(target.name, target.parameter, slot), kind, shape) for slot, shape in slots.items()
        ]
        if spelling.alpha and not whole:
            named.append((spelling.key(target.name, target.parameter, "alpha"), "F32", ()))
        found.append(PlannedLayer(named, 0 if whole else highest))
    return found


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
        return max((r or 0 for r in ranks(target)), default=0) or min(target.matrix)
    return min(most, rule.ceiling or most) if rule.name == COUNT else None


def weights_of(job: AdapterJob, sources: Sources, dtype: str) -> int:
    """Return the bytes of the weights whose changes are computed, twice where a rule looks at all layers first."""
    return sum(prod(t.shape) for t in sources.targets) * ITEM_BYTES[dtype] * (1 + job.rules.together)


def most_rank(target: Target) -> int:
    """Return the highest rank that the change of a layer can have."""
    own, short = ranks(target), min(target.matrix)
    return min(short, sum(r or 0 for r in own)) if own and None not in own else short


def ranks(target: Target) -> list[int | None]:
    """Return the rank of each change of a layer; None for one that is not a product of factors."""
    found = []
    for use in target.uses:
        low = ALGORITHMS[use.patch.algorithm].low_rank
        found.append(low.rank(use.patch.shapes, use.patch.view.shape) if low and use.patch.magnitude is None else None)
    return found


def nbytes(job: AdapterJob, target: Target) -> int:
    """Return about how many bytes the change of a weight takes: factors several times, or matrices."""
    out, cols = target.matrix
    factored = COMBINATIONS[job.method].linear and None not in ranks(target) and not target.values
    return 8 * min(6 * most_rank(target) * (out + cols) if factored else sys.maxsize,
                   (len(target.uses) + 3) * out * cols)  # fmt: skip
