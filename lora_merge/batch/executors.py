"""The places where groups of jobs run: a table of executors. Each returns every job's report, as the job ends."""

from __future__ import annotations

import pickle
import queue
import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import IO, Any, Final, TypeAlias

from ..errors import DeviceFailed, MergeError, UsageError
from ..planning.checkpoint_cache import CheckpointCache
from ..process import command
from ..progress import Progress, Step
from ..text import shown
from .jobs_file import BatchJob
from .report import JobReport, failed
from .shared_reads import JobGroup, carry_out

MOST_DEATHS: Final = 2  # how many workers a job may take down with it before it is given up


@dataclass(frozen=True)
class Workers:
    """The number of processes or tasks that work at a time, and their place."""

    count: int | None = None  # default: one process here, on Ray as many tasks as there is room for
    ray_address: str | None = None


THIS_PROCESS: Final = Workers()

RunGroups: TypeAlias = Callable[[Sequence[JobGroup], Workers, Progress], Iterator[JobReport]]


@dataclass(frozen=True)
class Executor:
    """A way to run groups of jobs."""

    run: RunGroups
    shared: bool  # whether all workers share one machine, and thus the bounds on its memory
    check: Callable[[], None] = lambda: None  # raises UsageError where what it needs is not installed


def local(groups: Sequence[JobGroup], workers: Workers, progress: Progress) -> Iterator[JobReport]:
    """Run groups in this process, or in several others on this machine.

    Where a device fails, this process cannot use it again: another one takes over.
    """
    if workers.count not in (None, 1):
        yield from _Local(groups, workers.count).reports(progress)
        return
    opened, left, failures = CheckpointCache(), deque(groups), dict[int, MergeError]()
    while left and not failures:
        group = left.popleft()
        for report in carry_out(group, opened, progress):
            if isinstance(report.error, DeviceFailed):
                failures[report.number] = report.error
            else:
                yield report
        left.extendleft(replace(group, entries=(e,)) for e in reversed(group.entries) if e.number in failures)
    if left:
        yield from _Local(left, 1, failures).reports(progress)


RAY: Final = (2, 60)
"""A version of Ray whose local clusters ask for a token unless that is turned off. Not all versions before do."""


INSTALL_RAY: Final = f'pip install -U "ray>={RAY[0]}.{RAY[1]}"'


def _check_ray() -> None:
    try:
        import ray
    except ImportError as e:
        raise UsageError("Ray is not installed", "`--executor ray`", INSTALL_RAY) from e
    version = getattr(ray, "__version__", "0")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < RAY:
        raise UsageError(f"Ray {version} is too old: its clusters accept connections from anyone", "`--executor ray`",
                         INSTALL_RAY)  # fmt: skip


def on_ray(groups: Sequence[JobGroup], workers: Workers, progress: Progress) -> Iterator[JobReport]:
    """Run groups on a Ray cluster; needs Ray."""
    from .ray import reports

    yield from reports(groups, workers.count, workers.ray_address, progress)


EXECUTORS: Final[Mapping[str, Executor]] = MappingProxyType(
    {"local": Executor(local, shared=True), "ray": Executor(on_ray, shared=False, check=_check_ray)}
)


def executor(name: str) -> Executor:
    """Return the row of the table; UsageError if there is none, or if it cannot be used here."""
    row = EXECUTORS.get(name.lower()) if isinstance(name, str) else None
    if row is None:
        raise UsageError(f"no executor is called {shown(name)!r}", "--executor", f"use one of {', '.join(EXECUTORS)}")
    row.check()
    return row


@dataclass
class _Worker:
    """A child process and the group that it works at."""

    number: int
    process: subprocess.Popen[bytes]
    listener: threading.Thread
    left: dict[int, BatchJob] = field(default_factory=dict)  # jobs of its group without a report
    group: JobGroup | None = None

    def close(self) -> int:
        """Close the pipes of a process that has ended or is about to; return its exit code."""
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what was not sent is of no use any more
                if pipe is not None:
                    pipe.close()
        return self.process.wait()

    def give(self, group: JobGroup) -> None:
        """Send it a group to work at."""
        from .worker import GroupTask

        self.group, self.left = group, {e.number: e for e in group.entries}
        assert self.process.stdin is not None, "made with a pipe"
        pickle.dump(GroupTask(group, self.number), self.process.stdin)
        self.process.stdin.flush()


class _Local:
    """Distributes groups over child processes. Another child does the jobs of one that dies, or whose device fails.

    `failures`: jobs that a process was lost with already, with their errors.
    """

    def __init__(
        self, groups: Collection[JobGroup], workers: int, failures: Mapping[int, MergeError] = MappingProxyType({})
    ) -> None:
        self.queue = deque(groups)
        self.count = min(workers, len(groups))
        self.workers: dict[int, _Worker] = {}
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.failures = dict(failures)  # job → the last failure of a device under it
        self.deaths = dict.fromkeys(failures, 1)  # job → workers that died over it

    def reports(self, progress: Progress) -> Iterator[JobReport]:
        """Return every job's report as it ends."""
        try:
            for number in range(self.count):
                self._start_worker(number)
            while self.workers:
                number, message = self.inbox.get()
                if isinstance(message, Step):
                    progress(message)
                elif isinstance(message, JobReport) and isinstance(message.error, DeviceFailed):
                    self.failures[message.number] = message.error  # the worker ends, and the job is run again
                elif isinstance(message, JobReport):
                    self.workers[number].left.pop(message.number)
                    yield message
                elif message is None:
                    self._next(self.workers[number])
                else:
                    yield from self._replace(self.workers.pop(number))
        finally:
            self._stop_workers()

    def _start_worker(self, number: int) -> None:
        process = _start()
        listener = threading.Thread(target=self._listen, args=(number, process.stdout), daemon=True)
        worker = self.workers[number] = _Worker(number, process, listener)
        listener.start()
        self._next(worker)

    def _next(self, worker: _Worker) -> None:
        """Give it the next group, or close its stdin, on which it ends."""
        worker.group, worker.left = None, {}
        try:
            if self.queue:
                worker.give(self.queue.popleft())
            elif worker.process.stdin is not None:
                worker.process.stdin.close()
        except BrokenPipeError:
            pass  # it died; its listener says so next, and its jobs are run again

    def _listen(self, number: int, stdout: IO[bytes]) -> None:
        """Put what a worker says into the inbox; last, the exception that ended the reading."""
        while True:
            try:
                message = pickle.load(stdout)
            except (EOFError, pickle.UnpicklingError, OSError) as end:
                self.inbox.put((number, end))
                return
            self.inbox.put((number, message))

    def _replace(self, worker: _Worker) -> Iterator[JobReport]:
        """Give the jobs of a worker that has ended to another one; report the ones that have failed for good."""
        code = worker.close()
        if worker.group is not None and worker.left:
            again = []
            for entry in worker.left.values():
                self.deaths[entry.number] = self.deaths.get(entry.number, 0) + 1
                if self.deaths[entry.number] < MOST_DEATHS:
                    again.append(entry)
                else:
                    yield failed(entry, self.failures.get(entry.number) or _death(entry, code), tries=MOST_DEATHS)
            if again:
                # One by one, so that a job that takes its worker down takes no other with it.
                self.queue.extend(replace(worker.group, entries=(e,)) for e in again)
        if self.queue:
            self._start_worker(worker.number)

    def _stop_workers(self) -> None:
        """End the workers that still run; each removes its unfinished outputs first."""
        for worker in self.workers.values():
            worker.process.terminate()
        for worker in self.workers.values():
            worker.listener.join()
            worker.close()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(command("lora_merge.batch.worker", "main"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _death(entry: BatchJob, code: int) -> MergeError:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return MergeError(f"the worker died of {how}, twice", entry.where,
                      "if it ran out of memory, use fewer --workers or a smaller --max-memory")  # fmt: skip
