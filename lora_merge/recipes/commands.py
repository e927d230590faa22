"""The commands that write: one row each. The command line, jobs files, Python, replay, forms and help read it.

Methods of a row import what they need when they are called: the rows are read for `--help` too.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from ..command import MERGE, Command, Request, Rows
from ..merge_methods import COMBINATIONS, PARAMETER_NAMES
from ..options import JOB_OPTIONS, KEEP, OF_MERGE, OPTIONS, Option

if TYPE_CHECKING:
    from ..adapters_out.job import AdapterJob
    from ..adapters_out.report import AdapterReport
    from ..job import Job
    from ..planning.checkpoint_cache import CheckpointCache
    from ..planning.downloads import Announce
    from ..planning.plan import Plan
    from ..progress import Progress
    from ..report import Report

_ROWS: Final = {
    **JOB_OPTIONS,
    "method": OPTIONS["method"]._replace(words=(*COMBINATIONS,), metavar="NAME", group="Options",
                                         help=f"Combine by {', '.join([*COMBINATIONS][:3])}, dare …"),
    "scale": OPTIONS["scale"]._replace(help="Scale the combined change."),
    "dtype": OPTIONS["dtype"]._replace(words=("keep", "fp32", "fp16", "bf16"),
                                       help="Write tensors in this dtype; keep: as the inputs."),
    "compute_dtype": OPTIONS["compute_dtype"]._replace(
        default=None, words=("fp64", "fp32"),
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
        return option._replace(**changes) if changes else option

    return MappingProxyType({name: row(name) for name in (*names, *_SHARED)})


class MergeCommand(Command):
    """A command that merges."""

    merges = True

    def make(self, request: Request, cache: CheckpointCache | None) -> Job:
        """Return the checked job."""
        from ..job import make_job

        return make_job(request.base or "", request.adapters, request.output, **request.options)

    def plan(self, job: Job, cache: CheckpointCache | None) -> Plan:
        """Return the plan."""
        from ..planning.checkpoint_cache import CheckpointCache
        from ..planning.make_plan import plan_job

        return plan_job(job, cache or CheckpointCache())

    def run(self, job: Job, progress: Progress, cache: CheckpointCache | None) -> Report:
        """Write the checkpoint; return the report."""
        from ..engine.admission import admit
        from ..engine.merge import run

        return run(admit(self.plan(job, cache)), progress)

    def fetch(
        self, job: Job, cache: CheckpointCache | None, progress: Progress, announce: Announce | None = None
    ) -> Job:
        """Return the job on inputs of this machine."""
        from ..engine.admission import downloaded

        return downloaded(job, progress, announce)


class UnmergeCommand(MergeCommand):
    """The command that takes a merge back."""

    def make(self, request: Request, cache: CheckpointCache | None) -> Job:
        """Return the checked job, which merges at the opposite strengths."""
        from .unmerge import unmerge_job

        return unmerge_job(Path(request.base or ""), request.adapters, request.output, **request.options)

    def plan(self, job: Job, cache: CheckpointCache | None) -> Plan:
        """Return the plan, with a note that says what is not restored."""
        from ..planning.checkpoint_cache import CheckpointCache
        from .unmerge import plan_unmerge

        return plan_unmerge(job, cache or CheckpointCache())


class AdapterModule(Protocol):
    """A module of `adapters_out` that makes, plans and runs the jobs of a command."""

    def make_job(self, request: Request, cache: CheckpointCache | None, /) -> AdapterJob:
        """Return the checked job."""

    def plan(self, job: AdapterJob, cache: CheckpointCache | None, /) -> AdapterReport:
        """Return what `run` would do, from headers."""

    def run(self, job: AdapterJob, progress: Progress, cache: CheckpointCache | None, /) -> AdapterReport:
        """Write the adapter; return the report."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AdapterCommand(Command):
    """A command that writes an adapter."""

    module: Callable[[], AdapterModule]
    """Imports the module that has its functions."""

    def make(self, request: Request, cache: CheckpointCache | None) -> AdapterJob:
        """Return the checked job."""
        return self.module().make_job(request, cache)

    def plan(self, job: AdapterJob, cache: CheckpointCache | None) -> AdapterReport:
        """Return what `run` would do, from headers."""
        return self.module().plan(job, cache)

    def run(self, job: AdapterJob, progress: Progress, cache: CheckpointCache | None) -> AdapterReport:
        """Write the adapter; return the report."""
        from ..adapters_out.report import judging

        return judging(job, self.module().run(job, progress, cache))

    def fetch(
        self, job: AdapterJob, cache: CheckpointCache | None, progress: Progress, announce: Announce | None = None
    ) -> AdapterJob:
        """Return the job on inputs of this machine."""
        from ..adapters_out.job import downloaded

        return downloaded(job, cache, progress, announce)


def _combine() -> AdapterModule:
    from ..adapters_out import combine

    return combine


def _convert() -> AdapterModule:
    from ..adapters_out import convert

    return convert


def _average() -> AdapterModule:
    from ..adapters_out import average

    return average


def _extract() -> AdapterModule:
    from ..engine.torch_preload import load_library

    load_library()
    from ..adapters_out.extract import run

    return run


ADAPTERS, BASE = "adapters", "base"
"""What a job may not be able to do without."""

COMMANDS: Final[Mapping[str, Command]] = MappingProxyType({
    row.name: row
    for row in (
        MergeCommand(MERGE, "merged", "adapters", (BASE,), OPTIONS, torch="meanwhile", effort=1.0),
        UnmergeCommand(
            "unmerge", "unmerged", "adapters", (ADAPTERS, BASE),
            MappingProxyType({n: row for n, row in OPTIONS.items() if n != "method" and n not in PARAMETER_NAMES}),
            torch="meanwhile", effort=1.0,
        ),
        AdapterCommand(
            "combine", "combined", "adapters", (ADAPTERS,),
            _options("rank", *_METHOD, *_FORM[1:], "format", *_ADAPTERS,
                     rank="exact", algorithm="lora", alpha="rank", format=KEEP,
                     help={"rank": "Set the rank: 32, same, energy:0.99 … [default: exact]"}),
            torch="rarely", combines=True, module=_combine,
        ),
        AdapterCommand(
            "resize", "resized", "adapter", (ADAPTERS,),
            _options(*_FORM, "format", *_ADAPTERS, algorithm="lora", alpha=KEEP, format=KEEP, required=("rank",),
                     help={"rank": "Set the rank: 16, energy:0.99, fro:0.9, size:50MiB …"}),
            torch="meanwhile", combines=True, cuts=True, module=_combine,
        ),
        AdapterCommand(
            "convert", "converted", "adapter", (ADAPTERS,),
            _options("to", *_FORM, *_ADAPTERS, to=KEEP, algorithm=KEEP, alpha=KEEP, recorded=("alpha",),
                     help={"rank": "Bring every module to LoRA at this rank."}),
            torch="rarely", module=_convert,
        ),
        AdapterCommand(
            "average", "averaged", "snapshots", (ADAPTERS,),
            _options("weights", "rank", "ema", "ema_to", "sigma_rel", "musubi_t", "space", "alpha", "format",
                     *_ADAPTERS[1:], rank="same", space="delta", alpha="rank", format=KEEP, recorded=("rank",),
                     help={"weights": "Weight the snapshots: 0.7,0.3. [default: equal]",
                           "rank": "Set the rank. [default: same as the snapshots]"}),
            torch="meanwhile", combines=True, module=_average,
        ),
        AdapterCommand(
            "extract", "extracted", "checkpoints", (ADAPTERS, BASE),
            _options(*_FORM, "others", "factor", "format", rank=32, algorithm="lora", alpha="rank", others="diff",
                     factor=-1, format="auto", recorded=("rank",),
                     help={"rank": "Set the rank: 32, energy:0.99, noise … [default: 32]"}),
            torch="first", effort=2.5, module=_extract,
        ),
    )
})  # fmt: skip
"""Name → command."""


def command_of(output: Path) -> Command:
    """Return the command that a file or folder says it was made by; `merge` for one that names none."""
    from ..files.checkpoint import open_checkpoint
    from ..planning.recipe import KEY, parsed

    name = (parsed(open_checkpoint(output).metadata.get(KEY, "")) or {}).get("command")
    return COMMANDS[name if isinstance(name, str) and name in COMMANDS else MERGE]


class Replay(NamedTuple):
    """What writes an output a second time."""

    run: Callable[[Progress], Any]
    """Writes it; returns the report."""
    plan: Plan | None
    """That of a merge."""


def replay_of(written: Path, output: str | Path, search: Sequence[Path] = (), **options: Any) -> Replay:
    """Return what writes an output a second time, under another name, by the command of its recipe."""
    from .replay import job_again, plan_again

    command = command_of(written)
    if command.merges:
        from ..engine.admission import admit
        from ..engine.merge import run

        plan = admit(plan_again(written, output, search, **options))
        return Replay(partial(run, plan), plan)
    job = job_again(command, written, output, search, **options)
    return Replay(lambda progress: command.run(job, progress, None), None)


def proof_of(
    output: Path, base: str | Path | None = None, adapters: Sequence[Any] = (), **options: Any
) -> dict[str, Any]:
    """Return the proof that an output is what its recipe describes, or the merge of `base` and `adapters`; see
    `replay.prove`."""
    from .replay import prove, prove_adapter

    if base is not None or adapters or (command := command_of(output)).merges:
        return prove(output, base, adapters, **options)
    return prove_adapter(command, output, **options)


def run_request(request: Request, progress: bool | Progress = False) -> Any:  # noqa: FBT001, FBT002  # as the caller's
    """Run a command, which Ctrl-C ends without a trace; return its report."""
    from ..planning.checkpoint_cache import CheckpointCache
    from ..process import interruptible
    from ..progress import watched

    with interruptible(), watched(progress) as watcher:
        command, cache = request.command, CheckpointCache()
        job = command.fetch(command.make(request, cache), cache, watcher)
        return command.run(job, watcher, cache)


def _named(name: str) -> Command:
    return COMMANDS[name]


for _kind in (MergeCommand, UnmergeCommand, AdapterCommand):  # jobs go to other processes with their row
    copyreg.pickle(_kind, lambda command: (_named, (command.name,)))
