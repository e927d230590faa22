"""The commands that write adapters: combine, resize, convert, average and extract. They decide nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ...options import OPTIONS
from ..habits import expanded
from ..parameters import Command, read, with_options
from ..text import echo, leave_lost_folder, silent
from ..values import named_adapter, named_parts, with_strengths
from .options import OWN

if TYPE_CHECKING:
    from ...adapters_out.job import AdapterJob
    from ...adapters_out.report import AdapterReport

SHARED: Final = ("dtype", "unmatched", "map", "overwrite", "max_memory", "verify")
ADAPTERS: Final = ("strength", "strength_for", "setting")
RANKS: Final = ("conv_rank", "max_rank", "rank_for")
METHOD: Final = ("method", "density", "gamma", "epsilon", "t", "elect", "normalise", "agree", "scale", "seed")
PRINTED: Final = ("dry_run", "json", "report", "html", "plot", "quiet", "verbose", "debug")

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER[:STRENGTH]", help="A file or a PEFT folder.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the application."""
    for command in (combine, resize, convert, average, extract):
        app.command()(command)


def _takes(*names: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command these options, and those that all of these commands have."""
    return with_options(*(OWN.get(name) or OPTIONS[name] for name in ("output", *names, *SHARED, *PRINTED)))


@_takes("base", *METHOD, *RANKS, "algorithm", "alpha", *ADAPTERS)
def combine(
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER[:STRENGTH]...", help="Files or PEFT folders.")],
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="32, same, energy:0.99 … Default: exact.")] = None,
    **options: Any,
) -> None:
    """Combine adapters into one adapter: exactly, or at a rank."""
    _carry_out("combine", adapters, {"rank": rank, **options})


@_takes("base", *RANKS, "algorithm", "alpha", *ADAPTERS)
def resize(
    adapter: Adapter,
    rank: Annotated[str, typer.Option(metavar="RULE", help="16, energy:0.99, fro:0.9, size:50MiB …")],
    **options: Any,
) -> None:
    """Write an adapter again at another rank.

    Of all adapters of that rank, the output is the nearest.
    """
    _carry_out("resize", [adapter], {"rank": rank, **options})


@_takes("base", *RANKS, "algorithm", "alpha", *ADAPTERS)
def convert(
    adapter: Adapter,
    to: Annotated[str, typer.Option(metavar="FORMAT", help=OWN["format"].help)],
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="Bring every module to LoRA at a rank.")] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="COMPONENT", help="Write only these; repeatable.")
    ] = None,
    **options: Any,
) -> None:
    """Write an adapter in the dialect of another program."""
    from ...adapters_out.convert import make_conversion, plan, run

    output, base, printed = _taken(options)
    (given,), found = _given([named_adapter(adapter)], {"rank": rank, "include": include, **options})
    task = make_conversion(given, output, base, {"to": to, **found})
    show(task.job, lambda: plan(task) if printed["dry_run"] else run(task), printed)


@_takes("base", "ema", "ema_to", "sigma_rel", *ADAPTERS[1:])
def average(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Files, the oldest first.")],
    weights: Annotated[str | None, typer.Option(metavar="W,W…", help="One number for each. Default: equal.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="Default: same, the snapshots' own.")] = None,
    **options: Any,
) -> None:
    """Average snapshots of one training.

    With equal weights, with given ones, or as an exponential moving average.
    """
    from ...adapters_out.average.weights import average_weights
    from ...adapters_out.rank_rules import SAME
    from ..values import as_number

    given = [as_number(w, "--weights", whole=False) for w in weights.split(",")] if weights else None
    numbers = read({name: options.pop(name) for name in ("ema", "ema_to", "sigma_rel")}, 0, OWN)
    found = average_weights(len(snapshots), weights=given, **numbers)
    named = [f"{path}:{weight!r}" for path, weight in zip(snapshots, found, strict=True)]
    _carry_out("average", named, {"rank": rank or SAME, **options})


@_takes(*RANKS, "algorithm", "others", "include", "exclude", "factor", "format", "alpha")
def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint before the training.")],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The checkpoint after it.")],
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="32, energy:0.99, noise … Default: 32.")] = None,
    **options: Any,
) -> None:
    """Write as an adapter by what two checkpoints differ."""
    from ...adapters_out.extract.run import plan, run
    from ...adapters_out.extract.task import make_extraction

    output, _, printed = _taken(options)
    task = make_extraction(base, tuned, output, _read({"rank": rank, **options}, 1))
    show(task.job, lambda: plan(task) if printed["dry_run"] else run(task), printed)


def _carry_out(command: str, adapters: Sequence[str], options: dict[str, Any]) -> None:
    """Run or plan `combine`, `resize` or `average`, and print the report."""
    from ...adapters_out.job import make_adapter_job
    from ...adapters_out.run import plan, run

    output, base, printed = _taken(options)
    named, found = _given([named_adapter(a) for a in expanded(adapters)], options)
    job = make_adapter_job(command, named, output, base, found)
    show(job, lambda: plan(job) if printed["dry_run"] else run(job), printed)


def _taken(options: dict[str, Any]) -> tuple[str | None, str | None, dict[str, Any]]:
    """Return the output, the base, and the options of what is printed, taken out of the options."""
    return options.pop("output"), options.pop("base", None), {name: options.pop(name) for name in PRINTED}


def _read(options: dict[str, Any], adapters: int) -> dict[str, Any]:
    """Return the values of options as jobs take them, for so many adapters."""
    from ...adapters_out.job import strings

    found = read(options, adapters, {**OPTIONS, **OWN})
    return {**found, "rank_for": strings(found["rank_for"])} if "rank_for" in found else found


def _given(adapters: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the adapters with their strengths, and the other options as jobs take them."""
    strength_for, found = options.pop("strength_for") or (), _read(options, len(adapters))
    named, parts = named_parts(with_strengths(adapters, found), strength_for)
    return named, {**found, "strength_for": parts}


def show(job: AdapterJob, do: Callable[[], AdapterReport], printed: dict[str, Any]) -> None:
    """Run or plan a job with `do`, and print its report."""
    from ..streams import Pictures, reporting

    pictures = Pictures(printed["html"], printed["plot"], dry_run=printed["dry_run"])
    with reporting(printed["report"]) as told:
        for file in (told, pictures):
            if file is not None:
                file.protect([a.path for a in job.adapters], [job.output])
        leave_lost_folder()
        if told is not None:
            told.begin()
        done = do()
        if told is not None:
            told.replace(done.to_json())
    pictures.write(lambda: json.loads(done.to_json()))
    if printed["json"]:
        echo(done.to_json())
        return
    say = silent if printed["quiet"] else echo
    for line in lines(done, verbose=printed["verbose"]):
        say(line)
    for note in done.notes:
        echo(f"note: {note}", err=printed["quiet"])


def lines(done: AdapterReport, *, verbose: bool) -> list[str]:
    """Return the lines of a report."""
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
