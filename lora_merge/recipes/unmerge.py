"""Takes a merge back: the same adapters at the opposite strengths, where their changes do not depend on the base.

W + Δ was rounded once and (W + Δ) − Δ is rounded once more, so every number differs from the original by at most one
rounding step of the larger of both, where the sums are finer than the values that are stored. How the merge computed,
rounded and cut is read from its recipe. Where the base itself is at hand it is the better way: it is exact.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any, Final, TypeAlias

from ..adapter_arguments import adapter_path
from ..disk.hashes import hash_once
from ..dtypes import COMPUTE_DTYPES, spoken
from ..errors import FitError, InputError, UsageError
from ..files.checkpoint import open_checkpoint
from ..job import Adapter, Job, adapter_list, make_job
from ..merge_methods import SUM
from ..options import BLOCK_LIST, OPTIONS
from ..paths import exists, input_name
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.make_plan import plan_job
from ..planning.plan import Plan
from ..proof.reference.floats import Floats
from ..report import NOT_THE_BASE
from ..text import Note, listed, quoted
from .find_inputs import around, different, find
from .read_recipe import NAME_ADAPTERS, Input, Recipe, as_merged, damaged, history, read_recipe

SHARED_OPTIONS: Final = ("setting", "unmatched", "compute_dtype")
"""Options of the merge that taking it back has too, where the user gives no others."""

OF_STRENGTH: Final = ("strength", "strengths", "strength_for")
"""Options that state strengths; without them a path alone has those of the recipe."""

NEGATIVE: Final = "merge it at a negative strength"

EXACT_DTYPES: Final = ("F32", "F64")
"""Dtypes of sums whose rounding and underflow are nothing against a step of a coarser dtype."""


def unmerge_job(
    merged: Path, adapters: Any, output: str | Path | None, search: Sequence[Path] = (), **options: Any
) -> Job:
    """Return the job that takes adapters out of a merged checkpoint: a merge at the opposite strengths.

    `adapters`: as for `merge`; a path alone has the strengths of the recipe. None: the adapters of the recipe, searched
    by content. FitError for a merge that is no sum.
    """
    recipes = _recipes(merged) if adapters else [read_recipe(as_merged(open_checkpoint(merged)), NAME_ADAPTERS)]
    recorded: dict[str, Any] = {}
    for recipe in recipes[:1]:
        _expect_sum(recipe, merged)
        recorded = {n: recipe.options[n] for n in SHARED_OPTIONS if n in recipe.options and n not in options}
    if not adapters:
        paths = find([a for a, _, _ in recipes[0].adapters], around(merged, search), digest=hash_once)
        adapters = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths, recipes[0].adapters, strict=True)]
        if strengths := options.get("strength") or options.get("strengths"):
            raise _of_no_adapter(merged, adapters, strengths)
    elif not any(options.get(name) for name in OF_STRENGTH):
        adapters = [*_at_recorded_strengths(adapter_list(adapters), recipes)]
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

    FitError for changes that depend on the base, as those of DoRA (there only the original base helps), for adapters
    that its recipe does not name, and for a recipe of another merge than a sum.
    """
    recipes = _recipes(job.base)
    recipe = next(iter(recipes), None)
    values = {**vars(job), "setting": dict(job.setting)}
    recorded = {} if recipe is None else {n: v for n, v in recipe.options.items() if n in SHARED_OPTIONS}
    with _recorded_options([n for n, value in recorded.items() if value == values[n]], job.base):
        plan = plan_job(job, cache)
    notes = [*_differences(plan, recipes)]
    for match in plan.adapters:
        patches = [part.patch for part in match.parts]
        wrong = [f"{p.module.name} depends on the weights before the merge" for p in patches if p.reads_base]
        wrong += [f"{key} was replaced or enlarged" for key in (*match.replaced, *match.grown, *match.separated)]
        if wrong:
            raise FitError(
                "the change by an adapter cannot be undone", f"{match.adapter.path}: {wrong[0]}", _instead(recipe)
            )
    if recipe is not None and not notes:
        notes = [_inexact(plan, recipe)]
    return plan.with_notes(*notes)


def _of_no_adapter(merged: Path, adapters: Sequence[Adapter], strengths: Any) -> UsageError:
    """Return the error for strengths without the adapters that are to be taken out at these: with all that the merge
    has, or for one strength with the last one that it may be for."""
    words = listed(_typed(input_name(a.path), a.strength, a.parts) for a in adapters)
    what = f"{input_name(merged)} has {words}, and a strength is for an adapter that is named"
    error = UsageError(what, "--strength", "name the adapter")
    values = strengths if isinstance(strengths, list) else []
    meant = [a.path for a in adapters if values and values[0] <= a.strength][-1:]
    if len(values) == len(adapters):
        meant = [a.path for a, value in zip(adapters, values, strict=True) if value <= a.strength]
    return error.instead(str(merged), str(merged), *map(str, meant)) if len(meant) == len(values) else error


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
    """Raise FitError for a merge that is no sum, or that may have cut values."""
    if (method := recipe.options.get("method", SUM)) != SUM:
        raise FitError(f"the merge used `--method {method}`, which cannot be undone", str(merged), _instead(recipe))
    if recipe.options.get("on_overflow", "error") == "saturate":
        raise FitError(
            "the merge may have cut values that are too large for the dtype (`--on-overflow saturate`): nothing "
            "restores them",
            str(merged), _instead(recipe),
        )  # fmt: skip


def _inexact(plan: Plan, recipe: Recipe) -> Note:
    """Return the note that says by how much values may differ from those before the merge."""
    computed = {plan.job.compute_dtype, recipe.options["compute_dtype"]}
    sums = min((COMPUTE_DTYPES[name] for name in computed), key=_digits)
    changed = [t for t in plan.targets if t.uses]
    stored = {e for t in changed for e in (t.weight.packing.encoding, t.packing.encoding)}
    if not all(e.plain for e in stored):
        steps = "what quantisation loses in the merge and again here"
    else:
        coarsest = min((e.title for e in stored), key=_digits, default=sums)
        finer = _digits(coarsest) < _digits(sums)
        drawn = recipe.options.get("rounding") == "stochastic"
        steps = f"at most {'two rounding steps' if drawn else 'one rounding step'} of {spoken(coarsest)}"
        if not finer or sums not in EXACT_DTYPES:
            also = f", and of {spoken(coarsest)}" if finer else ""
            steps = f"some rounding steps of {spoken(sums)}, in which the sums were made{also}"
    names = listed(dict.fromkeys(input_name(ref.path) for ref in plan.job.adapters))
    others = len(plan.job.adapters) < len(recipe.adapters)
    those = f"those of a merge without {names}" if others else "those before the merge"
    return Note(f"the values differ from {those} by {steps}, measured at the largest value of each sum")


def _digits(dtype: str) -> int:
    """Return the bits of a significand."""
    return Floats(dtype).digits


# What the recipes say of the adapters. The first recipe is that of the merge; the next ones are those of its base.

StrengthsByParts: TypeAlias = Mapping[tuple[tuple[str, float], ...], float]
"""Sorted parts with their factors → the sum of the strengths that an adapter has with these parts."""


def _at_recorded_strengths(adapters: Iterable[Any], recipes: Sequence[Recipe]) -> Iterator[Any]:
    """Yield the adapters; one that is a path alone has all strengths that the recipes state for it."""
    paths = set()
    for item in adapters:
        if not isinstance(item, str | Path):
            yield item
        elif (path := adapter_path(item)) not in paths:
            paths.add(path)
            inputs, _ = _named(path, recipes)
            merged = _strengths(use for recipe in recipes for use in recipe.adapters if use[0] in inputs)
            refs = [Adapter(path, s, parts) for parts, s in merged.items() if s]
            yield from refs or (path,)


def _differences(plan: Plan, recipes: Sequence[Recipe]) -> Iterator[Note]:
    """Yield a warning for each adapter that is not taken out as it was merged.

    FitError for an adapter that no recipe names, for one at more than its strength there, and where a merge with it, or
    a later one, was no sum.
    """
    by_path = defaultdict[str, list[Adapter]](list)
    for ref in plan.job.adapters:
        by_path[os.path.realpath(ref.path)].append(ref)
    merged = plan.base.path
    for path, name, refs in ((refs[0].path, input_name(refs[0].path), refs) for refs in by_path.values()):
        if not recipes:
            words = listed(_typed(name, -ref.strength, ref.parts) for ref in refs)
            what = f"nothing in {merged.name} shows that {name} was merged into it as {words}"
            yield Note(f"{what}: unless it was, {NOT_THE_BASE}")
            continue
        inputs, identical = _named(path, recipes)
        if not identical:
            yield Note(f"{name} was edited since it was merged: unless only its metadata was, {NOT_THE_BASE}")
        # Step 1: the strengths are those of the last merge, or those of all merges, or a part of these.
        uses = [[use for use in recipe.adapters if use[0] in inputs] for recipe in recipes]
        last, every = _strengths(uses[0]), _strengths(use for of_recipe in uses for use in of_recipe)
        taken = {parts: -s for parts, s in _strengths((None, ref.strength, ref.parts) for ref in refs).items()}
        count = max((n for n, of_recipe in enumerate(uses, 1) if of_recipe), default=0)
        if _equal(taken, last):
            count = 1
        elif not any(every.values()):
            words = listed(_typed(named.name, s, parts) for recipe in recipes for named, s, parts in recipe.adapters)
            what, where = f"{name} is not merged into {merged.name}", f"{merged}: its recipe names {words}"
            error = FitError(what, where, f"name one of these; to subtract {name} all the same, {NEGATIVE}")
            others = {path.with_name(named.name) for recipe in recipes for named, _, _ in recipe.adapters}
            near = [str(other) for other in others if exists(other) and str(other) not in by_path]
            raise error.instead(str(path), *near) if len(near) == 1 else error
        elif not _equal(taken, every):
            words, wrong = (listed(_typed(name, s, parts) for parts, s in these.items()) for these in (every, taken))
            if not _is_part(taken, every):
                what, where = f"{name} was merged as {words}, not {wrong}", f"{merged}: its recipe"
                raise FitError(what, where, f"leave its strength out; to subtract more, {NEGATIVE}")
            yield Note(f"{name} was merged as {words}, and a part of that is taken out: {NOT_THE_BASE}")
        # Step 2: the merge with it and the later ones were sums.
        for recipe in recipes[:count]:
            _expect_sum(recipe, merged)


def _named(path: Path, recipes: Sequence[Recipe]) -> tuple[list[Input], bool]:
    """Return the inputs of the recipes that are the adapter at `path`, by content, else by name; and whether they have
    its content."""
    adapters = {named: None for recipe in recipes for named, _, _ in recipe.adapters}
    namesakes = [named for named in adapters if named.name == input_name(path)]
    same = next((named for named in (*namesakes, *adapters) if _is(named, path)), None)
    if same is None:
        return namesakes, not namesakes
    return [named for named in adapters if _digests(named) == _digests(same)], True


def _is(named: Input, path: Path) -> bool:
    """Return whether the adapter at `path` is this input, byte for byte."""
    with suppress(InputError, OSError):
        return different(named, path, hash_once) is None
    return False


def _digests(named: Input) -> list[str]:
    return [digest for _, _, digest in named.files]


def _strengths(uses: Iterable[tuple[Any, float, tuple[tuple[str, float], ...]]]) -> StrengthsByParts:
    """Return the strengths of one adapter that is used several times."""
    strengths = defaultdict[tuple[tuple[str, float], ...], float](float)
    for _, strength, parts in uses:
        strengths[tuple(sorted(parts))] += strength
    return strengths


def _equal(taken: StrengthsByParts, merged: StrengthsByParts) -> bool:
    return taken.keys() == merged.keys() and all(isclose(s, merged[parts], abs_tol=1e-9) for parts, s in taken.items())


def _is_part(taken: StrengthsByParts, merged: StrengthsByParts) -> bool:
    """Return whether nowhere more is taken out than was merged."""
    shares = dict.fromkeys(merged, 0.0)
    for parts, strength in taken.items():
        smaller = all(0 <= factor <= 1 and not part.startswith(BLOCK_LIST) for part, factor in parts)
        place = parts if parts in merged or not smaller else ()
        if not merged.get(place):
            return False
        shares[place] += strength / merged[place]
    return all(0 <= share <= 1 or isclose(share, 1) for share in shares.values())


def _typed(name: str, strength: float, parts: Iterable[tuple[str, float]]) -> str:
    """Return an adapter as it is typed."""
    return f"{name}:{strength:g}" + "".join(f",{part}={factor:g}" for part, factor in parts)


def _recipes(merged: Path) -> list[Recipe]:
    """Return the recipes of a checkpoint, the last merge first; [] without one, or if it cannot be read yet."""
    try:
        index = open_checkpoint(merged)
    except InputError:  # the plan reports it; in a batch, a job before may write the file
        return []
    return history(as_merged(index))


def _instead(recipe: Recipe | None) -> str:
    if recipe is None:
        return "take the base from before the merge"
    names = listed(quoted(a.name) for a, _, _ in recipe.adapters)
    return f"take {quoted(recipe.base.name)}, SHA-256 {recipe.base.files[0][2]}, and merge {names} again as you want it"
