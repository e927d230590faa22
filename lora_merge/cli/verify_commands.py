"""The commands about finished files and this machine: verify, replay, unmerge, doctor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..options import EVERY_VALUE, OPTIONS, READING
from ..paths import expand, output_path
from ..progress import unwatched
from ..recipes.commands import COMMANDS
from ..text import json_text
from .adapter_commands import load_torch
from .argument_values import checked_output, completed, named_adapter
from .help import add
from .options import (
    AS_JSON,
    DRY_RUN,
    HTML,
    JSON_TENSORS,
    OUTPUT,
    QUIET,
    REPORT,
    SILENT,
    read_with_adapters,
    with_options,
)
from .progress_display import PROOF, Display, paused, watching
from .reports import (
    PageFiles,
    ReportOptions,
    announcing,
    echo,
    merge_and_report,
    pictured,
    put,
    show_adapter_report,
    show_closing,
    show_merge,
    show_plan,
)
from .terminal import styled

if TYPE_CHECKING:
    from ..planning.plan import Plan

Merged = Annotated[str, typer.Argument(metavar="MERGED", help="A merged checkpoint, file or folder.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the application."""
    for command, lines in (
        (verify, ("verify merged.safetensors", "verify merged.safetensors --full --search ~/models")),
        (replay, ("replay merged.safetensors -o again.safetensors",)),
        (unmerge, ("unmerge merged.safetensors style.safetensors -o before",)),
        (doctor, ("doctor", "doctor /mnt/models")),
    ):
        add(app, command, *lines)


@with_options(
    *(option for option in OPTIONS.values() if option.in_verify or option.name == "cache"), before="search", stated=True
)
def verify(
    output: Merged,
    base: Annotated[str | None, typer.Option(metavar="PATH", help="Read this base instead of the recipe's.")] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="ADAPTER[:STRENGTH]", help="Read these adapters, in order; repeatable."),
    ] = None,
    search: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER", help="Search this folder for the recipe's inputs; repeatable.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help=READING[EVERY_VALUE].help)] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the proof as one JSON object on stdout.")] = False,
    json_tensors: JSON_TENSORS = False,
    quiet: SILENT = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Print all that the proof found, with its units.")
    ] = False,
    **options: Any,
) -> None:
    """Verify that a file is the merge that its recipe describes.

    Finds the inputs by their hashes, or takes the named ones.
    """
    from ..recipes.commands import command_of, proof_of
    from ..report import verify_rows, without_tensors

    output, base = completed(output), base and completed(base)
    options.pop("cache")  # inputs have been looked up with it
    pairs, values = read_with_adapters([named_adapter(a) for a in adapter or []], options)
    stated = {name: value for name, value in values.items() if value}
    folders = [expand(p) for p in search or []]
    weights = PROOF if base is not None or pairs or command_of(expand(output)).merges else None
    with watching(quiet=as_json or quiet, weights=weights) as display:
        proof = proof_of(
            expand(output),
            base,
            pairs,
            search=folders,
            full=full,
            options=stated,
            progress=display or unwatched,
            announce=announcing(display, quiet=as_json or quiet),
        )
    if as_json:
        put(json_text(proof if json_tensors else without_tensors(proof)))
    elif not quiet:
        show_closing("verified", [*verify_rows(proof, verbose=verbose)], whole=verbose)


@with_options(OPTIONS["device"], OPTIONS["cache"], OPTIONS["overwrite"], before="as_json")
def replay(
    path: Merged,
    output: Annotated[str, OUTPUT],
    search: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER", help="Search this folder for the inputs; repeatable.")
    ] = None,
    as_json: AS_JSON = False,
    json_tensors: JSON_TENSORS = False,
    quiet: QUIET = False,
    **options: Any,
) -> None:
    """Repeat a merge from its recipe.

    Finds the inputs by their hashes.
    """
    from ..recipes.commands import command_of, replay_of

    path, output, folders = completed(path), str(checked_output(output)), [expand(p) for p in search or []]
    report_options = ReportOptions(as_json=as_json, quiet=quiet, done="made again", tensors=json_tensors)
    with watching(quiet=quiet) as display:
        load_torch(command_of(expand(path)))
        reported = {"progress": display or unwatched, "announce": announcing(display, quiet=quiet)}
        repeated = replay_of(expand(path), output, folders, **reported, **options)
        if repeated.plan is not None:
            with paused(display):
                show_plan(repeated.plan, report_options)
        report = repeated.run(display or unwatched)
    if repeated.plan is not None:
        show_merge(report, repeated.plan, report_options)
    else:
        show_adapter_report(report, report_options)


@with_options(*COMMANDS["unmerge"].options.values(), before="dry_run")
def unmerge(
    path: Merged,
    adapters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADAPTER[:STRENGTH]...",
            help="Adapters to take out, at the strengths of the recipe. [default: all of it]",
        ),
    ] = None,
    output: Annotated[str | None, OUTPUT] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Search this folder for the recipe's adapters; repeatable."),
    ] = None,
    dry_run: DRY_RUN = False,
    as_json: AS_JSON = False,
    json_tensors: JSON_TENSORS = False,
    report: REPORT = None,
    html: HTML = None,
    quiet: QUIET = False,
    **options: Any,
) -> None:
    """Take adapters out of a merged checkpoint.

    Restores the base up to one rounding step; only the base itself is exact. Without -o it names the base.
    """
    from ..engine.admission import admit
    from ..recipes.replay import refuse_to_unmerge
    from .stdio import reporting

    command = COMMANDS["unmerge"]
    path, output, pictures = (
        completed(path),
        checked_output(output),
        PageFiles(html, None, quiet=quiet, dry_run=dry_run),
    )
    words = [named_adapter(a) for a in adapters or []]
    if output is None:
        refuse_to_unmerge(expand(path), [expand(word.path) for word in words])
    named, stated = read_with_adapters(words, options)
    overwrite = bool(stated.get("overwrite"))
    report_options = ReportOptions(
        dry_run=dry_run, as_json=as_json, quiet=quiet, overwrite=overwrite, done=command.done, tensors=json_tensors
    )
    stated |= {"overwrite": True} if dry_run else {}

    def planned(display: Display | None) -> Plan:
        folders = [expand(p) for p in search or []]
        job = command.job(named, output or "", expand(path), {**stated, "search": folders})
        if not dry_run:
            job = command.fetch(job, None, display or unwatched, announcing(display, quiet=quiet))
        plan = admit(command.plan(job, None), dry=dry_run)
        pictures.protect(plan.inputs, [plan.job.output])
        return plan

    with reporting(report) as file:
        if file is not None:
            file.protect([expand(path)], [output_path(output or path)])
        merged = merge_and_report(planned, file, report_options)
    if merged is not None:
        pictures.write(lambda: {**pictured(*merged), "command": command.name})


@with_options()
def doctor(
    folder: Annotated[str, typer.Argument(help="Folder on the disk to measure.")] = ".",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object on stdout.")] = False,
    quiet: SILENT = False,
) -> None:
    """Check whether this machine can merge.

    Tests versions, devices, every formula and the disk; the exit code is 0 if all is well.
    """

    where = expand(folder)
    if not where.is_dir():
        raise UsageError("there is no such folder", str(where), "name a folder that is there")
    with watching(quiet=as_json or quiet, doing="measuring the devices and the disk"):
        from .doctor import examine, rows

        examined = examine(where)
    if as_json:
        put(json_text(examined))
    elif not quiet:
        title = "problems" if examined["problems"] else "all is well"
        show_closing(title, [*rows(examined)], failed=bool(examined["problems"]), whole=True)
        if not (examined["problems"] or styled(sys.stdout)):
            echo(title)
    raise typer.Exit(1 if examined["problems"] else 0)
