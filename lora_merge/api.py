"""The Python API for files: `merge` and `plan`. The API for tensors in memory is in the room `memory`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import make_job
from .process import interruptible

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import MergeOptions
    from .planning.plan import Plan
    from .report import Report


def merge(
    base: str | Path,
    adapters: Sequence[Any] | str | Path,
    output: str | Path | None = None,
    **options: Unpack[MergeOptions],
) -> Report:
    """Merge adapters into a base model, write the result, verify it, and return a report.

    W' = W + Σᵢ sᵢ · (Fᵢ(W) − W): every adapter's formula Fᵢ is applied to the unchanged weight W, and the sum is
    rounded once to the dtype of the output. The options have the same names as on the command line. The output appears
    under its name when it is complete, or not at all; Ctrl-C leaves nothing behind.

    Parameters:
        base: The model: a checkpoint file, or a model folder (diffusers, transformers).
        adapters: One adapter or a list of them: a path (file or PEFT folder), a pair `(path, strength)`, or an
            `Adapter` with strengths for parts of the model.
        output: The file or folder to write. None: `<base>+<adapter>.safetensors` in the current folder.
        dtype: "keep" (every tensor keeps the dtype that it has in the base), "fp32", "fp16", "bf16", "fp8_e4m3fn" or
            "fp8_e5m2"; or a torch dtype.
        compute_dtype: "fp32", "fp64", "bf16" or "fp16": the dtype that formulas compute in.
        device: "auto" (the fastest one of this machine), "cpu", "cuda", "cuda:1", "mps", "xpu", or several:
            "cuda:0,cuda:1".
        strength: One number for each adapter, in order, where `adapters` are paths. Default: 1 for each.
        strength_for: Part of the model → factor that multiplies the strengths: `{"te": 0.5, "IN04-IN08": 0,
            "re:attn2": 0.8}`; parts are components, blocks, or regular expressions over the base's keys.
        unmatched: "error", or "skip": leave out modules that match no weight of the base, and list them in the report.
        on_overflow: "error", or "saturate": replace numbers that are too large for the dtype of the output by its
            largest finite number, and count them in the report.
        method: "sum" (the rule above), or "compose": adapters one after the other, in the order given.
        setting: Values that the adapter's file lacks, such as `{"lora_alpha": 16}`.
        map: A table of names (YAML) for a model that is not known.
        overwrite: Whether an existing output is replaced. Default: False.
        max_memory: Limit of the host memory for weights in flight: bytes, or a text such as "512MiB". Default: 1 GiB.
        max_vram: The same for the memory of a GPU. Default: 5 GiB, the most that a batched call needs.
        verify: Whether the written file is read again and verified. Default: True.
        title: The title in the metadata of the output, `modelspec.title`. Default: the base's.
        metadata: More entries of the metadata: `{"modelspec.author": "me"}`. They replace the base's of the same name.
        no_metadata: Leave out the recipe, and all names and hashes of inputs, also those that the base's own metadata
            has. `verify` and `replay` then have to be told the inputs. Default: False.

    Returns:
        A `Report`: `coverage` for each adapter, `written` bytes, `seconds`, `verified`, `to_json()`.

    Raises:
        MergeError: Every failure is one of its subclasses, with `what`, `where`, `fix` and `exit_code`: UsageError,
            InputError (missing, damaged or unsupported), FitError (adapter and base do not fit), ResourceError (disk,
            memory, device) and VerificationFailed.

    Example:
        >>> report = lora_merge.merge("base.safetensors", ["style.safetensors", ("detail.safetensors", 0.6)],
        ...                           output="merged.safetensors", dtype="bf16")
        >>> report.coverage["style.safetensors"]["matched"]
        264
    """
    from .engine.admission import admit
    from .engine.merge import run
    from .planning.cache import CheckpointCache
    from .planning.make_plan import make_plan, match, open_inputs

    with interruptible():
        job = make_job(base, adapters, output, **options)
        inputs = open_inputs(job, CheckpointCache())
        matched = match(inputs)
        plan = make_plan(matched)
        admitted = admit(plan)
        return run(admitted)


def plan(
    base: str | Path,
    adapters: Sequence[Any] | str | Path,
    output: str | Path | None = None,
    **options: Unpack[MergeOptions],
) -> Plan:
    """Plan what `merge` would do, from headers alone: no weight is read and nothing is written.

    Parameters:
        base: As for `merge`, like all other parameters and options.
        adapters: One adapter or a list of them.
        output: The file or folder that `merge` would write.

    Returns:
        A `Plan`: what every adapter matches, and every output tensor with its place and its size.

    Raises:
        MergeError: Every error that `merge` would raise before it reads weights.

    Example:
        >>> lora_merge.plan("base.safetensors", "style.safetensors").changed
        264
    """
    from .engine.admission import plan_merge, require_device

    made = plan_merge(make_job(base, adapters, output, **options))
    require_device(made.job)
    return made
