"""Values of options as words: those of a command line, lines of a text, fields of a page; and back.

A value is what a jobs file has for the option.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from .adapter_arguments import right_form
from .errors import UsageError
from .options import Kind, Option, number
from .text import from_json


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
        fix = f"write {option} {value}" if value else f"use a {kind} such as 1"
        raise UsageError(f"{text[:40]!r} is not a {kind}", option, fix) from e


def _rule(option: Option, text: str) -> tuple[str, str]:
    part, equals, rule = text.rpartition("=")
    if not equals:
        raise UsageError(f"{text[:80]!r} does not give a part and its rule", option.flag, "write it like te=8")
    return part, rule


def _list(option: Option, words: Sequence[str]) -> list[float]:
    texts = [text for word in words for text in word.replace(",", " ").split()]
    return [as_number(text, option.flag, whole=False) for text in texts]


def _as_word(value: Any) -> list[str]:
    return [str(value)]


def _as_pairs(value: Mapping[str, Any]) -> list[str]:
    return [f"{name}={v if isinstance(v, str) else json.dumps(v)}" for name, v in value.items()]


SPELLINGS: Final[Mapping[Kind, Spelling]] = MappingProxyType({
    "switch": Spelling(lambda _, words: words[0] == "true", _as_word),
    "whole": Spelling(lambda o, words: as_number(words[0], o.flag, whole=True), _as_word),
    "number": Spelling(lambda o, words: as_number(words[0], o.flag, whole=False), _as_word),
    "list": Spelling(_list, lambda value: [",".join(map(repr, value))]),
    "texts": Spelling(lambda _, words: [*words], lambda value: value),
    "settings": Spelling(lambda _, words: dict(map(parsed_setting, words)), _as_pairs),
    "entries": Spelling(lambda _, words: dict(map(metadata_entry, words)), _as_pairs),
    "rules": Spelling(lambda o, words: dict(_rule(o, word) for word in words), _as_pairs),
})  # fmt: skip
"""Kind of an option → its spelling; a value of another kind is its one word."""
