"""Reads paths and adapters as users write them: `~`, `file://` addresses, a strength behind a colon."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from typing import Final
from urllib.parse import unquote

from .errors import UsageError
from .options import number, unlike

WINDOWS: Final = os.name == "nt"

_DEVICE: Final = r"(?i)(?:CON|PRN|AUX|NUL|COM[1-9¹²³]|LPT[1-9¹²³]|CONIN\$|CONOUT\$) *(?:\..*)?"
"""Names that Windows has for devices, also with an ending.
Source: learn.microsoft.com/windows/win32/fileio/naming-a-file."""


ENDINGS: Final = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
"""Endings of files with weights, which are tried where a name has none."""

WEIGHTS: Final = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".msgpack", ".h5", ".tflite")
)
"""Suffixes of files with weights; those of the base would be stale beside the merged weights."""


_SPLIT: Final = r"(?i).+-\d{5}-of-(?P<parts>\d{5})\.gguf"
"""Source: llama.cpp, llama_split_path; any program that reads one part reads the others."""

_HUB: Final = r"[\w-][\w.-]{0,95}/(?!.*\.(?:safetensors|ckpt|pt|pth|bin|gguf|json)$)[\w.-]{1,96}"
_ADDRESS: Final = r"(?i)(?:https?|hf|s3|civitai):.*|civitai"

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


def split_strength(text: str) -> tuple[str, float | None]:
    """Return ("style.safetensors", 0.8) for "style.safetensors:0.8"; None if no number follows the last colon."""
    path, colon, tail = text.rpartition(":")
    try:
        return (path, number(tail)) if colon and path else (text, None)
    except ValueError:
        return text, None


def forbidden(path: str | Path) -> str:
    """Return the part of a path that Windows takes for no name of a file or folder; "" where there is none."""
    windows = PureWindowsPath(path)
    for part in windows.parts[1:] if windows.root else windows.parts:
        if re.search(r'[<>:"|?*\x00-\x1f]', part) or re.fullmatch(_DEVICE, part):
            return part
        if part[-1] in ". " and part != "..":
            return part
    return ""


def typed(words: Iterable[str]) -> str:
    """Return the words of a command as they are typed: quoted for cmd and PowerShell on Windows, else for a shell."""
    if WINDOWS:  # no name of a file has a quote there
        return " ".join(f'"{word}"' if re.search(r"[^\w.:/\\+-]", word) or not word else word for word in words)
    from shlex import join

    return join([*words])


def exists(path: str | Path) -> bool:
    """Return whether a path exists; False for a path that no file system allows."""
    return os.path.exists(path)  # noqa: PTH110  # a third of the calls, for thousands of jobs


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder; False where that cannot be seen: opening it then says why."""
    return exists(path) and Path(path).is_dir()


def is_file(path: str | Path) -> bool:
    """Return whether a path is a file; False where that cannot be seen: opening it then says why."""
    return exists(path) and Path(path).is_file()


def names_folder(path: str | Path) -> bool:
    """Return whether a user who names an output so means a folder: with a slash at the end, or because it is one."""
    return str(path).endswith(("/", os.sep)) or is_folder(expand(path))


def expand(path: str | Path) -> Path:
    """Return the path with `~` expanded, made absolute without resolving links; without a `..` that leaves no link."""
    whole = absolute(home(path))
    if ".." not in str(whole) or ".." not in whole.parts:
        return whole
    plain = Path(os.path.normpath(whole))
    return plain if os.path.realpath(plain) == os.path.realpath(whole) else whole


def real_path(path: Path) -> Path:
    """Return the path behind all links. `Path.resolve` raises RuntimeError for a link to itself before Python 3.13."""
    return Path(os.path.realpath(path))


def input_path(path: str | Path) -> Path:
    """Return the path of an input as `expand` does, with the ending of the file that is there if it lacks one.

    Raises UsageError for an address: a path would hold one slash where it has two.
    """
    if isinstance(path, str):
        check_input(path)
    expanded = expand(path)
    text = str(expanded)
    whole = with_found_ending(text)
    return expanded if whole == text else Path(whole)


def with_found_ending(path: str) -> str:
    """Return the path, with the ending of the file that is there if it lacks one."""
    return next((f"{path}{ending}" for ending in ("", *ENDINGS) if exists(f"{path}{ending}")), path)


def is_address(text: str) -> bool:
    """Return whether a text is an address of another machine, and not the path of a file here."""
    return re.match(_ADDRESS, text) is not None and not exists(text)


def no_address(path: str) -> str:
    """Return the path; UsageError for an address of another machine."""
    if is_address(path):
        raise UsageError("this is a URL, not a local file", path[:200], f"download it first: {_download(path)}")
    return path


def check_input(path: str) -> None:
    """Raise UsageError for an address, and for what may be the name of a model on the Hub."""
    no_address(path)
    if re.fullmatch(_HUB, path) and not exists(path) and not exists(path.partition("/")[0]):
        fix = (
            f"if it is a name on the Hub, download it first: hf download {path} --local-dir {path}; else check the path"
        )
        raise UsageError("neither a file nor a folder", path[:200], fix)


def _download(address: str) -> str:
    """Return how to download a file from its address."""
    for pattern, command in _SITES:
        if match := re.fullmatch(pattern, address, re.IGNORECASE):
            groups = [typed([group]) for group in match.groups()]
            return command.format(
                *(("https://civitai.com/api/download/models", *groups) if "curl" in command else groups)
            )
    if address.lower().startswith("http"):
        return f"curl -L -O -J {typed([address[:200]])}"
    return "in a browser; from the Hub: hf download OWNER/NAME"


def is_index(path: Path) -> bool:
    """Return whether this is the name of an index, which represents the folder of its shards."""
    return path.name.endswith(".json") and ".index." in path.name


def is_split(path: Path) -> bool:
    """Return whether this is the name of one of several parts of a GGUF model, which represents all of them."""
    match = re.fullmatch(_SPLIT, path.name)
    return match is not None and int(match["parts"]) > 1


def of_index(path: Path) -> Path:
    """Return the folder that an index or a part of a GGUF model represents; other paths as they are."""
    return path.parent if is_index(path) or is_split(path) else path


def output_file(path: str | Path, ending: str = ".safetensors") -> Path:
    """Return the path of a new file of weights as `expand` does: words get an ending, see `with_ending`, and a Path is
    taken as it is."""
    return expand(path) if isinstance(path, Path) else with_ending(expand(path), ending)


def with_ending(path: Path, ending: str = ".safetensors") -> Path:
    """Return the path of a new file of weights with an ending by which programs find it: the .5 of v1.5 is none.

    Raises UsageError for an ending that is nearly right.
    """
    suffix = path.suffix.lower()
    if suffix in WEIGHTS or suffix == ".sft" or exists(path):
        return path
    if path.name.endswith(".") or _misspelt(suffix):
        right = Path(path.name.rstrip(".")).with_suffix(ending)
        raise UsageError("the ending of the output is misspelt", str(path), f"name it {right}")
    return path.with_name(f"{path.name}{ending}")


def _misspelt(suffix: str) -> bool:
    """Return whether a suffix is nearly that of the files that are written."""
    if len(suffix) < 8:  # as the .001 of ten thousand jobs is
        return False
    from difflib import get_close_matches

    return bool(get_close_matches(suffix, (".safetensors",), 1, 0.85))


def home(path: str | Path) -> Path:
    """Return the path with `~` expanded; UsageError for an unknown user, or a path that no file system allows."""
    text = str(path)
    if "\0" in text or not text:
        raise UsageError("the path is empty or contains a NUL character", ascii(text)[:200], "correct the path")
    if text.startswith("file://"):
        path = text = unquote(text.removeprefix("file://"))
    try:
        os.fsencode(path)
        if not text.startswith("~"):
            return path if isinstance(path, Path) else Path(path)
        expanded = Path(os.path.expanduser(path))  # noqa: PTH111  # Path takes ./~name for ~name
    except TypeError as e:
        raise unlike(path, "a path", "a str or a Path") from e
    except UnicodeEncodeError as e:
        raise UsageError("the path contains an unpaired surrogate", ascii(text)[:200], "correct the path") from e
    if str(expanded).startswith("~"):
        raise UsageError("there is no such user", text, "write ./~… for a name that begins so")
    return expanded


_lost = False
"""Whether this process has left its current folder, as that was deleted."""


def leave_lost_folder() -> None:
    """Go to the root if the current folder was deleted: MKL ends the process when it is loaded there.

    Relative paths then remain errors.
    """
    global _lost
    _lost = not current_folders()
    if _lost:
        os.chdir(os.path.sep)


def current_folders() -> list[Path]:
    """Return the current folder; nothing if it was deleted."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return []
    return [] if _lost and here == Path(here.anchor) else [here]


def absolute(path: Path) -> Path:
    """Return the absolute path; UsageError for a relative one if the current folder was deleted."""
    if path.is_absolute():
        return path
    if not current_folders():
        raise UsageError("the current folder was deleted", str(path), "change to an existing folder")
    return path.absolute()
