"""Single files at URLs: read by ranges, downloaded into the store."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..addresses import WEB, Address
from .contents import Listed, SourceFiles
from .web import Endpoint, WebSource, facts_of


class Url(WebSource):
    """A file at a URL. Its content may change: two states differ in the ETag, or else in size and query."""

    streams = True

    def contents(self, address: Address) -> SourceFiles:
        """Return the file, by a request of one byte."""
        size, etag, stated = facts_of(Endpoint(address, address.name))
        name = stated or Path(unquote(urlsplit(address.name).path)).name or "model.safetensors"
        return SourceFiles(Address(WEB, address.name), Path(name).stem, {name: Listed(size, "", etag)})

    def endpoint(self, contents: SourceFiles, name: str) -> Endpoint:
        """Return the URL."""
        return Endpoint(contents.address, contents.address.name)

    def state(self, contents: SourceFiles) -> str:
        """Return size and ETag, or size and query."""
        file = next(iter(contents.files.values()))
        return f"{file.size} {file.etag or urlsplit(contents.address.name).query}"
