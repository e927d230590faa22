"""What an address leads to: the pinned address, and its files with sizes and hashes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Protocol, TypeAlias

from ..addresses import HUB, Address
from ..disk.remote import ReadRange
from ..disk.volumes import free_bytes
from ..errors import MergeError, ResourceError, UsageError
from ..text import size as spoken_size
from .hub_cache import hub_folder

Advance: TypeAlias = Callable[[int], object]
"""Is called with the number of bytes that have just arrived."""

SWITCHES: Final = ("LORA_MERGE_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. `sha256` and `etag` are empty if the source does not state them."""

    size: int
    sha256: str = ""
    etag: str = ""


@dataclass(frozen=True)
class SourceFiles:
    """What an address leads to. `name`: of the folder of its files, for people; `files`: name inside it → file;
    `revision`: as the user names it; `folder`: whether the address is that of a folder, also if it has one file."""

    address: Address
    name: str
    files: Mapping[str, SourceFile]
    revision: str = ""
    folder: bool = False

    @property
    def inside(self) -> str:
        """The name of the file or folder that the address means; "" for all files."""
        alone = len(self.files) == 1 and not self.folder
        return self.address.path or (next(iter(self.files)) if alone else "")


class Opener(Protocol):
    """A kind of source. Every function raises MergeError if the source cannot give what an address names."""

    @property
    def keeps(self) -> bool:
        """Whether files are downloaded before a run, and kept; else the run reads them from the source."""

    def local(self, address: Address) -> Path | None:
        """Return the path of the file or folder, if it is on this machine; without any request."""

    def contents(self, address: Address) -> SourceFiles:
        """Return what an address leads to."""

    def reader(self, contents: SourceFiles, name: str) -> ReadRange:
        """Return the function that reads ranges of a file."""

    def stored(self, contents: SourceFiles, name: str) -> Path | None:
        """Return the path of a file on this machine; None if it has to be downloaded."""

    def folder(self, contents: SourceFiles) -> Path:
        """Return the folder of this machine that files are downloaded to."""

    def fetch(self, contents: SourceFiles, names: Iterable[str], advance: Advance) -> None:
        """Download files."""


def is_offline() -> bool:
    """Return whether the user has switched requests off."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in SWITCHES)


def switches() -> str:
    """Return the variables by which the user has switched requests off, for people."""
    return " and ".join(name for name in SWITCHES if os.environ.get(name))


def switched_off(address: Address) -> MergeError:
    """Return the error for a model that is not on this machine, if requests are switched off."""
    names = switches()
    what = "the model is not on this machine, but downloads are switched off"
    if address.scheme == HUB:
        what = "neither a file nor a folder here, nor in the cache of the hub, and downloads are switched off"
    return UsageError(what, str(address), f"download it first: {address.download()}; or unset {names}")


def write(f: IO[bytes], data: bytes | memoryview, target: Path) -> None:
    """Write bytes of a download; ResourceError if the disk does not take them."""
    try:
        f.write(data)
    except OSError as e:
        raise ResourceError(f"the download cannot be written: {e.strerror}", str(target),
                            "remove files, or name a folder on another disk with --cache") from e  # fmt: skip


def require_room(folder: Path, needed: int) -> None:
    """Raise ResourceError if the disk of a folder has no room for so many bytes."""
    free = free_bytes(folder)
    if needed > free:
        other = "set HF_HOME to" if hub_folder() in folder.parents else "give --cache"
        raise ResourceError("not enough disk space for the download",
                            f"{folder}: {spoken_size(needed)} needed, {spoken_size(free)} free",
                            f"remove files, or {other} a folder on another disk")  # fmt: skip
