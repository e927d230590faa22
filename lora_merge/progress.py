"""The steps of a run: the functions that do the work report them, and whoever shows progress adds them up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from .options import unlike
from .text import html_table, one_line

Stage: TypeAlias = Literal["load", "merge", "make", "flush", "prove", "look"]
"""`load`: inputs are opened and torch is imported. `merge`: bytes are merged and written. `make`: the layers of an
adapter are computed. `flush`: the disk takes the last of them. `prove`: the written file is read again. `look`: files
are measured or compared."""

APART: Final = 0.1
"""Seconds between two steps of work that has many more: those of `Gathered`, and those within a window of a merge."""


SECOND_HAND: Final = 0.5
"""Seconds between two redraws of a bar of tqdm that no step moves: the elapsed time in it goes on."""


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
        thread.join()


class Step(NamedTuple):
    """Work that was just done, or, with `done` 0, a stage that begins.

    Attributes:
        stage: "load", "merge", "make", "flush", "prove" or "look".
        output: The output that it belongs to.
        done: Since the step before: bytes merged and written (merge), or of the weights that were looked at (make,
            prove, look).
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
"""A function that is called with each step, from the thread that does it."""


def unwatched(_: Step) -> None:
    """Do nothing with a step."""


def counted(progress: Progress, stage: Stage, output: str, total: int) -> Callable[[int], object]:
    """Begin a stage; return a function that reports so many bytes as done, in all not more than `total`."""
    left = total
    progress(Step(stage, output, total=total))

    def told(count: int) -> None:
        nonlocal left
        left -= (done := min(count, left))
        progress(Step(stage, output, done, total))

    return told


Counting: TypeAlias = Callable[[Stage, int], Callable[[int], object]]
"""Begins a stage of so many bytes, and returns a function that reports how many of them were just done."""


class Gathered:
    """Adds up steps of one stage and passes them on ten times a second: a step costs a message to another process."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._clock = progress, clock
        self._waiting: dict[tuple[str, str], Step] = {}
        self._passed_on = -APART

    def __call__(self, step: Step) -> None:
        """Take a step; a stage that begins is passed on at once."""
        key = step.stage, step.output
        before = self._waiting.get(key)
        self._waiting[key] = step if before is None else step._replace(done=before.done + step.done)
        if not step.done or self._clock() - self._passed_on >= APART:
            self.flush()

    def flush(self) -> None:
        """Pass on what has been added up."""
        self._passed_on = self._clock()
        for step in self._waiting.values():
            self._progress(step)
        self._waiting.clear()


class Bar:
    """A bar of tqdm for one run: the bytes written, then the bytes proven."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._stage = bar, ""

    def __call__(self, step: Step) -> None:
        """Take a step."""
        if step.stage != self._stage:
            self._stage = step.stage
            self._bar.set_description(step.stage)
            if step.stage == "prove":
                self._bar.reset(step.total or None)
        if step.total and step.total != self._bar.total:
            self._bar.total = step.total
        self._bar.update(step.done)


class JobBar:
    """A bar of tqdm for many runs: how many of them have ended, and what the last step was about."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self, step: Step) -> None:
        """Take a step."""
        self._bar.set_description(one_line(f"{step.stage} {Path(step.output).name}"))

    def end(self) -> None:
        """Count a run that has ended."""
        self._bar.update()


@contextmanager
def watched(progress: bool | Progress, *, jobs: int = 0) -> Iterator[Progress]:  # noqa: FBT001  # the public keyword
    """Give the block the function that a run calls with each step: the caller's own, a bar for True, one that does
    nothing for False.

    `jobs`: how many runs there are, whose bar counts them. Raises UsageError for other values.
    """
    if callable(progress):
        yield progress
    elif progress is True:
        from tqdm.auto import tqdm  # a widget in notebooks

        made = tqdm(total=jobs, unit="job") if jobs else tqdm(unit="B", unit_scale=True, unit_divisor=1024)
        with made as bar, beating(bar.refresh, SECOND_HAND):
            yield JobBar(bar) if jobs else Bar(bar)
    elif progress is False or progress is None:
        yield unwatched
    else:
        raise unlike(progress, "progress", "True, False, or a function of a lora_merge.Step")
