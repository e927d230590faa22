"""From a finished output back to its job: to prove it, or to make it again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

from ..disk.files import StoredTensor
from ..disk.reader import Reader
from ..dtypes import DTYPES, FLOATS, FORMATS, Shape
from ..errors import UsageError, VerificationFailed
from ..files.checkpoint import Index, open_checkpoint
from ..files.formats.output import FILES, FOLDERS
from ..job import TOKENIZERS, Adapter, Job, make_job
from ..options import checked
from ..paths import absolute, current_folders
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.make_plan import plan_job
from ..planning.output_files import contents, differing, misleading
from ..planning.plan import Plan
from ..planning.recipe import KEY
from ..progress import Progress, unwatched
from ..text import Note, listed, plural, quoted
from .find_inputs import SEARCH, different, find
from .grids import ROUNDING
from .header_changes import header_changes, notes, with_header_changes
from .loadable import instead
from .read_recipe import Recipe, damaged, read_recipe
from .verify import check_header, verify

Stated: TypeAlias = str | Path | tuple[str | Path, float | None] | Adapter
"""An adapter as the caller names it: a path, or a path and a strength, or an Adapter."""
RECIPE_EDITED: Final = "the header with the recipe was changed after the merge"


def prove(  # noqa: PLR0913  # the options of `lora-merge verify`
    output: Path,
    base: str | Path | None = None,
    adapters: Sequence[Stated] = (),
    *,
    search: Sequence[Path] = (),
    full: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
    progress: Progress = unwatched,
) -> dict[str, Any]:
    """Prove that `output` is the merge that its recipe describes, or that of `base` and `adapters`.

    Without `base` and `adapters` the inputs are searched by content beside the output, in the current folder
    and in `search`. A strength that is not named is the recipe's, or 1. `options`, for an output without a recipe, are
    those of `merge` that its tensors do not show (strength_for, method, unmatched, on_overflow, map, setting).
    `compute_dtype` is for all outputs: the user, not the file, decides whether the rounding of sums in 16 bits is
    allowed. VerificationFailed if it is not that merge.
    """
    index = open_checkpoint(output)
    judged = checked(options)["compute_dtype"] if "compute_dtype" in options else ""
    options = {name: value for name, value in options.items() if name != "compute_dtype"}
    if KEY in index.metadata:
        refuse_stated(options)
    with ExitStack() as stack:
        if base is None and not adapters:
            recipe = read_recipe(index, "give --base and --adapter")
            around = _around(output, search)
            job = _job(recipe, find(recipe, around), output, stack, around)
        elif base is None or not adapters:
            raise UsageError("half of the inputs are named", "--base and --adapter", "name the base and all adapters")
        else:
            job = _job_of(index, base, adapters, options, stack)
        plan = _followed(job, index)
        judged = judged or min(("fp32", plan.job.compute_dtype), key=ROUNDING.__getitem__)
        if plan.is_folder != index.path.is_dir():
            kind, other = ("folder", "file") if plan.is_folder else ("file", "folder")
            what = f"the base is a {kind}, and so is what it gives; the output is a {other}"
            raise VerificationFailed(what, str(output), f"name the {kind} itself")
        reader = stack.enter_context(Reader([plan.base, *(m.adapter.index for m in plan.adapters)]))
        changes = header_changes(plan, index)
        try:
            proof = verify(plan, output, reader, full=full, judged=judged, progress=progress)
        except VerificationFailed as e:
            raise with_header_changes(e, changes) from e
        proof["warnings"] += notes(changes, index)
        if KEY in index.metadata and (wrong := misleading(plan, output)):
            raise VerificationFailed("the weights are right, but files beside them are not those of the merge, and let "
                                     "them be loaded as another model, or not at all", f"{output}: {listed(wrong)}",
                                     instead(output))  # fmt: skip
        if sides := differing(contents(plan), output):
            proof["warnings"].append(Note(f"not what the merge writes, or missing beside the weights: {listed(sides)}"))
        return {"output": str(output), "proven": True, **proof, "schema": "lora-merge/proof/1"}


def refuse_stated(options: Iterable[str]) -> None:
    """Raise UsageError if any options are named, as the recipe of the output states them."""
    if flags := ", ".join(f"--{name.replace('_', '-')}" for name in options):
        raise UsageError("options that the recipe states", flags,
                         "leave them out")  # fmt: skip


def plan_again(path: Path, output: str | Path, search: Sequence[Path] = (), **options: Any) -> Plan:
    """Return the plan that makes `path` a second time, under another name; its inputs are searched by content."""
    index = open_checkpoint(path)
    recipe = read_recipe(index)
    with ExitStack() as stack:
        around = _around(path, search)
        job = _job(recipe, find(recipe, around), output, stack, around, **options)
        plan = _followed(job, index)
    _require_same(plan, path, recipe)
    edited = [change for change in header_changes(plan, index) if change.differences]
    more = tuple(Note(f"{RECIPE_EDITED}: {c.path.name}: {'; '.join(c.differences)}") for c in edited)
    return replace(plan, base=replace(plan.base, notes=(*plan.base.notes, *more)))


def _require_same(plan: Plan, path: Path, recipe: Recipe) -> None:
    """Raise VerificationFailed unless the plan gives the tensors of the output."""
    try:
        for file in plan.files:
            check_header(file, path / file.name if file.name else path)
    except VerificationFailed as e:
        raise VerificationFailed(f"the recipe and its inputs give another model: {e.what}", e.where,
                                 f"it was made by version {recipe.version}; merge again") from e  # fmt: skip


def _followed(job: Job, index: Index) -> Plan:
    """Return the plan for the job; a UsageError for values of a recipe becomes the error of a damaged recipe."""
    try:
        return plan_job(job, CheckpointCache())
    except UsageError as e:
        if KEY not in index.metadata:
            raise
        raise damaged(index.path, f"{e.what} ({e.where})") from e


def refuse_to_unmerge(path: Path) -> NoReturn:
    """Raise a UsageError that says how to get a merge without one of its adapters."""
    recipe = read_recipe(open_checkpoint(path))
    base, adapters = recipe.base, ", ".join(quoted(a.name) for a, _, _ in recipe.adapters)
    raise UsageError(
        "a merge cannot be taken back: its sums were rounded, and a difference of rounded sums is not the base",
        f"{path}: {quoted(base.name)} with {adapters}",
        f"use the base itself ({quoted(base.name)}, SHA-256 {base.files[0][2]}); to change a strength or leave an "
        "adapter out, merge again from it",
    )


def _around(output: Path, search: Sequence[Path]) -> list[Path]:
    return [*search, absolute(output).parent, *current_folders()]


def _job(
    recipe: Recipe, paths: Sequence[Path], output: str | Path, stack: ExitStack, folders: Sequence[Path], **options: Any
) -> Job:
    """Return the recipe's job; its name table is in a temporary file until the stack closes.

    `folders`: where the folder of a tokenizer that the recipe names is looked for, by its name.
    """
    if recipe.tokenizer:
        options["tokenizer"] = _tokenizer(recipe.tokenizer, (*folders, *(path.parent for path in paths)))
    if recipe.map_text is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options["map"] = folder / recipe.map_name
        # an input that no later run reads: it needs no sync
        options["map"].write_text(recipe.map_text, encoding="utf-8")
    return recipe.job(paths, output, **options)


def _tokenizer(whose: str, folders: Iterable[Path]) -> str | Path:
    """Return the value of `--tokenizer` for a name in a recipe; UsageError if no folder of that name is there."""
    if whose in TOKENIZERS:
        return whose
    file = next((folder / whose for folder in folders if (folder / whose).is_dir()), None)
    if file is None:
        raise UsageError(f"the folder {quoted(whose)}, whose tokenizer the output has, is not found", "the recipe",
                         SEARCH)  # fmt: skip
    return file


def _job_of(
    index: Index, base: str | Path, adapters: Sequence[Stated], options: Mapping[str, Any], stack: ExitStack
) -> Job:  # fmt: skip
    """Return the job for named inputs; the recipe, or else the output itself, gives the options that are not named."""
    plain = [a[0] if isinstance(a, tuple) and a[1] is None else a for a in adapters]
    if KEY not in index.metadata:
        job = make_job(base, plain, index.path, **options)
        return replace(job, dtype=_dtype(index, open_checkpoint(job.base)))
    recipe = read_recipe(index)
    if len(recipe.adapters) != len(adapters):
        made_with = plural(len(recipe.adapters), "adapter")
        raise VerificationFailed(
            f"the output was made with {made_with}, not {len(adapters)}",
            str(index.path),
            "name the adapters that its recipe names, in their order",
        )
    job = make_job(base, plain, index.path)
    for old, path in zip(recipe.inputs, (job.base, *(a.path for a in job.adapters)), strict=True):
        open_checkpoint(path)  # InputError for what is missing or damaged
        other = different(old, path)
        if other is not None:
            raise VerificationFailed("the output was made from another version of an input",
                                     f"{other} is not the {quoted(old.name)} of its recipe",
                                     "name the inputs of its recipe, or merge again")  # fmt: skip
    for (entry, strength, _), adapter, said in zip(recipe.adapters, job.adapters, plain, strict=True):
        if adapter.strength != strength and not isinstance(said, str | Path):
            raise VerificationFailed(f"the output was made with strength {strength:g} of {quoted(entry.name)}, not "
                                     f"{adapter.strength:g}", str(index.path),
                                     f"give {strength:g}, or no strength: the recipe has it")  # fmt: skip
    paths = [job.base, *(a.path for a in job.adapters)]
    stated = _job(recipe, paths, index.path, stack, _around(index.path, ()))
    refs = tuple(
        ref if isinstance(said, str | Path) else Adapter(ref.path, adapter.strength, adapter.parts or ref.parts)
        for ref, adapter, said in zip(stated.adapters, job.adapters, plain, strict=True)
    )
    return replace(stated, adapters=refs)


def _dtype(index: Index, base: Index) -> str:
    """Return the --dtype that gives the output its dtypes, or its quantised weights where the base has other ones."""
    for name, packing in index.packed.items():
        old = base.packed.get(name)
        if packing.encoding.quantised and name in base.tensors and (old is None or old.encoding != packing.encoding):
            return _format(index, base, name)
    floats = {n: t.dtype for n, t in index.tensors.items() if t.dtype in FLOATS}
    if all(base.tensors[n].dtype == d for n, d in floats.items() if n in base.tensors):
        return "keep"
    options = {dtype: option for option, dtype in DTYPES.items()}
    dtypes = set(floats.values())
    if len(dtypes) > 1 or not dtypes <= set(options):
        raise VerificationFailed("no --dtype gives such a mixture of dtypes", f"{index.path}: {', '.join(dtypes)}",
                                 "the file was made in another way")  # fmt: skip
    return options[dtypes.pop()]


def _format(index: Index, base: Index, name: str) -> str:
    """Return the --dtype that stores a weight as the output does."""
    for option in FORMATS:
        form = (FOLDERS if index.path.is_dir() else FILES).get(option)
        if form is None:
            same = index.packed[name].encoding.title.lower() == option
        else:
            new = form.make(base.tensors[name])
            same = new is not None and _stored(index, name) == _as_stored((new.packing.codes, *new.beside))
        if same:
            return option
    raise VerificationFailed(f"no --dtype gives weights of {index.packed[name].encoding.title}",
                             f"{index.path}: {quoted(name)}", "the file was made in another way")  # fmt: skip


def _stored(index: Index, name: str) -> frozenset[tuple[str, str, Shape]]:
    """Return name, dtype and shape of all tensors in which a weight is stored."""
    packing = index.packed[name]
    tensors = {t.name: t for header in index.headers.values() for t in header.tensors.values()}
    return _as_stored((packing.codes, *(tensors[n] for n in packing.names if n in tensors)))


def _as_stored(tensors: Iterable[StoredTensor | None]) -> frozenset[tuple[str, str, Shape]]:
    return frozenset((t.name, t.dtype, t.shape) for t in tensors if t is not None)
