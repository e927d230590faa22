"""The commands that write adapters: one row each. The command line, jobs files, Python, replay and help read it.

Functions of a row import what they need when they are called: the rows are read for `--help` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

from ..adapter_options import ADAPTER_OPTIONS, KEEP, OF_MERGE, Request, Rows
from ..errors import MergeError
from ..merge_methods import COMBINATIONS
from ..method_parameters import PARAMETER_NAMES
from ..options import OPTIONS, Option

if TYPE_CHECKING:
    from ..planning.checkpoint_cache import CheckpointCache
    from ..progress import Progress
    from .job import AdapterJob
    from .report import AdapterReport

Inputs: TypeAlias = Literal["adapters", "adapter", "checkpoints"]
"""What a command reads: some adapters, one adapter, or a base and the tuned checkpoint, which takes the place of one
adapter."""

Torch: TypeAlias = Literal["first", "beside", "rarely"]
"""When a process that only runs the command loads torch: before anything else, beside the opening of inputs, or only
if a layer needs it."""

Make: TypeAlias = "Callable[[Request, Rows, CheckpointCache | None], AdapterJob]"


class Runner(Protocol):
    """The module that plans and runs a command. `cache`: the checkpoints that are open."""

    def plan(self, job: AdapterJob, cache: CheckpointCache | None, /) -> AdapterReport:
        """Return what `run` would do, from headers."""
        ...

    def run(self, job: AdapterJob, progress: Progress, cache: CheckpointCache | None, /) -> AdapterReport:
        """Write the output."""
        ...


@dataclass(frozen=True)
class Command:
    """A command that writes an adapter."""

    name: str
    done: str  # of its report: "combined"
    inputs: Inputs
    options: Rows  # with the defaults that they have here; None: no rule, or a value that depends on the inputs
    make: Make  # request → checked job
    runner: Callable[[], Runner]
    torch: Torch
    effort: float = 0.25
    """The time for a byte of the weights in fp64, relative to a byte that a merge writes. Measured with adapters of
    SDXL in fp16."""

    def job(
        self,
        adapters: Any,
        output: str | Path | None,
        base: str | Path | None,
        options: Mapping[str, Any],
        cache: CheckpointCache | None = None,
    ) -> AdapterJob:
        """Return the checked job; UsageError or FitError for what is wrong.

        `cache`: the checkpoints that are open. With one, headers are read where they decide the output's name.
        """
        return self.make(Request(self.name, adapters, output, base, options), self.options, cache)

    def plan(self, job: AdapterJob, cache: CheckpointCache | None) -> AdapterReport:
        """Return what `run` would do, from headers."""
        return self.runner().plan(job, cache)

    def run(self, job: AdapterJob, progress: Progress, cache: CheckpointCache | None) -> AdapterReport:
        """Write the output; return the report, with what it advises for the job."""
        from .report import judging

        return judging(job, self.runner().run(job, progress, cache))


_ROWS: Final = {
    **OPTIONS, **ADAPTER_OPTIONS,
    "method": replace(OPTIONS["method"], words=(*COMBINATIONS,), metavar="NAME", group="Options",
                      help=f"Combine by {', '.join([*COMBINATIONS][:3])}, dare …"),
    "scale": replace(OPTIONS["scale"], help="Scale the combined change."),
    "dtype": replace(OPTIONS["dtype"], words=("keep", "fp32", "fp16", "bf16"),
                     help="Write tensors in this dtype; keep: as the inputs."),
    "compute_dtype": replace(
        OPTIONS["compute_dtype"], default=None, words=("fp64", "fp32"),
        help="Compute formulas in this dtype. [default: fp64, or fp32 if that loses nothing]",
    ),
    "musubi_t": Option("musubi_t", "switch", default=False, recorded="given",
                       help="Count the steps of a post-hoc EMA as musubi-tuner does.", in_batch=False, group=""),
}  # fmt: skip
"""The options of `merge` and of adapters, with the help that they have for these commands."""

_METHOD: Final = ("method", *PARAMETER_NAMES)
_FORM: Final = ("rank", "conv_rank", "max_rank", "rank_for", "algorithm", "alpha")
_SHARED: Final = (
    "include", "exclude", "dtype", "compute_dtype", "unmatched", "map", "cache", "overwrite", "device",
    "max_memory", "max_vram", "verify",
)  # fmt: skip
_ADAPTERS: Final = ("strength", "strength_for", "setting")


def _options(
    *names: str,
    recorded: tuple[str, ...] = (),
    required: tuple[str, ...] = (),
    help: Mapping[str, str] = MappingProxyType({}),
    **defaults: Any,
) -> Rows:
    """Return options by name, in the order of `--help`, with defaults and help of one command.

    `recorded`: the options that its recipe records even if they have the default. `required`: the ones that it needs.
    """

    def row(name: str) -> Option:
        option = _ROWS[name]
        changes: dict[str, Any] = {"default": defaults[name]} if name in defaults else {}
        changes |= {"help": help[name]} if name in help else {}
        if name not in OF_MERGE:
            changes |= {"recorded": "always" if name in recorded else "given", "required": name in required}
        return replace(option, **changes) if changes else option

    return MappingProxyType({name: row(name) for name in (*names, *_SHARED)})


def _adapter_job(request: Request, rows: Rows, _: CheckpointCache | None) -> AdapterJob:
    from .job import adapter_job

    return adapter_job(request, rows)


def _conversion_job(request: Request, rows: Rows, _: CheckpointCache | None) -> AdapterJob:
    from .job import conversion_job

    return conversion_job(request, rows)


def _average_job(request: Request, rows: Rows, _: CheckpointCache | None) -> AdapterJob:
    from .average import average_job

    return average_job(request, rows)


def _extraction_job(request: Request, rows: Rows, cache: CheckpointCache | None) -> AdapterJob:
    from .job import extraction_job

    job = extraction_job(request, rows)
    if cache is not None:
        from .extract.run import with_format

        with suppress(MergeError):  # the plan raises it
            job = with_format(job, request.output, cache)
    return job


def _combine() -> Runner:
    from . import combine

    return combine


def _convert() -> Runner:
    from . import convert

    return convert


def _average() -> Runner:
    from . import average

    return average


def _extract() -> Runner:
    from .extract import run

    return run


COMMANDS: Final[Mapping[str, Command]] = MappingProxyType({
    row.name: row
    for row in (
        Command(
            "combine", "combined", "adapters",
            _options("rank", *_METHOD, *_FORM[1:], "format", *_ADAPTERS,
                     rank="exact", algorithm="lora", alpha="rank", format=KEEP,
                     help={"rank": "Set the rank: 32, same, energy:0.99 … [default: exact]"}),
            _adapter_job, _combine, torch="rarely",
        ),
        Command(
            "resize", "resized", "adapter",
            _options(*_FORM, "format", *_ADAPTERS, algorithm="lora", alpha=KEEP, format=KEEP, required=("rank",),
                     help={"rank": "Set the rank: 16, energy:0.99, fro:0.9, size:50MiB …"}),
            _adapter_job, _combine, torch="beside",
        ),
        Command(
            "convert", "converted", "adapter",
            _options("to", *_FORM, *_ADAPTERS, to=KEEP, algorithm=KEEP, alpha=KEEP, recorded=("alpha",),
                     help={"rank": "Bring every module to LoRA at this rank."}),
            _conversion_job, _convert, torch="rarely",
        ),
        Command(
            "average", "averaged", "adapters",
            _options("weights", "rank", "ema", "ema_to", "sigma_rel", "musubi_t", "space", "alpha", "format",
                     *_ADAPTERS[1:], rank="same", space="delta", alpha="rank", format=KEEP, recorded=("rank",),
                     help={"weights": "Weight the snapshots: 0.7,0.3. [default: equal]",
                           "rank": "Set the rank. [default: same as the snapshots]"}),
            _average_job, _average, torch="beside",
        ),
        Command(
            "extract", "extracted", "checkpoints",
            _options(*_FORM, "others", "factor", "format", rank=32, algorithm="lora", alpha="rank", others="diff",
                     factor=-1, format="auto", recorded=("rank",),
                     help={"rank": "Set the rank: 32, energy:0.99, noise … [default: 32]"}),
            _extraction_job, _extract, torch="first", effort=2.5,
        ),
    )
})  # fmt: skip
"""Name → command."""
