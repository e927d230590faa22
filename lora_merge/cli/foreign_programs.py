"""Lines that begin as those of other programs: with the name of one, a configuration, inputs of a node, or Python.

Each is read as a command of ours with options of other programs (`typed_line.py` gives them their roles).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from ..adapter_arguments import of_tags
from ..command import MERGE
from ..errors import MergeError, UsageError
from ..paths import ENDINGS, exists, expand, is_file, typed, words_of
from ..text import from_json
from .compat import FOREIGN_COMMANDS
from .corrected_line import is_adapter
from .foreign_names import Role, meaning_of
from .typed_line import looks_like_path, names_file

LAUNCHERS: Final = r"(?:.*[\\/])?python[0-9.]*(?:\.exe)?|!.*|py|-[mu]|accelerate|launch|uv|run|[A-Z_]+=.*"
"""Words before the name of a program that is written in Python."""
TRAINERS: Final = "(?:pre|fine)?(?:train|tune)(?:ing|er)?|sft|dreambooth"
"""Words in the names of programs that train."""
OF_SHELL: Final = frozenset(
    ["pip", "pip3", "conda", "git", "hf", "huggingface-cli", "mv", "rm", "ls", "cd", "wget", "curl"]
)
"""Programs that do nothing with weights."""
PYTHON: Final = r"(?:\w+ *= *)?[A-Za-z_][\w.]*\(|(?:from|import) \w"
"""How a line of Python begins."""
NO_PROGRAM: Final = "there is neither such a command nor such a file"
NAME_THE_FILES: Final = "name the files: `lora-merge BASE ADAPTER`"
OF_FILES: Final = frozenset({Role.BASE, Role.ADAPTERS, Role.MODEL, Role.TUNED, "-o {}"})
"""The roles of options whose values name files."""


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
    certain: bool
    """Whether it is no line of ours with a mistake."""
    advice: str = ""
    """What to do if its files are not clear; "" for what its options say."""


def program_of(args: Sequence[str], commands: Collection[str], is_foreign: Callable[[str], bool]) -> Program | None:
    """Return the program whose line these words are; None for others. UsageError for programs with other tasks.

    `is_foreign`: whether an option is one of other programs.
    """
    if (inputs := _of_inputs(args, commands)) is not None:
        return inputs
    if len(args) == 1 and " -" in args[0] and not exists(args[0]):  # a line in quotes
        args = words_of(args[0])
    plain = [*dropwhile(lambda word: re.fullmatch(LAUNCHERS, word), args)]
    scripts = [n for n, word in enumerate(plain) if word.endswith(".py")]
    plain = plain[scripts[0] :] if scripts and len(plain) < len(args) else plain
    named = _name(plain, commands)
    words, files = with_settings(plain[len(named) :])
    _check_task(args, named, words)
    command = next(filter(None, (_command_of(word, commands) for word in named)), "")
    if command == "extract" and "mergekit" in named[0]:
        words = [*words[1::-1], *words[2:]]  # MODEL BASE OUTPUT
    files_of = [word for word in words if not word.startswith("-") and names_file(word)]
    models = [word for word in files_of if not is_adapter(word)]
    if named and command == "convert" and models == files_of != []:
        raise UsageError(f"{named[0]} converts models, and lora-merge adapters", " ".join(args)[:200], NAME_THE_FILES)
    complete = len(files_of) > 1 and models[:1] == files_of[:1]  # BASE ADAPTER
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    certain = any(word.endswith(".py") or word.replace("-", "_") in FOREIGN_COMMANDS for word in named)
    of_module = any(re.fullmatch(r"\w+\.\w+", word) and not word.endswith(ENDINGS) for word in named)  # mlx_lm.fuse
    certain = certain or (bool(command) and (len(named) > 1 or of_module))
    if files:
        what = "this is a configuration of another program"
        return Program(what, " ".join(named or files), command or MERGE, words, certain=True)
    missing = [word for word in words if word.endswith((".yaml", ".yml")) and not exists(word)]
    advice = f"there is no {missing[0]} here; check its path" if missing else ""
    if certain or (named and (complete or any(map(is_foreign, options)))):
        return Program(NO_PROGRAM, " ".join(named), command or MERGE, words, certain, advice)
    return None


def _name(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """Return the words at the beginning of a line that name a program: `axolotl merge-lora`, `merge_lora.py`."""
    first, second = [*words[:2], "", ""][:2]
    of_verb = bool(second) and not exists(second) and (bool(_command_of(second, commands)) or _trains(second))
    if of_verb and not {first[:1], second[:1]} & {"-"} and not looks_like_path(second):
        return [first, second]
    return [] if first.startswith("-") or (names_file(first) and not first.endswith(".py")) else [*words[:1]]


def _trains(word: str) -> bool:
    return any(re.fullmatch(TRAINERS, part) for part in re.split(r"[\W_]+", word.removesuffix(".py")))


def _check_task(args: Sequence[str], named: Sequence[str], words: Sequence[str]) -> None:
    """Raise UsageError for a program that does what this one does not."""
    line = " ".join(args)[:200]
    if named and (
        any(_trains(word) for word in named if word.endswith(".py") or word is not named[0]) or "--train" in words
    ):
        raise UsageError(f"{named[0]} trains, and lora-merge merges what is trained", line, NAME_THE_FILES)
    if named and named[0] in OF_SHELL:
        raise UsageError(f"{named[0]} is a command of the shell", line, f"run it alone: {typed(args)}")
    if named and "quantize" in named[0] and not named[0].endswith(ENDINGS):
        fix = "a merge quantises what it writes: `lora-merge BASE ADAPTER --dtype q8_0`"
        raise UsageError(f"{named[0]} quantises models", line, fix)


def _command_of(word: str, commands: Collection[str]) -> str:
    """Return the command of ours that does what a program with this name does, by the verb in the name; "" for
    others. A GGUF file is written by a merge."""
    name = re.sub(r".*[\\/]|\.py$", "", word).replace("-", "_")
    verbs = (FOREIGN_COMMANDS.get(verb, verb) for verb in (name, *re.split("[_.]", name)))
    command = "" if word.endswith(ENDINGS) else next((verb for verb in verbs if verb in commands), "")
    return MERGE if command == "convert" and "gguf" in name else command


def _with_node_inputs(args: Sequence[str]) -> list[str]:
    """Return a line with the inputs of nodes, `lora_name=style` or `lora_name: style`, as options."""
    words, of_option = list[str](), False
    for word in args:
        name = re.fullmatch("([a-z]+(?:_[a-z]+)+)(?:=.+|:)", word)
        if words and words[-1].startswith("--") and words[-1].endswith("="):
            words[-1] += word
        elif name is not None and not (exists(word) or of_option) and meaning_of(f"--{name[1]}") is not None:
            words.append(f"--{word.removesuffix(':')}{'=' * word.endswith(':')}")
        else:
            words.append(word)
        of_option = word.startswith("-") and "=" not in word
    return words


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and value of what a JSON text states, whatever the level."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif name and meaning_of(f"--{name}") is not None:
        yield name, value


def _of_inputs(args: Sequence[str], commands: Collection[str]) -> Program | None:
    """Return inputs of nodes as options, or calls in Python; None for other lines."""
    text, words = " ".join(args), _with_node_inputs(args)
    if args and all(map(of_tags, args)):
        return Program("no base is named", text[:200], MERGE, words, certain=True)
    if len(args) == 1 and not exists(text) and re.match(PYTHON, text):
        return _of_python(text, commands)
    if len(args) == 1:
        with suppress(ValueError, OSError, MergeError):
            words = [f"--{name}={value}" for name, value in _leaves(from_json(_json_of(text)))] or words
    if not words or words == [*args]:
        return None
    what, advice = "these are inputs of another program", "name a base and an adapter"
    return Program(what, text[:200], MERGE, words, certain=True, advice=advice)


def _json_of(text: str) -> str:
    """Return the text of a workflow, or what was typed."""
    if not text.endswith(".json") or not is_file(expand(text)):
        return text
    from ..files.file_signatures import LONGEST_BEGINNING
    from ..files.yaml_source import read_text

    workflow = read_text(expand(text), LONGEST_BEGINNING)
    return workflow if "class_type" in workflow else ""


def _of_python(text: str, commands: Collection[str]) -> Program:
    """Return calls in Python as words: strings that name files, numbers, and keywords as options."""
    words, command = list[str](), ""
    with suppress(SyntaxError):  # a placeholder, or a line that is cut
        calls = [node for node in ast.walk(ast.parse(text.strip())) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda call: (call.func.end_lineno or 0, call.func.end_col_offset or 0)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            command = _command_of(name, commands) or command
            words += _words_of_call(name, call)
    words = [*dict.fromkeys(words)]
    advice = "name a base and an adapter, or run it in Python"
    return Program("this is a line of Python", text[:200], command or MERGE, words, certain=True, advice=advice)


def _words_of_call(name: str, call: ast.Call) -> Iterator[str]:
    keywords = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg}
    file_in_folder, loads = keywords.pop("weight_name", None), re.search("from_|load", name)
    for value in map(_value, call.args):
        values = value if isinstance(value, list | tuple) else [value]
        numbers = [f"{number}" for number in values if isinstance(number, int | float) and not isinstance(number, bool)]
        files = [item for item in values if isinstance(item, str) and item]
        if isinstance(file_in_folder, str):
            yield from (str(PurePosixPath(folder, file_in_folder)) for folder in files)
        elif name.startswith("save"):
            yield from (f"--save-to={file}" for file in files[:1])
        else:
            yield from (file for file in files if loads or looks_like_path(file))
        if numbers:
            yield f"--weights={','.join(numbers)}"
    for keyword, value in keywords.items():
        if value is not None:
            yield f"--{keyword}={str(value).lower() if isinstance(value, bool) else value}"


def _value(node: ast.expr) -> Any:
    """Return the value of an expression; of `torch.float16` its last word; None if it is not stated."""
    if isinstance(node, ast.Attribute):
        return node.attr
    with suppress(ValueError):
        return ast.literal_eval(node)
    return None


def with_settings(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a line with the files and the output of a configuration, such as one of Axolotl, as options in its place,
    but those of which the line has one; and the configurations. UsageError for one of mergekit."""
    words, files = list[str](), list[str]()
    configurations = [word for word in args if word.endswith((".yaml", ".yml")) and exists(word)]
    stated = {_role(arg) for arg in args if configurations and arg.startswith("-")}
    for word in args:
        fields = _fields(word) if word in configurations else {}
        roles = {name: _role(f"--{name}") for name, value in fields.items() if isinstance(value, str)}
        roles = {name: role for name, role in roles.items() if role in OF_FILES - stated}
        paths = {name for name in roles if looks_like_path(fields[name]) and name != "adapter"}  # a kind, of Axolotl
        roles = {name: role for name, role in roles.items() if role == "-o {}" or name in paths}
        settings = [f"--{name}={fields[name]}" for name, role in roles.items() if role != "-o {}"]
        for output in (fields[name] for name, role in roles.items() if role == "-o {}"):
            trained = exists(output) and expand(output).is_dir()  # of Axolotl, with the adapter in it
            settings.append(f"--output_dir={output.rstrip('/')}{'/merged' if trained else ''}")
            if trained and Role.ADAPTERS not in {*roles.values(), *stated} and is_adapter(output):
                settings.append(f"--lora={output}")
        words += settings or [word]
        files += [word] * bool(settings)
    return words, files


def _role(option: str) -> str:
    """Return the role of an option of another program for a merge; "" for none."""
    forms = meaning.forms if (meaning := meaning_of(option)) else ()
    return next((form for form in forms if form in OF_FILES), "")


def _fields(path: str) -> Mapping[str, Any]:
    """Return the fields of a YAML file of another program; {} for others. UsageError for one of mergekit."""
    from ..files.file_signatures import LONGEST_BEGINNING, is_mergekit, of_mergekit, top_fields
    from ..files.yaml_source import parse, read_text

    fields: object = {}
    try:
        names, text = top_fields(expand(path)), read_text(expand(path), LONGEST_BEGINNING)
    except (OSError, MergeError):  # here and below, the command itself reports it
        return {}
    if {"jobs", "base", "adapters"} & names:
        return {}
    if is_mergekit(names):
        raise of_mergekit(path)
    if any(_role(f"--{name}") for name in names):
        with suppress(MergeError):
            fields = parse(text, path).value
    return fields if isinstance(fields, dict) else {}
