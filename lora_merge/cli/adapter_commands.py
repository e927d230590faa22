"""The commands that write adapters: combine, resize, convert, average and extract, with the options of their rows
(recipes/commands.py) and the options that only the command line has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ..adapter_arguments import right_form
from ..command import Command as Row
from ..errors import UsageError
from ..option_texts import as_number, part_rule
from ..options import ADAPTER_OPTIONS, KEEP, Option
from ..paths import exists
from ..progress import unwatched
from ..recipes.commands import COMMANDS
from ..text import Note
from .argument_values import NamedAdapter, checked_output, completed, named_adapter, named_adapters
from .help import add
from .options import (
    AS_JSON,
    DRY_RUN,
    HTML,
    JSON_TENSORS,
    PLOT,
    QUIET,
    REPORT,
    Command,
    read_with_adapters,
    with_options,
)
from .progress_display import watching
from .reports import PageFiles, ReportOptions, announcing, show_adapter_report

if TYPE_CHECKING:
    from ..adapters_out.job import AdapterJob
    from ..adapters_out.report import AdapterReport
    from ..planning.checkpoint_cache import CheckpointCache


PRINTED: Final = MappingProxyType({
    "dry_run": DRY_RUN,
    "as_json": AS_JSON,
    "json_tensors": JSON_TENSORS,
    "report": REPORT,
    "html": HTML,
    "plot": PLOT,
    "quiet": QUIET,
    "verbose": Annotated[bool, typer.Option("-v", "--verbose", help="List every layer.")],
})  # fmt: skip
"""The options for what is shown: name → type."""

OUTPUT_OPTION: Final = Annotated[
    str | None, typer.Option("-o", "--output", metavar="PATH", help="Write this file or folder.")
]
BASE_OPTION: Final = Annotated[
    str | None, typer.Option(metavar="BASE", help="Read the model, if a formula or a name needs it.")
]

CHANGING: Final = ("rank", "algorithm", "alpha", "dtype", "strength_for")
"""Options by which an adapter becomes another one in the same format."""

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
        add(app, command, *lines)


def _takes(row: Row) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the options of its row, and those of the command line."""
    files = {"output": OUTPUT_OPTION, **({"base": BASE_OPTION} if row.inputs != "checkpoints" else {})}
    shown = [_on_the_line(option) for option in row.options.values() if option.group]
    return with_options(*_optional(files), *shown, *_optional(PRINTED))


def _optional(types: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """Yield parameters that may be left out, from their names and types."""
    for name, annotation in types.items():
        default = False if annotation.__origin__ is bool else None
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _on_the_line(option: Option) -> Option:
    """Return an option whose default, which is that of the command, is stated by its help alone."""
    return option._replace(default=() if option.default == () else None) if option.name in ADAPTER_OPTIONS else option


@_takes(COMMANDS["combine"])
def combine(
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER[:STRENGTH]...", help="Files or PEFT folders.")],
    **options: Any,
) -> None:
    """Combine adapters into one adapter: exactly, or at a rank."""
    _carry_out(COMMANDS["combine"], adapters, options)


@_takes(COMMANDS["resize"])
def resize(adapter: Adapter, **options: Any) -> None:
    """Resize an adapter to another rank.

    Writes the best approximation of that rank.
    """
    _carry_out(COMMANDS["resize"], [adapter], options)


@_takes(COMMANDS["convert"])
def convert(adapter: Adapter, **options: Any) -> None:
    """Convert an adapter to the format of another program."""
    output, base, printed = _shared_values(options)

    def make(_: CheckpointCache) -> Any:
        (ref,), stated = _job_values([named_adapter(adapter)], options)
        job = COMMANDS["convert"].job([ref], output, base, stated)
        same = all(stated.get(name) in (None, KEEP, []) for name in ("to", *CHANGING))
        if same and isinstance(ref, str):
            fix = "give `--to diffusers`; or another --dtype, --rank, --algorithm or --alpha"
            raise UsageError("no format is named", "lora-merge convert", fix)
        return job

    show(COMMANDS["convert"], make, **printed)


@_takes(COMMANDS["average"])
def average(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Files, the oldest first.")],
    **options: Any,
) -> None:
    """Average snapshots of one training.

    Weights are equal, stated by --weights, or those of an exponential moving average.
    """
    _carry_out(COMMANDS["average"], snapshots, options)


@_takes(COMMANDS["extract"])
def extract(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint before the training.")],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The checkpoint after it.")],
    **options: Any,
) -> None:
    """Extract the difference of two checkpoints as an adapter.

    `lora-merge diff` is short for `extract --algorithm full`, which is exact.
    """
    output, _, printed = _shared_values(options)

    def make(cache: CheckpointCache) -> Any:
        refs, stated = _job_values([NamedAdapter(completed(tuned))], options)
        return COMMANDS["extract"].job(refs, output, completed(base), stated, cache)

    show(COMMANDS["extract"], make, **printed)


def _carry_out(command: Row, adapters: Sequence[str], options: dict[str, Any]) -> None:
    """Run or plan `combine`, `resize` or `average`, and print the report."""
    output, base, printed = _shared_values(options)

    def make(_: CheckpointCache) -> Any:
        if "weights" in command.options:
            _check_weights(adapters, options)
        named, stated = _job_values(named_adapters(adapters, output=output), options)
        return command.job(named, output, base, stated)

    show(command, make, **printed)


def _check_weights(words: Sequence[str], options: dict[str, Any]) -> None:
    """Read --weights; UsageError for a weight among the files, and for a word that is no number."""
    stated = options.get("weights") or ""
    numbers = [word for word in words if right_form(word) and not exists(word)]
    count = len(words) - len(numbers)
    equal = [f"{1 / max(count, 1):.3g}"] * count
    if numbers:
        share = float(right_form(numbers[0]))
        right = [*map(right_form, numbers)] if len(numbers) == count else equal
        right = [f"{share:g}", f"{1 - share:g}"] if count == 2 > len(numbers) and 0 < share < 1 else right
        weights = f"--weights={','.join(right)}"
        error = UsageError("a weight is not a snapshot", " ".join(numbers), f"write `{weights}`")
        raise error.instead(numbers[0], weights) if len(numbers) == 1 else error
    values = stated.split(",") if stated else []
    if values and not any(map(right_form, values)):
        raise UsageError(f"{stated[:40]!r} are no weights", "--weights", f"write `--weights {','.join(equal)}`")
    if values:
        options["weights"] = [as_number(value, "--weights", whole=False) for value in values]


def _shared_values(options: dict[str, Any]) -> tuple[str | None, str | None, dict[str, Any]]:
    """Return the output, the base, and the options of what is printed, taken out of the options."""
    output, base = checked_output(options.pop("output")), options.pop("base", None)
    printed = {name: options.pop(name) for name in PRINTED}
    if printed["dry_run"]:
        options["overwrite"] = True  # a plan replaces nothing
    return output, base and completed(base), printed


def _job_values(adapters: Sequence[NamedAdapter], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the adapters with their strengths, and the other options as jobs take them."""
    named, stated = read_with_adapters(adapters, options)
    if "rank_for" in stated:
        rules = [*map(part_rule, stated["rank_for"])]
        by_part = dict(rules)  # as jobs files have it, so that a recipe has one form
        stated["rank_for"] = by_part if len(by_part) == len(rules) else rules
    return named, stated


def show(
    command: Row, make: Callable[[CheckpointCache], Any], *, dry_run: bool, as_json: bool, json_tensors: bool,
    report: str | None, html: str | None, plot: str | None, quiet: bool, verbose: bool,
) -> None:  # fmt: skip
    """Run or plan a job and print its report. The job is made below the display, as torch may be imported for it."""
    from ..adapters_out.job import needed_downloads
    from ..engine.torch_preload import keep_freed_memory
    from ..planning.checkpoint_cache import CheckpointCache
    from ..sources.outputs import announcement
    from .stdio import reporting

    pictures = PageFiles(html, plot, quiet=quiet, dry_run=dry_run)
    with reporting(report) as report_file, watching(quiet=quiet) as display:
        # Step 1: torch, as early as the command needs it.
        load_torch(command, dry=dry_run)
        # Step 2: the job, whose paths no other output may replace.
        cache = CheckpointCache()
        job: AdapterJob = make(cache)
        keep_freed_memory(job.inputs.max_memory)
        for file in (report_file, pictures):
            if file is not None:
                file.protect([a.path for a in job.adapters], [job.output])
        if report_file is not None:
            report_file.begin()
        # Step 3: the plan or the run.
        if dry_run:
            done = command.plan(job, cache)
            notes = [Note(download.text()) for download in needed_downloads(job).values() if download.size]
            done = replace(done, notes=(*done.notes, *notes))
        else:
            announce = announcing(display, quiet=quiet)
            job = command.fetch(job, cache, display or unwatched, announce)
            if announce is not None and (text := announcement(job.output)):
                announce(text)
            done = command.run(job, display or unwatched, cache)
        if report_file is not None:
            report_file.replace(done.to_json(tensors=json_tensors))
    pictures.write(lambda: _pictured(done, job) if html is not None else asdict(done))
    options = ReportOptions(as_json=as_json, quiet=quiet, verbose=verbose, done=command.done, tensors=json_tensors)
    show_adapter_report(done, options)


def load_torch(command: Row, *, dry: bool = False) -> None:
    """Load torch as early as a command needs it. `dry`: for its plan."""
    from ..engine.torch_preload import keep_freed_memory, preload

    if command.torch == "first":
        preload(wait=True)
    elif command.torch == "rarely" or dry:
        keep_freed_memory()
    else:
        preload()


def _pictured(done: AdapterReport, job: AdapterJob) -> dict[str, Any]:
    """Return a report with its pictures, for a page."""
    from ..viewing.pictures import pictured_adapter

    return pictured_adapter(done, job.paths)
