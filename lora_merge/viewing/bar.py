"""A progress bar for Python programs and notebooks; the command line draws its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..options import unlike
from ..progress import Progress, Step, unwatched


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


@contextmanager
def watched(progress: bool | Progress) -> Iterator[Progress]:  # noqa: FBT001  # the public keyword
    """Give the block what a run calls with its steps: the caller's function, a bar for True, nothing for False.

    Raises UsageError for other values.
    """
    if callable(progress):
        yield progress
    elif progress is True:
        from tqdm.auto import tqdm  # a widget in notebooks

        with tqdm(unit="B", unit_scale=True, unit_divisor=1024) as bar:
            yield Bar(bar)
    elif progress is False or progress is None:
        yield unwatched
    else:
        raise unlike(progress, "progress", "True, False, or a function of a lora_merge.Step")
