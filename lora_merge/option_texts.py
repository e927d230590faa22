"""Options in words: their values on a command line, in lines of a text and fields of a page, and back; and the options
and commands of a message as jobs files and Python have them.

A value is what a jobs file has for the option. Messages are written with the words of the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from .adapter_arguments import right_form
from .command import MERGE
from .errors import UsageError
from .options import JOB_OPTIONS, Option, OptionKind, number
from .paths import split_strength, words_of
from .text import CODE, Message, from_json


class Spelling(NamedTuple):
    """How the values of one kind of options are written."""

    read: Callable[[Option, Sequence[str]], Any]
    """Returns the value of some words; UsageError for words that are no value."""
    write: Callable[[Any], Sequence[str]]
    """Returns the words of a value."""


def value_of(option: Option, words: Sequence[str]) -> Any:
    """Return the value that words state; UsageError for words that are no value of the option."""
    return SPELLINGS[option.kind].read(option, words) if option.kind in SPELLINGS else words[0]


def on_command_line(option: Option, value: Any) -> Iterator[str]:
    """Yield the words of a command line that state a value."""
    if option.kind == "switch":
        yield option.flag if value else f"--no-{option.name}"
        return
    write = SPELLINGS[option.kind].write if option.kind in SPELLINGS else _as_word
    yield from (f"{option.flag}={word}" for word in write(value))


def parsed_setting(text: str) -> tuple[str, Any]:
    """Return ("lora_alpha", 16) for "lora_alpha=16"; values are JSON, or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{text!r} does not give a setting and its value", "--setting", "write it like lora_alpha=16")
    try:
        return name, from_json(value)
    except ValueError:
        return name, value


def metadata_entry(text: str) -> tuple[str, str]:
    """Return ("modelspec.author", "me") for "modelspec.author=me"."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(
            f"{text[:80]!r} does not give an entry and its text", "--metadata", "write it like modelspec.author=NAME"
        )
    return name, value


def as_number(text: str, option: str, *, whole: bool) -> float:
    """Return the number that a text holds; UsageError for another text. A whole number is an int."""
    try:
        return int(text) if whole and "_" not in text else number(text)
    except ValueError as e:
        kind, value = "whole number" if whole else "number", "" if whole else right_form(text)
        fix = f"write `{option} {value}`" if value else f"use a {kind} such as 1"
        raise UsageError(f"{text[:40]!r} is not a {kind}", option, fix) from e


def part_rule(text: str) -> tuple[str, str]:
    """Return ("te", "8") for "te=8"."""
    part, _, rule = text.rpartition("=")
    if not (part and rule):
        raise UsageError(f"{text[:80]!r} does not give a part and its rule", "--rank-for", "write it like te=8")
    return part, rule


def _list(option: Option, words: Sequence[str]) -> list[float]:
    texts = [text for word in words for text in word.replace(",", " ").split()]
    return [as_number(text, option.flag, whole=False) for text in texts]


def _as_word(value: Any) -> list[str]:
    return [str(value)]


def _as_pairs(value: Mapping[str, Any]) -> list[str]:
    return [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in value.items()]


SPELLINGS: Final[Mapping[OptionKind, Spelling]] = MappingProxyType({
    "switch": Spelling(lambda _, words: words[0] == "true", _as_word),
    "whole": Spelling(lambda o, words: as_number(words[0], o.flag, whole=True), _as_word),
    "number": Spelling(lambda o, words: as_number(words[0], o.flag, whole=False), _as_word),
    "list": Spelling(_list, lambda value: [",".join(map(repr, value))]),
    "texts": Spelling(lambda _, words: [*words], lambda value: value),
    "settings": Spelling(lambda _, words: dict(map(parsed_setting, words)), _as_pairs),
    "entries": Spelling(lambda _, words: dict(map(metadata_entry, words)), _as_pairs),
    "ranks": Spelling(lambda _, words: dict(map(part_rule, words)), _as_pairs),
})  # fmt: skip
"""Kind of an option → its spelling; a value of another kind is its one word."""


# Options and commands in messages.

PAIRS: Final = ("parts", "settings", "entries", "ranks")
"""Kinds of options whose values are a name and a value."""

LISTS: Final = ("texts", "list", "numbers")
"""Kinds of options that have several values."""


class Surface(NamedTuple):
    """A place in which people state options, other than the command line: how it writes what a message mentions."""

    pair: str
    """A name and its value, or a part and its factor."""
    switch: Mapping[bool, str]
    literal: Callable[[str], str]
    """Returns a value that is typed on the command line, with its quotes if it has any."""
    names: Mapping[str, str]
    """Option without a row, or with another name there → its name."""
    lacks: Sequence[str]
    """Options with a row that are none there."""
    command: Callable[[str], str] | None
    """Returns a command of ours; None: as it is typed."""


def takes(name: str, word: str) -> bool:
    """Return whether a word is one of the words that an option takes."""
    option = JOB_OPTIONS.get(name)
    return option is not None and word in (option.examples or option.words)


def in_jobs_file(text: str) -> str:
    """Return a message with its options as a jobs file has them: `unmatched: skip` for `--unmatched skip`.

    Commands stay as they are typed.
    """
    return _with_options(text, JOBS_FILE)


def in_python(text: str) -> str:
    """Return a message in Python's words: `unmatched="skip"` for `--unmatched skip`, `combine([A, B])` for
    `lora-merge combine A B`."""
    return _with_options(text, PYTHON)


_MENTION: Final = (
    r"(?<![\w-])(?:--(?P<name>[a-z][a-z-]*)|-o)(?![\w-])(?: (?P<value>'[^']*'|[^\s,;)-][^\s,;)]*(?<![.:])))?"
)
"""An option in a sentence, and the word behind it; -o is the output."""

_TYPED: Final = r"(?:--(?P<name>[a-z][a-z-]*)|-o)(?: (?!--)(?P<value>.*?))?(?= --| -o |$)"
"""An option that can be typed, and its value."""

_NAMED: Final = r"(?<![\w-])lora-merge ([a-z]+)\b"
"""A command in a sentence."""


def _with_options(text: str, surface: Surface) -> str:
    pieces = CODE.split(Message(text).written)
    for n, piece in enumerate(pieces):
        if n % 2 == 0:
            words = re.sub(_MENTION, lambda m: _mention(m, surface), piece)
            pieces[n] = _in_calls(words, surface.command) if surface.command else words
        elif piece.startswith("lora-merge "):
            pieces[n] = surface.command(piece) if surface.command else f"`{piece}`"
        else:
            options = [_option(m["name"], m["value"], surface) or m[0] for m in re.finditer(_TYPED, piece)]
            pieces[n] = ", ".join(options) or piece
    return "".join(pieces)


def _in_calls(words: str, call: Callable[[str], str]) -> str:
    """Return a sentence with commands as calls, and the placeholder of an adapter with its strength as a pair."""
    words = re.sub(_NAMED, lambda m: call(m[0]) if m[1] in CALLS else m[0], words)
    return re.sub(r"\bADAPTER:[0-9.]+[0-9]", lambda m: _adapter(m[0]), words)


def _mention(match: re.Match[str], surface: Surface) -> str:
    """Return an option of a sentence; the word behind it is its value if it looks like one."""
    name, word = match["name"], match["value"]
    if word and (word.isupper() or re.search("[0-9:=']", word) or takes((name or "output").replace("-", "_"), word)):
        return _option(name, word, surface) or match[0]
    return (_option(name, None, surface) or match[0].partition(" ")[0]) + (f" {word}" if word else "")


def _option(flag: str | None, value: str | None, surface: Surface) -> str:
    """Return an option as a surface has it; "" if it has none. `flag`: its name; None for the output."""
    name = (flag or "output").replace("-", "_")
    name, option = surface.names.get(name, name), JOB_OPTIONS.get(name)
    if off := option is None and name.startswith("no_") and name[3:] in JOB_OPTIONS:
        name, option = name[3:], JOB_OPTIONS.get(name[3:])
    if (option is None and name not in surface.names.values()) or name in surface.lacks:
        return ""
    kind = option.kind if option else "path"
    if kind == "switch":
        return surface.pair.format(name, surface.switch[not off])
    if not value:
        return name
    quote = value[0] if value[0] in QUOTES else ""
    part, equals, factor = value.strip(QUOTES).rpartition("=")
    if kind in PAIRS and equals:
        pair = f"{surface.literal(f'{quote}{part}{quote}')}: {surface.literal(factor)}"
        return surface.pair.format(name, f"{{{pair}}}")
    text = surface.literal(value)
    return surface.pair.format(name, f"[{text}]" if kind in LISTS else text)


QUOTES: Final = "'\""


def _yaml(text: str) -> str:
    """Return a value as YAML has it, without escapes."""
    return "'" + text[1:-1].replace("'", "''") + "'" if text[0] in QUOTES else text


def _literal(text: str) -> str:
    """Return a value as Python has it: numbers, lists and placeholders such as FILE as they are, and else a text."""
    text = text.strip(QUOTES)
    plain = re.fullmatch(r"[A-Z]+[0-9]?|-?[0-9.]+(,-?[0-9.]+)*|\[.*\]|true|false|…", text)
    return {"true": "True", "false": "False"}.get(text, text) if plain else json.dumps(text, ensure_ascii=False)


CALLS: Final[Mapping[str, tuple[int, str]]] = MappingProxyType({
    **dict.fromkeys(("extract", "resize", "convert", "inspect", "compare", "replay", "verify"), (9, "{}({})")),
    **dict.fromkeys((MERGE, "unmerge"), (1, "{}({})")), **dict.fromkeys(("combine", "average"), (0, "{}({})")),
    "parts": (9, 'inspect({1})["blocks"]'),
    "batch": (9, 'run_batch([{{"base": BASE, "adapters": [ADAPTER], "output": OUTPUT}}])'),
    "schema": (9, "print(*lora_merge.typed_options.JobTable.__annotations__)"),
})  # fmt: skip
"""Command → how many of its words are not in a list of adapters, and the call of its name and arguments."""


def python_call(command: str) -> str:
    """Return the call that does what a command of ours does: `combine(["a", ("b", 0.5)])`."""
    words = words_of(command)[1:]
    name, *rest = words if words and words[0] in CALLS else (MERGE, *words)
    alone, form = CALLS[name]
    at = next((n for n, word in enumerate(rest) if word.startswith("-")), len(rest))
    if at and name == "batch":
        form = "run_batch({1})"
    arguments = [*map(_literal, rest[:at][:alone])]
    if adapters := [*map(_adapter, rest[:at][alone:])]:
        arguments.append(f"[{', '.join(adapters)}]")
    arguments += [_option(m["name"], m["value"], PYTHON) or m[0] for m in re.finditer(_TYPED, " ".join(rest[at:]))]
    return form.format(name, ", ".join(arguments))


def _adapter(word: str) -> str:
    path, strength = split_strength(word)
    return _literal(path) if strength is None else f"({_literal(path)}, {strength:g})"


JOBS_FILE: Final = Surface(
    "{}: {}", {True: "true", False: "false"}, _yaml, {"base": "base", "output": "output"}, ("overwrite", "card"),
    None,
)  # fmt: skip

PYTHON: Final = Surface(
    "{}={}", {True: "True", False: "False"}, _literal,
    {**{name: name for name in ("base", "output", "search", "full", "workers", "ray_address", "executor")},
     "adapter": "adapters", "json": "to_json()", "dry_run": "plan()"},
    (), python_call,
)  # fmt: skip
