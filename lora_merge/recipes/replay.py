"""From a finished output back to its job: to prove it, or to write it again.

A merge is planned again and its weights are computed again by separate formulas. An adapter is written again next
to the output, with the proof of its command, and both files are compared byte by byte.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

from ..adapters.modules import model_in_its_place
from ..adapters_out.average import MOVING
from ..adapters_out.job import AdapterJob
from ..adapters_out.output_file import CONTENTS
from ..addresses import with_addresses
from ..command import Command
from ..disk.files import sha256
from ..disk.reader import Reader
from ..dtypes import DTYPES, FLOATS, QUANTISED_DTYPES, Shape, StoredTensor
from ..errors import FitError, UsageError, VerificationFailed
from ..files.checkpoint import Index, open_checkpoint
from ..files.formats.output import FILE_FORMATS, FOLDER_FORMATS
from ..job import Adapter, Job, make_job
from ..options import OF_MERGE, TOKENIZERS, checked
from ..paths import absolute, typed
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.downloads import Announce, downloaded_job
from ..planning.header_entries import TITLE
from ..planning.make_plan import plan_job
from ..planning.output_files import contents, differing, misleading
from ..planning.plan import Plan
from ..planning.recipe import KEY, parsed
from ..progress import Progress, unwatched
from ..proof.grids import ROUNDING
from ..proof.header_changes import header_changes, notes, with_header_changes
from ..proof.loadable import instead
from ..proof.verify import check_header, verify
from ..report import ADAPTER_PROOF
from ..text import Note, listed, plural, quoted
from .find_inputs import SEARCH, around, different, find, record
from .read_recipe import NAME_ADAPTERS, Recipe, as_merged, damaged, input_of, read_recipe, uses_of

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
    announce: Announce | None = None,
) -> dict[str, Any]:
    """Prove that `output` is the merge that its recipe describes, or that of `base` and `adapters`.

    Without `base` and `adapters` the inputs are searched by content next to the output, in the current folder
    and in `search`. A strength that is not named is the recipe's, or 1. `options`, for an output without a recipe, are
    those of `merge` that its tensors do not show (strength_for, method, unmatched, on_overflow, map, setting).
    `compute_dtype` is for all outputs: the user, not the file, decides whether the rounding of sums in 16 bits is
    allowed. VerificationFailed if it is not that merge. An adapter that a command wrote is proven by `prove_adapter`.
    """
    # Step 1: the job: that of the recipe, or of the named inputs.
    index = open_checkpoint(output)
    judged = checked(options)["compute_dtype"] if "compute_dtype" in options else ""
    options = {name: value for name, value in options.items() if name != "compute_dtype"}
    if KEY in index.metadata:
        refuse_stated(options)
    with ExitStack() as stack:
        if base is None and not adapters:
            recipe = read_recipe(index, "give --base and --adapter")
            folders = around(output, search)
            job = _job(recipe, find(recipe.inputs, folders, progress, announce), output, stack, folders)
        elif base is None or not adapters:
            raise UsageError(
                "only some of the inputs are named", "--base and --adapter", "name the base and all adapters"
            )
        else:
            job = downloaded_job(_job_of(index, base, adapters, options, stack), progress, announce)
        # Step 2: its plan; a file gives a file, a folder gives a folder.
        plan = _followed(job, index)
        judged = judged or min(("fp32", plan.job.compute_dtype), key=ROUNDING.__getitem__)
        if plan.is_folder != index.path.is_dir():
            kind, other = ("folder", "file") if plan.is_folder else ("file", "folder")
            what = f"the base is a {kind}, and so is what it gives; the output is a {other}"
            raise VerificationFailed(what, str(output), f"name the {kind} itself")
        # Step 3: the header and the weights.
        reader = stack.enter_context(Reader([plan.base, *(m.adapter.index for m in plan.adapters)]))
        changes = header_changes(plan, index)
        try:
            proof = verify(plan, output, reader, full=full, judged=judged, progress=progress)
        except VerificationFailed as e:
            raise with_header_changes(e, changes) from e
        proof["warnings"] += notes(changes, index)
        # Step 4: the other files of the output.
        if KEY in index.metadata and (wrong := misleading(plan, output)):
            what = "the weights are right, but other files of the output are not those of the merge"
            raise VerificationFailed(f"{what}, and let them be loaded as another model, or not at all",
                                     f"{output}: {listed(wrong)}", instead(output))  # fmt: skip
        if sides := differing(contents(plan), output):
            proof["warnings"].append(
                Note(f"not what the merge writes, or missing next to the weights: {listed(sides)}")
            )
        return {"output": with_addresses(str(output)), "proven": True, **proof, "schema": "lora-merge/proof/1"}


def refuse_stated(options: Iterable[str]) -> None:
    """Raise UsageError if any options are named, as the recipe of the output states them."""
    if flags := ", ".join(f"--{name.replace('_', '-')}" for name in options):
        raise UsageError("options that the recipe states", flags, "leave them out")


def plan_again(
    merged: Path, output: str | Path, search: Sequence[Path] = (), *, progress: Progress = unwatched,
    announce: Announce | None = None, **options: Any,
) -> Plan:  # fmt: skip
    """Return the plan that makes `merged` a second time, under another name; its inputs are searched by content."""
    index = open_checkpoint(merged)
    recipe = read_recipe(index)
    with ExitStack() as stack:
        folders = around(merged, search)
        paths = find(recipe.inputs, folders, progress, announce)
        job = _job(recipe, paths, output, stack, folders, **options)
        plan = _followed(job, index)
    _require_same(plan, merged, recipe)
    edited = [change for change in header_changes(plan, index) if change.differences]
    return plan.with_notes(*(Note(f"{RECIPE_EDITED}: {c.path.name}: {'; '.join(c.differences)}") for c in edited))


def _require_same(plan: Plan, output: Path, recipe: Recipe) -> None:
    """Raise VerificationFailed unless the plan gives the tensors of the output."""
    try:
        for file in plan.files:
            check_header(file, output / file.name if file.name else output)
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


def refuse_to_unmerge(merged: Path, named: Sequence[Path] = ()) -> NoReturn:
    """Raise a UsageError that says how to get a merge without one of its adapters; InputError for a model among the
    `named` ones."""
    index = as_merged(open_checkpoint(merged))
    for path in named:
        if model := model_in_its_place(open_checkpoint(path, adapter=True)):
            raise model
    output = f"`-o {typed([f'{merged.stem}-unmerged{merged.suffix}'])}`"
    if named and KEY not in index.metadata:
        raise UsageError("no output is named", str(merged), f"name it: {output}")
    recipe = read_recipe(index, NAME_ADAPTERS)
    base, adapters = recipe.base, ", ".join(quoted(a.name) for a, _, _ in recipe.adapters)
    raise UsageError(
        "a merge cannot be undone exactly: its sums were rounded, and a difference of rounded sums is not the base",
        f"{merged}: {quoted(base.name)} with {adapters}",
        f"use the base itself ({quoted(base.name)}, SHA-256 {base.files[0][2]}), and merge again from it; if it is "
        f"lost, up to a rounding step: {output}",
    )


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


def _tokenizer(name: str, folders: Iterable[Path]) -> str | Path:
    """Return the value of `--tokenizer` for a name in a recipe; UsageError if no folder of that name is there."""
    if name in TOKENIZERS:
        return name
    path = next((folder / name for folder in folders if (folder / name).is_dir()), None)
    if path is None:
        raise UsageError(f"the folder {quoted(name)}, whose tokenizer the output has, is not found", "the recipe",
                         SEARCH)  # fmt: skip
    return path


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
        count = plural(len(recipe.adapters), "adapter")
        raise VerificationFailed(f"the output was made with {count}, not {len(adapters)}",
                                 str(index.path),
                                 "name the adapters that its recipe names, in their order")  # fmt: skip
    job = make_job(base, plain, index.path)
    for old, path in zip(recipe.inputs, (job.base, *(a.path for a in job.adapters)), strict=True):
        open_checkpoint(path)  # InputError for what is missing or damaged
        other = different(old, path)
        if other is not None:
            raise VerificationFailed("the output was made from another version of an input",
                                     f"{other} is not the {quoted(old.name)} of its recipe",
                                     "name the inputs of its recipe, or merge again")  # fmt: skip
    for (recorded, strength, _), caller_ref, named in zip(recipe.adapters, job.adapters, plain, strict=True):
        if caller_ref.strength != strength and not isinstance(named, str | Path):
            raise VerificationFailed(f"the output was made with strength {strength:g} of {quoted(recorded.name)}, not "
                                     f"{caller_ref.strength:g}", str(index.path),
                                     f"give {strength:g}, or no strength: the recipe has it")  # fmt: skip
    paths = [job.base, *(a.path for a in job.adapters)]
    stated = _job(recipe, paths, index.path, stack, around(index.path, ()))
    refs = tuple(
        ref if isinstance(named, str | Path) else Adapter(ref.path, caller_ref.strength, caller_ref.parts or ref.parts)
        for ref, caller_ref, named in zip(stated.adapters, job.adapters, plain, strict=True)
    )
    return replace(stated, adapters=refs)


def _dtype(output: Index, base: Index) -> str:
    """Return the --dtype that gives the output its dtypes, or its quantised weights where the base has other ones."""
    for name, packing in output.packed.items():
        old = base.packed.get(name)
        if packing.encoding.quantised and name in base.tensors and (old is None or old.encoding != packing.encoding):
            return _format(output, base, name)
    floats = {n: t.dtype for n, t in output.tensors.items() if t.dtype in FLOATS}
    if all(base.tensors[n].dtype == d for n, d in floats.items() if n in base.tensors):
        return "keep"
    options = {dtype: option for option, dtype in DTYPES.items()}
    dtypes = set(floats.values())
    if len(dtypes) > 1 or not dtypes <= set(options):
        raise VerificationFailed("no --dtype gives such a mixture of dtypes", f"{output.path}: {', '.join(dtypes)}",
                                 "the file was made in another way")  # fmt: skip
    return options[dtypes.pop()]


def _format(output: Index, base: Index, name: str) -> str:
    """Return the --dtype that stores a weight as the output does."""
    for option in QUANTISED_DTYPES:
        form = (FOLDER_FORMATS if output.path.is_dir() else FILE_FORMATS).get(option)
        if form is None:
            same = output.packed[name].encoding.title.lower() == option
        else:
            making = form.make(base.tensors[name])
            same = making is not None and _stored(output, name) == _as_stored((making.packing.codes, *making.others))
        if same:
            return option
    raise VerificationFailed(f"no --dtype gives weights of {output.packed[name].encoding.title}",
                             f"{output.path}: {quoted(name)}", "the file was made in another way")  # fmt: skip


def _stored(index: Index, name: str) -> frozenset[tuple[str, str, Shape]]:
    """Return name, dtype and shape of all tensors in which a weight is stored."""
    packing = index.packed[name]
    tensors = {t.name: t for header in index.headers.values() for t in header.tensors.values()}
    return _as_stored((packing.codes, *(tensors[n] for n in packing.names if n in tensors)))


def _as_stored(tensors: Iterable[StoredTensor | None]) -> frozenset[tuple[str, str, Shape]]:
    return frozenset((t.name, t.dtype, t.shape) for t in tensors if t is not None)


OF_MERGE_RECORDED: Final = frozenset(("dtype", "unmatched", "setting"))
"""The options of `merge` that the recipe of an adapter states. Its other entries are ignored: anybody may have written
the file, so it does not decide where something is written or how much memory is used."""


def job_again(  # noqa: PLR0913  # the options of `lora-merge replay`
    command: Command,
    adapter: Path,
    output: str | Path,
    search: Sequence[Path] = (),
    *,
    links: Path | None = None,
    full: bool = False,
    progress: Progress = unwatched,
    announce: Announce | None = None,
    **options: Any,
) -> AdapterJob:
    """Return the job by which a command wrote an adapter; InputError for a damaged recipe, or for an input that is not
    found.

    `links`: a folder for links to inputs that have other names now, which the output states. `full`: whether its proof
    computes every layer again.
    """
    # Step 1: the values of the recipe, checked before a user adds others.
    metadata = open_checkpoint(adapter).metadata
    recipe = parsed(metadata.get(KEY, "")) or {}
    try:
        adapters = uses_of(recipe["tuned" if command.inputs == "checkpoints" else "adapters"])
        base = input_of(recipe["base"]) if "base" in recipe else None
        recorded = {name for name in command.options if name not in OF_MERGE} | OF_MERGE_RECORDED
        stated = {name: value for name, value in recipe["options"].items() if name in recorded}
        if "weights" in command.options and not any(name in stated for name in MOVING):
            stated = {"weights": [strength for _, strength, _ in adapters], **stated}

        def job(paths: Sequence[Path], **more: Any) -> AdapterJob:
            refs = [Adapter(p, s, parts) for p, (_, s, parts) in zip(paths, adapters, strict=False)]
            if "weights" in command.options:  # the strengths of the recipe
                refs = [replace(ref, strength=1.0) for ref in refs]
            written: AdapterJob = command.job(refs, output, paths[-1] if base else None, {**stated, **more})
            return written

        inputs = [*(a for a, _, _ in adapters), *([base] if base else [])]
        job([adapter] * len(inputs))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise damaged(adapter, str(e)) from e
    except (UsageError, FitError) as e:
        raise damaged(adapter, f"{e.what} ({e.where})") from e
    # Step 2: the inputs, by their content.
    paths = find(inputs, around(adapter, search), progress, announce)
    if links is not None:
        paths = [_as_named(path, named.name, links) for path, named in zip(paths, inputs, strict=True)]
        for path, named in zip(paths, inputs, strict=True):
            record(named, path)
    # Step 3: the job, with the title of the file that is written again, and not one by its own name.
    written = job(paths, **options)
    return replace(written, inputs=replace(written.inputs, title=metadata.get(TITLE)), full=full)


def _as_named(path: Path, name: str, links: Path) -> Path:
    """Return a path of an input that ends in the name of its recipe, where the disk allows a link."""
    if path.name == name or Path(name).name != name:
        return path
    link = Path(tempfile.mkdtemp(dir=links)) / name
    try:
        link.symlink_to(absolute(path), target_is_directory=path.is_dir())
    except OSError:
        return path
    return link


def prove_adapter(  # noqa: PLR0913  # the options of `lora-merge verify`
    command: Command, adapter: Path, *, search: Sequence[Path] = (), full: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}), progress: Progress = unwatched, announce: Announce | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write an adapter again in a temporary folder, with its own proof, and compare the bytes; VerificationFailed where
    they differ.

    `full`: whether every layer is computed again in float64. `options`: none, as the recipe states all: UsageError.
    """
    refuse_stated(options)
    with tempfile.TemporaryDirectory() as folder:
        job = job_again(
            command, adapter, Path(folder) / adapter.name, search, links=Path(folder), full=full, progress=progress,
            announce=announce, verify=True,
        )  # fmt: skip
        report = command.run(job, progress, None)
        pairs = zip(_files(Path(report.output)), _files(adapter), strict=True)
        if any(sha256(a) != sha256(b) for a, b in pairs):
            raise VerificationFailed("its inputs and its recipe give different bytes", str(adapter),
                                     "it was changed after it was made, or made by another version")  # fmt: skip
    return {"output": with_addresses(str(adapter)), "proven": True, "full": full, "same_bytes": True,
            **(report.verified or {}), "survival": report.survival, "schema": ADAPTER_PROOF}  # fmt: skip


def _files(adapter: Path) -> list[Path]:
    return [adapter / name for name in CONTENTS] if adapter.is_dir() else [adapter]
