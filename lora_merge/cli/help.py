"""Help by groups of options, completion in shells, and errors for arguments that click refuses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from ..adapter_arguments import right_form
from ..command import MERGE
from ..errors import MergeError, UsageError
from ..option_texts import takes
from ..options import OPTIONS
from ..paths import ENDINGS, exists, expand, with_found_ending
from ..recipes.commands import COMMANDS
from ..text import plural
from .corrected_line import in_places, is_adapter, line, options_of, path_of, split_words
from .foreign_names import alike
from .terminal import COLOR_FLAG, DEBUG, EVERYWHERE, Color, without_global_options

UNRECORDED: Final = "If the output has no recipe"
"""Heading of the options of a merge that `verify` reads from a recipe, if there is one."""

OPTION_GROUPS: Final = ("Strength", "Method", "Input", "Output", "Computation", UNRECORDED, "Report")
"""Headings of options, in the order of the help; other options come first, below "Options"."""

BY_NAME: Final = {
    "output": "Output",
    **dict.fromkeys(
        ("as_json", "json_tensors", "report", "html", "plot", "quiet", "verbose", "dry_run", "schema"), "Report"
    ),
}
"""Parameter that many commands have → its heading."""

COMMAND_GROUPS: Final = {
    "Merge": ("merge", "batch", "ui", "comfyui", "demo"),
    "Adapters": tuple(name for name, row in COMMANDS.items() if not row.merges),
    "Look": ("inspect", "parts", "compare", "architectures", "algorithms"),
    "Check": ("verify", "replay", "unmerge", "doctor", "schema"),
}
"""Heading of commands → its commands, in the order of use."""

LONGEST_CHOICES: Final = 40  # letters of choices behind the name of an option


class GroupedCommand(TyperCommand):
    """A command that lists its options by groups, its usage as "BASE ADAPTER[:STRENGTH]... [OPTIONS]"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments as text."""
        take_text(self.get_params(ctx))
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; for the shell's completion also those of every command."""
        return [*super().get_params(ctx), *(everywhere() if ctx.resilient_parsing else ())]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words behind the name of the command, the options last."""
        words = []
        for parameter in (p for p in self.get_params(ctx) if p.param_type_name == "argument"):
            word = str(parameter.metavar or parameter.name.upper())
            word += "..." if parameter.nargs == -1 and "..." not in word else ""
            words.append(word if parameter.required else f"[{word}]")
        return [*words, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options by groups."""
        groups: dict[str, list[tuple[str, str]]] = {
            "Arguments": [],
            "Options": [],
            **{name: [] for name in OPTION_GROUPS},
        }
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None:
                continue
            if parameter.param_type_name == "argument":
                groups["Arguments"].append((row[0].partition(" <")[0], row[1]))
            else:
                name = getattr(parameter, "rich_help_panel", None) or BY_NAME.get(parameter.name, "Options")
                groups.setdefault(name, []).append(_row(str(parameter.name).upper().replace("_", "-"), *row))
        groups["Report"] += EVERYWHERE
        groups["Report"] += [row for row in groups["Options"] if "--help" in row[0]]
        groups["Options"] = [row for row in groups["Options"] if "--help" not in row[0]]
        for name, rows in groups.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows, col_max=min(30, formatter.width // 2))


class CommandGroup(TyperGroup):
    """Commands below one word, such as `comfyui install`, with the options of every command."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words behind the name of the group."""
        return ["COMMAND", "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, and the options of every command."""
        self.format_commands(ctx, formatter)
        rows = [row for p in self.get_params(ctx) if (row := p.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl([*EVERYWHERE, *rows], col_max=min(30, formatter.width // 2))


def add(app: typer.Typer, command: Callable[..., None], *lines: str, name: str | None = None) -> None:
    """Add a command to the program. `lines`: its examples."""
    app.command(name, cls=GroupedCommand, epilog=examples(*lines) if lines else None)(command)


def take_text(parameters: Iterable[Any]) -> None:
    """Have parameters take text as it is.

    `process_value` is click's documented place for that. Since 0.29 typer has pydantic look at every value there, whose
    import alone takes 0.1 s. `make_job` and its like parse the text.
    """
    for parameter in parameters:
        if "process_value" not in vars(parameter):  # a process may run a command many times
            parameter.process_value = partial(_process, parameter, parameter.process_value)


def _process(parameter: Any, process: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """Return the text as it is, with its callback called; typer itself handles required arguments and switches."""
    if value is None or value == ():
        return process(ctx, value) if parameter.required else value
    if isinstance(value, bool):
        return process(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


@cache
def everywhere() -> list[Any]:
    """Return the options of every command as parameters. The program takes them before it looks at any other."""
    app = typer.Typer(add_completion=False)
    app.command()(_everywhere)
    return [*typer.main.get_command(app).params]


def _everywhere(
    color: Annotated[Color, typer.Option(COLOR_FLAG, help=EVERYWHERE[0][1])] = "auto",
    debug: Annotated[bool, typer.Option(DEBUG, help=EVERYWHERE[1][1])] = False,
) -> None: ...


def _row(word: str, names: str, text: str) -> tuple[str, str]:
    """Return the row of an option: `word` in place of a type, and of choices that find no room in a line."""
    names = names.replace("<list[str]>", word).replace("<str>", word)
    start, _, choices = names.partition(" <")
    if len(choices) < LONGEST_CHOICES:
        return names, text
    sentence, bracket, default = text.partition("  [")
    return f"{start} {word}", f"{sentence} One of {', '.join(choices[:-1].split('|'))}.{bracket}{default}"


def offered(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that gives the words with a beginning, for the shell's completion."""
    known = list(words)

    def beginning(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return beginning


def files(incomplete: str) -> list[str]:
    """Return the files and folders whose paths begin so, for the shell's completion."""
    from glob import escape, glob

    paths = sorted(glob(f"{escape(incomplete)}*"))  # noqa: PTH207
    return [f"{path}/" if Path(path).is_dir() else path for path in paths]


def examples(*commands: str) -> str:
    """Return the end of a help text: examples, one a line, as click leaves them."""
    return "\b\nExamples:\n" + "".join(f"  lora-merge {command}\n" for command in commands)


REFUSED: Final[type[Exception]] = typer.BadParameter.__mro__[1]
"""The errors of click for arguments that it cannot take, of typer's own copy of click or of click itself."""


def refused(error: Exception, args: Sequence[str], commands: Mapping[str, Any]) -> MergeError:
    """Return the error for arguments that click cannot take, in our three lines. `args`: the line; `commands`: by
    name."""
    typed = " ".join(["lora-merge", *args])[:200]
    words = without_global_options(args, checked=False)
    context, parameter = getattr(error, "ctx", None), getattr(getattr(error, "param", None), "name", "")
    command = " ".join(context.command_path.split()[1:]) if context is not None else ""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    if context is None and "requires an arg" in text:  # click does not name the command
        command = next((word for word in args[:1] if word in commands), MERGE)
    see = f"see `{' '.join(['lora-merge', 'help', *command.split()[:1]])}`"
    if command == MERGE and parameter in ("base", "adapters") and "issing" in type(error).__name__:
        what = "no adapter is named" if parameter == "adapters" else "no base and no adapter is named"
        return UsageError(what, typed, f"`lora-merge BASE ADAPTER:0.8`; {see}")
    if name := getattr(error, "option_name", "") if text.startswith("No such") else "":
        near, advice = _advice(name, context)
        return UsageError(f"there is no option {name}", typed, advice + see).instead(name, *near[:1])
    if unknown := re.match("No such command '([^']*)'", text):  # of a group of commands, such as comfyui
        names = getattr(getattr(context, "command", None), "commands", commands)
        near = get_close_matches(unknown[1], names, 1, 0.7)
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}; {see}"
        return UsageError(f"there is no command {unknown[1]!r}", typed, fix).instead(unknown[1], *near)
    known = context.command if context is not None else commands.get(command)
    if text.startswith("Missing option") and (model := _model_as_adapter(known, words)):
        return model
    extra = _extra(text)
    if command == "batch" and extra and (models := [path for path in map(path_of, args) if path.endswith(ENDINGS)]):
        from ..files.file_signatures import model_as_jobs

        return model_as_jobs(models[0])
    corrected = _whole_line(error, text, command, known, words)
    fix = corrected.removesuffix("; ") if corrected.startswith("write lora-merge ") else f"{corrected}{see}"
    what = f"{plural(len(extra), 'word')} too many: {' '.join(extra)}" if extra else f"{text[:1].lower()}{text[1:]}"
    return UsageError(what.rstrip("."), typed, fix)


def _extra(text: str) -> list[str]:
    """Return the words for which a command has no place, from the text of click."""
    words = re.fullmatch(r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)\.?", text)
    return words[1].split(" ") if words else []


def _model_as_adapter(command: Any, words: Sequence[str]) -> MergeError | None:
    """Return the error for a model in the place of the adapter of a command, which a missing option would hide."""
    from ..adapters.modules import model_in_its_place
    from ..files.checkpoint import open_checkpoint

    of_adapter = any(parameter.name == "adapter" for parameter in command.params)
    for word in filter(exists, words if of_adapter else ()):
        with suppress(MergeError):  # the command itself reports it
            return model_in_its_place(open_checkpoint(expand(word), adapter=True))
    return None


def _whole_line(error: Exception, text: str, command: str, known: Any, words: Sequence[str]) -> str:
    """Return how to correct a line that lacks a word, or has one too many: the line itself, with values as in the
    example of the command's help."""

    epilog = getattr(known, "epilog", None) or ""
    example = next(iter(re.findall(r"^  (lora-merge .*)", epilog, re.MULTILINE)), "")
    flag = next(iter(re.findall(r"[Oo]ption '(--?[\w-]+)", text)), "")
    value = next(iter(re.findall(rf"{re.escape(flag)} (\S+)", example)), "") if flag else ""
    if flag == "--rank" and "--max-rank" in words[:-1]:  # as mergekit names it
        at = words.index("--max-rank")
        return f"write {line([*words[:at], flag, *words[at + 1 :]])}; "
    value = value or {"-o": "out.safetensors", "--html": "report.html"}.get(flag, "")
    missing = getattr(error, "param", None) if "issing" in type(error).__name__ else None
    if value and missing is not None:
        return f"write {line([*words, flag, value])}; "
    if value and words[-1:] == [flag]:
        return f"write {line([*words, value])}; "
    called = command.split()
    if called and words[: len(called)] == called and known is not None:
        plain, options = split_words(words[len(called) :], options_of(known))
        if missing is not None and missing.param_type_name == "argument":
            required = [p for p in known.params if p.param_type_name == "argument" and p.required][len(plain) :]
            names = [f"{p.metavar or p.name}".partition("[")[0].strip(".").upper() for p in required]
            alike = "ADAPTER" if plain and is_adapter(plain[0]) else "TUNED"
            words = [*called, *plain, *(alike if name == "B" else name for name in names), *options]
            right = in_places(words, options_of(known))
            other = [*called, "BASE", *plain, *options] if right and names == ["TUNED"] else []
            turned = in_places(other, options_of(known))
            or_so = f"or, if {plain[0]} is the model after the training, {line(turned)}; " if turned else ""
            return f"write {line(right or [*called, *plain, *names, *options])}; {or_so}"
        if (extra := _extra(text)) and plain[-len(extra) :] == extra:
            return _without_extra([*called, *plain[: -len(extra)]], extra, options, known)
    return "write its value after it; " if "requires an arg" in text else f"such as {example}; " if example else ""


def _without_extra(words: Sequence[str], extra: Sequence[str], options: Sequence[str], known: Any) -> str:
    """Return how to correct a line with words for which its command has no place: one of them may be the output."""
    if words[0] == "verify" and (right := _without_recipe(words[1:], extra)):
        return f"write {line([*right, *options])}; "
    each = [word for word in (*words[1:], *extra) if path_of(word) and is_adapter(path_of(word))]
    if len(each) > len(extra) and not {"-o", "--output"} & {*options}:
        return f"write {'; then '.join(line([words[0], word, *options]) for word in each)}; "
    word, *others = extra
    flag = "--rank" if right_form(word) else "--to" if takes("to", word) else "--output"
    flag = flag if flag in options_of(known) else "--output"
    free = flag in options_of(known) and not {flag, flag[1:3]} & {option.partition("=")[0] for option in options}
    if free and not others and (not exists(with_found_ending(word)) or Path(word).is_dir()):
        is_output = flag == "--output"
        named = line([*words, "-o" if is_output else flag, word, *options])
        return f"if {word} is the output, write {named}; " if is_output else f"write {named}; "
    return f"leave the rest out: {line([*words, *options])}; "


def _without_recipe(files: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """Return the words that verify an output without a recipe by its inputs, or that show how an adapter fits where no
    base is among these; [] for other words, and for an output that names its inputs."""
    from ..viewing.base import recipe_of

    if not all(map(exists, (*files, *inputs))) or recipe_of(expand(files[0])) is not None:
        return []
    flag_of = {word: "--adapter" if is_adapter(word) else "--base" for word in inputs}
    if "--base" not in flag_of.values():
        return ["inspect", *files, *inputs]
    return ["verify", *files, *(part for word in inputs for part in (flag_of[word], word))]


def _advice(name: str, context: Any) -> tuple[list[str], str]:
    """Return the options of the command that a misspelt one resembles, and advice on it."""
    parameters = getattr(getattr(context, "command", None), "params", ())
    known = [option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)]
    known += ["--help", COLOR_FLAG, DEBUG]
    if not name.startswith("--"):
        negative = "write the strength after the file name: ADAPTER:-0.8; "
        return [], negative if name[1:2].isdigit() else ""
    plain = name.replace("_", "-")
    if getattr(context, "info_name", "") == "batch" and plain in (option.flag for option in OPTIONS.values()):
        return [], _in_file(plain)
    near = alike(plain, known) or [option for option in known if option.startswith(plain)][:3]
    return near, f"did you mean {' or '.join(near)}? " if near else ""


def _in_file(flag: str) -> str:
    """Return where an option of merges belongs in a jobs file."""
    if flag == "--strength":
        return "write a strength after its path in the jobs file: adapters: [lora.safetensors:0.8]; "
    return f"write it in the jobs file, for a job or under defaults: {flag[2:].replace('-', '_')}: VALUE; "
