"""A batch that runs while its caller looks at the reports, or does not: what `run_batch` returns."""

from __future__ import annotations

import _thread
import concurrent.futures.thread  # noqa: F401  # its exit function is to run after ours, see the end
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from queue import SimpleQueue
from typing import Final, TypeAlias

from ..engine.merge import Progress
from .report import JobReport

Start: TypeAlias = Callable[[Progress], Generator[JobReport, None, None]]


class Reports(Iterator[JobReport]):
    """Jobs' reports as they end. The work has begun, in a thread of its own.

    `close`, or the end of a `with` block, stops it and removes what is unfinished; so does dropping this object
    in the middle of an iteration. Dropped before the first report was asked for, as by a call whose result nobody
    takes, it waits for the end, and warns of jobs that failed.
    """

    def __init__(self, start: Start) -> None:
        self._asked = True  # until there is something to wait for
        self._work = _Work(start)
        self._asked = False

    def __next__(self) -> JobReport:
        """The next job's report, when it ends; raises what concerns the batch as a whole."""
        self._asked = True
        try:
            message = self._work.inbox.get()
        except BaseException:  # KeyboardInterrupt: nobody will ask again
            self.close()
            raise
        if isinstance(message, JobReport):
            return message
        self._work.inbox.put(None)  # for who asks once more
        raise StopIteration if message is None else message

    def close(self) -> None:
        """Stop what is under way; returns when it has ended."""
        self._work.closing.set()
        self._work.ended.wait()
        self._work.inbox = SimpleQueue()
        self._work.inbox.put(None)

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._asked:
            if hasattr(self, "_work"):
                self._work.closing.set()
            return
        try:
            if self._work.is_alive():  # it is not in a process that was forked meanwhile
                self._work.ended.wait()
        except KeyboardInterrupt:  # it would be lost here
            self._work.interrupts = True
            self.close()
        self._work.warn()


class _Work(threading.Thread):
    """The jobs' thread. It does not know the object that its reports are asked from, which can thus be dropped."""

    def __init__(self, start: Start) -> None:
        super().__init__(name="batch")
        self.inbox: SimpleQueue[JobReport | BaseException | None] = SimpleQueue()
        self.closing, self.ended = threading.Event(), threading.Event()
        self.interrupts = False  # whether to pass KeyboardInterrupt on at the end
        self.reports = start(self.progress)  # what this raises, the caller gets at once
        _WORKS.add(self)
        self.start()

    def progress(self, _: int = 0) -> None:
        """Called at every step of the work: unwinds it where it is to stop, so that all is removed."""
        if self.closing.is_set():
            raise _Closed

    def run(self) -> None:
        """All reports, then what ended the work: None if nothing did."""
        try:
            with closing(self.reports):
                for report in self.reports:
                    self.inbox.put(report)
                    self.progress()
            self.inbox.put(None)
        except _Closed:
            self.inbox.put(None)
        except BaseException as e:  # noqa: BLE001  # raised where the reports are asked for
            self.inbox.put(e)
        finally:
            self.ended.set()
            if self.interrupts:
                time.sleep(0.01)  # the main thread leaves __del__, in which exceptions are lost
                _thread.interrupt_main()
            _WORKS.discard(self)

    def warn(self) -> None:
        """Say that jobs failed whose reports nobody took."""
        left = [self.inbox.get() for _ in range(self.inbox.qsize())]
        bad = [m.error if isinstance(m, JobReport) else m for m in left if not (m is None or getattr(m, "ok", False))]
        if bad:
            warnings.warn(f"{len(bad)} jobs of a batch failed and nobody took their reports: {bad[0]}", stacklevel=3)


class _Closed(BaseException):
    """The work is to stop."""


_WORKS: Final[set[_Work]] = set()


def _wait() -> None:
    """At the end of the program: the works go on until they have ended."""
    try:
        for work in tuple(_WORKS):
            work.join()
    except KeyboardInterrupt:
        for work in tuple(_WORKS):
            work.closing.set()
            work.ended.wait()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


# When the main thread has ended, the executors of the standard library, which the merges use, take no more work: their
# own exit function says so, and functions registered later run earlier. There is no public way to be in time.
with suppress(AttributeError):
    threading._register_atexit(_wait)  # type: ignore[attr-defined]
