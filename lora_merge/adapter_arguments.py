"""Numbers, and adapters with their strength, as other programs and the command line write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from .addresses import split
from .errors import UsageError
from .options import BLOCK_WEIGHTS
from .paths import ENDINGS, exists, input_path, split_strength, with_found_ending
from .text import python_code

_NUMBER: Final = r"=?(?P<value>-?[0-9]*[.,]?[0-9]+)(?:(?P<percent>%)|/(?P<below>[0-9]+))?"
"""A number as people write it: 0,8 or 80% or 4/5, also with the = of -s=0.8."""

_TAG: Final = r"<\w+:(?P<path>[^:<>]+)(?P<items>(?::[^:<>]*)*)>"
"""An adapter in the prompt of a web interface. Source: stable-diffusion-webui,
extensions-builtin/Lora/extra_networks_lora.py."""

_TAG_ITEM: Final = (
    r"(?:(?P<name>te|unet|lbw|dyn|start|stop|step)=)?"
    r"(?:(?P<number>[0-9.]+)|(?P<blocks>[A-Z][A-Z0-9]*|[0-9.]+(?:,[0-9.]+)+))"
)
"""A strength behind the path of a tag, of the text encoders first and then of the U-Net, or block weights."""

OF_STEPS: Final = "a merge is for all steps, and resize cuts ranks"
"""Why what `of_steps` returns is left out."""

LONGEST_WORD: Final = 1000  # letters of a word in which a strength is looked for, as the patterns try every place

_NUMBERS: Final = r"(?P<value>[+-]?[0-9]*[.,]?[0-9]+)(?P<percent>%?)(?:/(?P<below>[0-9]+))?"
_BESIDE: Final = (
    rf"[\s(\[{{]*(?P<path>.+?)[\s:=@*×;,|(\[{{]+x?{_NUMBERS}[\s)\]}};,x]*",
    rf"{_NUMBERS}[\s:=@*x×]+(?P<path>.+)",
)
"""A number next to a path, with whatever letters between the two; only for a path that is there."""

_SPELLINGS: Final = (  # compiled when a word is not understood: `--help` has no use for them
    r"(?P<path>.+?)[=@](?P<value>-?[0-9.,]+)(?P<percent>%?)",
    r"(?P<path>.+?):(?P<value>-?[0-9]+,[0-9]+)",
    r"(?P<path>.+?):(?P<value>-?[0-9.,]+)(?P<percent>%)",
    r"(?P<path>.+?):(?P<value>[0-9]+)/(?P<below>[0-9]+)",
    r"(?P<path>.+?):",
)
PART_WORDS: Final = frozenset({"unet", "transformer", "te", "vae", "lbw", "IN", "OUT", "MID", "BASE", "CLIP"})
"""Parts of a model whose names are letters alone."""

_PART: Final = r"(?!x[0-9])[A-Za-z_][\w.-]*"
_WITH_PARTS: Final = r"(?P<path>[^=]+?)(?::(?P<strength>[-+]?[0-9.]+))?[:,](?P<parts>[^,:=/]+=.*)"


def right_form(text: str) -> str:
    """Return "0.8" for "0.8", "0,8", "80%", "4/5" and "=0.8"; "" for what is no number."""
    match = re.fullmatch(_NUMBER, text)
    return value_of(match.groupdict()) if match else ""


def value_of(groups: Mapping[str, str | None]) -> str:
    """Return a number as it is written here: a point for a comma, a part of 1 for percents and fractions."""
    try:
        number = float(str(groups["value"]).replace(",", "."))
        if groups.get("percent"):
            number /= 100
        if groups.get("below"):
            number /= float(str(groups["below"]))
    except (ValueError, ZeroDivisionError):
        return "0.8"
    return f"{number:g}"


def other_spelling(text: str) -> tuple[str, str] | None:
    """Return path and strength of an adapter whose strength is not written as on the command line: lora@0.8, lora:80%.

    None for a file that is there, and for what holds no strength.
    """
    if exists(text) or len(text) > LONGEST_WORD:
        return None
    existing = (m for pattern in _BESIDE if (m := re.fullmatch(pattern, text)) and exists(with_found_ending(m["path"])))
    for match in filter(None, (*existing, *(re.fullmatch(pattern, text) for pattern in _SPELLINGS))):
        groups = match.groupdict()
        path, strength = split_strength(groups["path"].rstrip(":,"))
        value = value_of(groups) if groups.get("value") else "0.8" if strength is None else f"{strength:g}"
        if groups.get("value") and strength is not None:  # the second number is for a part that is not named
            value = f"{strength:g},te={value}"
        return _named(path), value
    return None


def with_parts(text: str) -> str:
    """Return "lora.safetensors:0.8,te=0" for an adapter whose parts are in another spelling: `lora:0.8;te:0`.

    "" for a name that is neither a file nor ends like one, and for what is neither a part nor a number.
    """
    path, *words = re.split(r"[\s,;:=@]+", text[:LONGEST_WORD])
    if not words or not (exists(with_found_ending(path)) or path.endswith(ENDINGS)):
        return ""
    strength, parts, named = "", dict[str, str](), ""
    for word in words:
        if (value := right_form(word)) and named:
            parts[named] = f"{parts[named]},{value}".lstrip(",")
            named = named if named == BLOCK_WEIGHTS else ""
        elif value and not strength:
            strength = value
        elif not value and not named and re.fullmatch(_PART, word) and not word.endswith(ENDINGS):
            named, parts[word] = word, ""
        else:
            return ""
    endings = "".join(f",{name}={value or '0.5'}" for name, value in parts.items())
    return f"{with_found_ending(path)}:{strength or '1'}{endings}" if endings else ""


def stray_word(text: str) -> str:
    """Return the word behind an adapter that is neither a strength nor a part, such as "half"; "" without one."""
    word = re.fullmatch(r".+:([A-Za-z]+)", text)
    return word[1] if word and word[1] not in PART_WORDS and with_parts(text) else ""


def of_tags(text: str) -> list[tuple[str, str, str]]:
    """Return path, strength and parts of each adapter in the form of a prompt of a web interface; [] for others.

    Examples:
        >>> of_tags("<lora:style:0.8>")
        [('style.safetensors', '0.8', '')]
    """
    tags = [re.fullmatch(_TAG, part) for part in re.findall("<[^<>]*>", text)]
    adapters = [_of_tag(tag["path"], tag["items"]) for tag in tags if tag]
    return [] if exists(text) or None in (*tags, *adapters) else [*filter(None, adapters)]


def of_steps(text: str) -> list[str]:
    """Return what a prompt says about ranks or steps of a picture, such as "stop=10"."""
    return re.findall("(?:dyn|start|stop|step)=[^:>]*", text)


def _of_tag(path: str, items: str) -> tuple[str, str, str] | None:
    values, free = dict[str, str](), ["te", "unet"]
    for item in filter(None, items.split(":")):
        match = re.fullmatch(_TAG_ITEM, item)
        if match is None:
            return None
        name = match["name"] or ("lbw" if match["blocks"] else next(iter(free), ""))
        values[name] = match["number"] or match["blocks"]
        free = [other for other in free if other != name]
    parts = [f"{part}={values[part]}" for part in ("unet", "te") if part in values and "unet" in values]
    parts += [f"lbw={values['lbw']}"] if "lbw" in values else []
    strength = "1" if "unet" in values else values.get("te", "1")  # the first number is for both
    return _named(path), strength, ",".join(parts)


def _named(path: str) -> str:
    return path if "." in path or split(path) is not None else f"{path}.safetensors"


class AdapterArgument(NamedTuple):
    """An adapter whose text holds its strength: the parts are pairs of a name and a factor, as text."""

    path: str
    strength: str
    parts: tuple[tuple[str, str], ...] = ()


def adapter_argument(text: str) -> AdapterArgument | None:
    """Return what a text means that is no path, but has a strength in it: `lora:0.8,te=0`, `lora@0.8`, `<lora:x:0.8>`.

    None for a file that is there, and for what holds no strength.
    """
    if exists(text) or len(text) > LONGEST_WORD:
        return None
    if address := split(text):
        strength, _, parts = address[1].removeprefix(":").partition(",")
        whole = AdapterArgument(text.removesuffix(address[1]), strength or "1", factors_by_part(parts))
        return whole if address[1] else None
    if tags := of_tags(text):
        path, strength, parts = tags[0]
        return AdapterArgument(path, strength, factors_by_part(parts))
    path, value = split_strength(text)
    if value is not None:
        return AdapterArgument(path, f"{value:g}")
    if match := re.fullmatch(_WITH_PARTS, with_parts(text) or text):
        return AdapterArgument(match["path"], match["strength"] or "1", factors_by_part(match["parts"]))
    reading = other_spelling(text)
    return AdapterArgument(*reading) if reading else None


def factors_by_part(text: str) -> tuple[tuple[str, str], ...]:
    """Return (("te", "0"), ("lbw", "1,0")) for "te=0, lbw=1,0"."""
    factors = re.split(r"[,;\s]+(?=[^,;\s=]+=)", text.strip(" ,;"))
    pairs = (factor.rpartition("=") if "=" in factor else (factor, "", "") for factor in factors if factor)
    return tuple((part.strip(), value.strip()) for part, _, value in pairs)


def adapter_path(path: str | Path, *, alone: bool = False) -> Path:
    """Return the path of an adapter as `input_path` does; UsageError for a text with a strength in it, as Python has
    other places for that. `alone`: it is opened by itself."""
    if isinstance(path, str) and (argument := adapter_argument(path)):
        name = json.dumps(argument.path, ensure_ascii=False)
        parts = "".join(f'("{part}", {_in_python(part, value)}), ' for part, value in argument.parts)
        if alone:
            fix = f"load_adapter({name}) * {argument.strength}"
        elif parts:
            fix = f"lora_merge.Adapter({name}, {argument.strength}, ({parts.rstrip(' ')}))"
        else:
            fix = f"({name}, {argument.strength}) in the list of adapters, or strengths=[{argument.strength}]"
        raise UsageError("a strength is not written like this in Python", path[:200], f"write {fix}")
    several = [word for word in re.split(r"\s*[,;]\s*", str(path)) if word]
    if len(several) > 1 and not exists(path) and all(exists(with_found_ending(word)) for word in several):
        raise UsageError("several adapters are written in one text", str(path)[:200], f"write {python_code(several)}")
    return input_path(path)


def _in_python(part: str, value: str) -> str:
    """Return a factor as Python has it; a list of block weights is a text."""
    return value if part != BLOCK_WEIGHTS and right_form(value) == value else json.dumps(value)
