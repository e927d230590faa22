"""Plans and runs `convert`: an adapter in another dialect, algorithm, dtype or α."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..command import Request
from ..errors import UsageError
from ..options import KEEP, pairs
from ..paths import is_folder, names_folder, nearest, output_file, typed
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Progress, unwatched
from .dialects import DIALECTS, OF_INPUT, dialect, stated_dialect
from .form import Conversion
from .input_adapters import as_named, chosen_of, open_adapters, without_base
from .job import RANK_OPTIONS, AdapterJob, adapter_job, algorithm_of
from .output_names import input_dialect
from .pipeline import AdapterRun, grouped, plan_modules, write_modules
from .rank_rules import NO_NOISE, NOISE, RankRules
from .report import AdapterReport


def make_job(request: Request, _: CheckpointCache | None = None) -> AdapterJob:
    """Return the job of `convert`; UsageError for an option or a value that is wrong."""
    stated, output, rows = request.stated, request.output, request.command.options
    form_options = {name: stated.pop(name) for name in ("to", "algorithm", *RANK_OPTIONS) if name in stated}
    to = stated_dialect(form_options.get("to", KEEP), "--to")
    algorithm = algorithm_of(request.command, form_options.get("algorithm", KEEP))
    job = adapter_job(request._replace(options=stated))
    if to is OF_INPUT and isinstance(output, str) and dialect(output) is not None:
        fix = f"write `lora-merge convert {typed([nearest(str(job.adapters[0].path))])} --to {output.lower()}`"
        raise UsageError("the output has the name of a format", output, fix)
    ranks: dict[str, Any] = {option: form_options[option] for option in RANK_OPTIONS if option in form_options}
    if ranks:
        job = replace(job, rules=_stated_rules(ranks), ranked=True)
    unnamed = output is None
    if output is not None and (not is_folder(job.adapters[0].path) if to is OF_INPUT else not to.folder):
        unnamed = names_folder(output)
        job = job.changed(output=job.output / "named when it is opened" if unnamed else output_file(output))
    changed = tuple((n, v) for n, v in form_options.items() if v != rows[n].default)
    return replace(job, algorithm=algorithm, format=to.name, options=(*job.options, *changed), unnamed=unnamed)


def _stated_rules(ranks: Mapping[str, Any]) -> RankRules:
    """Return the rules that the options of `convert` state."""
    if "rank" not in ranks:
        raise UsageError("convert needs a rank for all layers", "--rank", "give --rank too, such as exact")
    part_rules = pairs(ranks.get("rank_for", ()), "--rank-for")
    rules = RankRules.of(ranks["rank"], ranks.get("conv_rank"), ranks.get("max_rank"), part_rules)
    if rules.has(NOISE):
        raise UsageError(NO_NOISE, "`--rank noise`", "give a number or energy:x")
    return rules


def run(job: AdapterJob, progress: Progress = unwatched, _: CheckpointCache | None = None) -> AdapterReport:
    """Run a conversion: the output appears under its name when it is complete and verified, or not at all."""
    with AdapterRun(job, progress) as this:
        return write_modules(opened(job, this.hash_adapters()), this)


def plan(job: AdapterJob, cache: CheckpointCache | None = None) -> AdapterReport:
    """Return what `run` would do, from headers alone."""
    return plan_modules(opened(job, cache or CheckpointCache()))


def opened(job: AdapterJob, cache: CheckpointCache) -> Conversion:
    """Return the adapter of a conversion, and the modules that its changes become; FitError where headers show that the
    dialect cannot hold one. `cache`: the checkpoints that are open."""
    file = cache.adapter(job.adapters[0].path)
    to = input_dialect(file) if job.format == KEEP else DIALECTS[job.format]
    if job.base is None:
        inputs = chosen_of(job, as_named(job, [file]) if job.format == KEEP else without_base(job, [file], to))
    else:
        inputs = open_adapters(job, cache)
    return grouped(job, inputs, to)
