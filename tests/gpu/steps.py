"""The steps of the checklist: each runs programs, and returns figures by the names of predictions.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.gpu.programs import Figures, printed
from tests.gpu.rest import rest
from tests.gpu.rightness import machine, races, right, sanitizer, whole
from tests.gpu.speed import Part, flux, sdxl

LEAST: Final = 5.0
"""Seconds; with less a part is not begun."""

MINUTES: Final = 29.0
"""Of all steps."""


class Step(NamedTuple):
    """A chapter of the checklist, and the minutes that it may take where all steps have `MINUTES`."""

    name: str
    minutes: float
    parts: Callable[[Path], Iterator[Part]]
    """Folder for data → parts, those that tell most first; one that fails leaves the figures of the others."""


def probe(_data: Path) -> Iterator[Part]:
    """What the device and the link can do."""
    yield lambda seconds: printed("tests.gpu.probe", seconds=seconds)


def svd(_data: Path) -> Iterator[Part]:
    """What large SVDs take."""
    yield lambda seconds: printed("tests.gpu.probe", "svd", seconds=seconds)


STEPS: Final[Sequence[Step]] = (
    Step("machine", 1, machine), Step("right", 5, right), Step("probe", 1.5, probe), Step("sdxl", 4.5, sdxl),
    Step("whole", 4, whole), Step("rest", 3.5, rest), Step("races", 1.5, races), Step("flux", 4.5, flux),
    Step("sanitizer", 2, sanitizer), Step("svd", 1.5, svd),
)  # fmt: skip
"""Those that tell most first, as a machine may be taken away at any time."""


def carry_out(
    steps: Sequence[Step], data: Path, minutes: float = MINUTES, say: Callable[[str], object] = print,
    keep: Callable[[Figures], object] = lambda _: None,
) -> Figures:  # fmt: skip
    """Run the steps in so many minutes; a part that fails is told, and the others go on. Each step may take its share of
    the time that is left. `keep` is given the figures so far after each part."""
    figures: Figures = {}
    end = time.monotonic() + 60 * minutes
    for number, step in enumerate(steps):
        began, errors = time.monotonic(), list[str]()
        stop = began + (end - began) * step.minutes / sum(s.minutes for s in steps[number:])
        figures[f"{step.name}_errors"] = errors
        for part in _parts(step, data, stop):
            try:
                figures |= part(stop - time.monotonic())
            except Exception as e:  # noqa: BLE001  # whatever it is, the rest of the time is worth more
                figures |= getattr(e, "figures", {})
                errors.append(f"{type(e).__name__}: {e}"[:2000])
            keep(figures)
        say(f"{step.name}: {time.monotonic() - began:.0f} s" + "".join(f"\n  {e}" for e in errors))
    return figures


def _parts(step: Step, data: Path, stop: float) -> Iterator[Part]:
    """Yield the parts of a step; in place of one that cannot be made, or has no time left, one that raises the error."""

    def failed(e: Exception) -> Part:
        def part(_: float) -> Figures:
            raise e

        return part

    late = failed(TimeoutError("no time was left for some parts"))
    if time.monotonic() > stop - LEAST:
        yield late
        return
    try:
        for part in step.parts(data):
            if time.monotonic() > stop - LEAST:
                yield late
                return
            yield part
    except Exception as e:  # noqa: BLE001  # such as no room for files
        yield failed(e)
