"""The Python API of the commands that write adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from ..algorithms.lora import LORA
from ..boundary import public
from ..job import Adapters, OneAdapter
from ..merge_methods import SUM
from ..process import interruptible
from ..progress import Progress, watched
from ..typed_options import AdapterReading, AverageOptions, CombineOptions, ResizeOptions
from .commands import COMMANDS, Command
from .job import downloaded
from .report import AdapterReport


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
    return _written(COMMANDS["combine"], adapters, output, base, {**form, **options}, progress)


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
    return _written(COMMANDS["resize"], [adapter], output, base, {"rank": rank, **options}, progress)


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
    return _written(COMMANDS["convert"], [adapter], output, base, {**form, **options}, progress)


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
    return _written(COMMANDS["extract"], [tuned], output, base, {**form, **options}, progress)


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
    return _written(COMMANDS["average"], adapters, output, base, {**form, **options}, progress)


def _written(  # noqa: PLR0913, PLR0917  # the arguments of every command
    command: Command, adapters: Any, output: str | Path | None, base: str | Path | None, options: Mapping[str, Any],
    progress: bool | Progress,  # noqa: FBT001  # as the caller's
) -> AdapterReport:  # fmt: skip
    """Run a command, which Ctrl-C ends without a trace."""
    from ..planning.checkpoint_cache import CheckpointCache

    with interruptible(), watched(progress) as watcher:
        cache = CheckpointCache()
        job = command.job(adapters, output, base, options, cache)
        job = downloaded(job, lambda: command.plan(job, cache).written, watcher)
        return command.run(job, watcher, cache)
