"""The folder of downloaded files that no other program keeps: those of Civitai, URLs and object stores.

Each address has a folder of its own with its files in a folder of the model's name, and `source.json` next to that: the
pinned address, sizes and SHA-256. All are below the folder of `--cache` or `$LORA_MERGE_CACHE`, or else below
`lora-merge/files` in the user's cache folder. They may be emptied at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..addresses import WEB, Address, downloads_folder, parse
from ..disk.publish import put_file
from ..errors import InputError, MergeError
from ..paths import forbidden
from ..text import from_json
from .contents import Advance, SourceFiles

if TYPE_CHECKING:
    from .web import Endpoint

NOTE: Final = "source.json"
LARGEST: Final = 1 << 20  # bytes of such a note


@dataclass(frozen=True)
class Store:
    """The folder of all downloaded files. `named`: whether the user names it, and so asks for all to be kept."""

    root: Path
    named: bool

    @staticmethod
    def of_user() -> Store:
        """Return the folder that the user names, or the usual one."""
        if (folder := downloads_folder()) is not None:
            return Store(folder, named=True)
        from platformdirs import user_cache_path  # imported here: local files do not need it

        return Store(user_cache_path("lora-merge", appauthor=False) / "files", named=False)

    def entry(self, contents: SourceFiles, variant: str = "") -> Path:
        """Return the folder for the files of an address. `variant`: what distinguishes two states of one URL."""
        digest = hashlib.sha256(f"{contents.address} {variant}".encode()).hexdigest()
        return self.root / digest[:32] / file_name(contents.name)

    def folders(self) -> Iterator[tuple[Path, Address, Mapping[str, Any]]]:
        """Yield each folder of downloaded files with its pinned address, and with size and SHA-256 of its files."""
        for path in self.root.glob("*/*") if self.root.is_dir() else ():
            if path.is_dir() and (address := address_in_store(path)) is not None:
                yield path, address, note_at(path).get("files", {})

    def stored(self, address: Address) -> Path | None:
        """Return the path of the file or folder of an object store or a URL that was downloaded before."""
        for folder, known, files in self.folders():
            if (known.scheme, known.name) == (address.scheme, address.name.rstrip("/")) and (
                address.revision in ("", known.revision)
            ):
                alone = folder_of_one(known, files)
                return stored_file(folder, alone, files[alone].get("size", -1)) if alone else folder
        return None


def folder_of_one(address: Address, files: Mapping[str, Any]) -> str:
    """Return the name of the only file of an address that is that of a file; "" for a folder."""
    names = [*files]
    return names[0] if len(names) == 1 and (address.scheme == WEB or address.name.endswith(f"/{names[0]}")) else ""


def note_at(folder: Path) -> dict[str, Any]:
    """Return what is known about a folder of downloaded files; {} if it is none."""
    with suppress(OSError, ValueError, MergeError):
        raw = (folder.parent / NOTE).read_bytes()
        value = from_json(raw if len(raw) <= LARGEST else b"{}")
        return value if isinstance(value, dict) else {}
    return {}


def stored_file(folder: Path, name: str, size: int) -> Path | None:
    """Return the path of a file that was downloaded whole; None if there is none."""
    path = folder / file_name(name)
    if note_at(folder).get("files", {}).get(name, {}).get("size") == size and path.is_file():
        return path if path.stat().st_size == size else None
    return None


def keep(  # noqa: PLR0913, PLR0917  # where the file is, where it goes, and who brings it
    place: Endpoint, folder: Path, name: str, contents: SourceFiles, advance: Advance,
    fetch: Callable[[Path], str] | None = None,
) -> None:  # fmt: skip
    """Download a file of an address into its folder. Two processes take turns.

    `fetch`: the function of a library that downloads it to a path and returns its SHA-256; None: our own client does.
    """
    from filelock import FileLock

    from .web import download

    file = contents.files[name]
    path = folder / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / ".lock"):
        if stored_file(folder, name, file.size) is not None:
            return
        if fetch is not None:
            digest = fetch(path)
        else:
            digest = download(place, path, file.size, advance, sha256=file.sha256, etag=file.etag)
        note(folder, name, contents, digest)


@contextmanager
def arrive(folder: Path, name: str, contents: SourceFiles) -> Iterator[Callable[[bytes | memoryview], object]]:
    """Give the block a function that takes the bytes of a file in their order; at its end the file is in its folder.

    InputError for another number of bytes than the source states; nothing is then left.
    """
    size, path = contents.files[name].size, folder / file_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    part, digest = path.with_name(f"{path.name}.{os.getpid()}.part"), hashlib.sha256()
    try:
        with part.open("wb") as f:

            def write(data: bytes | memoryview) -> None:
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
    from ..disk.hashes import know  # its threads take six modules, and most commands download nothing

    know(folder / file_name(name), digest)
    files = {**note_at(folder).get("files", {}), name: {"size": contents.files[name].size, "sha256": digest}}
    put_file(folder.parent / NOTE, json.dumps({"source": str(contents.address), "files": files}, indent=1).encode())


def file_name(name: str) -> str:
    """Return the name of a file of another machine as every file system takes it, without a way out of its folder."""
    parts = [re.sub(r'[<>:"|?*\\\x00-\x1f]', "_", part) for part in name.split("/") if part not in ("", ".", "..")]
    safe = (f"_{part}" if forbidden(part) or part.startswith(".") else part for part in parts)
    return "/".join(part[:200] for part in safe) or "file"


def address_in_store(path: Path) -> Address | None:
    """Return the pinned address of a file or folder in the store; None for any other path."""
    above = (path, *path.parents)
    folder = next((p for p in above if re.fullmatch("[0-9a-f]{32}", p.parent.name)), None)
    source = note_at(folder).get("source") if folder is not None else None
    with suppress(MergeError):
        return parse(source) if isinstance(source, str) else None
    return None
