"""Takes a merge back: the same adapters at the opposite strengths, where their changes do not depend on the base.

W + Δ was rounded once and (W + Δ) − Δ is rounded once more, so every number differs from the original by at most one
rounding step of the larger of both, where the sums are finer than the numbers that are stored. How the merge computed,
rounded and cut is read from its recipe. Where the base itself is at hand it is the better way: it is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..dtypes import COMPUTE_DTYPES, spoken
from ..errors import FitError, InputError, UsageError
from ..files.checkpoint import open_checkpoint
from ..job import Adapter, Job, make_job
from ..merge_methods import SUM
from ..options import OPTIONS
from ..paths import input_name
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.make_plan import plan_job
from ..planning.plan import Plan
from ..proof.reference.floats import precision
from ..text import Note, listed, quoted
from .find_inputs import around, find
from .read_recipe import Recipe, damaged, read_recipe

SHARED_OPTIONS: Final = ("setting", "unmatched", "compute_dtype")
"""Options of the merge that taking it back has too, where the user gives no others."""


EXACT_DTYPES: Final = ("F32", "F64")
"""Dtypes of sums whose rounding and underflow are nothing against a step of a coarser dtype."""


def unmerge_job(
    merged: Path, adapters: Any, output: str | Path | None, search: Sequence[Path] = (), **options: Any
) -> Job:
    """Return the job that takes adapters out of a merged checkpoint: a merge at the opposite strengths.

    `adapters`: as for `merge`, at the strengths of the merge; none: those of its recipe, searched by content. FitError
    for a merge that is no sum.
    """
    recipe = read_recipe(open_checkpoint(merged), "name its adapters") if not adapters else _recipe(merged)
    recorded: dict[str, Any] = {}
    if recipe is not None:
        _expect_sum(recipe, merged)
        recorded = {n: recipe.options[n] for n in SHARED_OPTIONS if n in recipe.options and n not in options}
    if not adapters and recipe is not None:
        paths = find([a for a, _, _ in recipe.adapters], around(merged, search))
        adapters = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths, recipe.adapters, strict=True)]
    with _recorded_options(recorded, merged):
        job = make_job(merged, adapters, output, **options, **recorded)
    if job.method != SUM:
        raise FitError(
            f"`--method {job.method}` cannot be undone",
            f"`--method {job.method}`",
            "take the base from before the merge",
        )
    return replace(job, adapters=tuple(replace(a, strength=-a.strength) for a in job.adapters))


def plan_unmerge(job: Job, cache: CheckpointCache) -> Plan:
    """Return the plan of such a job, with a note that says what it cannot restore.

    FitError for changes that depend on the base, as those of DoRA (there only the original base helps), and for a
    recipe of another merge than a sum.
    """
    recipe = _recipe(job.base)
    values = {**vars(job), "setting": dict(job.setting)}
    recorded = {} if recipe is None else {n: v for n, v in recipe.options.items() if n in SHARED_OPTIONS}
    with _recorded_options([n for n, value in recorded.items() if value == values[n]], job.base):
        plan = plan_job(job, cache)
    if recipe is not None:
        _expect_sum(recipe, plan.base.path)
    for match in plan.adapters:
        patches = [use.patch for uses in match.uses.values() for use in uses]
        wrong = [f"{p.module.name} depends on the weights before the merge" for p in patches if p.reads_base]
        wrong += [f"{key} was replaced or enlarged" for key in (*match.replaced, *match.grown, *match.separated)]
        if wrong:
            raise FitError(
                "the change by an adapter cannot be undone", f"{match.adapter.path}: {wrong[0]}", _instead(recipe)
            )
    notes = [*_otherwise(plan, recipe)] or [_inexact(plan, recipe)]
    return replace(plan, base=replace(plan.base, notes=(*plan.base.notes, *notes)))


@contextmanager
def _recorded_options(recorded: Iterable[str], merged: Path) -> Iterator[None]:
    """Raise the error for a damaged recipe in place of one for an option that it states: the user did not type it."""
    try:
        yield
    except UsageError as e:
        if any(e.where.startswith(OPTIONS[name].flag) for name in recorded):
            raise damaged(merged, f"{e.what} ({e.where})") from e
        raise


def _expect_sum(recipe: Recipe, merged: Path) -> None:
    """Raise FitError for a merge that is no sum, or that may have cut numbers."""
    if (method := recipe.options.get("method", SUM)) != SUM:
        raise FitError(f"the merge used `--method {method}`, which cannot be undone", str(merged), _instead(recipe))
    if recipe.options.get("on_overflow", "error") == "saturate":
        raise FitError(
            "the merge may have cut values that are too large for the dtype (`--on-overflow saturate`): nothing "
            "restores them",
            str(merged), _instead(recipe),
        )  # fmt: skip


def _inexact(plan: Plan, recipe: Recipe | None) -> Note:
    """Return the note that says by how much numbers may differ from those before the merge."""
    computed = {plan.job.compute_dtype, *([recipe.options["compute_dtype"]] if recipe is not None else [])}
    sums = min((COMPUTE_DTYPES[name] for name in computed), key=_digits)
    changed = [t for file in plan.files for t in file.targets if t.uses]
    stored = {e for t in changed for e in (t.weight.packing.encoding, t.packing.encoding)}
    if not all(e.plain for e in stored):
        steps = "what quantisation loses in the merge and again here"
    else:
        coarsest = min((e.title for e in stored), key=_digits, default=sums)
        finer = _digits(coarsest) < _digits(sums)
        drawn = recipe is not None and recipe.options.get("rounding") == "stochastic"
        steps = f"at most {'two rounding steps' if drawn else 'one rounding step'} of {spoken(coarsest)}"
        if not finer or sums not in EXACT_DTYPES:
            also = f", and of {spoken(coarsest)}" if finer else ""
            steps = f"some rounding steps of {spoken(sums)}, in which the sums were made{also}"
    unknown = "" if recipe is not None else "; this holds for a merge that rounded to the nearest and cut nothing"
    at = "measured at the largest value of each sum"
    return Note(f"the values differ from those before the merge by {steps}, {at}{unknown}")


def _digits(dtype: str) -> int:
    """Return the bits of a significand."""
    return precision(dtype)[0]


def _otherwise(plan: Plan, recipe: Recipe | None) -> Iterator[Note]:
    """Yield a note for each adapter that is taken out at another strength than that at which it was merged."""
    merged = {a.name: [] for a, _, _ in recipe.adapters} if recipe is not None else {}  # type: dict[str, list[Any]]
    for named, strength, parts in recipe.adapters if recipe is not None else ():
        merged[named.name].append((strength, sorted(parts)))
    for ref in plan.job.adapters:
        name = input_name(ref.path)
        known = merged.get(name, [])
        if recipe is not None and not known:
            yield Note(f"the result is not the base: its recipe names no {name}")
        elif known and (-ref.strength, sorted(ref.parts)) not in known:
            strength, parts = known[0]
            factors = "".join(f",{part}={factor:g}" for part, factor in parts)
            yield Note(f"the result is not the base: {name} was merged as {name}:{strength:g}{factors}")


def _recipe(merged: Path) -> Recipe | None:
    """Return the recipe of a checkpoint; None where it has none."""
    try:
        return read_recipe(open_checkpoint(merged), "name its adapters")
    except InputError:
        return None


def _instead(recipe: Recipe | None) -> str:
    if recipe is None:
        return "take the base from before the merge"
    names = listed(quoted(a.name) for a, _, _ in recipe.adapters)
    return f"take {quoted(recipe.base.name)}, SHA-256 {recipe.base.files[0][2]}, and merge {names} again as you want it"
