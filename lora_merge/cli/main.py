"""The command line: arguments → Job, Report → text or JSON, errors → exit codes."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ..addresses import split, with_addresses
from ..command import MERGE
from ..errors import MergeError, UsageError, as_resource_error, error_dict, failure
from ..paths import exists, expand, leave_lost_folder
from ..process import LimitCheck, on_stop, signals_first
from ..progress import unwatched
from ..recipes.commands import COMMANDS
from ..text import Lines, json_text, one_line
from . import adapter_commands, comfyui_command, inspect_commands, tables, ui_command, verify_commands
from .argument_values import NamedAdapter, checked_output, named_adapters, named_base
from .batch_command import batch
from .compat import (
    PROGRAM_OPTIONS,
    SHORT_COMMANDS,
    check_base,
    check_command,
    check_format,
    check_once,
    check_spaces,
    check_values,
)
from .corrected_line import check_fix, correct, is_clear, options_of
from .help import COMMAND_GROUPS, REFUSED, GroupedCommand, add, everywhere, examples, files, refused, take_text
from .options import AS_JSON, DRY_RUN, HTML, JSON_TENSORS, OUTPUT, PLOT, QUIET, REPORT, read_with_adapters, with_options
from .progress_display import LOADING, Display, watching
from .reports import PageFiles, ReportOptions, announcing, echo, merge_and_report, pictured, put
from .terminal import debugging, show_error, styled, without_global_options

if TYPE_CHECKING:
    from ..job import Job
    from ..planning.plan import Plan

ROOT_OPTIONS = ("--help", "--version", "--install-completion", "--show-completion")

HELP = ("-h", "--help")

DRY_RUN_WORD = "--dry-run"

LEAST_HELP_COLUMNS = 52
"""Columns below which click would write its help too wide: it takes 50 at least."""

VALUELESS_OPTIONS = ("--json", "--quiet", "-q", "--verbose", "-v", "--overwrite", "--dry-run")
"""Options without a value, which may precede a command by mistake."""


class Commands(TyperGroup):
    """Runs `merge` when no subcommand is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `lora-merge BASE ADAPTER` as `lora-merge merge BASE ADAPTER`, and `lora-merge help X` as `X --help`."""
        args = without_global_options(args, checked=not ctx.resilient_parsing)
        if args[:2] == ["help", "help"]:
            args = args[1:]
        if args and (args[0] == "help" or (args[0] in HELP and args[1:] and args[1] in self.commands)):
            ctx.meta[HELP[-1]] = True
            args = [*(SHORT_COMMANDS.get(word, word).partition(" ")[0] for word in args[1:2]), "--help"]
        elif args and args[0] in SHORT_COMMANDS and not exists(args[0]):
            args = [*SHORT_COMMANDS[args[0]].split(), *args[1:]]
        elif args and args[0] in PROGRAM_OPTIONS and not exists(args[0]):
            args = [PROGRAM_OPTIONS[args[0]]]
        if not ctx.resilient_parsing:
            check_spaces(args)
        if args and args[0] not in self.commands and args[0] not in ROOT_OPTIONS:
            if not ctx.resilient_parsing:  # as while the shell completes a word
                self._suggest(args)
            args = [MERGE, *args]
        if args and args[0] in self.commands and not ctx.resilient_parsing:
            self._check(args[0], args[1:])
        take_text(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def _check(self, command: str, args: Sequence[str]) -> None:
        """Raise UsageError for a line that is not as a command has it."""
        known = options_of(self.commands[command])
        check_format(command, args, known)
        if command == MERGE:
            check_base(args, known)
        if not is_clear(args, known):
            from .foreign_options import check_line

            check_line(command, args, self.commands)
        check_values(args, known)
        check_once(args, known)

    def _suggest(self, args: list[str]) -> None:
        """Raise UsageError for a first word that is neither file nor command, or for a command after its options."""
        word = next((a for a in args if a not in VALUELESS_OPTIONS), "")
        if word != args[0] and word in self.commands and not exists(word):
            raise UsageError("options go after the command", word, f"lora-merge {word} … {args[0]}")
        if not is_clear(args, options_of(self.commands[MERGE])):
            from .foreign_options import check_foreign_command

            check_foreign_command(args, self.commands)
        purposes = {name: self.commands[name].get_short_help_str(200) for name in self.list_commands(None)}
        check_command(word, purposes, alone=len(args) == 1)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands, in the order of use."""
        return [name for names in self._groups().values() for name in names]

    def _groups(self) -> dict[str, list[str]]:
        """Return heading → its commands."""
        shown = {name for name, command in self.commands.items() if not command.hidden}
        groups = {title: [name for name in names if name in shown] for title, names in COMMAND_GROUPS.items()}
        return {**groups, "More": sorted(shown.difference(*COMMAND_GROUPS.values()))}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by groups, and then the options of the program."""
        for title, names in self._groups().items():
            rows = [(name, self.commands[name].get_short_help_str(formatter.width)) for name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        with formatter.section("Options"):
            formatter.write_dl([row for p in self.get_params(ctx) if (row := p.get_help_record(ctx))])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return commands and options, and files: the first word may be a base, except after `help`."""
        items, any_item = super().shell_complete(ctx, incomplete), super().shell_complete(ctx, "")[0]
        named = not incomplete.startswith("-") and HELP[-1] not in ctx.meta
        return [*items, *(type(any_item)(path) for path in files(incomplete) if named)]

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the program's own options; while the shell completes a word also those of every command."""
        return [*super().get_params(ctx), *(everywhere() if ctx.resilient_parsing else ())]


USAGE_EXAMPLES = examples(
    "sdxl.safetensors style.safetensors:0.8 --dtype bf16",
    "sdxl.safetensors a.safetensors:0.8 b.safetensors:0.5",
    "sdxl.safetensors style.safetensors --strength-for te=0",
    "./Llama-3.1-8B ./my-peft-adapter -o ./merged",
)

app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "color": False},
    help="Merge LoRA, LyCORIS and PEFT adapters into .safetensors checkpoints.\n\n"
    "lora-merge BASE ADAPTER[:STRENGTH] ... [options] is short for lora-merge merge.\n\n"
    "Run lora-merge help COMMAND for details.",
    epilog=USAGE_EXAMPLES,
)  # fmt: skip

add(app, batch, "batch jobs.yaml --dry-run", "batch jobs.yaml --workers 2 --report report.jsonl")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Options of the program itself."""
    if version:
        from ..version import __version__

        echo(f"lora-merge {__version__}")
        raise typer.Exit


@app.command(cls=GroupedCommand, epilog=USAGE_EXAMPLES)
@with_options(*COMMANDS[MERGE].options.values(), before="dry_run")
def merge(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE", help="Checkpoint: a file, a model folder, or an address such as hf://owner/name."
        ),
    ],
    adapters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ADAPTER[:STRENGTH]...",
            help="Adapter files, PEFT folders or addresses; none: the adapter that is attached inside BASE.",
        ),
    ] = None,
    output: Annotated[str | None, OUTPUT] = None,
    dry_run: DRY_RUN = False,
    as_json: AS_JSON = False,
    json_tensors: JSON_TENSORS = False,
    report: REPORT = None,
    html: HTML = None,
    plot: PLOT = None,
    quiet: QUIET = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List every tensor.")] = False,
    **options: Any,
) -> None:
    """Merge adapters into a base model and write the result."""
    from ..job import make_job
    from ..planning.plan import sources
    from .stdio import reporting

    pictures = PageFiles(html, plot, quiet=quiet, dry_run=dry_run)
    base = named_base(base)
    words = named_adapters(adapters or [], base, output) or [NamedAdapter(base)]
    named, values = read_with_adapters(words, options)
    with reporting(report) as file:
        job = make_job(base, named, checked_output(output), **values)
        if file is not None:
            file.protect(sources(job), [job.output])
        pictures.protect(sources(job), [job.output])
        report_options = ReportOptions(
            dry_run=dry_run, as_json=as_json, quiet=quiet, verbose=verbose, overwrite=job.overwrite,
            tensors=json_tensors,
        )  # fmt: skip
        merged = merge_and_report(lambda display: _planned(job, display, report_options), file, report_options)
    if merged is not None:
        pictures.write(lambda: pictured(*merged) if html is not None else asdict(merged[0]))


def _planned(job: Job, display: Display | None, options: ReportOptions) -> Plan:
    from ..engine.admission import downloaded, plan_merge

    if options.dry_run:
        return plan_merge(replace(job, overwrite=True), dry=True)
    return plan_merge(downloaded(job, display or unwatched, announcing(display, quiet=options.quiet)))


@app.command(cls=GroupedCommand)
def demo(
    folder: Annotated[str, typer.Argument(help="Folder of the files.")] = "lora-merge-demo",
) -> None:
    """Merge three small adapters into a small model, offline, in seconds."""

    where = expand(folder)
    with watching(quiet=False, doing=LOADING):
        from .demo import demo as run_demo
    run_demo(where, echo)


for room in (adapter_commands, tables, inspect_commands, verify_commands, comfyui_command, ui_command):
    room.add_to(app)


class _Stopped(BaseException):
    """SIGINT or SIGTERM has arrived. It unwinds everything, so that everything is cleaned up."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def _stop(number: int, _frame: FrameType | None) -> None:
    raise _Stopped(number)


@cache
def _program() -> Any:
    """Return the commands and their options as click has them; it takes 16 ms to make them."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the program; the only place that turns failures into text and exit codes."""
    on_stop(_stop)
    leave_lost_folder()
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, LimitCheck())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # blocks are folded side by side; more would wait for each other
    try:
        with signals_first():
            width = shutil.get_terminal_size().columns
            wide = {"terminal_width": width - 2} if width < LEAST_HELP_COLUMNS else {}
            raise SystemExit(_program()(prog_name="lora-merge", standalone_mode=False, **wide) or 0)
    except REFUSED as e:
        if not sys.argv[1:]:  # no argument at all
            put(Lines.of(str(e).splitlines()))
            raise SystemExit(UsageError.exit_code) from None
        _fail(refused(e, sys.argv[1:], _program().commands))
    except _Stopped as stop:
        _fail(stop, f"{stop}; nothing was left behind")
    except Exception as error:
        failure = as_resource_error(error) or error
        if isinstance(failure, MergeError):
            _fail(failure)
        if not isinstance(error, OSError):
            _print_json_error(error)
            raise
        where = one_line(str(error.filename or "an input or output"))
        _fail(error, f"{error.strerror or error}\n  where: {where}\n  fix:   nothing was left behind; run again")


def _fail(error: BaseException, text: str = "") -> None:
    """End the program: the failure on stderr, in words of its own or these, with --json also on stdout."""
    if isinstance(error, MergeError):
        correct(error, without_global_options(sys.argv[1:], checked=False), _program().commands)
        check_fix(error, _refusal)
    text = text or str(error)
    if debugging():
        import traceback

        traceback.print_exc()
    text = with_addresses(text)
    if styled(sys.stderr):
        show_error(text)
    else:
        print(f"error: {text}", file=sys.stderr)  # noqa: T201
    _print_json_error(error)
    raise SystemExit(error_dict(error)["exit_code"])


def _refusal(words: Sequence[str]) -> MergeError | None:
    """Return the error with which a plan of a line is refused, with its own line corrected; None for a line that is
    accepted, and for one that would write reports, read other machines, or has no plan."""
    command = next((word for word in words[:1] if word in _program().commands), MERGE)
    writes = any(word.partition("=")[0] in ("--report", "--html", "--plot") or "://" in word for word in words)
    read = [
        word for before, word in pairwise(["", *words]) if before not in ("-o", "--output") and not word.endswith(".py")
    ]
    if command not in COMMANDS or writes or any(split(word) is not None for word in read):
        return None
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            _program()([*words, DRY_RUN_WORD], prog_name="lora-merge", standalone_mode=False)
    except REFUSED as e:
        failed: BaseException = refused(e, words, _program().commands)
    except _Stopped:  # the error is shown as it is
        return None
    except Exception as e:  # noqa: BLE001  # what is no MergeError is not about the line
        failed = as_resource_error(e) or e
    else:
        return None
    if not isinstance(failed, MergeError):
        return None
    failed.reword(lambda text: text if DRY_RUN_WORD in words else text.replace(f" {DRY_RUN_WORD}", ""))
    correct(failed, words, _program().commands)
    return failed


def _print_json_error(error: BaseException) -> None:
    """Print the failure as JSON if --json is set; of a batch it is the last line, below those of its jobs."""
    if "--json" in sys.argv:
        with suppress(OSError, ValueError):  # a closed stdout
            put(json_text(failure(error)))
