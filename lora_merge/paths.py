"""Reads paths and adapters as users write them: `~`, `file://` addresses, a strength behind a colon."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Final
from urllib.parse import unquote

from .addresses import is_whole, located, output_address, staged
from .errors import WINDOWS as WINDOWS
from .errors import UsageError
from .options import number, unlike
from .text import one_line

_DEVICE: Final = r"(?i)(?:CON|PRN|AUX|NUL|COM[1-9¹²³]|LPT[1-9¹²³]|CONIN\$|CONOUT\$) *(?:\..*)?"
"""Names that Windows has for devices, also with an ending.
Source: learn.microsoft.com/windows/win32/fileio/naming-a-file."""


ENDINGS: Final = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
"""Endings of files with weights, which are tried where a name has none."""

JOBS_ENDINGS: Final = (".yaml", ".yml", ".csv")
"""Endings of jobs files; JSON, which YAML contains, is also the ending of other files."""

WEIGHT_SUFFIXES: Final = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data", ".msgpack", ".h5", ".tflite")
)
"""Suffixes of files with weights; those of the base would be stale next to the merged weights."""


_SPLIT: Final = r"(?i).+-\d{5}-of-(?P<parts>\d{5})\.gguf"
"""Source: llama.cpp, llama_split_path; any program that reads one part reads the others."""


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


def removal(path: str, *, folder: bool) -> list[str]:
    """Return the words of the command that removes a file or a folder, on Windows for cmd and PowerShell."""
    safe = f".{os.sep}{path}" if path.startswith("-") else path
    if WINDOWS:
        return ["cmd", "/c", "rmdir", "/s", safe] if folder else ["del", safe]
    return ["rm", *["-r"] * folder, safe]


def words_of(command: str) -> list[str]:
    """Return the words of a command that is `typed`."""
    if WINDOWS:
        return [quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', command)]
    from shlex import split

    return split(command)


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
    """Return whether a user who names an output so means a folder: with a slash at the end, or because it is one, as a
    repository and a bucket are."""
    if str(path).endswith(("/", os.sep)):
        return True
    address = output_address(str(path)) if ":" in str(path) else None
    return is_folder(expand(path)) if address is None else is_whole(address)


def output_path(path: str | Path) -> Path:
    """Return the path of an output as `expand` does; for an address that of its local copy."""
    place = staged(str(path))
    return expand(path) if place is None else place


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
    """Return the path of an input as `expand` does, with the ending of the file that is there if it lacks one; for an
    address the path of what it leads to."""
    if isinstance(path, str) and (place := located(path)) is not None:
        return place
    expanded = expand(path)
    text = str(expanded)
    whole = with_found_ending(text)
    return expanded if whole == text else Path(whole)


def with_found_ending(path: str) -> str:
    """Return the path, with the ending of the file that is there if it lacks one; for the folder of a repository in the
    cache of the hub that of its commit."""
    if REPOSITORY in path and Path(path).name.startswith(REPOSITORY):
        return _commit_folder(path)
    return next((f"{path}{ending}" for ending in ("", *ENDINGS) if exists(f"{path}{ending}")), path)


REPOSITORY: Final = "models--"
"""The beginning of the name of a repository's folder in the cache of huggingface_hub: `models--owner--name`."""


def _commit_folder(repository: str) -> str:
    """Return the folder of the commit that `main` is, or of the only one; the same path if it has neither."""
    folders = [*Path(repository, "snapshots").glob("*")]
    with suppress(OSError, ValueError):
        main = Path(repository, "refs", "main").read_text(encoding="ascii")[:64].strip()
        folders = [folder for folder in folders if folder.name == main] or folders
    return str(folders[0]) if len(folders) == 1 else repository


def input_name(path: Path) -> str:
    """Return the name of an input for people: of a commit in the cache of the hub that of its repository."""
    if path.parent.name == "snapshots" and path.parents[1].name.startswith(REPOSITORY):
        return path.parents[1].name.rpartition("--")[2]
    return path.name


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
    return output_path(path) if isinstance(path, Path) else with_ending(output_path(path), ending)


def with_ending(path: Path, ending: str = ".safetensors") -> Path:
    """Return the path of a new file of weights with an ending by which programs find it: the .5 of v1.5 is none.

    Raises UsageError for an ending that is nearly right.
    """
    suffix = path.suffix.lower()
    if suffix in WEIGHT_SUFFIXES or suffix == ".sft" or exists(path):
        return path
    if path.name.endswith(".") or _misspelt(suffix):
        right = Path(path.name.rstrip(".")).with_suffix(ending)
        error = UsageError("the ending of the output is misspelt", str(path), f"name it {right}")
        raise error.instead(str(path), str(path.with_name(right.name)))
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


def nearest(path: str) -> str:
    """Return a path as it is typed in the current folder, if it is inside."""
    try:
        return one_line(str(Path(path).relative_to(Path.cwd())))
    except (ValueError, OSError):
        return one_line(path)


def absolute(path: Path) -> Path:
    """Return the absolute path; UsageError for a relative one if the current folder was deleted."""
    if path.is_absolute():
        return path
    if not current_folders():
        raise UsageError("the current folder was deleted", str(path), "change to an existing folder")
    return path.absolute()
