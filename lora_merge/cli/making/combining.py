"""The commands that write adapters: combine and resize. They decide nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import UsageError
from ..habits import expanded
from ..parameters import read, with_options
from ..text import echo, leave_lost_folder, silent
from ..values import named_adapter, named_parts, with_strengths

if TYPE_CHECKING:
    from ...adapters_out.job import AdapterJob
    from ...adapters_out.report import AdapterReport

SHARED = ("dtype", "strength", "strength_for", "unmatched", "map", "setting", "overwrite", "max_memory", "verify")

Base = Annotated[str | None, typer.Option(metavar="BASE", help="The model, where a formula or a name needs it.")]
ConvRank = Annotated[str | None, typer.Option(metavar="RULE", help="The rule for convolutions.")]
MaxRank = Annotated[int | None, typer.Option(metavar="N", help="A ceiling for every rule.")]
RankFor = Annotated[list[str] | None, typer.Option(metavar="PART=RULE", help="The rule for a part; repeatable.")]
Algorithm = Annotated[
    str | None, typer.Option(metavar="WAY", help="lora, full (whole matrices) or auto. Default: lora.")
]
Alpha = Annotated[str | None, typer.Option(metavar="ALPHA", help="rank (alpha = rank), keep, or a number.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Plan only, from headers; write nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Report as one JSON object on stdout.")]
ReportTo = Annotated[str | None, typer.Option(metavar="PATH", help="Also write the JSON report to this file.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no report; notes go to stderr.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Name every layer.")]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks.")]
Output = Annotated[str | None, typer.Option("-o", "--output", metavar="PATH", help="File to write.")]


def add_to(app: typer.Typer) -> None:
    """Make them commands of the application."""
    for command in (combine, resize):
        app.command()(command)


@with_options(*SHARED, before="dry_run")
def combine(
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER[:STRENGTH]...", help="Files or PEFT folders.")],
    output: Output = None,
    base: Base = None,
    method: Annotated[str | None, typer.Option(metavar="NAME", help="sum, mean, ties, dare … Default: sum.")] = None,
    density: Annotated[float | None, typer.Option(metavar="X", help="Share of entries that ties, dare … keep.")] = None,
    gamma: Annotated[
        float | None, typer.Option(metavar="X", help="Share of largest entries that breadcrumbs drop.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(metavar="X", help="Half the range of della's densities.")] = None,
    t: Annotated[
        float | None, typer.Option(metavar="X", help="Place on the arc of slerp: 0 is the first adapter.")
    ] = None,
    elect: Annotated[str | None, typer.Option(metavar="HOW", help="sum or count: what decides a sign.")] = None,
    normalise: Annotated[str | None, typer.Option(metavar="HOW", help="count, weight or none.")] = None,
    agree: Annotated[
        int | None, typer.Option(metavar="N", help="How many adapters consensus needs. Default: all.")
    ] = None,
    scale: Annotated[float | None, typer.Option(metavar="X", help="Multiplies the result.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of random entries. Default: 0.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="32, same, energy:0.99 … Default: exact.")] = None,
    conv_rank: ConvRank = None,
    max_rank: MaxRank = None,
    rank_for: RankFor = None,
    algorithm: Algorithm = None,
    alpha: Alpha = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    report: ReportTo = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Combine adapters into one adapter: exactly, or at a rank."""
    own = {"method": method, "density": density, "gamma": gamma, "epsilon": epsilon, "t": t, "elect": elect,
           "normalise": normalise, "agree": agree, "scale": scale, "seed": seed, "rank": rank, "conv_rank": conv_rank,
           "max_rank": max_rank, "rank_for": rank_for, "algorithm": algorithm, "alpha": alpha}  # fmt: skip
    job = adapter_job("combine", adapters, output, base, own, options)
    carry_out(job, report, dry_run=dry_run, as_json=as_json, quiet=quiet, verbose=verbose)


@with_options(*SHARED, before="dry_run")
def resize(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER[:STRENGTH]", help="A file or a PEFT folder.")],
    rank: Annotated[str, typer.Option(metavar="RULE", help="16, energy:0.99, fro:0.9, size:50MiB …")],
    output: Output = None,
    base: Base = None,
    conv_rank: ConvRank = None,
    max_rank: MaxRank = None,
    rank_for: RankFor = None,
    algorithm: Algorithm = None,
    alpha: Alpha = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    report: ReportTo = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Write an adapter again at another rank: the best one of that rank."""
    own = {"rank": rank, "conv_rank": conv_rank, "max_rank": max_rank, "rank_for": rank_for, "algorithm": algorithm,
           "alpha": alpha}  # fmt: skip
    job = adapter_job("resize", [adapter], output, base, own, options)
    carry_out(job, report, dry_run=dry_run, as_json=as_json, quiet=quiet, verbose=verbose)


def adapter_job(
    command: str, adapters: list[str], output: str | None, base: str | None, own: dict[str, Any],
    options: dict[str, Any],
) -> AdapterJob:  # fmt: skip
    """Return the job that the arguments describe."""
    from ...adapters_out.job import make_adapter_job, strings

    given = [named_adapter(a) for a in expanded(adapters)]
    strength_for, found = options.pop("strength_for") or (), read(options, len(given))
    named, parts = named_parts(with_strengths(given, found), strength_for)
    if own["rank_for"]:
        own["rank_for"] = strings(own["rank_for"])
    stated = {name: as_number(name, value) for name, value in own.items() if value not in (None, [], ())}
    return make_adapter_job(command, named, output, base, {**found, "strength_for": parts, **stated})


NUMBERS = {**dict.fromkeys(("density", "gamma", "epsilon", "t", "scale"), float),
           **dict.fromkeys(("weights", "ema", "ema_to", "sigma_rel"), float),
           **dict.fromkeys(("agree", "seed", "max_rank"), int)}  # fmt: skip


def as_number(name: str, value: Any) -> Any:
    """Return the value of an option, which arrives as text (`take_text`); UsageError if it is not a number."""
    if name not in NUMBERS:
        return value
    try:
        return NUMBERS[name](value)
    except ValueError as e:
        flag = f"--{name.replace('_', '-')}"
        raise UsageError(f"{str(value)[:40]!r} is not a number", flag, "use a number such as 1") from e


def carry_out(
    job: AdapterJob, report: str | None, *, dry_run: bool, as_json: bool, quiet: bool, verbose: bool
) -> None:  # fmt: skip
    """Run or plan a job of the room's main run, and print its report."""
    from ...adapters_out.run import plan, run

    show(job, lambda: plan(job) if dry_run else run(job), report, as_json=as_json, quiet=quiet, verbose=verbose)


def show(
    job: AdapterJob, do: Callable[[], AdapterReport], report: str | None, *, as_json: bool, quiet: bool, verbose: bool
) -> None:  # fmt: skip
    """Run or plan a job with `do`, and print its report."""
    from ..streams import reporting

    with reporting(report) as told:
        if told is not None:
            told.protect([a.path for a in job.adapters], [job.output])
        leave_lost_folder()
        if told is not None:
            told.begin()
        done = do()
        if told is not None:
            told.replace(done.to_json())
    if as_json:
        echo(done.to_json())
        return
    say = silent if quiet else echo
    for line in lines(done, verbose=verbose):
        say(line)
    for note in done.notes:
        echo(f"note: {note}", err=quiet)


def lines(done: AdapterReport, *, verbose: bool) -> list[str]:
    """Return what people read of a report."""
    from ...text import size

    found = [f"adapter  {name}: {facts['modules']} modules change {facts['layers']} layers, {facts['strength']:g}×"
             for name, facts in done.coverage.items()]  # fmt: skip
    if verbose:
        for name, layer in done.layers.items():
            lost = "" if done.planned else f", residual {layer['residual']:.3g}"
            found.append(f"  {name}: {layer['algorithm']}, rank {layer['rank']}{lost}")
    found.append(f"output   {done.output}: {size(done.written)}, {done.dtype}, {len(done.layers)} layers")
    found.append(f"  {done.summary}")
    if done.verified:
        found.append(f"verified {done.verified['recomputed']} of {done.verified['layers']} layers again in float64: "
                     f"worst residual {done.verified['worst_residual']:.3g}")  # fmt: skip
    return found
