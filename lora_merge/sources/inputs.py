"""The seam between addresses and paths: every other room sees local paths alone.

`locate` returns a path for an address: that of the file or folder here, or of a **preview**, a folder of placeholders
with the names and sizes of all files, whose bytes are read by ranges (disk/remote.py). Headers are read from it.
`fetch` downloads what a run needs of a preview, and returns the path of that.
"""

from __future__ import annotations

import atexit
import os
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..addresses import (
    CIVITAI,
    HASH,
    HUB,
    MODELSCOPE,
    OBJECTS,
    WEB,
    Address,
    downloads_folder,
    parse,
    speak_with,
)
from ..disk.files import FileState
from ..disk.remote import ReadRange, RemoteFile, place
from ..disk.volumes import existing, free_bytes
from ..errors import InputError
from ..paths import WEIGHT_SUFFIXES, forbidden
from ..text import size as spoken_size
from .contents import Advance, Opener, SourceFiles, is_offline, require_room, switched_off
from .hub_cache import address_in_cache
from .store import Store, address_in_store, file_name

MOST_FILES: Final = 20_000  # of one repository

TYPICAL: Final = 50 << 20
"""Bytes a second of a usual connection, for the time that is named before the first byte."""


@dataclass(frozen=True)
class Preview:
    """What an address leads to, and the folder of its placeholders."""

    contents: SourceFiles
    opener: Opener
    root: Path


_lock = threading.RLock()
_located: dict[tuple[str, Path | None], Path] = {}
_previews: dict[Path, Preview] = {}
_folders: list[Path] = []


def locate(text: str) -> Path | None:
    """Return the path for an address; None for a text that is a path itself. An address is looked up once a process.

    MergeError if the address leads to nothing, or if that cannot be found out.
    """
    address = parse(text)
    if address is None:
        return None
    with _lock:
        key = text, downloads_folder()
        path = _located.get(key)
        if path is None or not path.exists():
            path = _located[key] = _open(address)
        return path


def forget(address: Address) -> None:
    """Look an address up anew when it is used next, and what is inside it: an output has been uploaded there."""

    def touches(text: str) -> bool:
        other = parse(text)
        if other is None or other.scheme != address.scheme:
            return False
        inside = f"{other.name}/".startswith(f"{address.name}/")
        return inside or (address.scheme != HUB and address.name.startswith(f"{other.name}/"))

    with _lock:
        for key in [key for key in _located if touches(key[0])]:
            del _located[key]


def _opener(scheme: str) -> Opener:
    """Return the source of a scheme, which is imported here: local files have no use for an HTTP client, which takes
    60 ms."""
    store = Store.of_user()
    if scheme == HUB:
        from .hub import Hub

        return Hub()
    if scheme in (CIVITAI, HASH):
        from .civitai import Civitai

        return Civitai(store)
    if scheme == MODELSCOPE:
        from .modelscope import ModelScope

        return ModelScope(store)
    if scheme == WEB:
        from .web import Url

        return Url(store)
    if scheme in OBJECTS:
        from .objects import Objects

        return Objects(store)
    from .other_systems import OtherSystem

    return OtherSystem(store)


def _open(address: Address) -> Path:
    opener = _opener(address.scheme)
    if (path := opener.local(address)) is not None:
        return path
    if is_offline():
        raise switched_off(address)
    contents = opener.contents(address)
    return _preview(contents, opener)


def _preview(contents: SourceFiles, opener: Opener) -> Path:
    """Return the path of placeholders for the files of an address."""
    inside, address = contents.inside, contents.address
    names = [name for name in contents.files if _belongs(name, inside, contents)]
    if not names or len(names) > MOST_FILES:
        what = "the address has too many files" if names else "the address has no such file or folder"
        near = [name for name in contents.files if name.endswith((".safetensors", ".gguf"))]
        fix = f"name one of {', '.join(near[:5])}" if near else "check the address"
        raise InputError(what, str(address), fix)
    root = _folder() / str(len(_previews)) / file_name(contents.name)
    for name in names:
        file = contents.files[name]
        place(root / _safe(name, address), RemoteFile(file.size, _reader(contents, opener, name), file.sha256))
    _previews[root] = Preview(contents, opener, root)
    speak_with(_with_addresses)
    return root / _safe(inside, address) if inside else root


def _belongs(name: str, inside: str, contents: SourceFiles) -> bool:
    """Return whether a file is what an address means, is in the folder that it means, or next to that file."""
    if name == inside or not inside or name.startswith(f"{inside}/"):
        return True
    return inside in contents.files and name.rpartition("/")[0] == inside.rpartition("/")[0]


def _safe(name: str, address: Address) -> str:
    """Return a name inside a source; InputError for one that leads out of it."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise InputError("a name of a file leads out of its folder", f"{address}: {name[:200]}",
                         "get it from another place")  # fmt: skip
    return name if os.name != "nt" or not forbidden(name) else file_name(name)


def _reader(contents: SourceFiles, opener: Opener, name: str) -> ReadRange:
    """Return the function that reads ranges of a file: of the one here, or of the other machine."""
    readers: list[ReadRange] = []

    def read(offset: int, count: int) -> bytes | memoryview:
        if (path := opener.stored(contents, name)) is not None:
            with path.open("rb") as f:
                f.seek(offset)
                return f.read(count)
        if not readers:
            readers.append(opener.reader(contents, name))
        return readers[0](offset, count)

    return read


def _folder() -> Path:
    """Return the folder of all previews, which ends with the process."""
    import tempfile  # imported here: local files need none

    if not _folders or not _folders[0].exists():
        _folders[:] = [Path(os.path.realpath(tempfile.mkdtemp(prefix="lora-merge-headers-")))]
        atexit.register(shutil.rmtree, _folders[0], ignore_errors=True)
    return _folders[0]


def folder_of_links(name: str, files: Mapping[str, Path]) -> Path:
    """Return a folder of this name, for the time of the process, with links to files by their names inside it."""
    import tempfile

    folder = Path(tempfile.mkdtemp(dir=_folder())) / file_name(name)
    for inside, path in files.items():
        (link := folder / inside).parent.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(path)
        except OSError:  # a system without links for users
            shutil.copyfile(path, link)
    return folder


def preview_of(path: Path) -> Preview | None:
    """Return the preview that a path belongs to; None for a file of this machine."""
    return next((_previews[root] for root in (path, *path.parents) if root in _previews), None) if _previews else None


@dataclass(frozen=True)
class Download:
    """Files of a preview that a run needs. `missing`: files that are not on this machine; `streamed`: whether the run
    reads them from the source, and nothing is kept."""

    preview: Preview
    names: tuple[str, ...]
    streamed: bool = False

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the files that have to be downloaded."""
        stored, contents = self.preview.opener.stored, self.preview.contents
        return tuple(name for name in self.names if stored(contents, name) is None)

    @property
    def size(self) -> int:
        """The bytes that come from the source."""
        return sum(self.preview.contents.files[name].size for name in self.missing)

    @property
    def room(self) -> int:
        """The bytes that are written to the disk."""
        return 0 if self.streamed else self.size

    def text(self) -> str:
        """Return what is downloaded, its size, the time and the free space, for people."""
        folder = self.preview.opener.folder(self.preview.contents)
        free, seconds = free_bytes(folder), self.size / TYPICAL
        time = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1, round(seconds))} s"
        if self.streamed:
            return (f"{spoken_size(self.size)} are read from {self.preview.contents.address}: {time} at "
                    f"{spoken_size(TYPICAL)}/s; nothing is kept without --cache DIR")  # fmt: skip
        return (f"{spoken_size(self.size)} are downloaded from {self.preview.contents.address}: "
                f"{time} at {spoken_size(TYPICAL)}/s, into {folder} ({spoken_size(free)} free)")  # fmt: skip


def download_of(path: Path, opened: Iterable[Path], *, keep: bool = False) -> Download | None:
    """Return what has to be downloaded for a run with an input; None for an input of this machine.

    `keep`: whether files are downloaded that a run could read from their source. `opened`: the files with weights that
    belong to the input. Of all other files of its folder those without weights
    are taken too: configurations, tokenizers, cards; of a single file the configuration next to it.
    """
    preview = preview_of(path)
    if preview is None:
        return None
    files = preview.contents.files
    used = {file.relative_to(preview.root).as_posix() for file in opened if preview.root in file.parents}
    whole = path.is_dir() or path.name.endswith(".index.json")
    top = (path if path.is_dir() else path.parent).relative_to(preview.root).as_posix()
    inside = "" if top == "." else f"{top}/"
    sides = {
        name
        for name in files
        if name.startswith(inside)
        and Path(name).suffix.lower() not in WEIGHT_SUFFIXES
        and (whole or ("/" not in name[len(inside) :] and name.endswith(".json")))
    }
    names = tuple(name for name in files if _safe(name, preview.contents.address) in used | sides)
    return Download(preview, names, not (keep or preview.opener.keeps))


def require_space(downloads: Iterable[Download], output: tuple[Path, int] | None = None) -> None:
    """Raise ResourceError if the disks have no room for what is downloaded, and for an output of this size."""
    needed: dict[int, tuple[Path, int]] = {}
    for download in (d for d in downloads if d.room):
        folder = download.preview.opener.folder(download.preview.contents)
        disk = _disk(folder)
        needed[disk] = folder, needed.get(disk, (folder, 0))[1] + download.room
    for disk, (folder, count) in needed.items():
        require_room(folder, count + (output[1] if output is not None and disk == _disk(output[0]) else 0))


def _disk(path: Path) -> int:
    return existing(path).stat().st_dev


def fetch(path: Path, download: Download | None, advance: Advance) -> Path:
    """Download what a run needs of an input; return the path of the input on this machine."""
    if download is None:
        return path
    preview = download.preview
    if download.streamed:
        return path
    preview.opener.fetch(preview.contents, download.missing, advance)
    folder = preview.opener.folder(preview.contents)
    inside = path.relative_to(preview.root).as_posix()
    if path.is_dir():
        return folder if inside == "." else folder / inside
    stored = preview.opener.stored(preview.contents, inside)
    return folder / inside if stored is None else stored


_recorded: dict[Path, tuple[Mapping[Path, FileState | None], Address | None]] = {}
"""Input of an earlier output → the states of its files, and where the recipe says that they came from."""


def record_origin(path: Path, files: Iterable[Path], source: str) -> None:
    """Let `origin` return what a recipe says of an input whose files have the bytes of that recipe, so that it is
    written again as it was, wherever its inputs are now. `source`: "" for files of this machine."""
    _recorded[path] = {file: FileState.at(file) for file in files}, parse(source) if source else None


def origin(path: Path) -> Address | None:
    """Return the pinned address of an input: of a preview, of a file in the cache of the hub or in the store."""
    states, recorded = _recorded.get(path, ({}, None))
    if states and all(FileState.at(file) == state for file, state in states.items()):
        return recorded
    preview = preview_of(path)
    if preview is None:
        return address_in_cache(path) or address_in_store(path)
    inside = path.relative_to(preview.root).as_posix()
    address = preview.contents.address
    if address.scheme not in (HUB, MODELSCOPE):
        return address
    return replace(address, path="" if inside == "." else inside)


def _with_addresses(text: str) -> str:
    """Return a text for people with addresses in place of the paths of previews."""
    kind = type(text)
    for root, preview in _previews.items():
        if str(root) in text:
            address, files = preview.contents.address, preview.contents.files
            whole = replace(address, path="") if address.scheme in (HUB, MODELSCOPE) else address
            for name in () if preview.contents.folder else files:
                text = text.replace(str(root / name), str(address))
            text = text.replace(str(root), str(whole))
    return kind(text)
