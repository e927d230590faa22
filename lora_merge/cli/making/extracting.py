"""The command that makes an adapter of the difference of two checkpoints. It decides nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..parameters import read, with_options
from .combining import (
    SHARED,
    Alpha,
    AsJson,
    ConvRank,
    Debug,
    DryRun,
    MaxRank,
    Output,
    Quiet,
    RankFor,
    ReportTo,
    Verbose,
    as_number,
    show,
)

Way = Annotated[str | None, typer.Option(metavar="WAY", help="lora, full or auto. Default: lora.")]
Format = Annotated[
    str | None, typer.Option(metavar="FORMAT", help="kohya, lycoris, onetrainer, comfy, diffusers or peft.")
]
Others = Annotated[str | None, typer.Option(metavar="WHAT", help="Biases, norms: diff, skip or error. Default: diff.")]
Include = Annotated[list[str] | None, typer.Option(metavar="PART", help="Compare only these; re:REGEX of base keys.")]
Exclude = Annotated[list[str] | None, typer.Option(metavar="PART", help="Leave these out; re:REGEX of base keys.")]


def add_to(app: typer.Typer) -> None:
    """Make it a command of the application."""
    app.command()(extract)


@with_options(*(name for name in SHARED if name not in ("strength", "strength_for", "setting")), before="dry_run")
def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint before the training.")],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The checkpoint after it.")],
    output: Output = None,
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="32, energy:0.99, noise … Default: 32.")] = None,
    conv_rank: ConvRank = None,
    max_rank: MaxRank = None,
    rank_for: RankFor = None,
    algorithm: Way = None,
    others: Others = None,
    include: Include = None,
    exclude: Exclude = None,
    format: Format = None,  # the name of the option
    alpha: Alpha = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    report: ReportTo = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    **options: Any,
) -> None:
    """Write the difference of two checkpoints as an adapter of the first one."""
    from ...adapters_out.extract.run import plan, run
    from ...adapters_out.extract.task import make_extraction
    from ...adapters_out.job import strings

    own = {"rank": rank, "conv_rank": conv_rank, "max_rank": max_rank, "rank_for": strings(rank_for or ()),
           "algorithm": algorithm, "others": others, "include": include, "exclude": exclude, "format": format,
           "alpha": alpha}  # fmt: skip
    stated = {name: as_number(name, value) for name, value in own.items() if value not in (None, [], ())}
    task = make_extraction(base, tuned, output, {**read(options, 1), **stated})
    show(task.job, lambda: plan(task) if dry_run else run(task), report, as_json=as_json, quiet=quiet, verbose=verbose)
