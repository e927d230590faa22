"""The commands that write adapters in another form: convert. They decide nothing."""

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
    show,
)

To = Annotated[str, typer.Option(metavar="FORMAT", help="kohya, lycoris, onetrainer, comfy, diffusers or peft.")]
Include = Annotated[list[str] | None, typer.Option(metavar="COMPONENT", help="Write only these; repeatable.")]


def add_to(app: typer.Typer) -> None:
    """Make them commands of the application."""
    app.command()(convert)


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
    stated = {name: value for name, value in own.items() if value not in (None, [], ())}
    task = make_conversion(given, output, base, {**found, "strength_for": parts, **stated})
    show(task.job, lambda: plan(task) if dry_run else run(task), report, as_json=as_json, quiet=quiet, verbose=verbose)
