"""Lines that begin as those of other programs: with the name of one, with its inputs, or with nothing but adapters.

Each is read as a command of ours with options of other programs (`typed_line.py` gives them their roles).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import dropwhile
from typing import Any, Final, NamedTuple

from ..adapter_arguments import of_tags
from ..command import MERGE
from ..errors import MergeError, UsageError
from ..paths import ENDINGS, exists, expand, is_file, typed, words_of
from .compat import FOREIGN_COMMANDS
from .foreign_inputs import (
    OF_PYTHON,
    of_python,
    with_options,
)
from .typed_file import TypedFile, looks_like_path, names_file
from .typed_line import Syntax

PYTHON_PROGRAM: Final = r"(?:.*[\\/])?(?i:python[0-9.]*|accelerate|torchrun)(?i:\.exe)?"
LAUNCHERS: Final = rf"{PYTHON_PROGRAM}|!.*|&|py|-[muc]|launch|uv|run|nohup|sudo|time|[A-Z_]+=.*"
"""Words before the name of a program that is written in Python."""
TRAINERS: Final = "(?:pre|fine)?(?:train|tune)(?:ing|er)?|sft|dreambooth"
"""Words in the names of programs that train."""
MERGERS: Final = r"(?:.*\W)?(?:merge_models|ModelMerge\w*|mergekit)(?!.*extract).*"
"""Names of programs that merge whole models."""
OF_SHELL: Final = ("cp", "mv", "rm", "ls", "cd", "pip", "pip3", "conda", "git", "hf", "huggingface-cli", "wget", "curl")
"""Programs that do nothing with weights."""
NO_PROGRAM: Final = "there is neither such a command nor such a file"
MISSPELT: Final = 0.8
"""The likeness to a command from which a word is a misspelt one."""
LONGEST_SCRIPT: Final = 1 << 20
"""Bytes of a script that is read."""


class Program(NamedTuple):
    """A line of another program."""

    what: str
    """What is wrong with it."""
    name: str
    """What shows whose line it is, as it is typed."""
    command: str
    """The command of ours that does what it does."""
    words: list[str]
    """Its options and files."""
    advice: str = ""
    """What to do if its files are not clear; "" for what its options say."""


def program_of(args: Sequence[str], commands: Mapping[str, Any]) -> Program | None:
    """Return the program whose line these words are; None for others. UsageError for programs with other tasks."""
    if args and all(map(of_tags, args)):
        return Program("no base is named", " ".join(args)[:200], MERGE, [*args])
    if len(args) == 1 and re.search(r"^[^(]*\w -[^(]*$", args[0]) and not exists(args[0]):  # a line in quotes
        args = words_of(args[0])
    starts = [n for n, word in enumerate(args) if re.fullmatch(PYTHON_PROGRAM, word)]  # conda run -n NAME python
    plain = [*dropwhile(lambda word: re.fullmatch(LAUNCHERS, word), args[starts[0] if starts else 0 :])]
    scripts = [n for n, word in enumerate(plain) if word.endswith(".py")]
    plain = plain[scripts[0] :] if scripts and len(plain) < len(args) else plain
    named = _name(plain, commands)
    words, inputs, what = with_options(plain[len(named) :])
    if inputs:
        advice = "name a base and an adapter" + ", or run it in Python" * (what == OF_PYTHON)
        name = " ".join(named or inputs)[:200]
        functions = re.findall(r"(\w+)\(", " ".join(inputs)) if what == OF_PYTHON else named
        command = next(filter(None, (_command_of(word, commands) for word in functions)), MERGE)
        return Program(what, name, command, words, advice)
    return _named_program(args, named, words, commands) if named else None


def _named_program(
    args: Sequence[str], named: Sequence[str], words: list[str], commands: Mapping[str, Any]
) -> Program | None:
    """Return what `program_of` returns, if a line begins with a name. `named`: its words; `words`: the other ones."""
    kinds = [kind for word in words if not word.startswith("-") and (kind := TypedFile(word).kind)]
    complete = len(kinds) > 1 and kinds[0] == "model"  # BASE ADAPTER
    command = next(filter(None, (_command_of(word, commands) for word in named)), "")
    _check_task(args, [*named, *(word for word in words if word == "--train")], complete=complete)
    if command == "convert" and {*kinds} == {"model"}:
        raise UsageError(f"{named[0]} converts models, and lora-merge adapters", " ".join(args)[:200],
                         "run it as it is")  # fmt: skip
    of_module = any(re.fullmatch(r"\w+\.\w+", word) and not word.endswith(ENDINGS) for word in named)  # mlx_lm.fuse
    certain = any(word.endswith(".py") or word.replace("-", "_") in FOREIGN_COMMANDS for word in named)
    certain = certain or (bool(command) and (len(named) > 1 or of_module))
    if not certain and get_close_matches(named[0], commands, 1, MISSPELT):  # a command of ours
        return None
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not (certain or complete or any(map(Syntax.of(MERGE, commands).is_foreign, options))):
        return None
    of_program = certain and (named[0] in OF_SHELL or re.search(r"[\W_]", named[0]) or len(named) > 1)
    what = f"{named[0]} is another program" if of_program else NO_PROGRAM
    if not words and is_file(expand(named[0])):  # a script
        words = of_python(_text(named[0]))
    elif command == "extract" and "mergekit" in named[0] and not any(word.startswith("-") for word in words[:2]):
        words = [*words[1::-1], *words[2:]]  # MODEL BASE OUTPUT
    missing = [word for word in words if word.endswith((".yaml", ".yml")) and not exists(word)]
    advice = f"there is no {missing[0]} here; check its path" if missing else ""
    return Program(what, " ".join(named), command or MERGE, words, advice)


def _name(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return the words at the beginning of a line that name a program: `axolotl merge-lora`, `merge_lora.py`."""
    first, second = [*words[:2], "", ""][:2]
    of_verb = bool(second) and not exists(second) and (bool(_command_of(second, commands)) or _trains(second))
    if of_verb and not {first[:1], second[:1]} & {"-"} and not looks_like_path(second):
        return [first, second]
    is_name = re.fullmatch(r"[\w.\\/:~-]*[\w.\\/~-]", first) and not first.startswith("-")  # lora_name: is an input
    return [first] if is_name and (first.endswith(".py") or not names_file(first)) else []


def _trains(word: str) -> bool:
    return any(re.fullmatch(TRAINERS, part) for part in re.split(r"[\W_]+", word.removesuffix(".py")))


def _check_task(args: Sequence[str], named: Sequence[str], *, complete: bool) -> None:
    """Raise UsageError for a program that does what this one does not. `complete`: whether files are named."""
    line, name = " ".join(args)[:200], named[0]
    if any(_trains(word) for word in named if word.endswith(".py") or word != name):
        raise UsageError(f"{name} trains, and lora-merge merges what is trained", line,
                         "train first, then merge what it writes")  # fmt: skip
    if re.fullmatch(MERGERS, name):
        fix = "write what each adds to a model as an adapter: `lora-merge extract BASE TUNED`; then merge these"
        raise UsageError(f"{name} merges whole models", line, fix)
    if name in OF_SHELL and not (name == "cp" and complete):
        raise UsageError(f"{name} is a command of the shell", line, f"run it alone: {typed(args)}")
    if "quantize" in name and not name.endswith(ENDINGS):
        fix = "a merge quantises what it writes: `lora-merge BASE ADAPTER --dtype q8_0`"
        raise UsageError(f"{name} quantises models", line, fix)
    if re.search("convert.*gguf", name):
        raise UsageError(f"{name} writes an adapter as GGUF, which lora-merge does not", line,
                         "run it as it is; or merge the adapter: `lora-merge BASE ADAPTER`")  # fmt: skip


def _command_of(word: str, commands: Collection[str]) -> str:
    """Return the command of ours that does what a program with this name does, by the verb in the name; "" for
    others."""
    name = re.sub(r".*[\\/]|\.py$", "", word).replace("-", "_")
    verbs = (FOREIGN_COMMANDS.get(verb, verb) for verb in (name, *re.split("[_.]", name)))
    return "" if word.endswith(ENDINGS) else next((verb for verb in verbs if verb in commands), "")


def _text(path: str) -> str:
    """Return the text of a script; "" for a file that is none."""
    from ..files.yaml_source import read_text

    try:
        return read_text(expand(path), LONGEST_SCRIPT)
    except (OSError, MergeError):
        return ""
