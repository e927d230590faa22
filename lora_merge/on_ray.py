"""Passes as tasks on a Ray cluster. Jobs and reports travel; weights stay on the disk that all nodes share."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Final

from .errors import MergeError, ResourceError
from .jobs_file import Entry
from .opened import Opened
from .outcome import JobReport, failed
from .passes import Pass, carry_out

RETRIES: Final = 3  # of a task whose worker or node died; what it finished is skipped then


def reports(passes: Sequence[Pass], workers: int | None, address: str | None) -> Iterator[JobReport]:
    """Every job's report, pass by pass, at most `workers` of them at a time (default: as the cluster has room).

    ResourceError if no cluster answers. Each task may use the memory bound
    of its jobs, as it may have a machine of its own.
    """
    import ray

    ours = not ray.is_initialized()
    if ours:
        _connect(ray, address)
    try:
        yield from _results(ray, list(passes), workers or len(passes))
    finally:
        if ours:
            ray.shutdown()


def _connect(ray: Any, address: str | None) -> None:
    try:
        if address is not None and ":" in address:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray itself would try for minutes
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, OSError, RuntimeError, ValueError) as e:
        raise ResourceError(f"no Ray cluster answers: {str(e).splitlines()[0]}", f"--ray-address {address}",
                            "start one with `ray start --head`, or leave the address out") from e  # fmt: skip


def _results(ray: Any, waiting: list[Pass], limit: int) -> Iterator[JobReport]:
    gpus = ray.cluster_resources().get("GPU", 0) >= 1
    running: dict[Any, Pass] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                this = waiting.pop(0)
                needed = 1 if gpus and any(e.job.device != "cpu" for e in this.entries) else 0
                task = ray.remote(_task).options(num_cpus=1, num_gpus=needed, max_retries=RETRIES)
                running[task.remote(this)] = this
            ready, _ = ray.wait(list(running), num_returns=1)
            for ref in ready:
                yield from _collect(ray, ref, running.pop(ref))
    finally:
        for ref in running:
            ray.cancel(ref, force=True)


def _collect(ray: Any, ref: Any, this: Pass) -> Iterator[JobReport]:
    """The reports of a task, or of its failure; an output that cannot be seen from here is a failure too."""
    try:
        found: list[JobReport] = ray.get(ref)
    except ray.exceptions.RayError as e:
        for entry in this.entries:
            yield failed(entry, _lost(entry, e), tries=RETRIES + 1)
        return
    entries = {e.number: e for e in this.entries}
    for report in found:
        if report.ok and not os.path.lexists(report.output):
            yield failed(entries[report.number], _unseen(report.output, f"made on {report.worker}"))
        else:
            yield report


def _task(this: Pass) -> list[JobReport]:
    """Runs on a node. Inputs that were there for the plan but are not here are on no shared disk."""
    found: list[JobReport] = []
    here: list[Entry] = []
    for entry in this.entries:
        missing = [p for p in (entry.job.base, *(a.path for a in entry.job.adapters)) if not p.exists()]
        if missing:
            found.append(failed(entry, _unseen(str(missing[0]), f"missing on the node {socket.gethostname()}")))
        else:
            here.append(entry)
    return found + list(carry_out(Pass(tuple(here), this.workers, this.wait), Opened()))


def _unseen(path: str, where: str) -> MergeError:
    return ResourceError("a path is not on a disk that all nodes share", f"{path}, {where}",
                         "put base, adapters and outputs on a disk mounted at one place on every node")  # fmt: skip


def _lost(entry: Entry, e: Exception) -> MergeError:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return MergeError(f"the Ray task was lost: {lines[-1] if lines else type(e).__name__}", entry.where,
                      "see that every node has lora-merge and the memory it needs; `ray logs` tells more")  # fmt: skip
