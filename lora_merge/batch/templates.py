"""Fills `{name}` in the texts of a jobs file with one value of the matrix.

A value may not lead an output out of the place that the file names: `..`, an absolute path or `~` counts only where
it is written in the template itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final

from ..adapter_arguments import adapter_argument, stray_word
from ..addresses import is_spelled_out, output_address, split
from ..options import Option, number, spelled
from ..paths import ENDINGS, forbidden, split_strength
from .schema import LONGEST_PATH
from .schema_errors import nearest

FIELD: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def distinct(values: Mapping[str, str]) -> str:
    """Return a name with all names of a matrix: {lora.stem}-{strength}, as a path cannot be in a name."""
    paths = {name for name, value in values.items() if PurePath(value).suffix in ENDINGS or "/" in value}
    return "-".join(f"{{{name}.stem}}" if name in paths else f"{{{name}}}" for name in values)


WRITE_STEM: Final = "write {name.stem} for a path, and strengths in the matrix: adapters: ['{name}:{strength}']"

RANK_RULE: Final = re.compile(r"[a-z]{2,}:[0-9][^/\\:]*")
"""A rule for ranks, such as energy:0.9, which is energy-0.9 in names of files, as in the names that commands give."""

PATH_PARTS: Final = ("stem", "name", "parent")
"""The parts of a path that `{name.PART}` may name."""


class NoSuchName(ValueError):
    """Why a template cannot be filled in."""


def literal(value: Any) -> Any:
    """Return a value for a jobs file in which braces are braces, not names of a matrix."""
    if isinstance(value, Mapping):
        return {name: literal(item) for name, item in value.items()}
    if isinstance(value, list):
        return [literal(item) for item in value]
    return value.replace("{", "{{").replace("}", "}}") if isinstance(value, str) else value


def render(template: str, values: Mapping[str, str]) -> str:
    """Return the text with every `{name}` replaced; `{{` and `}}` are braces. NoSuchName if it cannot be."""
    room = LONGEST_PATH

    def fill(match: re.Match[str]) -> str:
        nonlocal room
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] is None:
            raise NoSuchName(f"a single {match[0]!r} in {template!r}; write it twice if it is meant")
        value = _value(match[1], values, template)
        room -= len(value)
        if room < 0:
            raise NoSuchName(f"{template[:80]!r} becomes longer than {LONGEST_PATH} characters")
        return value

    return FIELD.sub(fill, template)


def render_word(value: Any, option: Option, values: Mapping[str, str]) -> Any:
    """Return the value of an option. Where it is a template for one of a few words, that word; NoSuchName if there is
    none."""
    if not (option.words and isinstance(value, str) and "{" in value):
        return value
    text = render(value, values)
    word = spelled(option, text)
    if word not in option.words:
        *some, last = map(repr, option.words)
        near = nearest(text, option.words, every=False)
        raise NoSuchName(f"should be {', '.join(some)} or {last}, not {text!r}{near}")
    return word


def render_output(template: str, values: Mapping[str, str]) -> str:
    """Return what `render` does, for a path that is written to; NoSuchName if a value leads it elsewhere."""
    values = {name: value.replace(":", "-") if RANK_RULE.fullmatch(value) else value for name, value in values.items()}
    path = render(template, values)
    literal = render(template, dict.fromkeys(values, "x"))
    if "\0" in literal:
        raise NoSuchName(f"a NUL character in {template!r}")
    whole, own_path = PurePath(path), PurePath(literal)
    escapes = whole.parts.count("..") != own_path.parts.count("..")
    absolute = whole.is_absolute() != own_path.is_absolute()
    home = path.startswith("~") != literal.startswith("~")
    elsewhere = (output_address(path) is None) != (output_address(literal) is None)
    if escapes or absolute or home or elsewhere or "\0" in path:
        raise NoSuchName(f"a value of the matrix leads the output to {path!r}; only the template itself may do that")
    for part, written in zip(whole.parts, own_path.parts, strict=False):
        if part != written and (name := forbidden(part)):
            raise NoSuchName(f"Windows allows no file of the name {name!r}, so no output has it; {WRITE_STEM}")
    return path


def split_adapter(written: str) -> tuple[str, float | None]:
    """Return path and strength of "style.safetensors:0.8"; NoSuchName where the path has more than a strength behind
    it, as on the command line, or has its strength as other programs write it."""
    address = split(written)
    if address is not None and "=" not in address[1] and (address[1] or is_spelled_out(written)):
        return written.removesuffix(address[1]), number(address[1][1:]) if address[1] else None
    path, strength = split_strength(written)
    argument = adapter_argument(written) if strength is None else None
    if argument is None:
        return path, strength
    if not argument.parts:
        raise NoSuchName(f"{written!r} is no way to write a strength; write {argument.path}:{argument.strength}")
    if word := stray_word(written):
        raise NoSuchName(f"{word!r} is neither a strength nor a part of a model; write {argument.path}:0.8")
    parts = ", ".join(f"{name}: {_quoted(value)}" for name, value in argument.parts)
    raise NoSuchName(f"parts of an adapter belong below strength_for; write {{path: {argument.path}, "
                     f"strength: {argument.strength}, strength_for: {{{parts}}}}}")  # fmt: skip


def _quoted(text: str) -> str:
    """Return a value as it is in a table of YAML."""
    return f'"{text}"' if "," in text else text


def _value(name: str, values: Mapping[str, str], template: str) -> str:
    plain, dot, part = name.partition(".")
    if plain not in values:
        hint = nearest(plain, values) if values else "; the job has no matrix"
        raise NoSuchName(f"no value for {{{name}}} in {template!r}{hint}")
    if not dot:
        return values[plain]
    if part not in PATH_PARTS:
        raise NoSuchName(
            f"{{{name}}} in {template!r}: a value has {', '.join(PATH_PARTS)}{nearest(part, PATH_PARTS, every=False)}"
        )
    return str(getattr(PurePath(values[plain]), part))
