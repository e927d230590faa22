"""Values of options and adapters on the command line: strengths, parts, settings, metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..adapter_arguments import OF_STEPS, of_steps, of_tags, other_spelling, right_form, stray_word, with_parts
from ..addresses import parse, split
from ..errors import InputError, UsageError
from ..options import BLOCK_WEIGHTS, REGEX, SWITCHED, factor, number
from ..paths import ENDINGS, WINDOWS, exists, expand, split_strength, typed, with_found_ending
from .corrected_line import STRENGTH_AFTER_BASE

if TYPE_CHECKING:
    from ..job import Adapter

ADAPTER_ORDER: Final = "adapters follow the base: `lora-merge BASE ADAPTER:0.8 ADAPTER2:0.5`"

_SEVERAL: Final = (
    r"(?P<path>[^=]+?):(?!\d+[,/]\d+$)(?P<unet>-?\d*\.?\d+)[:,;/](?P<te>-?\d*\.?\d+)(?P<more>[:,;/][\d.,;/:-]+)?"
)
"""Strengths behind a file, such as two in nodes of ComfyUI: of the model and of CLIP; 0,8 and 4/5 are one number."""

_BETWEEN_PARTS: Final = ",(?=[^,=]+=)"  # a list of block weights has commas too
_BEFORE_PARTS: Final = f"[,:](?=(?:{REGEX})?[^,:=/]+=)"
_NUMBERED: Final = "([0-9]{1,4}):"
_WINDOWS: Final = r"(?P<drive>[A-Za-z]):(?P<rest>[\\/].*)"


class NamedAdapter(NamedTuple):
    """An adapter as a word of the command line names it: "a.safetensors", "a.safetensors:0.8,te=0"."""

    path: str
    strength: float | None = None  # None: the word has none
    parts: tuple[tuple[str, Any], ...] = ()

    @property
    def bare(self) -> bool:
        """Whether the word is a path alone."""
        return self.strength is None and not self.parts

    @property
    def for_job(self) -> str | tuple[str, float] | Adapter:
        """The adapter as `make_job` takes it."""
        from ..job import Adapter  # it brings all formulas

        strength = 1.0 if self.strength is None else self.strength
        if self.parts:
            return Adapter(Path(self.path), strength, self.parts)
        return self.path if self.bare else (self.path, strength)


def expanded(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, and the files in place of a pattern such as loras/*.safetensors that no shell has expanded."""
    for word in words:
        if exists(word) or not set(word) & set("*?[") or split(word) is not None:
            yield word
            continue
        pattern, strength = split_strength(word)
        from glob import glob

        paths = sorted(glob(word)) or sorted(glob(pattern))  # noqa: PTH207
        if not paths:
            check_adapter(word)
            folder = Path(pattern).parent
            fix = "check the name and the ending" if exists(folder) else f"check the folder: there is no {folder} here"
            raise UsageError(f"no file matches {pattern[:200]}", word[:200], fix)
        behind = "" if strength is None else f":{strength:g}"
        yield from [f"{path}{behind}" for path in paths] or [word]


def check_words(words: Sequence[str]) -> None:
    """Raise UsageError for a number or a joining word among the adapters."""
    joining = [word for word in words if word in ("+", "&", "and", "with") and not exists(word)]
    if joining:
        raise UsageError("a word is not an adapter", joining[0], f"leave it out; {ADAPTER_ORDER}")
    if values := [word for word in words if right_form(word) and not exists(word)]:
        fix = "write the strength after the file name: ADAPTER:0.8"
        raise UsageError("a number is not an adapter", " ".join(values), fix)


def check_last(words: Sequence[str], base: str) -> None:
    """Raise InputError for a last word that is no adapter, but an output as `cp` and `mv` take it. `base`: "" if there
    is none."""
    last = words[-1] if words else ""
    if len(words) < 2 or split(last) is not None or not last.endswith((*ENDINGS, "/")) or exists(completed(last)):
        return
    from ..planning.fitting_files import missing_input

    error = missing_input(expand(last), adapter=True, partners=[expand(base)] if base else [])
    if not error.fix.startswith("did you mean"):
        raise InputError(
            "file not found", error.where, f"if it is the output, write `-o {typed([last])}`; else {error.fix.written}"
        )


def check_two(text: str) -> None:
    """Raise UsageError for an adapter with two strengths, or more."""
    if (two := re.fullmatch(_SEVERAL, text)) and not exists(f"{two['path']}:{two['unet']}"):
        if two["more"]:
            raise _several_strengths(text, two["path"])
        fix = f"write {two['path']}:{two['unet']}, or by part {two['path']}:1,unet={two['unet']},te={two['te']}"
        raise UsageError("two strengths after one file", text[:200], fix).instead(
            text, f"{two['path']}:1,unet={two['unet']},te={two['te']}"
        )
    if (preset := re.fullmatch(r"(.+:-?[0-9.]+):([A-Z][A-Z0-9]{2,})", text)) and not exists(text):
        raise _other_syntax("a list of block weights", text, f"{preset[1]},lbw={preset[2]}")


def _several_strengths(text: str, path: str) -> UsageError:
    """Return the error for three numbers or more after a file: a list of block weights, after one strength or two."""
    *values, last = text.removeprefix(f"{path}:").split(":")
    weights = re.split("[,;/]", last)
    if len(weights) == 1 or len(values) > 2:
        values, weights = [], re.split("[:,;/]", text.removeprefix(f"{path}:"))
    strength = ["1", f"unet={values[0]}", f"te={values[1]}"] if len(values) == 2 else values or ["1"]
    right = f"{path}:{','.join(strength)},lbw={','.join(weights)}"
    few = "" if len(weights) >= FEWEST_BLOCKS else f"{path}:{[*values, *weights][0]}, or by block "
    error = UsageError("several strengths after one file", text[:200], f"write {few}{right}")
    return error if few else error.instead(text, right)


FEWEST_BLOCKS: Final = 10
"""Numbers after a file from which on they are block weights."""


def check_adapter(text: str, parts: str = "") -> None:
    """Raise UsageError for an adapter with its strength as other programs write it. `parts`: what follows it."""
    if reading := other_spelling(text):
        path, value = reading
        raise _other_syntax("a strength", text + parts, f"{path}:{value}{parts}")


def check_parts(text: str) -> None:
    """Raise UsageError for adapters in one word, and for an adapter with its parts in another spelling."""
    check_list(text)
    right = with_parts(text)
    if word := stray_word(text):
        path = typed([with_found_ending(text.removesuffix(f":{word}"))])
        raise UsageError(f"{word!r} is neither a strength nor a part of a model", text[:200],
                         f"write {path}:0.8, or by part {path}:1,te=0.5")  # fmt: skip
    if right:
        raise _other_syntax("a factor for a part", text, right)


def check_variable(text: str) -> None:
    """Raise UsageError for a variable that the shell has not replaced, as it is that of another shell."""
    if match := re.match(r"%(\w+)%|\$env:(\w+)|\$\{?(\w+)\}?", text):
        name = next(filter(None, match.groups()))
        here = f"%{name}% in cmd, $env:{name} in PowerShell" if WINDOWS else f'"${name}"'
        raise UsageError("the shell has not replaced a variable", text[:200], f"write {here}, or the path itself")


def check_list(text: str) -> None:
    """Raise UsageError for files in one word, each with a strength or without."""
    several = [word for word in re.split(r"[,;+\s]+", text) if word]
    if several in ([], [text]) or exists(with_found_ending(text)):
        return
    if all(exists(with_found_ending(split_strength(word)[0])) for word in several):
        raise _other_syntax("a list of files", text, *several)
    if all(exists(with_found_ending(word.partition(":")[0])) for word in several):  # style:0.7:ALL,ink:0.3:0.5
        raise _other_syntax("a list of files", text, *several)
    readings = [other_spelling(word) for word in several]
    if all(reading and exists(reading[0]) for reading in readings):
        raise _other_syntax("a list of files", text, *(f"{path}:{value}" for path, value in filter(None, readings)))


def check_tag(text: str) -> None:
    """Raise UsageError for an adapter as a prompt of a web interface names it."""
    if tags := of_tags(text):
        words = (f"{path}:{strength}{parts and f',{parts}'}" for path, strength, parts in tags)
        error = _other_syntax("a strength", text, *words)
        dropped = "".join(f"leave out {item} ({OF_STEPS}); " for item in of_steps(text))
        raise error.reword(lambda words: f"{dropped}{words}" if dropped and words == error.fix.written else words)


def _other_syntax(what: str, text: str, *right: str) -> UsageError:
    """Return the error for a word that is written in another way here. `right`: the words in its place."""
    return UsageError(f"{what} has another syntax", text[:200], f"write {typed(right)}").instead(text, *right)


def named_base(text: str) -> str:
    """Return the base of a merge; UsageError for an adapter with its strength in its place."""
    address = split(text)
    path, strength = ("", None) if address is not None else split_strength(text)
    if (address and address[1]) or (strength is not None and not exists(text) and exists(completed(path))):
        raise UsageError(STRENGTH_AFTER_BASE, text[:200], "name the base first: `lora-merge BASE ADAPTER:0.8`")
    if address is None:
        check_list(text)
        check_variable(text)
    return completed(text)


def named_adapters(words: Sequence[str], base: str = "", output: str | None = None) -> list[NamedAdapter]:
    """Return all adapters of a command. `base`: their base, if it has one; `output`: the stated one."""
    check_words(words)
    if output is None:
        check_last(words, base)
    return [named_adapter(word) for word in expanded(words)]


def named_adapter(text: str) -> NamedAdapter:
    """Return the adapter that a word names; UsageError for one in the spelling of another program."""
    if exists(text):
        return NamedAdapter(completed(text))
    if (address := split(text)) is not None:
        return _at_address(text.removesuffix(address[1]), address[1])
    check_variable(text)
    check_tag(text)
    check_list(text)
    check_two(text)
    path, strength = split_strength(text)
    if strength is not None:
        if not exists(path := completed(path)):
            check_parts(text)
            check_adapter(text)
        return NamedAdapter(path, strength)
    for comma in (match.start() for match in re.finditer(_BEFORE_PARTS, text)):
        path, strength = split_strength(text[:comma])
        if strength is None:
            check_adapter(text[:comma], f",{text[comma + 1 :]}")
        if strength is not None or exists(completed(path)):
            return NamedAdapter(completed(path), strength, tuple(_parts_behind(text, comma + 1)))
    path = completed(text)
    check_parts(text)
    check_adapter(path)
    return NamedAdapter(path)


def _at_address(address: str, tail: str) -> NamedAdapter:
    """Return an adapter of another machine. `tail`: its strength and parts, such as ":0.8,te=0"."""
    strength, _, parts = tail.removeprefix(":").partition(",")
    if "=" in strength:  # parts without a strength
        strength, parts = "", tail[1:]
    value = number(strength) if strength else None
    return NamedAdapter(completed(address), value, tuple(_parts(parts)) if parts else ())


def _parts_behind(text: str, start: int) -> list[tuple[str, Any]]:
    """Return the parts behind an adapter. `start`: where they begin."""
    try:
        return _parts(text[start:])
    except UsageError as e:
        check_parts(text)
        raise UsageError(e.what, text[:200], e.fix) from None


def with_strengths(adapters: Sequence[NamedAdapter], options: dict[str, Any]) -> Sequence[NamedAdapter]:
    """Return the adapters with the strengths of `--strength`, taken out of `options`, so that parts of one may follow.

    `make_job` refuses them if their number is another one, or an adapter has a strength of its own.
    """
    if len(options.get("strength", ())) != len(adapters) or not all(a.bare for a in adapters) or not adapters:
        return adapters
    return [a._replace(strength=value) for a, value in zip(adapters, options.pop("strength"), strict=True)]


def named_parts(
    adapters: Sequence[NamedAdapter], strength_for: Sequence[str]
) -> tuple[list[NamedAdapter], list[tuple[str, Any]]]:
    """Return the adapters and the parts of `--strength-for` that are for all of them; `2:te=0` is for the second."""
    named, common = [*adapters], list[tuple[str, Any]]()
    for text in strength_for:
        numbered = re.match(_NUMBERED, text)
        if numbered is None:
            _check_named(text, [Path(a.path) for a in named])
            common += _parts(text)
            continue
        place = int(numbered[1]) - 1
        if not 0 <= place < len(named):
            fix = f"give a number from 1 to {len(named)}" if len(named) > 1 else "give 1: there is one adapter"
            raise UsageError(f"there is no adapter {numbered[1]}", f"`--strength-for {text[:80]}`", fix)
        old = named[place]
        named[place] = old._replace(parts=(*old.parts, *_parts(text[numbered.end() :])))
    return named, common


def _check_named(text: str, adapters: Sequence[Path]) -> None:
    """Raise UsageError for a part behind the name of an adapter, which has a number there."""
    name, colon, part = text.partition(":")
    for n, path in enumerate(adapters, 1):
        if colon and name in (str(path), path.name, path.stem):
            fix = f"`--strength-for {n}:{part}`" if "=" in part else f"the strength after the file name: {path}:{part}"
            raise UsageError("an adapter has its number here", f"`--strength-for {text[:80]}`", f"write {fix}")


def strengths(texts: Sequence[str], count: int) -> list[float] | None:
    """Return [0.8, 0.5] for `-s 0.8 -s 0.5` or `-s 0.8,0.5`; None without any. `count`: of the adapters."""
    texts = [word for text in texts for word in text.strip("[]()").replace(", ", " ").split() or [text]]
    numbers = [_strength(part) for text in texts for part in text.split(",")]
    if count == len(texts) < len(numbers) and all(map(right_form, texts)):  # -s 0,8
        fix = " ".join(f"-s {right_form(text)}" for text in texts)
        raise UsageError(f"a comma in the number {texts[0]}", "--strength", f"write a point: `{fix}`")
    return numbers or None


def _strength(text: str) -> float:
    try:
        return number(text)
    except ValueError:
        if value := right_form(text):
            raise UsageError(
                f"strength {text[:40]!r} in another spelling", "--strength", f"write `-s {value}`"
            ) from None
        return factor(text, "--strength")  # raises UsageError: not a number


def _parts(text: str) -> list[tuple[str, Any]]:
    """Return [("te", 0.5), ("unet", 0.8)] for "te=0.5,unet=0.8"; a list of block weights stays text."""
    texts = [text] if text.startswith(REGEX) else re.split(_BETWEEN_PARTS, text)
    return [_part(piece) for piece in texts]


def _part(text: str) -> tuple[str, Any]:
    name, equals, value = text.rpartition("=")
    if name == BLOCK_WEIGHTS:
        return name, value
    with suppress(ValueError):
        if equals and not name.endswith("=") and (name.startswith(REGEX) or re.fullmatch(r"(?:\w+ )?[^\s;=]+", name)):
            return name, number(value)
    if re.fullmatch(r"[A-Za-z][\w.+-]*", text):
        raise UsageError(
            f"{text!r} does not give a part and its factor", "--strength-for", f"write {text}=0.5"
        ).instead(text, f"{text}=0.5")
    name, _, value = re.sub("[=:]+", ":", text).rpartition(":")
    switched = str(int(SWITCHED[value.lower()])) if value.lower() in SWITCHED else ""
    right = right_form(value) or switched
    plain = right and (name.startswith(REGEX) or re.fullmatch(r"[\w.+-]+", name))
    fix = f"write {name}={right}" if plain else "write it like te=0.5"
    raise UsageError(f"{text!r} does not give a part and its factor", "--strength-for", fix)


def whole_number(text: str, option: str) -> int:
    """Return 2 for "2"."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise UsageError(f"{text[:40]!r} is not a whole number", option, "give 1 or more")


def completed(path: str) -> str:
    """Return the path, with the ending of the file that is there if it lacks one; for an address the path of what it
    leads to."""
    if parse(path) is not None:
        from ..sources.inputs import locate

        return str(locate(path))
    _check_drive(path)
    return with_found_ending(path)


def _check_drive(path: str) -> None:
    """Raise UsageError for a path of Windows on another system, where it would be one odd name."""
    if not WINDOWS and (drive := re.fullmatch(_WINDOWS, path)) and not exists(path):
        here = f"/mnt/{drive['drive'].lower()}{drive['rest']}".replace("\\", "/")
        raise UsageError("a Windows path on another system", path[:200], f"under WSL it is {here[:200]}")


def checked_output(output: str | None) -> str | None:
    """Return the output; UsageError for "-", the output of other programs."""
    if output == "-":
        raise UsageError("the output is a file, not a stream", "-o -", "name it: `-o merged.safetensors`")
    _check_drive(output or "")
    return output
