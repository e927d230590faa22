"""Runs as a worker process of a batch: takes groups on stdin, gives reports on stdout, both pickled; see executors.py.

Started anew (see process.py), and not forked: torch and CUDA do not survive a fork, and a program that
calls `run_batch` need not guard its main module.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

from ..process import collect_rarely, deliver_pending, on_stop, signals_first
from ..progress import StepBuffer, observed

if TYPE_CHECKING:
    from .jobs_file import BatchJob
    from .shared_reads import JobGroup


_sending = threading.Lock()
"""Held while a message is sent: steps come from another thread than reports."""


@dataclass(frozen=True)
class GroupTask:
    """A group, and the worker that is to make it."""

    group: JobGroup
    number: int  # of the worker, from 0


def main() -> None:
    """Work until stdin ends, or a signal ends it."""
    on_stop(_stop)
    with signals_first():
        _work()


def _work() -> None:
    """Make groups until stdin ends. What anything prints goes to stderr: stdout carries reports alone."""
    from ..engine.torch_preload import keep_freed_memory, preload
    from ..errors import DeviceFailed
    from ..planning.checkpoint_cache import CheckpointCache
    from .shared_reads import carry_out

    collect_rarely()
    preload()
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    opened = CheckpointCache()
    while True:
        deliver_pending()
        try:
            task: GroupTask = pickle.load(sys.stdin.buffer)  # from our own parent
        except (EOFError, pickle.UnpicklingError):  # cut off where the parent was killed in the middle of it
            return
        keep_freed_memory(min(e.job.max_memory for e in task.group.entries) // task.group.workers)
        failed = False
        with observed(partial(_send, reports)) as observer:
            steps = StepBuffer(observer)
            for report in carry_out(spread(task), opened, steps):
                steps.flush()
                _send(reports, report)
                failed = failed or isinstance(report.error, DeviceFailed)
        if failed:  # this process cannot use the device again
            raise SystemExit(1)
        _send(reports, None)


def spread(task: GroupTask) -> JobGroup:
    """Return the group with this worker's share of the cores and, where there are several GPUs, a GPU of its own."""
    if task.group.workers > 1:
        from ..engine.devices import share_cores

        share_cores(task.group.workers)
    entries = tuple(_on_gpu(e, task.number) for e in task.group.entries)
    return replace(task.group, entries=entries)


def _on_gpu(entry: BatchJob, number: int) -> BatchJob:
    from ..engine.devices import nth_device

    if not entry.command.merges:
        return entry
    return entry.changed(device=nth_device(entry.job.device, number))


def _send(reports: BinaryIO, message: Any) -> None:
    """Send a message to the parent. Where it is gone, end this process, which removes what it has begun."""
    try:
        with _sending:
            pickle.dump(message, reports)
            reports.flush()
    except BrokenPipeError:
        with Path(os.devnull).open("wb") as nowhere:  # what was not sent goes there on closing
            os.dup2(nowhere.fileno(), reports.fileno())
        raise SystemExit(1) from None


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(1)


if __name__ == "__main__":
    main()
