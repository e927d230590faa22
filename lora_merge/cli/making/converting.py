"""The commands that write adapters in another form: convert and average. They decide nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..parameters import read, with_options
from ..values import named_adapter, named_parts, with_strengths
from .combining import (
    SHARED,
    Algorithm,
    Alpha,
    AsJson,
    Base,
    Debug,
    DryRun,
    MaxRank,
    Output,
    Quiet,
    ReportTo,
    Verbose,
    adapter_job,
    as_number,
    carry_out,
    show,
)

To = Annotated[str, typer.Option(metavar="FORMAT", help="kohya, lycoris, onetrainer, comfy, diffusers or peft.")]
Include = Annotated[list[str] | None, typer.Option(metavar="COMPONENT", help="Write only these; repeatable.")]


def add_to(app: typer.Typer) -> None:
    """Make them commands of the application."""
    for command in (convert, average):
        app.command()(command)


@with_options(*SHARED, before="dry_run")
def convert(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER[:STRENGTH]", help="A file or a PEFT folder.")],
    to: To,
    output: Output = None,
    base: Base = None,
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="Bring every module to LoRA at a rank.")] = None,
    max_rank: MaxRank = None,
    algorithm: Algorithm = None,
    alpha: Alpha = None,
    include: Include = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    report: ReportTo = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Write an adapter in the dialect of another program."""
    from ...adapters_out.convert import make_conversion, plan, run

    strength_for, found = options.pop("strength_for") or (), read(options, 1)
    (given,), parts = named_parts(with_strengths([named_adapter(adapter)], found), strength_for)
    own = {"to": to, "rank": rank, "max_rank": max_rank, "algorithm": algorithm, "alpha": alpha, "include": include}
    own["max_rank"] = None if max_rank is None else as_number("max_rank", max_rank)
    stated = {name: value for name, value in own.items() if value not in (None, [], ())}
    task = make_conversion(given, output, base, {**found, "strength_for": parts, **stated})
    show(task.job, lambda: plan(task) if dry_run else run(task), report, as_json=as_json, quiet=quiet, verbose=verbose)


@with_options(*(name for name in SHARED if name != "strength"), before="dry_run")
def average(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Files, the oldest first.")],
    output: Output = None,
    base: Base = None,
    weights: Annotated[str | None, typer.Option(metavar="W,W…", help="One number for each. Default: equal.")] = None,
    ema: Annotated[float | None, typer.Option(metavar="BETA", help="Exponential moving average.")] = None,
    ema_to: Annotated[float | None, typer.Option(metavar="BETA", help="Its last step; linear in between.")] = None,
    sigma_rel: Annotated[float | None, typer.Option(metavar="X", help="Width of a post-hoc EMA, up to 0.288.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="Default: same, the snapshots' own.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    report: ReportTo = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Average snapshots of one training: equal weights, given ones, or an EMA."""
    from ...adapters_out.average.weights import average_weights
    from ...adapters_out.rank_rules import SAME

    stated = {"ema": ema, "ema_to": ema_to, "sigma_rel": sigma_rel}
    numbers = {name: as_number(name, value) for name, value in stated.items() if value is not None}
    given = [as_number("weights", w) for w in weights.split(",")] if weights else None
    found = average_weights(len(snapshots), weights=given, **numbers)
    named = [f"{path}:{weight!r}" for path, weight in zip(snapshots, found, strict=True)]
    job = adapter_job("average", named, output, base, {"rank": rank or SAME, "rank_for": None}, options)
    carry_out(job, report, dry_run=dry_run, as_json=as_json, quiet=quiet, verbose=verbose)
