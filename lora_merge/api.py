"""The Python API for files: `merge` and `plan`, and `inspect` and `compare`, which only look.

The API for tensors in memory is in the room `memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from typing_extensions import Unpack

from .adapters_out.report import AdapterReport
from .addresses import downloads_in
from .boundary import public
from .facts import Facts
from .job import Adapter, Adapters, OneAdapter, adapter_list, make_job
from .paths import expand, input_path
from .planning.former_plans import FormerPlans
from .planning.plan import Plan
from .process import interruptible
from .progress import Progress, watched
from .report import Report
from .typed_options import PythonOptions, VerifyOptions


@public
def merge(
    base: str | Path,
    adapters: Adapters = (),
    output: str | Path | None = None,
    *,
    progress: bool | Progress = False,
    **options: Unpack[PythonOptions],
) -> Report:
    """Merge adapters into a base model, write the result, verify it, and return a report.

    W' = W + Σᵢ sᵢ · (Fᵢ(W) − W): every adapter's formula Fᵢ is applied to the unchanged weight W, and the sum is
    rounded once to the dtype of the output. The options have the same names as on the command line. The output appears
    under its name when it is complete, or not at all; Ctrl-C leaves nothing behind.

    Parameters:
        base: The model: a checkpoint file, whose ending may be left out, or a model folder (diffusers, transformers).
            As any input it may be an address, such as "hf://owner/name@revision" or "civitai:12345".
        adapters: One adapter or a list of them: a path (file or PEFT folder), a pair `(path, strength)`, or an
            `Adapter` with strengths for parts of the model. Or a table of path → strength. None: the adapter that is
            attached inside the base, or that its folder holds.
        output: The file or folder to write; or an address that it is uploaded to, such as "hf://owner/name" or
            "s3://bucket/key". A file's name that is a str gets `.safetensors` if it lacks an ending; a
            `Path` is taken as it is. None: `<base>+<adapter>.safetensors` in the current folder.
        progress: True for a progress bar (tqdm; a widget in notebooks), or a function that is called with each
            `lora_merge.Step`: its `stage` (load, fetch, merge, flush, prove), and the bytes `done` since the step
            before. It is called in a thread of its own, one step at a time. If it is slow, steps are added up; if it
            raises, that is logged once (logger `lora_merge`), and the merge goes on without it. KeyboardInterrupt ends
            the merge.
        dtype: "keep" (every tensor keeps the dtype that it has in the base), "fp32", "fp16", "bf16", "fp8_e4m3fn" or
            "fp8_e5m2"; or a torch dtype.
        compute_dtype: "fp32", "fp64", "bf16" or "fp16": the dtype that formulas compute in.
        device: "auto" (the fastest one of this machine), "cpu", "cuda", "cuda:1", "mps", "xpu", or several:
            "cuda:0,cuda:1".
        strength: One number for each adapter, in order, if `adapters` are paths. Default: 1 for each.
        strengths: Another name for it.
        strength_for: Part of the model → factor that multiplies the strengths: `{"te": 0.5, "IN04-IN08": 0,
            "re:attn2": 0.8}`; parts are components, blocks, or regular expressions over the base's keys.
        unmatched: "error", or "skip": leave out modules that match no weight of the base, and list them in the report.
        on_overflow: "error", or "saturate": replace numbers that are too large for the dtype of the output by its
            largest finite number, and count them in the report.
        rounding: "nearest", or "stochastic": each number of a weight that an adapter changes, in all its rows, becomes
            one of its two neighbours in the output's dtype or format, the nearer one more often. Changes smaller than a
            step survive on average, as noise. Other weights have the nearest numbers.
        seed: Of stochastic rounding, dare and della: the same seed gives the same bytes.
        keep_precision: Weights that a quantising `dtype` ("fp8_scaled", "nvfp4", "nf4", "q8_0" …) leaves as they are:
            "re:" and a regular expression, or a glob, for keys of the base, in addition to the usual ones (norms,
            embeddings, first and last layers, modulation); "none" quantises those too.
        method: "sum" (the rule above); "compose": adapters one after the other, in the order given; or a method that
            computes one change from all changes, as for `combine`: "mean", "ties", "dare", "dare_ties", "della",
            "della_ties", "breadcrumbs", "breadcrumbs_ties", "prune", "slerp", "karcher", "model_stock", "consensus".
        density: Of ties, dare, della, breadcrumbs and prune: the share of entries that are kept. Default: 1.
        gamma: Of breadcrumbs: the share of the largest entries that are dropped.
        epsilon: Of della: chances are between density − epsilon and density + epsilon.
        t: Of slerp: 0 is the first adapter, 1 the second.
        elect: Of ties: "sum" of the changes, or "count" of their signs, decides the sign of an entry.
        normalise: Of ties: what elected entries are divided by: their "count", the "weight" Σ|sᵢ|, or "none".
        agree: Of consensus: how many adapters must have one sign. Default: all.
        scale: Multiplies what these methods give.
        setting: Values that the adapter's file lacks, such as `{"lora_alpha": 16}`.
        map: A table of names (YAML) for a model that is not known.
        cache: The folder in which files of addresses are kept. Default: object stores and URLs are read without a copy,
            files of Civitai and ModelScope are kept in the user's cache folder, those of the hub in the hub's own.
        tokenizer: Whose tokenizer, chat template and processor files an output folder gets: "adapter", "base", or the
            path of a folder. Default: the adapter's if the embeddings grew to its size, else the base's.
        overwrite: Whether an existing output is replaced. Default: False.
        max_memory: Limit of the host memory for weights in flight: bytes, or a text such as "512MiB". Default: 1 GiB.
        max_vram: The same for the memory of a GPU. Default: 5 GiB.
        verify: Whether the written file is read again and verified. Default: True.
        title: The title in the metadata of the output, `modelspec.title`. Default: the base's.
        metadata: More entries of the metadata: `{"modelspec.author": "me"}`. They replace the base's of the same name.
        no_metadata: Leave out the recipe, and all names and hashes of inputs, also the ones in the base's own
            metadata. `verify` and `replay` then need the inputs. Default: False.
        card: Whether to write a model card: README.md in a folder, NAME.md next to a file. A card that is there keeps
            its text and gets a section. Default: with folders.

    Returns:
        A `Report`: `coverage` for each adapter, `written` bytes, `seconds`, `verified`, `to_json()`.

    Raises:
        MergeError: Every failure is one of its subclasses, with `what`, `where`, `fix` and `exit_code`: UsageError,
            InputError (missing, damaged or unsupported), FitError (adapter and base do not fit), ResourceError (disk,
            memory, device) and VerificationFailed.

    Examples:
        >>> report = lora_merge.merge("base.safetensors", ["style.safetensors", ("detail.safetensors", 0.6)],
        ...                           output="merged.safetensors", dtype="bf16")
        >>> report.coverage["style.safetensors"]["matched"]
        264
    """
    from .engine.admission import admit, downloaded
    from .engine.merge import run
    from .planning.checkpoint_cache import CheckpointCache
    from .planning.make_plan import make_plan, match, open_inputs

    with interruptible(), watched(progress) as watcher:
        job = downloaded(make_job(base, adapters, output, **options), watcher)  # addresses of other machines
        inputs = open_inputs(job, CheckpointCache())
        matched = match(inputs)
        plan = make_plan(matched)
        admitted = admit(plan)
        return run(admitted, watcher)  # writes, verifies, then gives the output its name


@public
def plan(
    base: str | Path,
    adapters: Adapters = (),
    output: str | Path | None = None,
    **options: Unpack[PythonOptions],
) -> Plan:
    """Plan what `merge` would do, from headers alone: no weight is read and nothing is written.

    Parameters:
        base: As for `merge`, like all other parameters and options.
        adapters: One adapter or a list of them.
        output: The file or folder that `merge` would write.

    Returns:
        A `Plan`: what every adapter matches, and every output tensor with its place and its size.

    Raises:
        MergeError: Every error that `merge` would raise before it reads weights, except for a disk that has no room for
            `size` bytes.

    Examples:
        >>> lora_merge.plan("base.safetensors", "style.safetensors").changed
        264
    """
    from .engine.admission import plan_merge, require_device

    planned = plan_merge(make_job(base, adapters, output, **options), dry=True)
    require_device(planned.job)
    return planned


@public
def unmerge(
    merged: str | Path, adapters: Adapters = (), output: str | Path | None = None, *,
    search: Sequence[str | Path] = (), progress: bool | Progress = False, **options: Unpack[PythonOptions],
) -> Report:  # fmt: skip
    """Take adapters out of a merged checkpoint: the same changes with the opposite sign.

    Sums were rounded, so every number differs from the one before the merge by about one rounding step; a note of the
    report says by how much. A merge that may have cut numbers (`on_overflow="saturate"`) or was no sum is refused. The
    base itself, if it is at hand, is exact.

    Parameters:
        merged: A file or a folder that adapters were merged into.
        adapters: As for `merge`, at the strengths of the merge. None: those of the recipe, which are found by their
            hashes next to the file, in the current folder and in `search`.
        output: The file or folder to write.
        search: More folders, which are searched three levels deep.
        progress: As for `merge`, like all options.

    Returns:
        A `Report`, as that of `merge`.

    Raises:
        FitError: The change by an adapter depends on the base, as those of DoRA, or replaced weights.
        MergeError: As `merge`.

    Examples:
        >>> lora_merge.unmerge("merged.safetensors", ("style.safetensors", 0.8), "base.safetensors").written
    """
    from .engine.admission import admit
    from .engine.merge import run
    from .planning.downloads import downloaded_job
    from .recipes.unmerge import plan_unmerge

    with interruptible(), watched(progress) as watcher, downloads_in(options.get("cache")):
        path, folders, local = input_path(merged), [*map(expand, search)], partial(downloaded_job, progress=watcher)
        return run(admit(plan_unmerge(path, adapters, output, folders, local=local, **options)), watcher)


@public
def replay(  # noqa: PLR0913  # the options of the command
    made: str | Path,
    output: str | Path,
    *,
    search: Sequence[str | Path] = (),
    device: str = "auto",
    cache: str | Path | None = None,
    overwrite: bool = False,
    progress: bool | Progress = False,
) -> Report | AdapterReport:
    """Make an output a second time, from the recipe in its metadata.

    The inputs are found by their hashes: next to the output, in the current folder and in `search`.

    Parameters:
        made: The output to make again: a file or a folder.
        output: The file or folder to write.
        search: More folders, which are searched three levels deep.
        device: As for `merge`.
        cache: As for `merge`.
        overwrite: Whether an existing output is replaced.
        progress: As for `merge`.

    Returns:
        A `Report`, as `merge`; an `AdapterReport` for an output of a command that writes adapters.

    Raises:
        InputError: The output has no recipe, or an input is not found.
        VerificationFailed: An input has other bytes than the recipe says.
        MergeError: As `merge`.

    Examples:
        >>> lora_merge.replay("merged.safetensors", "again.safetensors", search=["models", "loras"]).written
        2132696762
    """
    from .adapters_out.commands import COMMANDS
    from .engine.admission import admit
    from .engine.merge import run
    from .recipes.replay import again

    with interruptible(), watched(progress) as watcher, downloads_in(cache):
        made, folders = input_path(made), [expand(folder) for folder in search]
        written = again(made, output, folders, device=device, overwrite=overwrite, progress=watcher)
        if isinstance(written, Plan):
            return run(admit(written), watcher)
        return COMMANDS[written.command].run(written, watcher, None)


@public
def verify(  # noqa: PLR0913  # the options of the command
    output: str | Path,
    base: str | Path | None = None,
    adapters: Adapters = (),
    *,
    search: Sequence[str | Path] = (),
    full: bool = False,
    cache: str | Path | None = None,
    progress: bool | Progress = False,
    **options: Unpack[VerifyOptions],
) -> Facts:
    """Prove that a file or folder is the merge that it should be; the weights are computed again in float64.

    Parameters:
        output: The merged checkpoint.
        base: Its base. None: the inputs of the recipe in its metadata, found by their hashes.
        adapters: Its adapters, as for `merge`; given together with `base`. Those without a strength have that of the
            recipe, or 1.
        search: More folders to search for the inputs, three levels deep.
        full: Whether every byte and every row is compared, not a sample.
        cache: As for `merge`.
        progress: As for `merge`.
        compute_dtype: The dtype of sums whose rounding is allowed: "fp32" by default, whatever the recipe says.
        strength_for: As for `merge`, like all options below; only for outputs without a recipe.
        unmatched: See `merge`.
        on_overflow: See `merge`.
        rounding: See `merge`.
        seed: See `merge`.
        keep_precision: See `merge`.
        method: See `merge`.
        density: See `merge`.
        gamma: See `merge`.
        epsilon: See `merge`.
        t: See `merge`.
        elect: See `merge`.
        normalise: See `merge`.
        agree: See `merge`.
        scale: See `merge`.
        setting: See `merge`.
        map: See `merge`.
        title: See `merge`.
        metadata: See `merge`.

    Returns:
        A table of facts: `proven`, `tensors`, `worst_ulp`, `retained`, `warnings` …, of a written adapter `layers`,
        `recomputed`, `worst_residual` …; its `to_json()` of a merge has the
        format that `lora-merge schema proof` describes.

    Raises:
        VerificationFailed: It is not that merge; the message says where it differs.
        InputError: A file is missing or damaged, or the output has no recipe.
        MergeError: As `merge`.

    Examples:
        >>> lora_merge.verify("merged.safetensors")["proven"]
        True
    """
    from .recipes.replay import prove
    from .report import verify_rows

    stated, folders = adapter_list(adapters), [expand(folder) for folder in search]
    with interruptible(), watched(progress) as watcher, downloads_in(cache):
        output = input_path(output)
        proof = prove(output, base, stated, search=folders, full=full, options=options, progress=watcher)
    return Facts(proof, verify_rows)


@public
def inspect(  # noqa: PLR0913  # what is looked at, and pages and progress
    path: str | Path, adapter: OneAdapter | None = None, *, weights: bool = False, hashes: bool | None = False,
    pictures: bool = False, cache: str | Path | None = None, progress: bool | Progress = False,
    former: FormerPlans | None = None,
) -> Facts:  # fmt: skip
    """Report what a file or folder is, or how an adapter fits a base.

    Parameters:
        path: A checkpoint or an adapter.
        adapter: An adapter for the base at `path`, as for `merge`.
        weights: Whether numbers are read too: for norms, stable ranks and energies of an adapter, or with a base for
            the size of the change and how much of it the base's dtype keeps.
        hashes: Whether large files are hashed too; adapters up to 256 MiB are also for False. None: nothing is hashed,
            so that headers alone are read.
        pictures: Whether the numbers have singular values and histograms, which pages show.
        cache: As for `merge`.
        progress: As for `merge`.
        former: The `FormerPlans` of calls before this one, of `inspect` or of `plan_batch`: a file that they have
            opened is not opened again while it is the same.

    Returns:
        A table of facts, which shows itself as the text of `lora-merge inspect`; its `to_json()` has the format that
        `lora-merge schema inspect` describes.

    Raises:
        InputError: A file is missing, damaged or of a kind that is not supported.

    Examples:
        >>> facts = lora_merge.inspect("style.safetensors")
        >>> facts["algorithms"], facts["ranks"]
        ({'lora': 264}, [32])
    """
    from .facts import Facts
    from .viewing.inspect import inspect as look
    from .viewing.text import rows

    with interruptible(), watched(progress) as watcher, downloads_in(cache):
        ref: Adapter | None = None if adapter is None else make_job(path, [adapter], path).adapters[0]
        path = input_path(path)
        opened = None if former is None else former.checkpoints([path, *([ref.path] if ref else [])])
        facts = look(path, ref, weights=weights, hashes=hashes, pictures=pictures, progress=watcher, opened=opened)
    return Facts(facts, rows)


@public
def compare(  # noqa: PLR0913  # two for pages and progress
    a: str | Path, b: str | Path, *, base: str | Path | None = None, pictures: bool = False,
    cache: str | Path | None = None, progress: bool | Progress = False,
) -> Facts:  # fmt: skip
    """Compare two models, or the changes of two adapters: where they differ and by how much, or how alike they are.

    Parameters:
        a: A model or an adapter.
        b: Another one of the same kind.
        base: For two adapters that spell names in different words, or whose formulas read the weights: a base of both.
        pictures: As for `inspect`.
        cache: As for `merge`.
        progress: As for `merge`.

    Returns:
        A table of facts, which shows itself as text. For models: counts of equal and different tensors, ‖B−A‖ in all,
        by block and by tensor. For adapters: norms, cosine and overlap of spaces, in all, by block and by module. Its
        `to_json()` has the format that `lora-merge schema compare` describes.

    Raises:
        UsageError: One is an adapter and the other is not.
        InputError: A file is missing or damaged.

    Examples:
        >>> lora_merge.compare("base.safetensors", "merged.safetensors")["different"]
        264
    """
    from .facts import Facts
    from .viewing.compare import compare as look
    from .viewing.compare import compare_rows

    with interruptible(), watched(progress) as watcher, downloads_in(cache):
        of_both = None if base is None else input_path(base)
        facts = look(input_path(a), input_path(b), of_both, pictures=pictures, progress=watcher)
    return Facts(facts, compare_rows)
