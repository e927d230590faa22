"""`combine`, `resize` and `average` with `--format`: the result in the words of the first adapter, written again in
another dialect. Factors stay as they are where the dialect can hold them, so nothing is lost the second time."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, Final

from ...adapter_options import KEEP
from ...algorithms import ALGORITHMS
from ...dtypes import spoken
from ...errors import FitError, MergeError
from ...files.checkpoint import open_checkpoint
from ...matching.remarks import NO_ALPHA
from ...methods import COMBINATIONS
from ...planning.cache import CheckpointCache
from ...planning.recipe import KEY
from ...progress import Progress, unwatched
from ..dialects import Dialect, dialect
from ..job import AUTO, WHOLE, AdapterJob, form
from ..outcome.outcome import Run, output_dtype
from ..outcome.planned import plan as plan_in_own
from ..outcome.planned import ranks
from ..rank_rules import COUNT, EXACT, SAME, Rule
from ..report import AdapterReport
from ..run import run as run_in_own
from ..sources import Sources, open_sources
from ..written import unread

TRAINED_APART: Final = (
    "the head was trained apart from the embeddings that share its weight in this base, which a sum has no name for"
)


def plan(job: AdapterJob) -> AdapterReport:
    """Return what `run` would do, from headers."""
    return replace(plan_in_own(job), format=job.format)


def run(job: AdapterJob, progress: Progress = unwatched) -> AdapterReport:
    """Run a job: the output appears under its name when it is complete and verified, or not at all."""
    with Run(job, progress) as this:
        opened = CheckpointCache()
        this.hash_adapters(opened)
        sources = open_sources(job, opened)
        name = sources.fused if job.format == KEEP else job.format
        if name != KEEP:
            return _converted(job, sources, this, name)
        done = run_in_own(job, sources, this)
    return replace(done, notes=(*done.notes, *unread(open_checkpoint(job.output).tensors)))


def _converted(job: AdapterJob, sources: Sources, this: Run, name: str) -> AdapterReport:
    """Run a job in the words of the first adapter, and convert its result to a dialect."""
    from ..convert import make_conversion
    from ..convert import run as run_conversion

    to = dialect(name)
    if to is None:
        raise FitError("the first adapter has one module for several weights of this base, in words of no dialect",
                       str(job.adapters[0].path), "name the output's dialect, such as --format kohya")  # fmt: skip
    known = sources.inputs.names.shapes if sources.inputs else {}
    head = next((t.key for t in sources.targets if known and t.key not in known), "")
    if to.folder and head:
        raise FitError(TRAINED_APART, head, "give a base that stores both (tie_word_embeddings: false), or leave the "
                       f"head out: --exclude re:{head.partition('.')[0]}")  # fmt: skip
    there = next(f for f in (job.output.parent, *job.output.parent.parents) if f.exists())
    with tempfile.TemporaryDirectory(dir=there, prefix=".lora-merge-") as folder:
        whole = Path(folder) / "whole.safetensors"
        alpha = job.alpha if to.alpha else "rank"  # another one would be folded in by a second rounding
        own = replace(job, format=KEEP, algorithm=form(job.algorithm, to), alpha=alpha,
                      inputs=replace(job.inputs, output=whole))  # fmt: skip
        given = {n: getattr(job.inputs, n) for n in ("overwrite", "max_memory", "max_vram", "device", "map", "verify")}
        factored = _has_factors(job, sources)
        later = _later(job, sources, to, factored=factored)
        if later and factored:
            dtype = spoken(output_dtype(job, sources.adapters))
            widest = dtype == "fp64"  # no value of --dtype, but that of the inputs
            later |= {"dtype": KEEP if widest else dtype, "alpha": alpha}
            exactly = replace(job.rules, linear=Rule(EXACT), kernels=Rule(EXACT), parts=())
            own = replace(own, rules=exactly, inputs=replace(own.inputs, dtype=KEEP if widest else "fp32"))
        first = run_in_own(own, sources, this)
        again = make_conversion(whole, job.output, job.base, {"to": to.name, **given, **later})
        again = replace(again, tables=_tables(sources))
        told: dict[str, Any] = json.loads(open_checkpoint(whole).metadata[KEY])
        told["options"]["dtype"] = job.inputs.dtype
        try:
            second = run_conversion(again, this.progress, recipe=told, before=sources.adapters[0].index.config)
        except MergeError as e:
            e.rename(str(whole), str(job.adapters[0].path))  # the other file is gone
            raise
    return _together(first, second, cut=bool(later))


def _tables(sources: Sources) -> frozenset[str]:
    """Return the layers of the result that are embeddings, whose factors have the endings of other layers there."""
    own = (t.name for t in sources.targets if any(ALGORITHMS[u.patch.algorithm].of_table for u in t.uses))
    return frozenset(own)


def _later(job: AdapterJob, sources: Sources, to: Dialect, *, factored: bool) -> dict[str, Any]:
    """Return the options for the ranks of the modules that are written; {} where those of the weights are theirs.
    `factored`: what `_has_factors` says."""
    from ..convert import RANKS

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
    from ..places import places

    changed = {t.key for t in sources.targets}
    views = (place.view.row_slices for place in places(sources.inputs.names, to))
    return any(len(keys := {piece.key for piece in view}) > 1 and keys & changed for view in views)


def _together(first: AdapterReport, second: AdapterReport, *, cut: bool) -> AdapterReport:
    """Return the report of both steps. `cut`: whether the second one has decided the ranks.

    What the second loses is at right angles to what the first has lost.
    """
    residual = sqrt(first.residual**2 + second.residual**2 * max(0.0, 1 - first.residual**2))
    energy, layers, numbers = 1 - residual**2, first.layers, first.numbers
    if cut:
        every = {**first.numbers["all"], "residual": residual, "energy": energy}
        layers, numbers = second.layers, {**second.numbers, "all": every}
    return replace(
        first, output=second.output, format=second.format, dtype=second.dtype, layers=layers, numbers=numbers,
        residual=residual, energy=energy, written=second.written, seconds=first.seconds + second.seconds,
        notes=tuple(dict.fromkeys((*first.notes, *(n for n in second.notes if NO_ALPHA not in n)))),
        verified=second.verified if cut else first.verified,
        stages={stage: seconds + second.stages.get(stage, 0.0) for stage, seconds in first.stages.items()},
    )  # fmt: skip
