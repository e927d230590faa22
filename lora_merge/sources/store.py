"""The folder of downloaded files that no other program keeps: those of Civitai, URLs and object stores.

Each address has a folder of its own with its files in a folder of the model's name, and `source.json` next to that: the
pinned address, sizes and SHA-256. All are below `$LORA_MERGE_CACHE`, or `lora-merge/files` in the user's cache folder,
which may be emptied at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..addresses import Address, parse
from ..disk.publish import put_file
from ..errors import InputError, MergeError
from ..paths import forbidden
from ..safe_regex import from_json
from .contents import Advance, SourceFiles

if TYPE_CHECKING:
    from .web import Endpoint

NOTE: Final = "source.json"
LARGEST: Final = 1 << 20  # bytes of such a note


def store() -> Path:
    """Return the folder of all downloaded files."""
    if folder := os.environ.get("LORA_MERGE_CACHE"):
        return Path(folder).expanduser().absolute()
    from platformdirs import user_cache_path  # imported here: local files do not need it

    return user_cache_path("lora-merge", appauthor=False) / "files"


def entry(contents: SourceFiles, variant: str = "") -> Path:
    """Return the folder for the files of an address. `variant`: what distinguishes two states of one URL."""
    digest = hashlib.sha256(f"{contents.address} {variant}".encode()).hexdigest()
    return store() / digest[:32] / file_name(contents.name)


def note_at(folder: Path) -> dict[str, Any]:
    """Return what is known about a folder of downloaded files; {} if it is none."""
    with suppress(OSError, ValueError, MergeError):
        raw = (folder.parent / NOTE).read_bytes()
        value = from_json(raw if len(raw) <= LARGEST else b"{}")
        return value if isinstance(value, dict) else {}
    return {}


def folders() -> Iterator[Path]:
    """Yield the folders of downloaded files."""
    for path in store().glob("*/*") if store().is_dir() else ():
        if path.is_dir() and note_at(path):
            yield path


def stored_file(folder: Path, name: str, size: int) -> Path | None:
    """Return the path of a file that was downloaded whole; None if there is none."""
    path = folder / file_name(name)
    if note_at(folder).get("files", {}).get(name, {}).get("size") == size and path.is_file():
        return path if path.stat().st_size == size else None
    return None


def keep(place: Endpoint, folder: Path, name: str, contents: SourceFiles, advance: Advance) -> None:
    """Download a file of an address into its folder. Two processes take turns."""
    from filelock import FileLock

    from .web import download

    file = contents.files[name]
    path = folder / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / ".lock"):
        if stored_file(folder, name, file.size) is not None:
            return
        digest = download(place, path, file.size, advance, sha256=file.sha256, etag=file.etag)
        note(folder, name, contents, digest)


@contextmanager
def arrive(folder: Path, name: str, contents: SourceFiles) -> Iterator[Callable[[bytes], object]]:
    """Give the block a function that takes the bytes of a file in their order; at its end the file is in its folder.

    InputError for another number of bytes than the source states; nothing is then left.
    """
    size, path = contents.files[name].size, folder / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part, digest = path.with_name(f"{path.name}.{os.getpid()}.part"), hashlib.sha256()
    try:
        with part.open("wb") as f:

            def write(data: bytes) -> None:
                f.write(data)
                digest.update(data)

            yield write
            f.flush()
            os.fsync(f.fileno())
        if part.stat().st_size != size:
            raise InputError(
                "the download has another length than its source states", str(contents.address), "run again"
            )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    note(folder, name, contents, digest.hexdigest())


def note(folder: Path, name: str, contents: SourceFiles, digest: str) -> None:
    """Write down that a file was downloaded whole."""
    files = {**note_at(folder).get("files", {}), name: {"size": contents.files[name].size, "sha256": digest}}
    put_file(folder.parent / NOTE, json.dumps({"source": str(contents.address), "files": files}, indent=1).encode())


def file_name(name: str) -> str:
    """Return the name of a file of another machine as every file system takes it, without a way out of its folder."""
    parts = [re.sub(r'[<>:"|?*\\\x00-\x1f]', "_", part) for part in name.split("/") if part not in ("", ".", "..")]
    safe = (f"_{part}" if forbidden(part) or part.startswith(".") else part for part in parts)
    return "/".join(part[:200] for part in safe) or "file"


def address_in_store(path: Path) -> Address | None:
    """Return the pinned address of a file or folder in the store; None for any other path."""
    above = [path, *path.parents]
    folder = next((inner for inner, outer in zip(above, above[2:], strict=False) if outer == store()), None)
    source = note_at(folder).get("source") if folder is not None else None
    with suppress(MergeError):
        return parse(source) if isinstance(source, str) else None
    return None
