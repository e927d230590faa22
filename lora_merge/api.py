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
    from .engine.admission import plan_merge
    from .engine.merge import run

    with interruptible():
        return run(plan_merge(make_job(base, adapters, output, **options)))


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
