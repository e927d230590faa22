"""Admits a plan to its run: room in memory and on the disk, and an output path that may be written."""

from __future__ import annotations

from ..disk.destination import check_output
from ..disk.volumes import share_blocks
from ..disk.writer import require_space
from ..dtypes import COMPUTE_DTYPES
from ..errors import ResourceError
from ..job import Job
from ..planning.cache import CheckpointCache
from ..planning.make_plan import plan_job
from ..planning.plan import Plan
from .windows import unshared_bytes, window_room


def disk_bytes(plan: Plan) -> int:
    """Return how much space the output takes where it goes."""
    return unshared_bytes(plan) if share_blocks(plan.job.output, plan.base.path) else plan.size


def admit(plan: Plan) -> Plan:
    """Return the plan, with room for its output where that goes and in memory; UsageError or ResourceError
    otherwise.
    """
    job = plan.job
    window_room(job)
    check_output(
        job.output, plan.inputs, overwrite=job.overwrite, folder=plan.is_folder, contents=plan.contents,
        spared=plan.spared,
    )  # fmt: skip
    try:
        require_space(job.output, plan.size)
    except ResourceError:  # unless it shares enough with the base, which takes a while to add up
        require_space(job.output, disk_bytes(plan))
    return plan


def plan_merge(job: Job) -> Plan:
    """Return the plan for a job, from headers alone, admitted; raises whatever the merge would raise."""
    return admit(plan_job(job, CheckpointCache()))


def require_device(job: Job) -> None:
    """Raise ResourceError where the device is not here. Only torch can tell, which is imported unless it is the
    default.

    For plans that are not carried out: a merge finds out while it reads, when torch has been imported beside.
    """
    if job.device not in {"auto", "cpu"}:
        from .devices import places

        places(job.device, COMPUTE_DTYPES[job.compute_dtype])
