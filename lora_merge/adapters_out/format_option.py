"""`combine`, `resize` and `average` with `--format`: the result in the words of the first adapter, written again in
another dialect. Factors stay as they are where the dialect can hold them, so nothing is lost the second time.

An adapter that is not written yet, as far as headers tell it: a plan converts it as a run converts the real one. No
torch.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..adapter_options import KEEP
from ..adapters.modules import AdapterFile, group
from ..algorithms import ALGORITHMS
from ..disk.files import Memory, StoredTensor
from ..disk.writer import Room
from ..dtypes import bytes_of, spoken
from ..errors import FitError, MergeError
from ..files.checkpoint import Index, open_checkpoint
from ..matching.formula import NO_ALPHA
from ..merge_methods import COMBINATIONS
from ..models.part_factors import or_leave_out
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.recipe import KEY
from ..progress import Progress, unwatched
from ..text import Note
from .combine import run as run_in_own
from .dialects import Dialect, dialect
from .job import AUTO, FACTORS, WHOLE, AdapterJob, form
from .metadata.sizes import PlannedLayer, Tensor
from .output_file import unread
from .pipeline import Run, idle_alpha, output_dtype
from .planned_layers import plan as plan_in_own
from .planned_layers import planned_layers, ranks
from .rank_rules import COUNT, EXACT, SAME, Rule
from .report import AdapterReport
from .sources import Sources, open_sources, ruled

if TYPE_CHECKING:
    from .convert_job import Opened

TRAINED_APART: Final = (
    "the head was trained apart from the embeddings that share its weight in this base, which a sum has no name for"
)


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers."""
    sources = open_sources(job)
    job = ruled(job, sources)
    to = _written_in(job, sources)
    if to is None:
        return plan_in_own(job, sources)
    from .convert import make_conversion, opened
    from .convert import plan as plan_conversion

    pass

    first, second = _both(job, sources, to)
    sources = replace(sources, stores_alpha=to.alpha)
    own, checkpoints = replace(first, format=to.name), CheckpointCache()
    told = plan_in_own(own, sources)
    dtype = output_dtype(first, sources.adapters)
    checkpoints.pretend(pretended(job.adapters[0].path, planned_layers(first, sources, dtype)))
    task = make_conversion(job.adapters[0].path, job.output, job.base, {"to": to.name, **second, "overwrite": True})
    found = opened(replace(task, tables=_tables(sources)), checkpoints)
    again, origins = plan_conversion(task, found), {} if "rank" in second else _origins(found)
    open_ranks = {name for name, one in told.layers.items() if one["algorithm"] == FACTORS and not one["rank"]}
    layers = {name: {**one, "rank": 0} if open_ranks.intersection(origins.get(name, ())) else one
              for name, one in again.layers.items()}  # fmt: skip
    written = min(told.written, again.written) if job.rules.together else again.written
    notes = (*_notes(told, again), *idle_alpha(job, stored=to.alpha))
    return replace(told, layers=layers, format=again.format, dtype=again.dtype, written=written, notes=notes,
                   disk=Room.at(job.output, told.written + written).facts)  # fmt: skip


def _written_in(job: AdapterJob, sources: Sources) -> Dialect | None:
    """Return the dialect of the output; None for that of the first adapter."""
    name = sources.fused if job.format == KEEP else job.format
    if name == KEEP:
        return None
    to = dialect(name)
    if to is None:
        raise FitError("the first adapter has one module for several weights of this base, in words of no dialect",
                       str(job.adapters[0].path), "name the output's dialect, such as --format kohya")  # fmt: skip
    known = sources.inputs.names.shapes if sources.inputs else {}
    head = next((t.key for t in sources.targets if known and t.key not in known), "")
    if to.folder and head:
        raise FitError(
            TRAINED_APART, head, or_leave_out("give a base that stores both (tie_word_embeddings: false)", [head])
        )
    return to


def _both(job: AdapterJob, sources: Sources, to: Dialect) -> tuple[AdapterJob, dict[str, Any]]:
    """Return the job of the first step, and the options of the second one, which decides the ranks if it has a rule."""
    alpha = job.alpha if to.alpha else "rank"  # another one would be folded in by a second rounding
    own = replace(job, format=KEEP, algorithm=form(job.algorithm, to), alpha=alpha)
    given = {n: getattr(job.inputs, n) for n in ("overwrite", "max_memory", "max_vram", "device", "map", "verify")}
    factored = _has_factors(job, sources)
    later = _later(job, sources, to, factored=factored)
    if later and factored:
        dtype = spoken(output_dtype(job, sources.adapters))
        widest = dtype == "fp64"  # no value of --dtype, but that of the inputs
        later |= {"dtype": KEEP if widest else dtype, "alpha": alpha}
        exactly = replace(job.rules, linear=Rule(EXACT), kernels=Rule(EXACT), parts=(), layers={})
        own = replace(own, rules=exactly, inputs=replace(own.inputs, dtype=KEEP if widest else "fp32"))
    return own, {**given, **later}


def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Run a job: the output appears under its name when it is complete and verified, or not at all."""
    with Run(job, progress) as this:
        sources = open_sources(job, this.hash_adapters())
        job = ruled(job, sources)
        to = _written_in(job, sources)
        if to is not None:
            done = _converted(job, replace(sources, stores_alpha=to.alpha), this, to)
            return replace(done, notes=(*done.notes, *idle_alpha(job, stored=to.alpha)))
        done = run_in_own(job, sources, this)
    return replace(done, notes=(*done.notes, *unread(open_checkpoint(job.output).tensors)))


def _converted(job: AdapterJob, sources: Sources, this: Run, to: Dialect) -> AdapterReport:
    """Run a job in the words of the first adapter, and convert its result to a dialect."""
    from .convert import make_conversion
    from .convert import run as run_conversion

    there = next(f for f in (job.output.parent, *job.output.parent.parents) if f.exists())
    with tempfile.TemporaryDirectory(dir=there, prefix=".lora-merge-") as folder:
        whole = Path(folder) / "whole.safetensors"
        own, later = _both(job, sources, to)
        first = run_in_own(replace(own, inputs=replace(own.inputs, output=whole)), sources, this)
        again = make_conversion(whole, job.output, job.base, {"to": to.name, **later})
        again = replace(again, job=replace(again.job, full=job.full), tables=_tables(sources))
        told: dict[str, Any] = json.loads(open_checkpoint(whole).metadata[KEY])
        told["options"]["dtype"] = job.inputs.dtype
        seen: list[Opened] = []
        try:
            second = run_conversion(
                again, this.progress, recipe=told, before=sources.adapters[0].index.config, tell=seen.append
            )
        except MergeError as e:
            e.rename(str(whole), str(job.adapters[0].path))  # the other file is gone
            raise
    return _together(first, second, {} if "rank" in later else _origins(seen[0]))


def _tables(sources: Sources) -> frozenset[str]:
    """Return the layers of the result that are embeddings, whose factors have the endings of other layers there."""
    own = (t.name for t in sources.targets if any(ALGORITHMS[u.patch.algorithm].layout == "table" for u in t.uses))
    return frozenset(own)


def _later(job: AdapterJob, sources: Sources, to: Dialect, *, factored: bool) -> dict[str, Any]:
    """Return the options for the ranks of the modules that are written; {} where those of the weights are theirs.
    `factored`: what `_has_factors` says."""
    from .convert import RANKS

    given = {name: value for name, value in job.options if name in RANKS}
    if job.algorithm == WHOLE or given.keys() <= {"max_rank"}:
        return {}
    if given.get("rank") == SAME:
        known = {r for t in sources.targets for r in ranks(t)}
        if len(known) != 1 or None in known:
            return {}
        given["rank"] = known.pop()
    found = {"rank": EXACT, "algorithm": AUTO if job.algorithm == AUTO else KEEP, **given}
    counted = {job.rules.linear.name, job.rules.kernels.name, *(rule.name for _, rule in job.rules.parts)} == {COUNT}
    return found if factored or (counted and _fuses(sources, to)) else {}


def _has_factors(job: AdapterJob, sources: Sources) -> bool:
    """Return whether the result of every matrix is a product of factors, which are cut where they are written."""
    matrices = [t for t in sources.targets if not t.vector]
    known = (r is not None and r <= min(t.matrix) for t in matrices for r in ranks(t))
    return COMBINATIONS[job.method].linear and all(known) and not any(t.values or t.stacked for t in matrices)


def _fuses(sources: Sources, to: Dialect) -> bool:
    """Return whether a dialect has one module for several of the weights that change."""
    if sources.inputs is None:
        return False
    from .groups import places

    changed = {t.key for t in sources.targets}
    views = (place.view.row_slices for place in places(sources.inputs.names, to))
    return any(len(keys := {piece.key for piece in view}) > 1 and keys & changed for view in views)


def _origins(found: Opened) -> dict[str, list[str]]:
    """Return module of the output → the layers of the first step that are in it."""
    from .convert import prefix_name

    to = found.task.to
    return {prefix_name(to, one.place): [s.patch.module.where for s in one.shares] for one in found.there}


def _together(first: AdapterReport, second: AdapterReport, origins: Mapping[str, Sequence[str]]) -> AdapterReport:
    """Return the report of both steps. `origins`: module → layers of the first step; {} where the second one has
    decided the ranks.

    What the second loses is at right angles to what the first has lost.
    """
    residual = _lost_twice(first.residual**2, second.residual)
    energy, numbers = 1 - residual**2, first.numbers
    if not origins:
        every = {**first.numbers["all"], "residual": residual, "energy": energy}
        numbers = {**second.numbers, "all": every}
    uses = Counter(label for labels in origins.values() for label in labels)
    layers = {}
    for name, told in second.layers.items():
        own = [first.layers[label] for label in origins.get(name, ()) if label in first.layers]
        cut = any(uses[label] > 1 for label in origins.get(name, ()))
        layers[name] = _of_both(own, told, cut=cut) if own else told
    return replace(
        first, output=second.output, format=second.format, dtype=second.dtype, layers=layers, numbers=numbers,
        residual=residual, energy=energy, written=second.written, seconds=first.seconds + second.seconds,
        notes=_notes(first, second), verified=first.verified if origins else second.verified,
        stages={stage: seconds + second.stages.get(stage, 0.0) for stage, seconds in first.stages.items()},
    )  # fmt: skip


def _of_both(first: Sequence[Mapping[str, Any]], second: Mapping[str, Any], *, cut: bool) -> dict[str, Any]:
    """Return the facts of a module that is made of layers of the first step, or is a part of one (`cut`), whose share
    is then lost in it too."""
    squares = sum(one["norm"] ** 2 for one in first)
    share = sum((one["norm"] * one["residual"]) ** 2 for one in first) / squares if squares else 0.0
    residual = _lost_twice(share, second["residual"])
    norm = second["norm"] / sqrt(max(1 - share, 1e-30)) if cut else sqrt(squares)
    own = first[0] if len(first) == 1 and not cut else {}
    return {**own, **{name: second[name] for name in ("algorithm", "rank", "alpha")},
            "rank_before": max(one["rank_before"] for one in first), "norm": norm, "energy": 1 - residual**2,
            "residual": residual}  # fmt: skip


def _lost_twice(share: float, residual: float) -> float:
    """Return the residual of two steps: the first one has lost a share of ‖Δ‖², the second one has this residual."""
    return sqrt(share + residual**2 * max(0.0, 1 - share))


def _notes(first: AdapterReport, second: AdapterReport) -> tuple[Note, ...]:
    return tuple(dict.fromkeys((*first.notes, *(n for n in second.notes if NO_ALPHA not in n))))


def pretended(path: Path, layers: Iterable[PlannedLayer]) -> AdapterFile:
    """Return an adapter at a path with these tensors. α is the rank, and all other numbers are alike."""
    tensors = [one for layer in layers for one in _with_ranks(path, layer.tensors, layer.rank)]
    return group(Index(path, {one.name: one for one in tensors}, {}, ()))


def _with_ranks(path: Path, tensors: Sequence[Tensor], rank: int) -> list[StoredTensor]:
    found = []
    for name, dtype, shape in tensors:
        size = bytes_of(dtype, shape)
        content = partial(_number, rank) if not shape else partial(_ones, size)
        found.append(StoredTensor(name, dtype, shape, Memory(path, content), 0, size))
    return found


def _number(rank: int) -> memoryview:
    return memoryview(np.float32(rank).tobytes())


def _ones(size: int) -> memoryview:
    return memoryview(b"\1" * size)
