"""The Python API for files: merge, plan. That for tensors in memory is in engine/in_memory.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import make_job
from .process import interruptible

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import MergeOptions
    from .planning.plan import Plan
    from .report import Report


def merge(
    base: str | Path,
    adapters: Sequence[Any] | str | Path,
    output: str | Path | None = None,
    **options: Unpack[MergeOptions],
) -> Report:
    """Merge adapters into a base and write the result; every failure is a MergeError.

    `adapters`: paths, `(path, strength)` pairs or Adapter objects. Options are the command line's:
    dtype, compute_dtype, device, method, strength, strength_for, unmatched, on_overflow, map, setting, overwrite,
    max_memory, max_vram, verify.
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
    """What `merge` would do, without folding a weight; raises what it would raise."""
    from .engine.admission import plan_merge, require_device

    made = plan_merge(make_job(base, adapters, output, **options))
    require_device(made.job)
    return made
