"""Where passes run: a table of executors. Each gives the reports of all jobs, in the order in which they end."""

from __future__ import annotations

import pickle
import queue
import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import IO, Any, Final, TypeAlias

from ..engine.merge import Progress
from ..errors import MergeError, UsageError
from ..options import shown
from ..planning.cache import CheckpointCache
from ..process import command
from .groups import Pass, carry_out
from .jobs_file import Entry
from .report import JobReport, failed

LIVES: Final = 2  # how many workers a job may take down with it before it is given up


@dataclass(frozen=True)
class Crew:
    """How many work, and where."""

    workers: int | None = None  # default: one process here, on Ray as many tasks as there is room for
    ray_address: str | None = None


Run: TypeAlias = Callable[[Sequence[Pass], Crew, Progress], Iterator[JobReport]]


@dataclass(frozen=True)
class Executor:
    """A way to run passes; `shared` if all workers share one machine and thus one memory bound."""

    run: Run
    shared: bool
    check: Callable[[], None] = lambda: None
    """UsageError where it is not installed."""


def local(passes: Sequence[Pass], crew: Crew, progress: Progress) -> Iterator[JobReport]:
    """In this process, or in several others on this machine."""
    if crew.workers in (None, 1):
        opened = CheckpointCache()
        for this in passes:
            yield from carry_out(this, opened, progress)
    else:
        yield from _Local(passes, crew.workers or 1).reports(progress)


RAY: Final = (2, 60)
"""A version of Ray whose local clusters ask for a token unless they are told not to. Not all versions before do."""


def _check_ray() -> None:
    try:
        import ray
    except ImportError as e:
        raise UsageError("Ray is not installed", "--executor ray", "pip install 'lora-merge[ray]'") from e
    version = getattr(ray, "__version__", "0")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < RAY:
        raise UsageError(f"Ray {version} is too old: its clusters let everybody in", "--executor ray",
                         "pip install -U 'lora-merge[ray]'")  # fmt: skip


def on_ray(passes: Sequence[Pass], crew: Crew, progress: Progress) -> Iterator[JobReport]:
    """On a Ray cluster; needs the extra `lora-merge[ray]`."""
    from .ray import reports

    yield from reports(passes, crew.workers, crew.ray_address, progress)


EXECUTORS: Final[Mapping[str, Executor]] = MappingProxyType(
    {"local": Executor(local, shared=True), "ray": Executor(on_ray, shared=False, check=_check_ray)}
)


def executor(name: str) -> Executor:
    """The row of the table; UsageError if there is none, or if it cannot be used here."""
    if not isinstance(name, str) or name not in EXECUTORS:
        raise UsageError(f"no executor is called {shown(name)!r}", "--executor", f"use one of {', '.join(EXECUTORS)}")
    EXECUTORS[name].check()
    return EXECUTORS[name]


@dataclass
class _Worker:
    """A child process and the pass it is at."""

    number: int
    process: subprocess.Popen[bytes]
    listener: threading.Thread
    left: dict[int, Entry] = field(default_factory=dict)  # jobs of its pass that have no report yet
    this: Pass | None = None

    def close(self) -> int:
        """Close the pipes of a process that has ended or is about to; returns its exit code."""
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # what was not sent is of no use any more
                if pipe is not None:
                    pipe.close()
        return self.process.wait()

    def give(self, this: Pass) -> None:
        from .worker import Task

        self.this, self.left = this, {e.number: e for e in this.entries}
        assert self.process.stdin is not None, "made with a pipe"
        pickle.dump(Task(this, self.number), self.process.stdin)
        self.process.stdin.flush()


class _Local:
    """Passes over child processes. A child that dies costs its pass one life, and nobody else anything."""

    def __init__(self, passes: Sequence[Pass], workers: int) -> None:
        self.queue = deque(passes)
        self.count = min(workers, len(passes))
        self.workers: dict[int, _Worker] = {}
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.deaths: dict[int, int] = {}  # job → workers that died over it

    def reports(self, progress: Progress) -> Iterator[JobReport]:
        try:
            for number in range(self.count):
                self._hire(number)
            while self.workers:
                number, message = self.inbox.get()
                if isinstance(message, int):
                    progress(message)
                elif isinstance(message, JobReport):
                    self.workers[number].left.pop(message.number)
                    yield message
                elif message is None:
                    self._next(self.workers[number])
                else:
                    yield from self._bury(self.workers.pop(number))
        finally:
            self._dismiss()

    def _hire(self, number: int) -> None:
        process = _start()
        listener = threading.Thread(target=self._listen, args=(number, process.stdout), daemon=True)
        worker = self.workers[number] = _Worker(number, process, listener)
        listener.start()
        self._next(worker)

    def _next(self, worker: _Worker) -> None:
        """The next pass, or the end of its stdin, on which it ends."""
        worker.this, worker.left = None, {}
        try:
            if self.queue:
                worker.give(self.queue.popleft())
            elif worker.process.stdin is not None:
                worker.process.stdin.close()
        except BrokenPipeError:
            pass  # it died; its listener says so next, and its pass is run again

    def _listen(self, number: int, stdout: IO[bytes]) -> None:
        """Puts what a worker says into the inbox; the last word is the exception that ended it."""
        while True:
            try:
                message = pickle.load(stdout)
            except (EOFError, pickle.UnpicklingError, OSError) as end:
                self.inbox.put((number, end))
                return
            self.inbox.put((number, message))

    def _bury(self, worker: _Worker) -> Iterator[JobReport]:
        """The worker has ended: its jobs without a report go to another one, or have failed."""
        code = worker.close()
        if worker.this is not None and worker.left:
            again = []
            for entry in worker.left.values():
                self.deaths[entry.number] = self.deaths.get(entry.number, 0) + 1
                if self.deaths[entry.number] < LIVES:
                    again.append(entry)
                else:
                    yield failed(entry, _death(entry, code), tries=LIVES)
            if again:
                # One by one, so that a job that takes its worker down takes no other with it.
                self.queue.extend(replace(worker.this, entries=(e,)) for e in again)
        if self.queue:
            self._hire(worker.number)

    def _dismiss(self) -> None:
        """End what still runs; a worker removes its unfinished outputs first."""
        for worker in self.workers.values():
            worker.process.terminate()
        for worker in self.workers.values():
            worker.listener.join()
            worker.close()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(command("lora_merge.batch.worker", "main"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _death(entry: Entry, code: int) -> MergeError:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return MergeError(f"the worker died of {how}, twice", entry.where,
                      "if it ran out of memory, use fewer --workers or a smaller --max-memory")  # fmt: skip
