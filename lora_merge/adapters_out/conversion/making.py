"""The modules of a conversion whose numbers change: they are computed, and compared with the input's in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, prod, sqrt
from pathlib import Path
from typing import Any

from ...disk.draft import Draft
from ...disk.reader import Reader
from ...disk.spool import Heap
from ...engine.placement import HOST
from ...engine.torch_state import undisturbed
from ...errors import InputError
from ...progress import Counting
from ..changes import SINGLE, Evaluator
from ..converting import Converter
from ..job import FACTORS, AdapterJob
from ..joining.targets import is_plain
from ..layers import beyond_fp64, expect_finite
from ..outcome.layer import Kept
from ..peft.biases import with_biases
from ..peft.complete import as_table, completed
from ..places import Filled, Place
from ..side_by_side import PerThread, side_by_side
from ..sources import Sources
from .assumed import NOWHERE
from .caches import cache_of
from .kept import entry, kept
from .made import Made
from .proof import Claim, prove
from .task import Opened, Writing, bundled, weight_of


@undisturbed()
def made(found: Opened, reader: Reader, put: Heap | Draft, begin: Counting) -> Writing:
    """Return the tensors of every module, which wait or are in the draft; InputError where none changes anything."""
    task, sources, there, everywhere = found
    job = task.job
    alone = _evaluators(job, reader, sources)
    converter = Converter(job, task.to, task.rules, alone.get(), task.tables)
    own, zeros = _made(converter, alone, there, put, begin)
    if not own:
        raise InputError("the adapter changes nothing", str(job.adapters[0].path), "check its strength")

    def renewed(place: Place) -> Made:
        return converter.renewed(next(one for one in there if one.place == place))

    at_hand = sources.inputs is not None and sources.inputs.base.path != NOWHERE
    own = with_biases(own, everywhere, task.to, renewed if at_hand else None, lambda one: kept(one, put))
    value = converter.value if at_hand else None
    whole = completed(own, everywhere, task.to, value, lambda one: kept(one, put))
    cache = cache_of(job, reader, sources)
    beside = [entry(info.name, cache.fetch(info)) for info in bundled(sources.adapters[0], task.to)]
    return Writing(own, whole, zeros, beside, proof(found, reader, own, begin))


def proof(
    found: Opened, reader: Reader, made: Sequence[Kept], begin: Counting
) -> Callable[[Path], Mapping[str, Any]]:  # fmt: skip
    """Return the function that proves the output at a path."""
    task, sources, _, _ = found
    worst = max(sqrt(one.layer.lost / one.layer.squares) if one.layer.squares else 0.0 for one in made)

    @undisturbed()
    def proven(part: Path) -> Mapping[str, Any]:
        before = _evaluators(task.job, reader, sources, drawn=True)
        return prove(Claim(task.job, part, worst, _lost(made)), sources, before, begin)

    return proven


def _lost(made: Sequence[Kept]) -> dict[str, float]:
    """Return weight of the base → ‖Δ − Δ̂‖² of all modules that have rows of it."""
    found: dict[str, float] = {}
    for one in made:
        for key in {piece.key for piece in one.place.view.row_slices}:
            found[key] = found.get(key, 0.0) + one.layer.lost
    return found


def _evaluators(job: AdapterJob, reader: Reader, sources: Sources, *, drawn: bool = False) -> PerThread[Evaluator]:
    at = SINGLE if job.compute_dtype == "fp32" else HOST
    return PerThread(lambda: Evaluator(sources, cache_of(job, reader, sources, drawn=drawn), at, wide=at is SINGLE))


def _made(
    converter: Converter, alone: PerThread[Evaluator], there: Sequence[Filled], put: Heap | Draft, begin: Counting
) -> tuple[list[Kept], list[str]]:
    """Return the tensors of every module, and the names of those that change nothing. `alone`: the evaluator of each
    thread."""
    told = begin("make", sum(map(weight_of, there)))
    found, zeros, ranks = [], [], converter.ranks(there)

    def work(one: Filled) -> Made:
        here = replace(converter, evaluator=alone.get())
        made = here.made(one, ranks.get(one.place.label))
        here.evaluator.forget()
        if not isfinite(made.layer.squares):
            raise beyond_fp64(one.shares[0].patch.module.name if one.shares else one.place.name)
        expect_finite((t for t in made.tensors.values() if t.dtype.itemsize > 1), one.place.name)
        return as_table(made, converter.to, table=converter.is_table(one.place, one.shares))

    bound = converter.job.inputs.max_memory // 2  # the rest: torch, and what waits
    for one, made in zip(there, side_by_side(there, work, _nbytes, bound), strict=True):
        if not made.copied and made.layer.algorithm == FACTORS and (not made.layer.rank or not made.layer.squares):
            zeros.append(one.place.name)
        else:
            found.append(kept(made, put))
        told(weight_of(one))
    return found, zeros


def _nbytes(one: Filled) -> int:
    """Return about how many bytes the change of a module takes: factors several times, or matrices."""
    out, cols = one.place.view.matrix
    plain = one.shares and all(is_plain(s.patch) for s in one.shares)
    ranks = sum(s.patch.shapes["down"][0] for s in one.shares) if plain else out * cols
    read = sum(prod(shape) for s in one.shares for shape in s.patch.shapes.values())
    return 8 * min(6 * ranks * (out + cols), (len(one.shares) + 4) * out * cols) + 8 * read
