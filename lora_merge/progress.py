"""The steps of a run: the functions that do the work report them, and whoever shows progress adds them up.

Progress is shown by observers: a bar, a function of the caller, another process. They neither fail nor slow a run:
`Observer` calls them in a thread of its own, and `Guard` takes their errors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

from .options import unlike
from .text import html_table, one_line

Stage: TypeAlias = Literal["load", "fetch", "merge", "make", "flush", "prove", "upload", "look"]
"""`load`: inputs are opened and torch is imported. `fetch`: inputs are downloaded. `merge`: bytes are merged and
written. `make`: the layers of an adapter are computed. `flush`: the disk takes the last of them. `prove`: the written
file is read again. `upload`: an output of another machine is sent there. `look`: files are measured or compared."""

STEP_SECONDS: Final = 0.1
"""Seconds between two steps of work that has many more: those of `StepBuffer`, and those within a window of a merge."""

SECOND_HAND: Final = 0.5
"""Seconds between two redraws of a bar of tqdm that no step moves: the elapsed time in it goes on."""

GRACE: Final = 0.1
"""Seconds that a run waits for an observer in all, before `OBSERVER_SHARE` counts: quick observers get each step by
itself."""

OBSERVER_SHARE: Final = 0.02
"""Share of its time that a run waits for an observer at most."""

OBSERVER_SECONDS: Final = 1.0
"""Seconds that a run which has ended waits until its observer has taken the last steps."""

T = TypeVar("T")


class Guard:
    """Calls functions that only show progress. The first that fails is logged, and nothing is called from then on."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, act: Callable[..., T], *arguments: Any) -> T | None:
        """Return what a function returns; None if it fails, or if one has failed before."""
        if self.failed:
            return None
        try:
            return act(*arguments)
        except Exception as e:  # noqa: BLE001  # whatever it is, the run goes on
            self.failed = True
            self._warn(e)
        return None

    def _warn(self, e: Exception) -> None:
        import logging
        from traceback import extract_tb

        place = extract_tb(e.__traceback__)[-1]
        logging.getLogger("lora_merge").warning(
            "progress cannot be shown any more, and the run goes on: %s: %s (%s, line %s)",
            type(e).__name__, e, place.filename, place.lineno,
        )  # fmt: skip


@contextmanager
def beating(draw: Callable[[], object], apart: float) -> Iterator[None]:
    """Call a function in a thread of its own, again and again with so many seconds in between, until the block ends."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(apart):
            draw()

    thread = threading.Thread(target=beat, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(OBSERVER_SECONDS)  # a terminal that is stopped holds it for as long as it likes


class Step(NamedTuple):
    """Work that was just done, or, with `done` 0, a stage that begins.

    Attributes:
        stage: "load", "fetch", "merge", "make", "flush", "prove", "upload" or "look".
        output: The output that it belongs to; of a download the address.
        done: Since the step before: bytes downloaded (fetch), merged and written (merge), sent (upload), or of the
            weights that were looked at (make, prove, look).
        total: Of the stage, in the same unit; 0: not known.
        limit: What the merge spends most time on: start (torch), read, hash, fold or write.

    Examples:
        >>> steps: list[lora_merge.Step] = []
        >>> report = lora_merge.merge("base.safetensors", "style.safetensors", "out.safetensors", progress=steps.append)
        >>> sum(step.done for step in steps if step.stage == "merge") == report.written
        True
    """

    stage: Stage
    output: str = ""
    done: int = 0
    total: int = 0
    limit: str = ""

    def _repr_html_(self) -> str:
        return html_table("Step", self._asdict().items())


Progress: TypeAlias = Callable[[Step], object]
"""A function that is called with each step, from the thread that does it; those of callers by an `Observer`."""


def unwatched(_: Step) -> None:
    """Do nothing with a step."""


def counted(progress: Progress, stage: Stage, output: str, total: int) -> Callable[[int], object]:
    """Begin a stage; return a function that reports so many bytes as done, in all not more than `total`."""
    left = total
    progress(Step(stage, output, total=total))

    def advance(count: int) -> None:
        nonlocal left
        left -= (done := min(count, left))
        progress(Step(stage, output, done, total))

    return advance


Counting: TypeAlias = Callable[[Stage, int], Callable[[int], object]]
"""Begins a stage of so many bytes, and returns a function that reports how many of them were just done."""


_Steps: TypeAlias = dict[tuple[str, str], Step]
"""Stage and output → the steps that wait, added up."""


def _add(waiting: _Steps, step: Step) -> None:
    """Add a step to those that wait."""
    key = step.stage, step.output
    before = waiting.get(key)
    waiting[key] = step if before is None else step._replace(done=before.done + step.done)


class StepBuffer:
    """Adds up steps of one stage and passes them on ten times a second: a step costs a message to another process.

    Threads may report at the same time; the steps are passed on one at a time.
    """

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._lock = threading.RLock()
        self._waiting: _Steps = {}
        self._passed_on = -STEP_SECONDS

    def __call__(self, step: Step) -> None:
        """Take a step; a stage that begins is passed on at once."""
        with self._lock:
            _add(self._waiting, step)
            if not step.done or self._clock() - self._passed_on >= STEP_SECONDS:
                self.flush()

    def flush(self) -> None:
        """Pass on what has been added up."""
        with self._lock:
            self._passed_on = self._clock()
            while self._waiting:
                self._progress(self._waiting.pop(next(iter(self._waiting))))


class Observer:
    """Passes steps on to a function in a thread of its own, one at a time.

    A run waits for the function as long as that takes little of the run's time (`GRACE`, `OBSERVER_SHARE`). So a quick
    function gets every step before the work goes on. The steps that a slow one has not taken are added up, and those
    that it has not taken `OBSERVER_SECONDS` seconds after the run are lost. If it raises something else than an
    Exception, such as KeyboardInterrupt, the run ends with that at this step or the next.
    """

    def __init__(self, show: Progress, guard: Guard) -> None:
        self._show, self._guard = show, guard
        self._change = threading.Condition()
        self._waiting: _Steps = {}
        self._busy = self._ended = False
        self._raised: BaseException | None = None
        self._began, self._waited = time.monotonic(), 0.0
        self._thread: threading.Thread | None = None
        self._context = copy_context()  # the caller's, which notebooks need

    def __call__(self, step: Step) -> None:
        """Take a step."""
        with self._change:
            if not (self._guard.failed or self._ended):
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._context.run, args=(self._work,), daemon=True, name="observer"
                    )
                    self._guard(self._thread.start)
                _add(self._waiting, step)
                self._change.notify_all()
                self._wait(GRACE + OBSERVER_SHARE * (time.monotonic() - self._began) - self._waited)
            self._end_run()

    def finish(self) -> None:
        """Wait for the last steps to be taken, as the run has ended."""
        with self._change:
            self._wait(OBSERVER_SECONDS)
            self._end_run()

    def close(self) -> None:
        """Pass nothing on from now on."""
        with self._change:
            self._ended = True
            self._waiting.clear()
            self._change.notify_all()

    def _wait(self, seconds: float) -> None:
        start = time.monotonic()
        self._change.wait_for(lambda: not self._busy and (self._guard.failed or not self._waiting), max(0.0, seconds))
        self._waited += time.monotonic() - start

    def _end_run(self) -> None:
        """Raise what the function has raised to end the run."""
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised

    def _work(self) -> None:
        """Pass steps on until the run has ended."""
        while not self._guard.failed:
            with self._change:
                self._busy = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._waiting or self._ended)
                if self._ended:
                    return
                step = self._waiting.pop(next(iter(self._waiting)))
                self._busy = True
            try:
                self._guard(self._show, step)
            except BaseException as e:  # noqa: BLE001  # raised again in the thread of the run
                with self._change:
                    self._raised = e
        with self._change:
            self._busy = False  # only now is the failure logged
            self._change.notify_all()


@contextmanager
def observed(show: Progress, guard: Guard | None = None) -> Iterator[Observer]:
    """Give the block a function that takes its steps for an observer, which neither fails nor slows the block."""
    observer = Observer(show, guard or Guard())
    try:
        yield observer
        observer.finish()
    finally:
        observer.close()


class StageSum:
    """The steps of the stage that a run is in, added up: `done` of `total`, which is 0 if it is not known."""

    def __init__(self) -> None:
        self.stage, self.done, self.total = "", 0, 0

    def add(self, step: Step) -> bool:
        """Add a step; return whether a stage begins with it."""
        if begins := step.stage != self.stage:
            self.stage, self.done, self.total = step.stage, 0, 0
        self.done, self.total = self.done + step.done, step.total or self.total
        return begins


class Bar:
    """A bar of tqdm for one run: the bytes written, then the bytes proven."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._sum = bar, StageSum()

    def __call__(self, step: Step) -> None:
        """Take a step."""
        before = self._sum.stage
        if self._sum.add(step):
            self._bar.set_description(step.stage)
            if step.stage in ("prove", "upload") or before == "fetch":
                self._bar.reset(step.total or None)
        if step.total and step.total != self._bar.total:
            self._bar.total = step.total
        self._bar.update(step.done)


ENDED: Final[Any] = Step("ended", done=1)  # type: ignore[arg-type]  # no stage of a run
"""The step by which a bar of jobs counts a run that has ended."""


class JobBar:
    """A bar of tqdm for many runs: how many of them have ended, and what the last step was about."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self, step: Step) -> None:
        """Take a step."""
        if step.stage == ENDED.stage:
            self._bar.update(step.done)
        else:
            self._bar.set_description(one_line(f"{step.stage} {Path(step.output).name}"))


@contextmanager
def watched(progress: bool | Progress, *, jobs: int = 0) -> Iterator[Progress]:  # noqa: FBT001  # the public keyword
    """Give the block the function that a run calls with each step: for an observer, which is the caller's function or,
    for True, a bar; one that does nothing for False.

    `jobs`: how many runs there are, whose bar counts them. Raises UsageError for other values.
    """
    if callable(progress):
        with observed(progress) as observer:
            yield observer
    elif progress is True:
        guard = Guard()
        bar: Any = guard(_bar, jobs)  # None if it cannot be made; then the guard calls nothing
        try:
            show = JobBar(bar) if jobs else Bar(bar)
            with beating(lambda: guard(bar.refresh), SECOND_HAND), observed(show, guard) as observer:
                yield observer
        finally:
            guard(lambda: bar.close())
    elif progress is False or progress is None:
        yield unwatched
    else:
        raise unlike(progress, "progress", "True, False, or a function of a lora_merge.Step")


def _bar(jobs: int) -> Any:
    """Return a bar for so many runs, or for the bytes of one."""
    from tqdm.auto import tqdm  # a widget in notebooks

    return tqdm(total=jobs, unit="job") if jobs else tqdm(unit="B", unit_scale=True, unit_divisor=1024)
