"""Single files at URLs: read by ranges, downloaded into the store."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..addresses import WEB, Address
from ..disk.remote import ReadRange
from .contents import Advance, Listed, SourceFiles, is_offline, switched_off
from .store import Store, keep, stored_file
from .web import Endpoint, facts_of, ranges


class Url:
    """A file at a URL. Its content may change: two states differ in the ETag, or else in size and query."""

    def __init__(self, store: Store) -> None:
        self.store, self.keeps = store, store.named

    def local(self, address: Address) -> Path | None:
        """Return the path of a file that was kept, if no request can be made: only the server knows whether it has
        changed."""
        return self.store.stored(Address(WEB, str(address))) if is_offline() else None

    def contents(self, address: Address) -> SourceFiles:
        """Return the file, by a request of one byte."""
        if is_offline():
            raise switched_off(address)
        size, etag, stated = facts_of(Endpoint(address, address.name))
        name = stated or Path(unquote(urlsplit(address.name).path)).name or "model.safetensors"
        return SourceFiles(Address(WEB, address.name), Path(name).stem, {name: Listed(size, "", etag)})

    def reader(self, contents: SourceFiles, name: str) -> ReadRange:
        """Return the function that reads ranges of the file."""
        file = contents.files[name]
        return ranges(Endpoint(contents.address, contents.address.name), file.size, file.etag)

    def stored(self, contents: SourceFiles, name: str) -> Path | None:
        """Return the path of the file in the store."""
        return stored_file(self.folder(contents), name, contents.files[name].size)

    def folder(self, contents: SourceFiles) -> Path:
        """Return the folder of this state of the file."""
        file = next(iter(contents.files.values()))
        query = "" if file.etag else urlsplit(contents.address.name).query
        return self.store.entry(contents, f"{file.size} {file.etag or query}")

    def fetch(self, contents: SourceFiles, names: Iterable[str], advance: Advance) -> None:
        """Download the file."""
        for name in names:
            keep(Endpoint(contents.address, contents.address.name), self.folder(contents), name, contents, advance)
