"""The Python API for files: the commands that write, `plan`, and `verify`, `inspect` and `compare`, which only look.

The API for tensors in memory is in the room `memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from .adapters_out.report import AdapterReport
from .addresses import downloads_in
from .algorithms.lora import LORA
from .boundary import public
from .command import MERGE, Request
from .errors import AdapterAsBase, MergeError, OutputExists, UsageError
from .facts import Facts
from .job import Adapter, Adapters, OneAdapter, adapter_list, make_job
from .merge_methods import SUM
from .options import a_list
from .paths import expand, input_path
from .planning.former_plans import FormerPlans
from .planning.plan import Plan
from .planning.recipe import KEY
from .process import interruptible
from .progress import Progress, watched
from .recipes.commands import COMMANDS, proof_of, replay_of, run_request
from .report import Report
from .text import python_code
from .typed_options import (
    AdapterReading,
    AverageOptions,
    CombineOptions,
    PythonOptions,
    ResizeOptions,
    UnmergeOptions,
    VerifyOptions,
)


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
        on_overflow: "error", or "saturate": replace values that are too large for the dtype of the output by its
            largest finite number, and count them in the report.
        rounding: "nearest", or "stochastic": each number of a weight that an adapter changes, in all its rows, becomes
            one of its two neighbours in the output's dtype or format, the nearer one more often. Changes smaller than a
            step survive on average, as noise. Other weights have the nearest values.
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
        max_memory: Limit of the host memory for the weights that are merged at a time: bytes, or a text such as
            "512MiB". Default: 1 GiB.
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
    report: Report = _run(Request(COMMANDS[MERGE], adapters, output, base, options), progress)
    return report


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
    search: Sequence[str | Path] = (), progress: bool | Progress = False, **options: Unpack[UnmergeOptions],
) -> Report:  # fmt: skip
    """Take adapters out of a merged checkpoint: the same changes with the opposite sign.

    Sums were rounded, so every number differs from the one before the merge by about one rounding step; a note of the
    report says by how much. A merge that may have cut values (`on_overflow="saturate"`) or was no sum is refused. The
    base itself, if it is at hand, is exact.

    Parameters:
        merged: A file or a folder that adapters were merged into.
        adapters: As for `merge`; a path alone has the strengths of the recipe, and a smaller strength takes out a part.
            None: those of the recipe, which are found by their hashes next to the file, in the current folder and in
            `search`.
        output: The file or folder to write.
        search: More folders, which are searched three levels deep.
        progress: As for `merge`, like all options.

    Returns:
        A `Report`, as that of `merge`.

    Raises:
        FitError: The change by an adapter depends on the base, as those of DoRA, or replaced weights; or the recipe
            names no such adapter, or a smaller strength.
        MergeError: As `merge`.

    Examples:
        >>> lora_merge.unmerge("merged.safetensors", "style.safetensors", "base.safetensors").written
    """
    with downloads_in(options.get("cache")):
        named = {**options, "search": _folders(search)}
        report: Report = _run(Request(COMMANDS["unmerge"], adapters, output, input_path(merged), named), progress)
        return report


@public
def replay(  # noqa: PLR0913  # the options of the command
    written: str | Path,
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
        written: The output to make again: a file or a folder.
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
    with interruptible(), watched(progress) as watcher, downloads_in(cache):
        path, folders = input_path(written), _folders(search)
        repeated = replay_of(path, output, folders, device=device, overwrite=overwrite, progress=watcher)
        report: Report | AdapterReport = repeated.run(watcher)
        return report


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
    from .report import verify_rows

    stated, folders = adapter_list(adapters), _folders(search)
    with interruptible(), watched(progress) as watcher, downloads_in(cache):
        output = input_path(output)
        proof = proof_of(output, base, stated, search=folders, full=full, options=options, progress=watcher)
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
        weights: Whether values are read too: for norms, stable ranks and energies of an adapter, or with a base for
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
    from .viewing.inspect_rows import rows

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


# Adapters from adapters, or from two checkpoints.


@public
def combine(  # noqa: PLR0913  # each is an option of the command
    adapters: Adapters, output: str | Path | None = None, *, base: str | Path | None = None, method: str = SUM,
    rank: str | int = "exact", algorithm: str = LORA.name, alpha: str | float = "rank",
    progress: bool | Progress = False,
    **options: Unpack[CombineOptions],
) -> AdapterReport:  # fmt: skip
    """Combine adapters into one and write it: with the defaults, Δ = Σ sᵢΔWᵢ exactly, by concatenated factors.

    Parameters:
        adapters: Paths, pairs `(path, strength)`, or `Adapter` objects; any mixture of algorithms, ranks and dialects.
        output: The file to write. None: `<stem>+<stem>.safetensors` in the current folder. If the first adapter is a
            PEFT folder, a name without `.safetensors` is that of a folder.
        base: The model that they were trained on, if a formula reads it or names in different dialects must meet.
        method: A row of COMBINATIONS, with its `density`, `gamma`, `epsilon`, `t`, `elect`, `normalise`, `agree`,
            `scale` and `seed`.
        rank: A number or a rule: "exact", "same", "energy:0.99", "fro:0.9", "sum:0.9", "ratio:100", "above:0.1",
            "size:100MiB"; `conv_rank`, `max_rank` and `rank_for` as pairs of a part and a rule.
        algorithm: "lora", "full" (whole matrices), or "auto".
        alpha: "rank" (α = rank), "keep", or a number.
        format: A dialect of `convert`, such as "comfy" or "peft"; "keep": that of the first adapter.
        progress: As for `merge`; layers are computed in the stage "make": `done` counts the weights' bytes.
        options: Those of `merge`, and `include` and `exclude`: components such as "unet", or `re:REGEX` for the
            base's keys, without a base for module names.

    Returns:
        An `AdapterReport`: `layers`, `residual`, `energy`, `written`, `verified`, `to_json()`.

    Raises:
        MergeError: As for `merge`.

    Examples:
        >>> report = lora_merge.combine(["a.safetensors", ("b.safetensors", 0.5)], "c.safetensors", rank=32)
    """
    form = {"method": method, "rank": rank, "algorithm": algorithm, "alpha": alpha}
    return _written("combine", adapters, output, base, {**form, **options}, progress)


@public
def resize(
    adapter: OneAdapter,
    output: str | Path | None = None,
    *,
    rank: str | int,
    base: str | Path | None = None,
    progress: bool | Progress = False,
    **options: Unpack[ResizeOptions],
) -> AdapterReport:
    """Write an adapter again at other ranks: the best one of that rank, by Eckart and Young.

    Parameters:
        adapter: A path, a pair `(path, strength)`, or an `Adapter`.
        output: The file or folder to write, as for `combine`. None: `<stem>-r<rule>.safetensors` in the current folder.
        rank: A number or a rule, as for `combine`.
        base: The model that it was trained on, if its formula reads it.
        progress: As for `merge`; layers are computed in the stage "make": `done` counts the weights' bytes.
        options: Those of `merge`, and `include` and `exclude`: components such as "unet", or `re:REGEX` for the
            base's keys, without a base for module names.

    Returns:
        An `AdapterReport`.

    Raises:
        MergeError: As for `merge`.

    Examples:
        >>> lora_merge.resize("style.safetensors", "small.safetensors", rank="fro:0.9").summary
        'ranks 4 to 32 (median 16); survives: 97.3 % of the change (fair), worst layer … 81 %'
    """
    return _written("resize", [adapter], output, base, {"rank": rank, **options}, progress)


@public
def convert(  # noqa: PLR0913  # each is an option of the command
    adapter: OneAdapter, output: str | Path | None = None, *, to: str = "keep", base: str | Path | None = None,
    rank: str | int | None = None,
    conv_rank: str | int | None = None, max_rank: int | None = None,
    rank_for: Mapping[str, str | int] | Sequence[tuple[str, str | int]] = (), algorithm: str = "keep",
    alpha: str | float = "keep", progress: bool | Progress = False,
    **options: Unpack[AdapterReading],
) -> AdapterReport:  # fmt: skip
    """Write an adapter in another dialect: kohya, lycoris, onetrainer, comfy, ai-toolkit, diffusers, xlabs or peft (a
    folder).

    Parameters:
        adapter: A path, a pair `(path, strength)`, or an `Adapter`; the strength goes into the file.
        output: The file or folder to write. None: `<stem>.<format>.safetensors` in the current folder.
        to: The dialect. "keep": that of the input, with another dtype, α, rank or algorithm.
        base: The model that it was trained on, if the adapter's names and shapes do not show those of the output, or
            a formula reads its weights.
        rank: A rule that brings every module to LoRA at a rank, as for `combine`.
        conv_rank: The rule for convolutions.
        rank_for: Pairs of a part and its rule.
        max_rank: A ceiling for the rules.
        algorithm: "keep", "lora" (exact, if a formula has factors), "full" (whole matrices) or "auto".
        alpha: "keep", "rank" (α = rank) or a number, if the dialect stores α.
        progress: As for `merge`; layers are computed in the stage "make": `done` counts the weights' bytes.
        options: Those of `merge`, and `include` and `exclude`: components such as "unet", or `re:REGEX` for the
            base's keys, without a base for module names.

    Returns:
        An `AdapterReport`.

    Raises:
        MergeError: As for `merge`; FitError if the dialect cannot hold the adapter.

    Examples:
        >>> lora_merge.convert("style.safetensors", "style-comfy.safetensors", to="comfy", base="flux.safetensors")
    """
    form = {"to": to, "rank": rank, "conv_rank": conv_rank, "max_rank": max_rank, "algorithm": algorithm,
            "alpha": alpha, "rank_for": rank_for or None}  # fmt: skip
    return _written("convert", [adapter], output, base, {**form, **options}, progress)


@public
def extract(  # noqa: PLR0913  # each is an option of the command
    base: str | Path, tuned: str | Path, output: str | Path | None = None, *,
    rank: str | int = 32,
    conv_rank: str | int | None = None, max_rank: int | None = None,
    rank_for: Mapping[str, str | int] | Sequence[tuple[str, str | int]] = (), algorithm: str = LORA.name,
    others: str = "diff", factor: int = -1,
    format: str = "auto", alpha: str | float = "rank", progress: bool | Progress = False,
    **options: Unpack[AdapterReading],
) -> AdapterReport:  # fmt: skip
    """Write the difference of two checkpoints as an adapter: merged into `base` at strength 1 it gives `tuned`.

    Parameters:
        base: The checkpoint before the training: anything that `merge` takes as a base.
        tuned: The checkpoint after it, in the same or in another layout.
        output: The file or folder to write. None: `<tuned>-minus-<base>.safetensors` in the current folder.
        rank: A number or a rule, as for `combine`; "exact" keeps every direction, "noise" the ones larger than
            the rounding errors of the tuned checkpoint.
        conv_rank: The rule for convolutions. Default: `rank`.
        max_rank: A ceiling for every rule.
        rank_for: Pairs of a part and its rule.
        algorithm: "lora", "full" (whole differences), "auto": whole ones if factors would be larger, or "lokr": the
            nearest Kronecker product.
        factor: Of lokr: the size of the smaller factor, as LyCORIS takes it.
        others: "diff" writes biases, norms and other vectors, "skip" drops them with a note, "error" refuses them.
        format: A dialect of `convert`; "auto" is kohya's for models of images and a PEFT folder for others.
        alpha: "rank" (α = rank), or a number.
        progress: As for `merge`; layers are computed in the stage "make": `done` counts the weights' bytes.
        options: Those of `merge`, and `include` and `exclude`: components such as "unet", or `re:REGEX` for the
            base's keys, without a base for module names.

    Returns:
        An `AdapterReport`.

    Raises:
        MergeError: As for `merge`; FitError if the checkpoints are not of one model, InputError if they are
            equal.

    Examples:
        >>> report = lora_merge.extract("sdxl.safetensors", "sdxl-tuned.safetensors", "tuned-lora.safetensors", rank=64)
    """
    form = {"rank": rank, "conv_rank": conv_rank, "max_rank": max_rank, "rank_for": rank_for, "algorithm": algorithm,
            "others": others, "factor": factor, "format": format, "alpha": alpha}  # fmt: skip
    return _written("extract", [tuned], output, base, {**form, **options}, progress)


@public
def average(  # noqa: PLR0913  # each is an option of the command
    adapters: Sequence[OneAdapter], output: str | Path | None = None, *, base: str | Path | None = None,
    weights: Sequence[float] | None = None, ema: float | None = None, ema_to: float | None = None,
    sigma_rel: float | None = None, space: str = "delta", rank: str | int = "same", progress: bool | Progress = False,
    **options: Unpack[AverageOptions],
) -> AdapterReport:  # fmt: skip
    """Average snapshots of one training, the oldest first: Σ wᵢΔWᵢ, cut to the snapshots' own rank.

    Parameters:
        adapters: Paths of the snapshots, the oldest first.
        output: The file to write. None: `<stem>+<stem>.safetensors` in the current folder. If the first adapter is a
            PEFT folder, a name without `.safetensors` is that of a folder.
        base: The model, if a formula reads it.
        weights: One number for each. Default: equal weights.
        ema: β of an exponential moving average.
        ema_to: β of its last step; in between it is linear.
        sigma_rel: The width of a post-hoc EMA, at most 0.288.
        space: "delta" averages changes; "factors" the tensors of the files, as a training's own EMA does, which needs
            equal names and shapes.
        rank: A number or a rule, as for `combine`.
        alpha: "rank" (α = rank), "keep", or a number.
        format: A dialect of `convert`; "keep": that of the first snapshot.
        progress: As for `merge`; layers are computed in the stage "make": `done` counts the weights' bytes.
        options: Those of `merge`, and `include` and `exclude`: components such as "unet", or `re:REGEX` for the
            base's keys, without a base for module names.

    Returns:
        An `AdapterReport`.

    Raises:
        MergeError: As for `merge`.

    Examples:
        >>> report = lora_merge.average(["e1.safetensors", "e2.safetensors"], "mean.safetensors", ema=0.9)
    """
    form = {"weights": weights, "ema": ema, "ema_to": ema_to, "sigma_rel": sigma_rel, "space": space, "rank": rank}
    return _written("average", adapters, output, base, {**form, **options}, progress)


def _folders(search: Iterable[str | Path] | None) -> list[Path]:
    named = a_list(() if search is None else search, "search", "a list of folders")
    return [expand(folder) for folder in named]


def _written(  # noqa: PLR0913, PLR0917  # the arguments of every command
    command: str, adapters: Any, output: str | Path | None, base: str | Path | None, options: Mapping[str, Any],
    progress: bool | Progress,  # noqa: FBT001  # as the caller's
) -> AdapterReport:  # fmt: skip
    report: AdapterReport = _run(Request(COMMANDS[command], adapters, output, base, options), progress)
    return report


def _run(request: Request, progress: bool | Progress) -> Any:  # noqa: FBT001  # as the caller's
    try:
        return run_request(request, progress)
    except OutputExists as e:
        raise _second_adapter(request, Path(e.where)) or e from e.__cause__
    except AdapterAsBase as e:
        raise AdapterAsBase(e.what, e.where, _in_order(request) or e.fix.written) from e.__cause__


def _in_order(request: Request) -> str:
    """Return the call whose base is the model among the adapters, or that combines these where there is none; "" where
    there may be several."""
    from .adapters.modules import is_adapter
    from .files.checkpoint import open_checkpoint

    adapters = adapter_list(request.adapters)
    if not adapters or not all(isinstance(item, str | Path) for item in adapters):
        return ""
    try:
        models = [item for item in adapters if not is_adapter(open_checkpoint(input_path(item), adapter=True))]
    except MergeError:
        return ""
    others = [request.base, *(item for item in adapters if item not in models)]
    words = [*models, others, *([] if request.output is None else [request.output])]
    call = f"{request.command.name if models else 'combine'}({', '.join(map(python_code, words))})"
    return f"write {call}" if len(models) < 2 else ""


def _second_adapter(request: Request, output: Path) -> UsageError | None:
    """Return the error for an output that is an adapter which was meant to be in the list; None for an earlier output
    of ours, and where the list has several."""
    from .adapters.modules import is_adapter
    from .files.checkpoint import open_checkpoint

    adapters = adapter_list(request.adapters)
    try:
        index = open_checkpoint(output)
    except MergeError:
        return None
    if len(adapters) > 1 or not request.command.several or not is_adapter(index) or KEY in index.metadata:
        return None
    base = f"{python_code(request.base)}, " if request.command.merges else ""
    fix = f'write {request.command.name}({base}{python_code([*adapters, request.output])}, "out.safetensors")'
    if not all(isinstance(item[0] if isinstance(item, tuple) else item, str | Path) for item in adapters):
        fix = "put it into the list of adapters, or choose another output"
    return UsageError("the output is an adapter that exists", str(output), fix)
