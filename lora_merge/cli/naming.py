"""Files as people name them: without their ending, by an address of another machine, or by a path of Windows."""

from __future__ import annotations

import re
from typing import Final

from ..errors import UsageError
from ..paths import WINDOWS, exists, typed

_WINDOWS: Final = re.compile(r"(?P<drive>[A-Za-z]):(?P<rest>[\\/].*)")
_HUB: Final = re.compile(r"[\w-][\w.-]{0,95}/(?!.*\.(?:safetensors|ckpt|pt|pth|bin|gguf|json)$)[\w.-]{1,96}")
ADDRESS: Final = re.compile(r"(?:(?:https?|hf|s3|civitai):.*|civitai)", re.IGNORECASE)


def is_address(text: str) -> bool:
    """Return whether a text is an address of another machine, and not the path of a file here."""
    return ADDRESS.match(text) is not None and not exists(text)


_SITES: Final = (
    (r"https?://civitai\.com/models/.*[?&]modelVersionId=([0-9]+).*", "curl -L -O -J {}/{}"),
    (r"https?://civitai\.com/models/.*", "open the page in a browser"),
    (r"civitai:/*(?:models/)?([0-9]+).*", "curl -L -O -J {}/{}"),
    (r"(s3://.+)", "aws s3 cp {} ."),
    (
        r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/(?:resolve|blob|raw)/[^/]+/([^?#\s]+).*",
        "hf download {} {}",
    ),
    (r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*", "hf download {}"),
    (r"hf:/+(?:models/)?([\w.-]+/[\w.-]+)/([^@\s]+)", "hf download {} {}"),
    (r"hf:/+(?:models/)?([\w.-]+/[\w.-]+).*", "hf download {}"),
)
"""Pattern of an address → the command that downloads it."""


def _download(address: str) -> str:
    """Return how to download a file from its address."""
    for pattern, command in _SITES:
        if found := re.fullmatch(pattern, address, re.IGNORECASE):
            groups = [typed([group]) for group in found.groups()]
            return command.format(
                *(("https://civitai.com/api/download/models", *groups) if "curl" in command else groups)
            )
    if address.lower().startswith("http"):
        return f"curl -L -O -J {typed([address[:200]])}"
    return "in a browser; from the Hub: hf download OWNER/NAME"


ENDINGS: Final = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
"""Endings that are tried where a name has none."""


def completed(path: str) -> str:
    """Return the path, with the ending of the file that is there if it lacks one; UsageError for an address."""
    if is_address(path):
        raise UsageError("an address, and not a file", path[:200], f"download it first: {_download(path)}")
    if _HUB.fullmatch(path) and not exists(path) and not exists(path.partition("/")[0]):
        fix = f"if it is a name on the Hub, download it first: hf download {path}; else check the path"
        raise UsageError("neither a file nor a folder", path[:200], fix)
    _check_drive(path)
    there = [] if exists(path) else [f"{path}{ending}" for ending in ENDINGS if exists(f"{path}{ending}")]
    return there[0] if there else path


def _check_drive(path: str) -> None:
    """Raise UsageError for a path of Windows on another system, where it would be one odd name."""
    if not WINDOWS and (drive := _WINDOWS.fullmatch(path)) and not exists(path):
        here = f"/mnt/{drive['drive'].lower()}{drive['rest']}".replace("\\", "/")
        raise UsageError("a path of Windows, on another system", path[:200], f"under WSL it is {here[:200]}")


def with_ending(output: str | None, *, file: bool, like: str = "") -> str | None:
    """Return the output's name; where a `file` is written, with the ending that programs look for.

    `like`: the base; where it is a GGUF file, its ending is the output's too. UsageError for "-", the output of other
    programs: a file is written under a name.
    """
    from ..disk.destination import with_ending as ended

    if output == "-":
        raise UsageError("the output is a file, not a stream", "-o -", "name it: -o merged.safetensors")
    _check_drive(output or "")
    ending = ".gguf" if like.lower().endswith(".gguf") else ".safetensors"
    return output if output is None or not file else ended(output, ending)
