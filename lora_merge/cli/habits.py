"""Words that people type from habit: options and spellings of other programs, each answered with the right form."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ..errors import UsageError
from ..paths import exists

ASKED: Final = MappingProxyType({"-h": "--help", "-V": "--version", "version": "--version"})
"""Words by which people ask the program about itself → the option."""

_BASE: Final = "the base is the first word: lora-merge BASE ADAPTER"
_ADAPTERS: Final = "adapters follow the base: lora-merge BASE ADAPTER:0.8 ADAPTER2:0.5"
_STRENGTH: Final = "a strength stands behind its file: lora-merge BASE ADAPTER:0.8; or give -s 0.8 for each adapter"
_OUTPUT: Final = "use -o FILE"
_DTYPE: Final = "use --dtype fp16, bf16 or fp32"
_PART: Final = "use --strength-for, such as --strength-for te=0; lora-merge parts BASE lists the parts"

FOREIGN: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("--model", "--base", "--base-model", "--base_model", "--sd_model", "--checkpoint", "--ckpt"), _BASE
        ),
        **dict.fromkeys(
            ("--models", "--lora", "--loras", "--lora-path", "--adapter", "--adapters", "--peft"), _ADAPTERS
        ),
        **dict.fromkeys(("--ratio", "--ratios", "--weight", "--weights", "-w", "--alpha"), _STRENGTH),
        **dict.fromkeys(("--multiplier", "--strengths", "--lora-scale", "--lora_scale"), _STRENGTH),
        **dict.fromkeys(("--save_to", "--save-to", "--out", "--out-path", "--output-path", "--output_dir"), _OUTPUT),
        **dict.fromkeys(("--precision", "--save_precision", "--save-precision", "--half", "--type"), _DTYPE),
        **dict.fromkeys(("--fp16", "--bf16", "--fp32", "--float16", "--bfloat16"), _DTYPE),
        **dict.fromkeys(("--cuda", "--gpu"), "use --device cuda"),
        **dict.fromkeys(("--cpu",), "use --device cpu"),
        **dict.fromkeys(("--force", "-f", "-y", "--yes"), "use --overwrite"),
        **dict.fromkeys(("-n", "--plan", "--simulate"), "use --dry-run"),
        **dict.fromkeys(("--te-strength", "--unet-strength", "--only", "--exclude", "--lbw", "--block-weights"), _PART),
    }
)
"""Option of another program → what to write instead. sd-scripts, mergekit, diffusers' scripts, cp."""

_SPELLINGS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"<lora:(?P<path>.+?):(?P<value>[0-9.]+)(?::.*)?>",
        r"(?P<path>.+?)[=@](?P<value>-?[0-9.,]+)(?P<percent>%?)",
        r"(?P<path>.+?):(?P<value>-?[0-9]+,[0-9]+)",
        r"(?P<path>.+?):(?P<value>-?[0-9.,]+)(?P<percent>%)",
        r"(?P<path>.+?):(?P<value>[0-9]+)/(?P<below>[0-9]+)",
        r"(?P<path>.+?):",
    )
)
_NUMBER: Final = re.compile(r"-?[0-9]*[.,]?[0-9]+%?")
_HUB: Final = re.compile(r"[\w-][\w.-]{0,95}/(?!.*\.(?:safetensors|ckpt|pt|pth|bin|gguf|json)$)[\w.-]{1,96}")
_ADDRESS: Final = re.compile(r"(?:(?:https?|hf|s3|civitai):.*|civitai)", re.IGNORECASE)


def check_options(args: Sequence[str], known: Set[str]) -> None:
    """Raise UsageError for an option that only other programs have. `known`: the options of the command."""
    names = dict.fromkeys(arg.partition("=")[0] for arg in args)
    found = [name for name in names if name in FOREIGN and not {name, f"{name}s"} & known]
    if found:
        fix = "; ".join(dict.fromkeys(FOREIGN[name] for name in found))
        raise UsageError(f"there is no option {' nor '.join(found)} here", " ".join(args)[:200], fix)


def check_command(word: str, commands: Collection[str]) -> None:
    """Raise UsageError for a first word that is neither a command nor a file."""
    if exists(word) or not re.fullmatch(r"[A-Za-z][A-Za-z-]*", word):
        return
    if completed(word) != word:
        return
    near = get_close_matches(word, commands, 1, 0.7)
    fix = f"lora-merge {near[0]} …" if near else f"name a base, or one of the commands: {', '.join(commands)}"
    raise UsageError("there is neither such a command nor such a file", word, fix)


ENDINGS: Final = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
"""Endings that are tried where a name has none."""


def completed(path: str) -> str:
    """Return the path, with the ending of the file that is there if it lacks one; UsageError for an address."""
    if _ADDRESS.match(path) and not exists(path):
        how = "with a browser, or: curl -L -O ADDRESS" if path.lower().startswith("http") else "with a browser"
        fix = f"download it first, {how}; from the Hub: hf download OWNER/NAME"
        raise UsageError("an address, and not a file", path[:200], fix)
    if _HUB.fullmatch(path) and not exists(path) and not exists(path.partition("/")[0]):
        fix = f"if it is a name on the Hub, download it first: hf download {path}; else check the path"
        raise UsageError("neither a file nor a folder", path[:200], fix)
    there = [] if exists(path) else [f"{path}{ending}" for ending in ENDINGS if exists(f"{path}{ending}")]
    return there[0] if there else path


def with_ending(output: str | None, *, file: bool) -> str | None:
    """Return the output's name; where a `file` is written, with the ending that programs look for.

    UsageError for "-", the output of other programs: a file is written under a name.
    """
    if output == "-":
        raise UsageError("the output is a file, not a stream", "-o -", "name it: -o merged.safetensors")
    plain = output is not None and not Path(output).suffix and not output.endswith(("/", os.sep))
    return f"{output}.safetensors" if plain and file and not exists(str(output)) else output


def expanded(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, and the files in place of a pattern such as loras/*.safetensors that no shell has expanded."""
    for word in words:
        found = sorted(glob.glob(word)) if not exists(word) and set(word) & set("*?[") else []  # noqa: PTH207
        yield from found or [word]


def check_adapter(text: str) -> None:
    """Raise UsageError for an adapter with its strength as other programs write it."""
    if exists(text):
        return
    if _NUMBER.fullmatch(text):
        fix = f"give each strength its own -s: -s 0.8 -s {text}; or write it behind its file: ADAPTER:{text}"
        raise UsageError("a number where an adapter belongs", text, fix)
    for pattern in _SPELLINGS:
        if match := pattern.fullmatch(text):
            found = match.groupdict()
            value = _value(found) if found.get("value") else "0.8"
            path = found["path"] if "." in found["path"] else f"{found['path']}.safetensors"
            raise UsageError("a strength in another program's words", text[:200], f"write {path}:{value}")


def _value(found: Mapping[str, str | None]) -> str:
    """Return a number as it is written here: a point for a comma, a part of 1 for percents and fractions."""
    try:
        number = float(str(found["value"]).replace(",", "."))
        if found.get("percent"):
            number /= 100
        if found.get("below"):
            number /= float(str(found["below"]))
    except (ValueError, ZeroDivisionError):
        return "0.8"
    return f"{number:g}"
