"""Runs groups as tasks on a Ray cluster. Jobs and reports travel; weights stay on the disk that all nodes share."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Final

from ..disk.uploads import sink_of
from ..errors import DeviceFailed, MergeError, ResourceError, UsageError
from ..planning.checkpoint_cache import CheckpointCache
from ..progress import Guard, Progress, Step, StepBuffer, observed
from ..sources.outputs import on_this_machine
from .jobs_file import BatchJob
from .report import JobReport, failed
from .shared_reads import JobGroup, carry_out

RETRIES: Final = 3  # of a task whose worker or node died; what it finished is skipped then
REPORT_POLL: Final = 0.5  # seconds between looks at what running tasks report
CANCEL_SECONDS: Final = 20.0  # seconds that a cancelled task has to remove what it has not finished


def reports(
    groups: Sequence[JobGroup], workers: int | None, address: str | None, progress: Progress
) -> Iterator[JobReport]:
    """Return every job's report as it ends, with at most `workers` groups at a time (default: as the cluster has room).

    ResourceError if no cluster answers; UsageError if a local one would let everybody in. Each task may use the memory
    bound of its jobs, as it may have a machine of its own.
    """
    import ray

    with ExitStack() as stack:
        if not ray.is_initialized():
            local = address is None and not os.environ.get("RAY_ADDRESS")
            if local:
                stack.enter_context(token_demanded())
            _connect(ray, address, **({"include_dashboard": False} if local else {}))
            stack.callback(ray.shutdown)
        yield from _Ray(ray, progress).reports(list(groups), workers or len(groups))


@contextmanager
def token_demanded() -> Iterator[None]:
    """Have a cluster that is started here ask everybody for a token, by its environment.

    Its processes listen on all interfaces, whatever address they are given, and run any code that they are sent. Ray
    asks for a token unless that is turned off; UsageError if the user has turned it off. The token is made for this
    process, unless the user has set one, and is written nowhere.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")  # Ray sets the first one itself
    before = {name: os.environ.get(name) for name in names}
    if (before["RAY_AUTH_MODE"] or "").lower() == "disabled":
        raise UsageError("without a token, anyone on the network could run code on a cluster started here",
                         "RAY_AUTH_MODE=disabled", "unset it, or name a cluster of yours: --ray-address")  # fmt: skip
    if not (before["RAY_AUTH_TOKEN"] or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = _token()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@cache
def _token() -> str:
    """Return one token for the life of the process: Ray reads it once."""
    return secrets.token_hex(32)


def _connect(ray: Any, address: str | None, **more: Any) -> None:
    try:
        if address is not None and ":" in address:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray itself would try for minutes
        ray.init(address=address, log_to_driver=False, logging_level="error", **more)
    except (ConnectionError, OSError, RuntimeError, ValueError) as e:
        raise ResourceError(f"no Ray cluster answers: {str(e).splitlines()[0]}", f"`--ray-address {address}`",
                            "start one with `ray start --head`, or leave the address out") from e  # fmt: skip


class _Inbox:
    """An actor that holds what the tasks report while they run, until the driver takes it."""

    def __init__(self) -> None:
        self.messages: list[JobReport | int] = []

    def put(self, message: JobReport | int) -> None:
        self.messages.append(message)

    def take(self) -> list[JobReport | int]:
        taken, self.messages = self.messages, []
        return taken


class _Ray:
    """Starts tasks and takes their reports: through the inbox at once, and for certain when their task ends."""

    def __init__(self, ray: Any, progress: Progress) -> None:
        self.ray, self.progress = ray, progress
        self.inbox = ray.remote(_Inbox).options(num_cpus=0, max_restarts=-1).remote()
        self.gpus = max((int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]), default=0)  # of a node
        self.running: dict[Any, JobGroup] = {}
        self.left: dict[int, BatchJob] = {}  # jobs without a report
        self.waiting: list[JobGroup] = []
        self.again: set[int] = set()  # jobs that are run once more, as a device failed under them

    def reports(self, waiting: list[JobGroup], limit: int) -> Iterator[JobReport]:
        self.waiting, self.left = waiting, {e.number: e for group in waiting for e in group.entries}
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < limit:
                    self._start(self.waiting.pop(0))
                ended, _ = self.ray.wait(list(self.running), num_returns=1, timeout=REPORT_POLL)
                yield from self._news()
                for task in ended:
                    yield from self._end(task, self.running.pop(task))
        finally:
            self._stop()

    def _start(self, group: JobGroup) -> None:
        """Start a group as a task. One that needs more GPUs than any node has fails on a node with most of them."""
        gpus = max(len(named_gpus(e.job.device)) if e.command.merges else 0 for e in group.entries)
        sent = group
        if gpus <= self.gpus:
            sent = replace(group, entries=tuple(map(_on_granted, group.entries)))
        task = self.ray.remote(_task).options(num_cpus=1, num_gpus=min(gpus, self.gpus), max_retries=RETRIES)
        self.running[task.remote(sent, self.inbox)] = group

    def _news(self) -> Iterator[JobReport]:
        try:
            messages = self.ray.get(self.inbox.take.remote(), timeout=REPORT_POLL)
        except (self.ray.exceptions.RayError, TimeoutError):
            return  # its node is lost; all reports come with the tasks as well
        for message in messages:
            if isinstance(message, Step):
                self.progress(message)
            elif not isinstance(message.error, DeviceFailed):  # those come with their task
                yield from self._reachable(message)

    def _end(self, task: Any, group: JobGroup) -> Iterator[JobReport]:
        """Return the reports of a task that has ended, or failed, that the inbox has not brought."""
        try:
            reports = self.ray.get(task)
        except self.ray.exceptions.RayError as e:
            reports = [failed(entry, _lost(entry, e), tries=RETRIES + 1) for entry in group.entries]
        for report in reports:
            if isinstance(report.error, DeviceFailed) and report.number in self.left.keys() - self.again:
                self.again.add(report.number)  # Ray runs no second task in a process that had a GPU
                self.waiting.append(replace(group, entries=(self.left[report.number],)))
            else:
                yield from self._reachable(report)

    def _reachable(self, report: JobReport) -> Iterator[JobReport]:
        """Return the first report of each job; an output that cannot be seen from here is a failure."""
        entry = self.left.pop(report.number, None)
        if entry is not None and report.ok and _is_missing(entry):
            yield failed(entry, _unseen(report.output, f"made on {report.worker}"))
        elif entry is not None:
            yield report

    def _stop(self) -> None:
        """Interrupt what is under way, which removes unfinished outputs; end what does not listen."""
        tasks = list(self.running)
        for force in (False, True) if tasks else ():
            for task in tasks:
                self.ray.cancel(task, force=force)
            _, tasks = self.ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_SECONDS)
            if not tasks:
                break


def _is_missing(entry: BatchJob) -> bool:
    """Return whether an output cannot be seen from here; one of another machine was read there by its job."""
    output = entry.job.output
    return sink_of(output) is None and not os.path.lexists(output)


def named_gpus(device: str) -> list[str]:
    """Return the different GPUs of a job's device list; `auto` and `cuda` are one, whichever it is."""
    return [] if device in ("cpu", "mps") else list(dict.fromkeys(d.strip() for d in device.split(",")))


def granted(device: str) -> str:
    """Return the device list as a task has to write it: Ray shows it its own GPUs alone, counted from 0."""
    if ":" not in device:
        return device
    number = {name: n for n, name in enumerate(named_gpus(device))}
    return ",".join(f"{d.strip().partition(':')[0]}:{number[d.strip()]}" for d in device.split(","))


def _task(group: JobGroup, inbox: Any) -> list[JobReport]:
    """Make a group on a node. Inputs that the plan found but this node does not see are on no shared disk."""
    reports: list[JobReport] = []
    guard = Guard()  # what the inbox does not get comes with the task
    with observed(inbox.put.remote, guard) as observer:
        steps = StepBuffer(observer)
        for report in _here(group, steps):
            steps.flush()
            guard(inbox.put.remote, report)
            reports.append(report)
    return reports


def _here(group: JobGroup, progress: Progress) -> Iterator[JobReport]:
    present: list[BatchJob] = []
    for entry in group.entries:
        missing = [p for p in entry.inputs if not p.exists()]
        if missing:
            yield failed(entry, _unseen(str(missing[0]), f"missing on the node {socket.gethostname()}"))
        else:
            present.append(entry.changed(output=on_this_machine(entry.job.output)))
    yield from carry_out(replace(group, entries=tuple(present)), CheckpointCache(), progress)


def _on_granted(entry: BatchJob) -> BatchJob:
    """Return a job on the GPUs that Ray gives its task."""
    if not entry.command.merges:
        return entry
    return entry.changed(device=granted(entry.job.device))


def _unseen(path: str, where: str) -> MergeError:
    return ResourceError("a path is not on a disk that all nodes share", f"{path}, {where}",
                         "put base, adapters and outputs on a disk mounted at one place on every node")  # fmt: skip


def _lost(entry: BatchJob, e: Exception) -> MergeError:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return MergeError(f"the Ray task was lost: {lines[-1] if lines else type(e).__name__}", entry.where,
                      "check that every node has lora-merge and the memory it needs; `ray logs` shows "
                      "more")  # fmt: skip
