"""`combine`, `resize` and `average` with `--format`: the result in the words of the first adapter, written again in
another dialect. Factors stay as they are where the dialect can hold them, so nothing is lost the second time.

A plan converts an adapter that is not written yet, as far as headers show it, as a run converts the real one. No torch.
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
from ..job import make_job
from ..matching.formula import NO_ALPHA
from ..merge_methods import COMBINATIONS
from ..models.part_factors import or_leave_out
from ..options import pairs
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.recipe import KEY
from ..progress import Progress, unwatched
from ..text import Note
from .combine import forms_of, planned_layers
from .combine import plan as plan_first
from .combine import run as run_first
from .dialects import Dialect, dialect
from .groups import places
from .job import AUTO, FACTORS, RANKS, WHOLE, AdapterJob, algorithm_in
from .metadata.sizes import PlannedLayer, Tensor
from .output_file import unread
from .pipeline import AdapterRun, idle_alpha, output_dtype
from .rank_rules import COUNT, EXACT, SAME, RankRules, Rule
from .report import AdapterReport
from .sources import Sources, open_sources, ruled

if TYPE_CHECKING:
    from .conversion import Conversion

TRAINED_APART: Final = (
    "the head was trained apart from the embeddings that share its weight in this base, which a sum has no name for"
)


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers."""
    sources = open_sources(job)
    job = ruled(job, sources)
    to = _written_in(job, sources)
    if to is None:
        return plan_first(job, sources)
    from .convert import opened
    from .convert import plan as plan_conversion

    first, later = _both(job, sources, to)
    sources = replace(sources, stores_alpha=to.alpha)
    report, checkpoints = plan_first(replace(first, format=to.name), sources), CheckpointCache()
    dtype = output_dtype(first, sources.adapters)
    checkpoints.pretend(pretended(job.adapters[0].path, planned_layers(sources, forms_of(first, sources), dtype)))
    second = _second(job, sources, job.adapters[0].path, to, {**later, "overwrite": True})
    conversion = opened(second, checkpoints)
    again, origins = plan_conversion(second, conversion), {} if "rank" in later else _origins(conversion)
    open_ranks = {name for name, facts in report.layers.items() if facts["algorithm"] == FACTORS and not facts["rank"]}
    layers = {name: {**facts, "rank": 0} if open_ranks.intersection(origins.get(name, ())) else facts
              for name, facts in again.layers.items()}  # fmt: skip
    written = min(report.written, again.written) if job.rules.together else again.written
    notes = (*_notes(report, again), *idle_alpha(job, stored=to.alpha))
    return replace(report, layers=layers, format=again.format, dtype=again.dtype, written=written, notes=notes,
                   disk=Room.at(job.output, report.written + written).facts)  # fmt: skip


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
    first = replace(job, format=KEEP, algorithm=algorithm_in(job.algorithm, to), alpha=alpha)
    shared = {n: getattr(job.inputs, n) for n in ("overwrite", "max_memory", "max_vram", "device", "map", "verify")}
    factored = _has_factors(job, sources)
    later = _later(job, sources, to, factored=factored)
    if later and factored:
        dtype = spoken(output_dtype(job, sources.adapters))
        widest = dtype == "fp64"  # no value of --dtype, but that of the inputs
        later |= {"dtype": KEEP if widest else dtype, "alpha": alpha}
        exactly = replace(job.rules, linear=Rule(EXACT), kernels=Rule(EXACT), parts=(), layers={})
        first = replace(first, rules=exactly, inputs=replace(first.inputs, dtype=KEEP if widest else "fp32"))
    return first, {**shared, **later}


def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Run a job: the output appears under its name when it is complete and verified, or not at all."""
    with AdapterRun(job, progress) as this:
        sources = open_sources(job, this.hash_adapters())
        job = ruled(job, sources)
        to = _written_in(job, sources)
        if to is not None:
            done = _converted(job, replace(sources, stores_alpha=to.alpha), this, to)
            return replace(done, notes=(*done.notes, *idle_alpha(job, stored=to.alpha)))
        done = run_first(job, sources, this)
    return replace(done, notes=(*done.notes, *unread(open_checkpoint(job.output).tensors)))


def _converted(job: AdapterJob, sources: Sources, this: AdapterRun, to: Dialect) -> AdapterReport:
    """Run a job in the words of the first adapter, and convert its result to a dialect."""
    from .convert import run as run_conversion

    parent = next(f for f in (job.output.parent, *job.output.parent.parents) if f.exists())
    with tempfile.TemporaryDirectory(dir=parent, prefix=".lora-merge-") as folder:
        # Step 1: the result in the words of the first adapter.
        whole = Path(folder) / "whole.safetensors"
        first, later = _both(job, sources, to)
        report = run_first(first.at(whole), sources, this)
        # Step 2: the same in the words of the dialect, with the recipe of the first step.
        second = _second(job, sources, whole, to, later)
        recipe: dict[str, Any] = json.loads(open_checkpoint(whole).metadata[KEY])
        recipe["options"]["dtype"] = job.inputs.dtype
        conversions: list[Conversion] = []
        try:
            again = run_conversion(second, this.progress, recipe=recipe, before=sources.adapters[0].index.config,
                                   on_open=conversions.append)  # fmt: skip
        except MergeError as e:
            e.rename(str(whole), str(job.adapters[0].path))  # the other file is gone
            raise
    return _together(report, again, {} if "rank" in later else _origins(conversions[0]))


def _second(job: AdapterJob, sources: Sources, path: Path, to: Dialect, options: Mapping[str, Any]) -> AdapterJob:
    """Return the job that converts the result of the first step. `options`: as `_both` returns them."""
    of_form = {name: value for name, value in options.items() if name in (*RANKS, "algorithm", "alpha")}
    of_merge = {name: value for name, value in options.items() if name not in of_form}
    inputs = replace(make_job(job.base or path, [path], path, **of_merge), output=job.output)
    rank, kernels, most, parts = (of_form.get(name) for name in RANKS)
    rules = RankRules.of(rank or EXACT, kernels, most, pairs(parts or (), "--rank-for"))
    return AdapterJob(
        "convert", inputs, job.base, rules, ranked=rank is not None, algorithm=of_form.get("algorithm", KEEP),
        alpha=of_form.get("alpha", KEEP), format=to.name, full=job.full, tables=_tables(sources),
    )  # fmt: skip


def _tables(sources: Sources) -> frozenset[str]:
    """Return the layers of the result that are embeddings, whose factors have the endings of other layers there."""
    tables = (t.name for t in sources.targets if any(ALGORITHMS[u.patch.algorithm].layout == "table" for u in t.uses))
    return frozenset(tables)


def _later(job: AdapterJob, sources: Sources, to: Dialect, *, factored: bool) -> dict[str, Any]:
    """Return the options for the ranks of the modules that are written; {} where those of the weights are theirs.
    `factored`: what `_has_factors` says."""
    stated = {name: value for name, value in job.options if name in RANKS}
    if job.algorithm == WHOLE or stated.keys() <= {"max_rank"}:
        return {}
    if stated.get("rank") == SAME:
        known = {r for t in sources.targets for r in t.ranks}
        if len(known) != 1 or None in known:
            return {}
        stated["rank"] = known.pop()
    later = {"rank": EXACT, "algorithm": AUTO if job.algorithm == AUTO else KEEP, **stated}
    counted = {job.rules.linear.name, job.rules.kernels.name, *(rule.name for _, rule in job.rules.parts)} == {COUNT}
    return later if factored or (counted and _fuses(sources, to)) else {}


def _has_factors(job: AdapterJob, sources: Sources) -> bool:
    """Return whether the result of every matrix is a product of factors, which are cut where they are written."""
    matrices = [t for t in sources.targets if not t.vector]
    known = (r is not None and r <= min(t.matrix) for t in matrices for r in t.ranks)
    return COMBINATIONS[job.method].linear and all(known) and not any(t.values or t.stacked for t in matrices)


def _fuses(sources: Sources, to: Dialect) -> bool:
    """Return whether a dialect has one module for several of the weights that change."""
    if sources.inputs is None:
        return False
    changed = {t.key for t in sources.targets}
    views = (place.view.row_slices for place in places(sources.inputs.names, to))
    return any(len(keys := {piece.key for piece in view}) > 1 and keys & changed for view in views)


def _origins(conversion: Conversion) -> dict[str, list[str]]:
    """Return module of the output → the layers of the first step that are in it."""
    from .convert import prefix_name

    to = conversion.to
    return {
        prefix_name(to, module.place): [s.patch.module.where for s in module.shares] for module in conversion.modules
    }


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
    for name, facts in second.layers.items():
        origin_facts = [first.layers[label] for label in origins.get(name, ()) if label in first.layers]
        cut = any(uses[label] > 1 for label in origins.get(name, ()))
        layers[name] = _of_both(origin_facts, facts, cut=cut) if origin_facts else facts
    return replace(
        first, output=second.output, format=second.format, dtype=second.dtype, layers=layers, numbers=numbers,
        residual=residual, energy=energy, written=second.written, seconds=first.seconds + second.seconds,
        notes=_notes(first, second), verified=first.verified if origins else second.verified,
        stages={stage: seconds + second.stages.get(stage, 0.0) for stage, seconds in first.stages.items()},
    )  # fmt: skip


def _of_both(first: Sequence[Mapping[str, Any]], second: Mapping[str, Any], *, cut: bool) -> dict[str, Any]:
    """Return the facts of a module that is made of layers of the first step, or is a part of one (`cut`), whose share
    is then lost in it too."""
    squares = sum(facts["norm"] ** 2 for facts in first)
    share = sum((facts["norm"] * facts["residual"]) ** 2 for facts in first) / squares if squares else 0.0
    residual = _lost_twice(share, second["residual"])
    norm = second["norm"] / sqrt(max(1 - share, 1e-30)) if cut else sqrt(squares)
    unchanged = first[0] if len(first) == 1 and not cut else {}
    return {**unchanged, **{name: second[name] for name in ("algorithm", "rank", "alpha")},
            "rank_before": max(facts["rank_before"] for facts in first), "norm": norm, "energy": 1 - residual**2,
            "residual": residual}  # fmt: skip


def _lost_twice(share: float, residual: float) -> float:
    """Return the residual of two steps: the first one has lost a share of ‖Δ‖², the second one has this residual."""
    return sqrt(share + residual**2 * max(0.0, 1 - share))


def _notes(first: AdapterReport, second: AdapterReport) -> tuple[Note, ...]:
    return tuple(dict.fromkeys((*first.notes, *(n for n in second.notes if NO_ALPHA not in n))))


def pretended(path: Path, layers: Iterable[PlannedLayer]) -> AdapterFile:
    """Return an adapter at a path with these tensors. α is the rank, and all other numbers are alike."""
    tensors = [tensor for layer in layers for tensor in _with_ranks(path, layer.tensors, layer.rank)]
    return group(Index(path, {tensor.name: tensor for tensor in tensors}, {}, ()))


def _with_ranks(path: Path, tensors: Sequence[Tensor], rank: int) -> list[StoredTensor]:
    stored = []
    for name, dtype, shape in tensors:
        size = bytes_of(dtype, shape)
        content = partial(_number, rank) if not shape else partial(_ones, size)
        stored.append(StoredTensor(name, dtype, shape, Memory(path, content), 0, size))
    return stored


def _number(rank: int) -> memoryview:
    return memoryview(np.float32(rank).tobytes())


def _ones(size: int) -> memoryview:
    return memoryview(b"\1" * size)
