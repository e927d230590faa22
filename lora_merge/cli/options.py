"""Rows of the tables of options as parameters of commands, and the values of their texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import typer

from ..addresses import downloads_in
from ..errors import MergeError
from ..option_texts import as_number, metadata_entry, parsed_setting
from ..options import JOB_OPTIONS, Option
from ..paths import expand
from .argument_values import NamedAdapter, completed, named_parts, strengths, with_strengths
from .help import UNRECORDED, offered

if TYPE_CHECKING:
    from ..job import Adapter

Command = TypeVar("Command", bound=Callable[..., None])

OUTPUT: Final = typer.Option("-o", "--output", metavar="PATH", help="Write this file or folder; also hf://… or s3://….")
DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Plan only, from headers; write nothing.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the report as one JSON object on stdout.")]
JSON_TENSORS = Annotated[
    bool, typer.Option("--json-tensors", help="Add the values of every tensor to the JSON report.")
]
REPORT = Annotated[str | None, typer.Option(metavar="PATH", help="Write the JSON report to this file or pipe, too.")]
HTML = Annotated[str | None, typer.Option(metavar="FILE", help="Write a page for the browser, too.")]
PLOT = Annotated[str | None, typer.Option(metavar="FILE", help="Draw the result as .png, .svg or .pdf, too.")]

QUIET = Annotated[bool, typer.Option("-q", "--quiet", help="Print no progress and no report; notes go to stderr.")]
SILENT = Annotated[bool, typer.Option("-q", "--quiet", help="Print nothing; the exit code is the answer.")]


def dialects(incomplete: str) -> list[str]:
    """Return the dialects of adapters whose names begin so, for the shell's completion."""
    from ..adapters_out.dialects import names

    return offered(names())(incomplete)


def parts_on_line(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the parts and blocks of the base that the line names, with factor 0, for the shell's completion."""
    from ..viewing.parts import parts_of

    before, comma, word = incomplete.rpartition(",")
    base = ctx.params.get("base") or "".join(ctx.args[:1])  # an option without a value has ended the reading
    try:
        model = parts_of(expand(completed(base)))
    except (MergeError, OSError):  # the merge itself reports it
        return []
    return [f"{before}{comma}{name}" for name in offered(f"{n}=0" for n in (*model["parts"], *model["blocks"]))(word)]


def keep_in(ctx: typer.Context, value: str | None) -> str | None:
    """Keep downloads of the command in a folder: inputs are looked up while its arguments are read."""
    if value and not ctx.resilient_parsing:
        ctx.with_resource(downloads_in(expand(value)))
    return value


CALLED: Final[Mapping[str, Callable[..., Any]]] = {"cache": keep_in}
"""Option that has an effect before its command runs → the function that brings it about."""


OFFERED: Final[Mapping[str, Callable[..., list[str]]]] = {
    "strength_for": parts_on_line,
    "device": offered(("auto", "cpu", "cuda", "cuda:0", "mps", "xpu")), "format": dialects, "to": dialects,
    "alpha": offered(("rank", "keep")),
}  # fmt: skip
"""Option that takes other words too → the words that the shell offers."""


def with_options(
    *rows: Option | inspect.Parameter, before: str = "", stated: bool = False
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command these options in place of its `**options`: rows of tables or parameters.

    `before`: the parameter that `--help` lists after them; "" if they are the last. `stated`: they describe
    an output without a recipe, and have no defaults. Without rows the annotations of the command are evaluated alone,
    once: typer evaluates texts several times, which `--help` waits for.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        added = [_parameter(row, stated=stated) if isinstance(row, Option) else row for row in rows]
        place = [p.name for p in named].index(before) if before else len(named)
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*named[:place], *added, *named[place:])]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


OF_VERIFY: Final = {"compute_dtype": "Allow the rounding of this dtype, whatever the recipe says. [default: fp32]"}
"""Option → its help where it is no statement on how an output was made."""

OPTION_TYPES: Final = {"switch": bool, "whole": int, "number": float}
"""Kind of an option → type of its value on the command line, where it is not text."""


@cache  # commands share rows
def _parameter(option: Option, *, stated: bool) -> inspect.Parameter:
    many = option.kind in ("numbers", "parts", "settings", "entries", "ranks", "texts")
    default = None if stated or many else option.default
    words: Any = Literal.__getitem__(option.words) if option.words else str  # for help and completion; see take_text
    kind: Any = list[str] if many else OPTION_TYPES.get(option.kind, words)
    flag = f"{option.flag}/--no-{option.name}" if option.kind == "switch" and default is not False else option.flag
    text = OF_VERIFY.get(option.name, option.help) if stated else option.help
    group = UNRECORDED if stated and option.in_verify and option.name not in OF_VERIFY else option.group
    argument = typer.Option(
        *filter(None, (option.short, flag)), metavar=option.metavar, help=text, rich_help_panel=group,
        autocompletion=OFFERED.get(option.name), callback=CALLED.get(option.name),
    )  # fmt: skip
    default = inspect.Parameter.empty if option.required else default
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, argument]
    )


def read_with_adapters(
    adapters: Sequence[NamedAdapter], options: Mapping[str, Any]
) -> tuple[list[str | tuple[str, float] | Adapter], dict[str, Any]]:
    """Return the adapters with their strengths and parts, and the values of the other options, as `make_job` takes
    them; UsageError for a wrong text."""
    values = {name: value for name, value in options.items() if name != "strength_for"}
    for option in (JOB_OPTIONS[name] for name in values if name in JOB_OPTIONS):
        if option.kind in ("whole", "number") and isinstance(values[option.name], str):
            values[option.name] = as_number(values[option.name], option.flag, whole=option.kind == "whole")
    values["strength"] = strengths(values.get("strength") or (), len(adapters))
    values["setting"] = [parsed_setting(text) for text in values.get("setting") or ()]
    values["metadata"] = [metadata_entry(text) for text in values.get("metadata") or ()]
    values = {name: value for name, value in values.items() if value not in (None, (), [])}
    named, parts = named_parts(with_strengths(adapters, values), options.get("strength_for") or ())
    refs = [adapter.for_job for adapter in named]
    return refs, {"strength_for": parts, **values} if "strength_for" in options else values
