"""The fixes of messages, typed: what was refused is run again as the message says.

While a test of the table `TYPED` runs, each error is taken down with the command line, or with the call of the Python
API as a command line. After it, every alternative of the fix is typed by itself: the same error must not come again,
and no UsageError, which would be about what was typed. A later error of another kind is allowed.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from lora_merge.errors import MergeError
from tests.kit.adapters import kohya
from tests.kit.command_line import run
from tests.kit.files import save
from tests.kit.models import sd1

OPTION: Final = re.compile(
    r"(?<![\w-])(?P<flag>--[a-z][a-z-]*|-[os])(?![\w-])"
    r"(?: (?!(?:or|and|to|is|too|out|that|makes|gives|where|names|keeps|was|merges|changes|leaves|replaces|then|if|with)"
    r"(?![\w./=])|--|\()(?P<value>'[^']*'|\"[^\"]*\"|[^\s;]*[^\s,;:.?)]))?"
)
"""An option of a fix, and its value where one follows."""

COMMAND: Final = re.compile(r"lora-merge (?P<words>(?!(?:to|carry|has|doctor's)\b)[^;(…]*[^;.(…\s])")
"""A command of a fix, up to the end of its clause."""

STOPS: Final = frozenset(
    ["makes", "writes", "tells", "lists", "prints", "write", "and", "or", "to", "for", "has", "leaves", "takes"]
)
"""Words of a sentence that follow a command."""

OTHERS: Final = re.compile(r"(?:hf|curl(?:\.exe)?|ulimit|pip|ray|chmod|git|nvidia-smi)(?: -{0,2}[^\s;,)]+)+")
"""Commands of other programs: of the network, of the shell, of the system."""

OURS: Final = re.compile(r"(?<![\w-])(?:--[a-z]|-[os](?![\w-]))|lora-merge [a-zA-Z]")
"""What makes a fix one that is typed."""

TOGETHER: Final = re.compile(r"\s*(?:,? (?:with|and))?\s*")
"""Between two options that are typed together."""

NEW: Final = "A-NEW-FOLDER"
"""What stands for a folder of the test in a command line."""

CHOSEN: Final[Mapping[str, str]] = {
    "--rank": "4", "--weights": "0.5", "RULE": "4", "N": "4", "--ema": "0.5", "--sigma-rel": "0.1", "--to": "kohya", "--format": "kohya",
    "FILE": f"{NEW}/a.safetensors", "NAME": f"{NEW}/a.safetensors",
    "FOLDER/NAME.safetensors": f"{NEW}/b.safetensors", "FOLDER": f"{NEW}/one", "OTHER": f"{NEW}/other", "--dtype": "bf16",
    "lora_alpha=VALUE": "lora_alpha=16", "parts=VALUE": "parts=[[0,8],[12,16]]", "--algorithm": "full", "--alpha": "rank", "--keep-precision": "none", "--max-memory": "64MiB", "--search": "../former", "--device": "cpu", "--compute-dtype": "fp64", "--method": "sum", "--strength-for": "te=0", "--map": "names.yaml",
}  # fmt: skip
"""Option without a value, or placeholder, of a fix → the value that a user chooses."""

NUMBERS: Final = ("-s", "--strength")
"""Options that a fix states anew, though they can be given several times."""

MISTYPED: Final = ("there is no option", "there is neither", "missing ", "got unexpected", "requires", "the base has no such part",
                   "a regular expression", "the output is a folder, but")  # fmt: skip
"""Headlines of errors about what was typed."""

WRITTEN: Final = re.compile(r"write `(?P<text>[^`]+)` to (?P<name>[\w.]+)")
"""A file that a fix has the user write."""

PLANNED: Final = ("merge", "combine", "resize", "convert", "average", "extract", "batch")
"""The commands that have `--dry-run`."""


class Failure(NamedTuple):
    """A command line that was refused, and what was said of it."""

    argv: tuple[str, ...]
    folder: str
    what: str
    fix: str


@contextmanager
def taken_down() -> Iterator[list[Failure]]:
    """Take down the command line, or the public call, above every error that is made."""
    failures: list[Failure] = []
    plain = MergeError.__init__

    def noted(error: MergeError, what: str, where: str, fix: str) -> None:
        plain(error, what, where, fix)
        argv = asked()
        if argv is not None:
            failures.append(Failure(argv, str(Path.cwd()), error.what, error.fix))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MergeError, "__init__", noted)
        yield failures


def asked() -> tuple[str, ...] | None:
    """What the outermost command or public function on the stack was asked for, as a command line."""
    main = threading.main_thread()
    of_main = threading.current_thread() is not main and main.ident is not None  # a lane of the engine
    argv, frame = None, sys._current_frames()[main.ident] if of_main and main.ident else sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        name = Path(frame.f_code.co_filename).name
        if name == "boundary.py" and frame.f_code.co_name == "call":
            argv = as_typed(*(frame.f_locals[one] for one in ("function", "args", "kwargs")))
        elif name == "main.py" and frame.f_code.co_name == "main" and "lora_merge" in frame.f_code.co_filename:
            argv = tuple(sys.argv[1:])
        elif name == "testing.py" and frame.f_code.co_name == "invoke":  # of typer, for the command line in a test
            argv = tuple(map(str, frame.f_locals["args"] or ()))
    return argv


def as_typed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...] | None:
    """A call of the Python API as a command line; None for what has none, such as tensors in memory."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return None
    command = "merge" if function.__name__ == "plan" else function.__name__
    if command not in commands():
        return None
    words, flags = [command], []
    options = parameters((command,))
    values = {name: value for name, value in {**bound, **bound.get("options", {})}.items()
             if name not in ("options", "progress") and value is not None}  # fmt: skip
    try:
        for name, value in values.items():
            flag = "--" + name.replace("_", "-").replace("strengths", "strength")
            if flag in options:
                flags += as_option(flag, options[flag], value)
            elif name == "output" and "-o" in options:
                flags += ["-o", os.fspath(value)]
            else:
                words += as_paths(value)
    except (TypeError, AttributeError):
        return None
    return (*words, *flags)


def as_paths(value: Any) -> list[str]:
    """Paths with strengths and parts behind them."""
    if isinstance(value, str | os.PathLike):
        return [os.fspath(value)]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int | float):
        return [f"{os.fspath(value[0])}:{value[1]}"]
    if hasattr(value, "path"):
        return [f"{value.path}:{value.strength}" + "".join(f",{part}={factor}" for part, factor in value.parts)]
    if isinstance(value, Mapping):
        return [f"{os.fspath(path)}:{strength}" for path, strength in value.items()]
    return [word for one in value for word in as_paths(one)]


def as_option(flag: str, option: Any, value: Any) -> list[str]:
    """An option with its value."""
    if option.is_flag:
        return [flag] if value else [one for one in option.secondary_opts if one.startswith("--no")][:1]
    if isinstance(value, Mapping):
        value = [f"{name}={one}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        items = ["=".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in value]
        return [word for one in items for word in (flag, one)] if option.multiple else [flag, ",".join(items)]
    return [flag, str(value).removeprefix("torch.")]


@cache
def commands() -> Mapping[str, Any]:
    from lora_merge.cli.main import _program

    return dict(_program().commands)


def command_of(argv: tuple[str, ...]) -> str:
    return argv[0] if argv and (argv[0] in commands() or argv[0] == "help") else "merge"


def parameters(argv: tuple[str, ...]) -> dict[str, Any]:
    command = commands().get(command_of(argv))
    return {o: p for p in command.params for o in (*p.opts, *p.secondary_opts)} if command else {}


@cache
def scene() -> Mapping[str, str]:
    """Placeholder of a command → a file of its kind."""
    folder = Path(tempfile.mkdtemp(prefix="scene"))
    base, tuned, lora = (folder / f"{name}.safetensors" for name in ("base", "tuned", "lora"))
    save(sd1(), base), save({k: v + (v.ndim == 2) for k, v in sd1().items()}, tuned), save(kohya(sd1()), lora)
    jobs = folder / "jobs.yaml"
    jobs.write_text(f"version: 1\njobs:\n- {{base: {base}, adapters: [{lora}], output: {folder}/o.safetensors}}\n")
    vectors = folder / "vectors.safetensors"
    save({k: v + 0.5 if "norm" in k else v for k, v in sd1().items()}, vectors)
    files = {"BASE": base, "VECTORS": vectors, "MODEL": base, "TUNED": tuned, "JOBS.yaml": jobs, "OTHER.yaml": Path(NEW, "other.yaml"),
             "DIR": folder / "demo", "OUT": folder / "out.safetensors"}  # fmt: skip
    files |= dict.fromkeys(("ADAPTER", "ADAPTER2", "A", "B", "SNAPSHOT"), lora)
    return {name: str(path) for name, path in files.items()}


def ways(failure: Failure) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Every alternative of a fix that can be typed: its words, and the command line with it.

    None where no user could choose the value from the words alone.
    """
    rest, argv, value = OTHERS.sub(_blank, failure.fix), failure.argv, None
    for match in COMMAND.finditer(rest):
        first = match["words"].split()[0]
        if first in commands() or first == "help" or first.isupper() or "." in first:
            rest = rest.replace(match[0], _blank(match))
            yield match[0], whole_command(match["words"])
    if failure.what.startswith("there is no option"):
        for word in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", failure.what):
            argv, value = without_unknown(argv, word)
    groups: list[list[re.Match[str]]] = []
    for match in OPTION.finditer(rest):
        if groups and TOGETHER.fullmatch(rest[groups[-1][-1].end() : match.start()]):
            groups[-1].append(match)
        else:
            groups.append([match])
    for group in groups:
        edited: tuple[str, ...] | None = argv
        for n, match in enumerate(group):
            again = n > 0 or not (match["flag"] in NUMBERS or rest[: match.start()].endswith("change "))
            out = rest[: match.start()].endswith("leave ") or rest[match.end() :].startswith(" out")
            if edited is not None:
                edited = (
                    without(edited, match["flag"])
                    if out
                    else with_option(edited, match["flag"], match["value"] or value, again=again)
                )
        yield rest[group[0].start() : group[-1].end()], edited


def _blank(match: re.Match[str]) -> str:
    return " " * len(match[0])


def without_unknown(argv: tuple[str, ...], flag: str) -> tuple[tuple[str, ...], str | None]:
    """A command line without an option that is not known, and the word behind that."""
    left, value, after = [], None, False
    for word in argv:
        if word.partition("=")[0] == flag:
            after, value = "=" not in word, word.partition("=")[2] or None
        elif after and not word.startswith("-"):
            value, after = word, False
        else:
            left.append(word)
            after = False
    return tuple(left), value


def whole_command(words: str) -> tuple[str, ...]:
    """The words of a command with the files of the scene in place of placeholders."""
    typed_words = shlex.split(words)
    stop = next((n for n, word in enumerate(typed_words) if word.rstrip(",") in STOPS and n), len(typed_words))
    typed_words = [re.sub(r"\[:STRENGTH\]|\.\.\.|[,?]$", "", word) for word in typed_words[:stop]]
    filled = []
    for before, word in zip(["", *typed_words], typed_words, strict=False):
        name, colon, strength = word.partition(":")
        filled.append(
            CHOSEN[word] if before.startswith("-") and word in CHOSEN else scene().get(name, name) + colon + strength
        )
    return tuple(word for word in filled if word)


def without(argv: tuple[str, ...], flag: str) -> tuple[str, ...]:
    """A command line without an option."""
    option = parameters(argv).get(flag)
    names, left, value = {flag, *(option.opts if option else ())}, [], False
    for word in argv:
        if value:
            value = False
        elif word in names:
            value = option is not None and not option.is_flag
        elif word.partition("=")[0] not in names:
            left.append(word)
    return tuple(left)


def with_option(argv: tuple[str, ...], flag: str, value: str | None, *, again: bool = True) -> tuple[str, ...] | None:
    """A command line with an option, in the place of one of the same name if that takes one value or not `again`."""
    option = parameters(argv).get(flag)
    if option is None or option.is_flag:
        return (*argv, flag)  # without such an option the command says so
    text = shlex.split(value)[0] if value and value[0] in "'\"" else value
    if flag == "--base" and text in (None, "MODEL"):
        text = base_beside(argv)
    elif text is None and flag == "-o":
        text = (
            f"{NEW}/c" + next((Path(word).suffix for word in argv[argv.index("-o") + 1 :]), "")
            if "-o" in argv
            else None
        )
    elif text is None or text in CHOSEN:
        text = CHOSEN.get(text or flag)
    if text is None:
        return None
    argv = tuple(word for word in argv if flag != "-o" or word != text)  # it was in the place of an input
    return (*(argv if option.multiple and again else without(argv, flag)), flag, text)


def base_beside(argv: tuple[str, ...]) -> str:
    """The base in a folder of the inputs, as its name says; else that of the scene."""
    folders = {Path(word).parent for word in argv if os.path.sep in word}
    return next((str(path) for folder in folders for path in sorted(folder.glob("*base*"))), scene()["BASE"])


def said_of(argv: tuple[str, ...], more: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and headline of a command."""
    planned = command_of(argv) in PLANNED and "--init" not in argv
    done = run(*argv, *(one for one in more if planned and one not in argv))
    said = re.search(r"^error: (.*)", done.err, re.MULTILINE)
    return done.code, said[1] if said else done.err[-200:]


def placed(argv: tuple[str, ...], new: str) -> tuple[str, ...]:
    """A command line with new files, and those that the fix has the user write, in a folder of the test."""
    there = {path.name for path in Path(new).iterdir()}
    return tuple(str(Path(new, word)) if word in there else word.replace(NEW, new) for word in argv)


def typed(failure: Failure) -> dict[str, str] | None:
    """Type the fix of a failure: what was typed → what is wrong with it, "" for nothing; None if it does not come again."""
    suggestions = list(ways(failure))
    if not suggestions or not Path(failure.folder).is_dir():
        return None
    wrong = {}
    with tempfile.TemporaryDirectory() as new, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{new}/caches")
        patch.chdir(failure.folder)
        for more in (("--dry-run",), ()):
            code, said = said_of(failure.argv, more)
            if code and said.startswith(failure.what.split("\n")[0][:60]):
                break
        else:
            return None
        for file in WRITTEN.finditer(failure.fix):
            Path(new, file["name"]).write_text(file["text"])
        for words, argv in suggestions:
            if argv is None:
                wrong[words] = "no value to type"
                continue
            code, again = said_of(placed(argv, new), more)
            about = any(word.strip("'\"") in again for word in words.split() if word.startswith("-") or "=" in word)
            same = code and (again == said or (code == 2 and (about or again.startswith(MISTYPED))))
            wrong[words] = f"{code}: {again}" if same else ""
    return wrong


def pattern(text: str) -> re.Pattern[str]:
    """What a text of the code with … for what is filled in may become."""
    return re.compile(re.escape(text).replace("…", ".*"), re.DOTALL)


def expect_typed(failures: list[Failure], texts: list[str]) -> None:
    """Type the fixes of the failures of a test; each of these texts must have been one of them."""
    for text in texts:
        mine = [one for one in failures if pattern(text).fullmatch(one.fix)]
        assert mine, f"the test does not raise an error of this fix: {text}"
        outcomes = [outcome for one in dict.fromkeys(mine) if (outcome := typed(one)) is not None]
        assert outcomes, f"the error does not come again as a command: {mine[0]}"
        bad = {words: why for outcome in outcomes for words, why in outcome.items() if why}
        assert not bad, f"{text}: {bad}"
