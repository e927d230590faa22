"""The folder of downloaded files that no other program keeps: those of Civitai, URLs and object stores.

Each address has a folder of its own with its files in a folder of the model's name, and `source.json` next to that: the
pinned address, sizes and SHA-256. All are below the folder of `--cache` or `$LORA_MERGE_CACHE`, or else below
`lora-merge/files` in the user's cache folder. They may be emptied at any time.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..addresses import CIVITAI, WEB, Address, downloads_folder, parse
from ..disk.remote import RANGES_AT_ONCE, ReadRange
from ..errors import MergeError
from ..paths import forbidden
from ..text import from_json
from .contents import Advance, SourceFiles, is_offline, write

NOTE: Final = "source.json"
LARGEST: Final = 1 << 20  # bytes of such a note
PIECE: Final = 16 << 20  # bytes of one range


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
        import hashlib

        digest = hashlib.sha256(f"{contents.address} {variant}".encode()).hexdigest()
        return self.root / digest[:32] / file_name(contents.name)

    def folders(self) -> Iterator[tuple[Path, Address, Mapping[str, Any]]]:
        """Yield each folder of downloaded files with its pinned address, and with size and SHA-256 of its files."""
        for path in self.root.glob("*/*") if self.root.is_dir() else ():
            if path.is_dir() and (address := address_in_store(path)) is not None:
                yield path, address, note_at(path).get("files", {})

    def find(self, address: Address) -> Path | None:
        """Return the path of the file or folder of an address that was downloaded before."""
        address = parse(str(address)) or address  # notes have no query and no password
        for folder, known, files in self.folders():
            if _answers(known, address):
                name = address.path or _only_file(known, files)
                return stored_file(folder, name, files[name].get("size", -1)) if name in files else folder
        return None


def _answers(known: Address, address: Address) -> bool:
    """Return whether the files of a pinned address are those of another, which may lack what pins it."""
    details = (known.revision, address.revision), (known.path, address.path), (known.file, address.file)
    same = (known.scheme, known.name) == (address.scheme, address.name.rstrip("/"))
    return same and all(word in ("", pinned) for pinned, word in details)


def _only_file(address: Address, files: Mapping[str, Any]) -> str:
    """Return the name of the only file of an address that is that of a file; "" for a folder."""
    names = [*files]
    alone = len(names) == 1 and (address.scheme in (WEB, CIVITAI) or address.name.endswith(f"/{names[0]}"))
    return names[0] if alone else ""


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


class StoredSource(ABC):
    """A source whose files are downloaded into the store."""

    streams = False
    """Whether runs read the files from the source unless the user asks for them to be kept."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def keeps(self) -> bool:
        """Whether files are downloaded before a run."""
        return self.store.named or not self.streams

    def local(self, address: Address) -> Path | None:
        """Return the path of what was downloaded, if the address is pinned, or no request can be made: only the source
        knows whether it has changed."""
        return self.store.find(address) if address.pinned or is_offline() else None

    @abstractmethod
    def reader(self, contents: SourceFiles, name: str) -> ReadRange:
        """Return the function that reads ranges of a file."""

    def state(self, _: SourceFiles) -> str:
        """Return what distinguishes two states of an address; "" if the address itself does."""
        return ""

    def folder(self, contents: SourceFiles) -> Path:
        """Return the folder for this state of an address."""
        return self.store.entry(contents, self.state(contents))

    def stored(self, contents: SourceFiles, name: str) -> Path | None:
        """Return the path of a file in the store; None if it has to be downloaded."""
        return stored_file(self.folder(contents), name, contents.files[name].size)

    def fetch(self, contents: SourceFiles, names: Iterable[str], advance: Advance) -> None:
        """Download files into the store. Two processes take turns."""
        from filelock import FileLock

        from ..disk.hashes import know  # its threads take six modules, and most commands download nothing
        from ..disk.publish import put_file

        folder = self.folder(contents)
        for name in names:
            path, size = folder / file_name(name), contents.files[name].size
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.parent / ".lock"):
                if self.stored(contents, name) is not None:
                    continue
                digest = self.download(contents, name, path, advance)
                know(path, digest)
                files = {**note_at(folder).get("files", {}), name: {"size": size, "sha256": digest}}
                note = {"source": str(contents.address), "files": files}
                put_file(folder.parent / NOTE, json.dumps(note, indent=1).encode())

    def download(self, contents: SourceFiles, name: str, target: Path, advance: Advance) -> str:
        """Download a file to a path, by several ranges at a time; return its SHA-256."""
        import hashlib
        from concurrent.futures import ThreadPoolExecutor  # as in `disk/remote.py`

        read, size = self.reader(contents, name), contents.files[name].size
        part, digest = target.with_name(f"{target.name}.part"), hashlib.sha256()
        try:
            with part.open("wb") as f, ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="ranges") as pool:
                for start in range(0, size, PIECE * RANGES_AT_ONCE):
                    places = range(start, min(size, start + PIECE * RANGES_AT_ONCE), PIECE)
                    for data in pool.map(lambda at: read(at, min(PIECE, size - at)), places):
                        write(f, data, target)
                        digest.update(data)
                        advance(len(data))
                f.flush()
                os.fsync(f.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return digest.hexdigest()


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
