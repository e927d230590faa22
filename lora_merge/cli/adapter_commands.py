"""The commands that write adapters: combine, resize, convert, average and extract. They decide nothing.

The options of the commands that write adapters: what they share with `merge` (OPTIONS), what they alone have
(ADAPTER_OPTIONS), and here what only the command line has, or what stands for something else there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ..adapter_options import ADAPTER_OPTIONS, KEEP
from ..errors import UsageError
from ..merge_methods import COMBINATIONS
from ..options import OPTIONS, Kind, Option
from ..progress import unwatched
from .argument_values import named_adapter, named_adapters, named_parts, with_strengths
from .compat import checked_output, completed
from .help import examples
from .options import Command, dialects, read, with_options
from .progress_display import watching
from .reports import Pictures, put, show_adapter_report

if TYPE_CHECKING:
    from ..adapters_out.report import AdapterReport
    from ..batch.commands import Task


def _row(name: str, kind: Kind, metavar: str | None, text: str, short: str = "", group: str = "Report") -> Option:
    default = False if kind == "switch" else None
    return Option(name, kind, default, text, "never", short=short, metavar=metavar, group=group)


OWN: Final = MappingProxyType({**ADAPTER_OPTIONS} | {
    row.name: row
    for row in (
        _row("output", "path", "PATH", "File to write.", "-o", "Output"),
        _row("base", "path", "BASE", "The model, where a formula or a name needs it.", group="Options"),
        replace(OPTIONS["method"], default=None, words=(*COMBINATIONS,), metavar="NAME", group="Options",
                help=f"{', '.join([*COMBINATIONS][:3])}, dare … Default: sum."),
        replace(OPTIONS["dtype"], words=("keep", "fp32", "fp16", "bf16"), help="Of the output; keep: as the inputs."),
        replace(OPTIONS["compute_dtype"], default=None, words=("fp64", "fp32"),
                help="Numbers that formulas compute with. Default: fp64, or fp32 where that loses nothing."),
        _row("dry_run", "switch", None, "Plan only, from headers; write nothing."),
        _row("json", "switch", None, "Report as one JSON object on stdout."),
        _row("report", "path", "PATH", "Also write the JSON report to this file."),
        _row("html", "path", "FILE", "Also write a page to look at in a browser."),
        _row("plot", "path", "FILE", "Also draw it, as .png, .svg or .pdf."),
        _row("quiet", "switch", None, "No progress, no report; notes go to stderr.", "-q"),
        _row("verbose", "switch", None, "Name every layer.", "-v"),
    )
})  # fmt: skip
"""Name → option that `merge` does not have, or has with another help."""


SHARED: Final = ("include", "exclude", "dtype", "compute_dtype", "unmatched", "map", "overwrite", "device",
                 "max_memory", "max_vram", "verify")  # fmt: skip
CHANGING: Final = ("rank", "algorithm", "alpha", "dtype", "strength_for")
"""Options by which an adapter becomes another one in the same format."""

ADAPTERS: Final = ("strength", "strength_for", "setting")
RANKS: Final = ("conv_rank", "max_rank", "rank_for")
METHOD: Final = ("method", "density", "gamma", "epsilon", "t", "elect", "normalise", "agree", "scale", "seed")
PRINTED: Final = ("dry_run", "json", "report", "html", "plot", "quiet", "verbose")

DONE: Final = {"combine": "combined", "resize": "resized", "convert": "converted", "average": "averaged",
               "extract": "extracted"}  # fmt: skip

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER[:STRENGTH]", help="A file or a PEFT folder.")]


def add_to(app: typer.Typer) -> None:
    """Add these commands to the application."""
    for command, lines in (
        (combine, ("combine a.safetensors:0.8 b.safetensors:0.5 -o both.safetensors",
                   "combine a.safetensors b.safetensors --method ties --rank 32")),
        (resize, ("resize style.safetensors --rank 16", "resize style.safetensors --rank energy:0.99 -o s")),
        (convert, ("convert style.safetensors --to diffusers --base sdxl.safetensors",)),
        (average, ("average epoch1.safetensors epoch2.safetensors -o mean.safetensors",)),
        (extract, ("extract sdxl.safetensors tuned.safetensors --rank 32",)),
    ):  # fmt: skip
        app.command(epilog=examples(*lines))(command)


def _takes(*names: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command these options, and those that all of these commands have."""
    return with_options(*(OWN.get(name) or OPTIONS[name] for name in ("output", *names, *SHARED, *PRINTED)))


@_takes("base", *METHOD, *RANKS, "algorithm", "alpha", "format", *ADAPTERS)
def combine(
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER[:STRENGTH]...", help="Files or PEFT folders.")],
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="32, same, energy:0.99 … Default: exact.")] = None,
    **options: Any,
) -> None:
    """Combine adapters into one adapter: exactly, or at a rank."""
    _carry_out("combine", adapters, {"rank": rank, **options})


@_takes("base", *RANKS, "algorithm", "alpha", "format", *ADAPTERS)
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
    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", help=OWN["to"].help, autocompletion=dialects),
    ] = KEEP,
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="Bring every module to LoRA at a rank.")] = None,
    **options: Any,
) -> None:
    """Write an adapter in the dialect of another program."""
    output, base, printed = _taken(options)

    def task() -> Task:
        from ..adapters_out.convert import make_conversion, plan, run
        from ..batch.commands import Task

        (named,), values = _given([named_adapter(adapter)], {"rank": rank, **options})
        if to == KEEP and isinstance(named, str) and all(values.get(name) in (None, KEEP, []) for name in CHANGING):
            fix = "give --to, such as --to diffusers; or another --dtype, --rank, --algorithm or --alpha"
            raise UsageError("no format is named", "lora-merge convert", fix)
        job = make_conversion(named, output, base, {"to": to, **values})
        return Task(job.job, partial(plan, job), partial(run, job))

    show("convert", task, printed)


@_takes("base", "ema", "ema_to", "sigma_rel", "space", "alpha", "format", *ADAPTERS[1:])
def average(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Files, the oldest first.")],
    weights: Annotated[str | None, typer.Option(metavar="W,W…", help="One number for each. Default: equal.")] = None,
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="Default: same, the snapshots' own.")] = None,
    **options: Any,
) -> None:
    """Average snapshots of one training.

    With equal weights, with given ones, or as an exponential moving average.
    """
    output, base, printed = _taken(options)

    def task() -> Task:
        from ..adapters_out.average import make_average
        from ..batch.commands import Task
        from .argument_values import as_number

        numbers = [as_number(w, "--weights", whole=False) for w in weights.split(",")] if weights else None
        named, values = _given(named_adapters(snapshots, options.get("strength")), {"rank": rank, **options})
        job = make_average(named, output, base, {"weights": numbers, **values})
        return Task(job.job, job.plan, job.run)

    show("average", task, printed)


@_takes(*RANKS, "algorithm", "others", "factor", "format", "alpha")
def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint before the training.")],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The checkpoint after it.")],
    rank: Annotated[str | None, typer.Option(metavar="RULE", help="32, energy:0.99, noise … Default: 32.")] = None,
    **options: Any,
) -> None:
    """Write the difference of two checkpoints as an adapter.

    `lora-merge diff` is short for `extract --algorithm full`, which is exact.
    """
    output, _, printed = _taken(options)

    def task() -> Task:
        from ..adapters_out.extract.run import plan, prepared, run
        from ..batch.commands import Task
        from ..planning.checkpoint_cache import CheckpointCache

        values, cache = _read({"rank": rank, **options}, 1), CheckpointCache()
        job = prepared(completed(base), completed(tuned), output, values, cache)
        return Task(job.job, partial(plan, job, cache), partial(run, job, cache=cache))

    show("extract", task, printed)


def _carry_out(command: str, adapters: Sequence[str], options: dict[str, Any]) -> None:
    """Run or plan `combine`, `resize` or `average`, and print the report."""
    output, base, printed = _taken(options)

    def task() -> Task:
        from ..adapters_out.format_option import plan, run
        from ..adapters_out.job import make_adapter_job
        from ..batch.commands import Task

        named, values = _given(named_adapters(adapters, options.get("strength")), options)
        job = make_adapter_job(command, named, output, base, values)
        return Task(job, partial(plan, job), partial(run, job))

    show(command, task, printed)


def _taken(options: dict[str, Any]) -> tuple[str | None, str | None, dict[str, Any]]:
    """Return the output, the base, and the options of what is printed, taken out of the options."""
    output, base = checked_output(options.pop("output")), options.pop("base", None)
    printed = {name: options.pop(name) for name in PRINTED}
    if printed["dry_run"]:
        options["overwrite"] = True  # a plan replaces nothing
    return output, base and completed(base), printed


def _read(options: dict[str, Any], adapters: int) -> dict[str, Any]:
    """Return the values of options as jobs take them, for so many adapters."""
    from ..adapters_out.job import strings

    values = read(options, adapters, {**OPTIONS, **OWN})
    return {**values, "rank_for": strings(values["rank_for"])} if "rank_for" in values else values


def _given(adapters: Sequence[Any], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the adapters with their strengths, and the other options as jobs take them."""
    strength_for, values = options.pop("strength_for") or (), _read(options, len(adapters))
    named, parts = named_parts(with_strengths(adapters, values), strength_for)
    return named, {**values, "strength_for": parts}


def show(command: str, make: Callable[[], Task], printed: dict[str, Any]) -> None:
    """Run or plan a task, which is made while progress is shown, as torch may be imported for it; print its report."""
    from ..engine.torch_preload import keep_freed_memory, preload
    from .stdio import reporting

    pictures = Pictures(printed["html"], printed["plot"], quiet=printed["quiet"], dry_run=printed["dry_run"])
    with reporting(printed["report"]) as report, watching(quiet=printed["quiet"]) as display:
        if command == "extract":
            preload(wait=True)  # it is imported first of all
        elif command in ("combine", "convert") or printed["dry_run"]:
            keep_freed_memory()  # most of them need no torch
        else:
            preload()
        task = make()
        keep_freed_memory(task.job.inputs.max_memory)
        for file in (report, pictures):
            if file is not None:
                file.protect([a.path for a in task.job.adapters], [task.job.output])
        if report is not None:
            report.begin()
        done = task.plan() if printed["dry_run"] else task.run(display or unwatched)
        if report is not None:
            report.replace(done.to_json())
    pictures.write(lambda: _with_pictures(done, task) if printed["html"] is not None else asdict(done))
    if printed["json"]:
        put(done.to_json())
        return
    show_adapter_report(done, DONE[command], quiet=printed["quiet"], verbose=printed["verbose"])


def _with_pictures(done: AdapterReport, task: Task) -> dict[str, Any]:
    """Return a report with the paths of its inputs, and the spectrum and the histogram of each layer of the output."""
    from ..viewing.base import recipe_of
    from ..viewing.pictures import made_pictures

    shown = made_pictures(Path(done.output))
    layers = {name: {**layer, **shown.get(name, {})} for name, layer in done.layers.items()}
    inputs = [*(a.path for a in task.job.adapters), *([task.job.base] if task.job.base else [])]
    return {**asdict(done), "layers": layers, "recipe": recipe_of(Path(done.output)), "inputs": [*map(str, inputs)]}
