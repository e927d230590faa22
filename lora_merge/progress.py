"""The steps of a run: the functions that do the work report them, and whoever shows progress adds them up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, TypeAlias

Stage: TypeAlias = Literal["load", "merge", "flush", "prove"]
"""`load`: inputs are opened and torch is imported. `merge`: bytes are written. `flush`: the disk takes the last of
them. `prove`: the written file is read again."""

APART: Final = 0.1
"""Seconds between two steps that `Gathered` passes on."""


class Step(NamedTuple):
    """Work that was just done, or, with `done` 0, a stage that begins."""

    stage: Stage
    output: str = ""  # the output that it belongs to
    done: int = 0  # since the step before: bytes written (merge), bytes of tensors that were looked at (prove)
    total: int = 0  # of the stage, in the same unit; 0: not known
    limit: str = ""  # what the merge spends most time on: start (torch), read, hash, fold or write


Progress: TypeAlias = Callable[[Step], object]
"""A function that is called with each step, from the thread that does it."""


def unwatched(_: Step) -> None:
    """Do nothing with a step."""


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
