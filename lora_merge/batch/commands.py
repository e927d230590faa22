"""The commands of a jobs file that write adapters: what each of them makes of a job, plans and runs. Torch is imported
where one is planned.

A job of such a command is kept as a Request, plain data that goes to worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ..engine.torch_preload import load_library
from ..errors import MergeError, UsageError
from ..job import Adapter, Job
from ..paths import with_ending
from ..text import plural

if TYPE_CHECKING:
    from ..adapters_out.job import AdapterJob
    from ..adapters_out.report import AdapterReport
    from ..progress import Progress

MERGE: Final = "merge"
"""The command of a job that names none."""

UNMERGE: Final = "unmerge"
"""The command of a job that takes adapters out of its base: a merge at the opposite strengths."""


@dataclass(frozen=True)
class Request:
    """One job of a command that writes an adapter."""

    command: str
    adapters: tuple[Adapter, ...]
    base: Path | None
    output: str
    options: tuple[tuple[str, Any], ...]

    def task(self, bounds: Job | None = None) -> Task:
        """Return the checked job with what plans and runs it. `bounds`: whose limit on memory and word on replacing the
        output hold instead. UsageError or FitError for what is wrong."""
        options = dict(self.options)
        if bounds is not None:
            options |= {"max_memory": bounds.max_memory, "overwrite": bounds.overwrite}
        if self.command in ONE and len(self.adapters) != 1:
            raise UsageError(
                f"{self.command} takes one adapter", plural(len(self.adapters), "adapter"), "write a job for each"
            )
        if self.command in RULED and "rank" not in options:
            raise UsageError(f"{self.command} needs a rule for the rank", "rank", "write rank: 16 or energy:0.99")
        load_library()
        return COMMANDS[self.command](self, options)

    @property
    def inputs(self) -> tuple[Path, ...]:
        """The paths that are read."""
        return (*(a.path for a in self.adapters), *([] if self.base is None else [self.base]))


@dataclass(frozen=True)
class Task:
    """A checked job, and what plans it from headers and runs it."""

    job: AdapterJob
    plan: Callable[[], AdapterReport]
    run: Callable[[Progress], AdapterReport]


def _as_it_is(request: Request, options: Mapping[str, Any]) -> Task:
    """Return the task of a command that takes adapters as they are given."""
    return _adapter_task(request, request.adapters, options)


def _adapter_task(request: Request, adapters: Sequence[Adapter], options: Mapping[str, Any]) -> Task:
    from ..adapters_out.job import make_adapter_job

    job = make_adapter_job(request.command, adapters, request.output, request.base, options)

    def does(what: str, *progress: Progress) -> AdapterReport:
        from ..adapters_out import format_option

        found: AdapterReport = getattr(format_option, what)(job, *progress)
        return found

    return Task(job, partial(does, "plan"), partial(does, "run"))


def _conversion(request: Request, options: Mapping[str, Any]) -> Task:
    from ..adapters_out.convert import make_conversion, plan, run

    made = make_conversion(request.adapters[0], request.output, request.base, options)
    return Task(made.job, partial(plan, made), partial(run, made))


def _extraction(request: Request, options: Mapping[str, Any]) -> Task:
    from ..adapters_out.extract.extract_job import make_extraction
    from ..adapters_out.extract.run import plan, prepared, run
    from ..planning.checkpoint_cache import CheckpointCache

    if request.base is None:
        raise UsageError("extract needs a base", "base", "name the checkpoint before the training")
    own = {name: value for name, value in options.items() if name != "strength_for"}
    inputs = request.base, request.adapters[0].path, request.output, own
    made = make_extraction(*inputs)
    if made.to is None and with_ending(made.job.output) != made.job.output:  # a file or a folder, as the base says
        with suppress(MergeError):  # the plan says what is wrong
            made = prepared(*inputs, CheckpointCache())
    return Task(made.job, partial(plan, made), partial(run, made))


def _average(request: Request, options: Mapping[str, Any]) -> Task:
    from ..adapters_out.average import make_average

    made = make_average(request.adapters, request.output, request.base, options)
    return Task(made.job, made.plan, made.run)


COMMANDS: Final[Mapping[str, Callable[[Request, Mapping[str, Any]], Task]]] = MappingProxyType(
    {"combine": _as_it_is, "resize": _as_it_is, "convert": _conversion, "extract": _extraction, "average": _average}
)
"""Command → function that returns the task of a request. Its options are in `TAKES` (adapter_options.py)."""

EFFORT: Final[Mapping[str, float]] = MappingProxyType({"convert": 0.25, "extract": 5.0})
"""Command → the time that it takes for a byte of the weights, relative to a byte that a merge writes; 1 for the others.
Measured with adapters of SDXL."""

RULED: Final = frozenset({"resize"})
"""Commands that have no rank of their own."""

ONE: Final = frozenset({"resize", "convert", "extract"})
"""Commands of one adapter; that of `extract` is the tuned checkpoint."""
