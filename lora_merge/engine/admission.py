"""Checks before a plan runs: memory, disk space, and whether the output path may be written."""

from __future__ import annotations

from dataclasses import replace

from ..addresses import with_addresses
from ..disk.destination import check_output
from ..disk.volumes import share_blocks
from ..disk.writer import Room, require_space
from ..dtypes import COMPUTE_DTYPES
from ..errors import MergeError, ResourceError
from ..job import Job
from ..planning.checkpoint_cache import CheckpointCache
from ..planning.downloads import Announce, downloads_of, fetch_all, job_at
from ..planning.make_plan import plan_job
from ..planning.plan import Plan
from ..progress import Progress
from ..sources.outputs import announcement
from ..text import Note, size
from .row_blocks import blocks
from .windows import unshared_bytes, window_room


def disk_bytes(plan: Plan) -> int:
    """Return the bytes that the output takes on its disk."""
    return unshared_bytes(plan) if share_blocks(plan.job.output, plan.base.path) else plan.size


def disk_room(plan: Plan) -> Room:
    """Return the bytes that the output takes on its disk, and those that are free there."""
    return Room.at(plan.job.output, disk_bytes(plan))


def admit(plan: Plan, *, dry: bool = False) -> Plan:
    """Return the plan if there is enough memory and disk space for it; UsageError or ResourceError otherwise.

    `dry`: the plan does not run, and reports a disk without room for its output instead (`disk_room`).
    """
    job = plan.job
    window_room(job)
    if text := announcement(job.output, plan.size):
        plan = plan.with_notes(Note(text))
    replaces = check_output(
        job.output, plan.read, overwrite=job.overwrite, folder=plan.is_folder, contents=plan.contents
    )
    plan = replace(plan, replaces=replaces)
    _require_room(plan)
    if dry:
        return plan
    try:
        require_space(job.output, plan.size)
    except ResourceError:  # it may still fit if it shares blocks with the base; their sum takes a while
        require_space(job.output, disk_bytes(plan))
    return plan


def _require_room(plan: Plan) -> None:
    """Raise ResourceError if one weight whose changes become one change takes more than the memory limit."""
    targets = [t for t in plan.targets if t.combines]
    largest = max((b for t in targets for b in blocks(t)), key=lambda b: b.room, default=None)
    if largest is not None and largest.room > plan.job.max_memory:
        needed = f"give `--max-memory {-(-largest.room >> 20)}MiB`"
        what = (
            "a whole weight at once, which takes" if largest.by_rows else "all changes of a weight at once, which take"
        )
        raise ResourceError(
            f"{plan.job.method} needs {what} {size(largest.room)}",
            f"{largest.target.name}: `--max-memory {plan.job.max_memory}`", needed,
        )  # fmt: skip


def plan_merge(job: Job, *, dry: bool = False) -> Plan:
    """Return the admitted plan of a job, made from headers alone; raises what the merge would raise by then. `dry`: as
    for `admit`."""
    try:
        plan = admit(plan_job(job, CheckpointCache()), dry=dry)
    except MergeError as e:
        raise e.reword(with_addresses) from None
    notes = [Note(d.text()) for d in downloads_of([job]).values() if d.size] if dry else []
    return plan.with_notes(*notes)


def downloaded(job: Job, progress: Progress, announce: Announce | None = None) -> Job:
    """Return the job on inputs of this machine: what it lacks is downloaded, if the job can run by the headers.

    Raises what the merge would raise by then, and ResourceError if the disks have no room.
    """
    needed = downloads_of([job])
    if not needed:
        return job
    plan = plan_merge(job)
    return job_at(job, fetch_all(needed, (plan.job.output, disk_bytes(plan)), progress, announce))


def require_device(job: Job) -> None:
    """Raise ResourceError if this machine lacks the device. That takes torch, which is imported unless the device is
    "auto" or "cpu"."""
    if job.device not in {"auto", "cpu"}:
        from .devices import places

        places(job.device, COMPUTE_DTYPES[job.compute_dtype])
