"""HTTP requests with the standard library: ranges, downloads that resume, tokens that go to one host alone; and the
sources that have each file at a URL.

No message of this module contains a query, a header or a token: queries of signed URLs are secrets.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit

from ..addresses import WEB, Address, is_private
from ..disk.remote import ReadRange
from ..errors import InputError, MergeError, RemoteError, ResourceError
from ..text import from_json
from ..text import size as spoken_size
from ..version import __version__
from .contents import Advance, SourceFile, SourceFiles, write
from .store import StoredSource

AGENT: Final = f"lora-merge/{__version__}"
"""Civitai answers 403 to the usual names of Python's clients."""

TIMEOUT: Final = 30.0  # seconds without a byte
TRIES: Final = 6
LONGEST_WAIT: Final = 60.0  # seconds before a request is repeated, whatever the server asks for
HOPS: Final = 8  # redirects of one request
BLOCK: Final = 1 << 20  # bytes that are written at once
ANSWER: Final = 32 << 20  # bytes of a JSON answer

REDIRECTS: Final = (301, 302, 303, 307, 308)
INSECURE: Final = 311  # means a redirect to an address without encryption; no server answers it
BUSY: Final = (408, 429, 500, 502, 503, 504)
"""Answers after which a request is repeated."""

wait = time.sleep


@dataclass(frozen=True)
class Endpoint:
    """A URL of an address. `token`: of the `Authorization` header, for the host of the URL alone. `advice`: status →
    what to do, in place of what is said for all servers."""

    address: Address
    url: str = field(repr=False)
    token: str = field(default="", repr=False)
    advice: Mapping[int, str] = field(default_factory=dict)


class _Refusal(Exception):
    """A server's answer that is no success."""

    def __init__(self, status: int, headers: Message) -> None:
        super().__init__(status)
        self.status, self.headers = status, headers


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect: `_answer` does, without the token on another host."""


@cache  # to read the certificates of the system takes 0.3 s
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=ssl.create_default_context()))


def _answer(place: Endpoint, headers: Mapping[str, str]) -> Any:
    """Return the response to a GET, behind all redirects; `_Refusal` for a failure."""
    url, opener = place.url, _opener()
    for _ in range(HOPS):
        request = urllib.request.Request(url, headers={"User-Agent": AGENT, "Accept-Encoding": "identity", **headers})
        if place.token and _origin(url) == _origin(place.url):
            request.add_header("Authorization", f"Bearer {place.token}")
        try:
            return opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as e:
            target = e.headers.get("Location")
            e.close()
            if e.code not in REDIRECTS or not target:
                raise _Refusal(e.code, e.headers) from None
            url = urljoin(url, target)
            if not is_private(url):  # in the clear anybody on the way could change the weights
                raise _Refusal(INSECURE, e.headers) from None
    raise _Refusal(310, Message())


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


@contextmanager
def get(place: Endpoint, headers: Mapping[str, str] = MappingProxyType({})) -> Iterator[Any]:
    """Give the block the response to a GET. It is repeated while the server is busy or out of reach; MergeError then,
    and for an answer that is no success."""
    for left in reversed(range(TRIES)):
        try:
            response = _answer(place, headers)
            break
        except _Refusal as e:
            if e.status not in BUSY or not left:
                raise refused(place, e.status) from None
            wait(_pause(e.headers.get("Retry-After"), TRIES - left))
        except (OSError, http.client.HTTPException) as e:
            if not left or _is_final(e):
                raise unreachable(place.address, e) from None
            wait(_pause(None, TRIES - left))
    with response:
        yield response


def _pause(asked: str | None, attempt: int) -> float:
    """Return seconds to wait: what the server asks for, else twice as many after each attempt."""
    with suppress(TypeError, ValueError):
        return min(LONGEST_WAIT, max(0.0, float(asked or "")))
    return float(min(LONGEST_WAIT, 0.5 * 2**attempt))


def _is_final(e: Exception) -> bool:
    """Return whether a failure will not pass by itself: a certificate that is wrong."""
    return isinstance(getattr(e, "reason", e), ssl.SSLCertVerificationError)


def json_at(place: Endpoint) -> Any:
    """Return the JSON value at a URL."""
    with get(place, {"Accept": "application/json"}) as response:
        raw = response.read(ANSWER + 1)
    try:
        return from_json(raw if len(raw) <= ANSWER else b"")
    except ValueError:
        raise InputError("the server's answer is no JSON", str(place.address), "run again later") from None


def facts_of(place: Endpoint) -> tuple[int, str, str]:
    """Return size, ETag and file name of what is at a URL, by a GET of one byte: some servers refuse HEAD.

    InputError if the server does not read ranges, or does not state the size.
    """
    with get(place, {"Range": "bytes=0-0"}) as response:
        total = str(response.headers.get("Content-Range", "")).rpartition("/")[2]
        length = total if response.status == 206 else response.headers.get("Content-Length", "")
        if not str(length).isdigit():
            raise InputError("the server does not state the size of the file", str(place.address),
                             f"download it first: {place.address.download()}")  # fmt: skip
        etag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        name = response.headers.get_filename() or ""
    return int(length), etag, Path(name.replace("\\", "/")).name


def ranges(place: Endpoint, size: int, etag: str = "") -> ReadRange:
    """Return a function that reads ranges of a file; InputError if its bytes or their number have changed."""

    def read(offset: int, count: int) -> bytes:
        if not count:
            return b""
        for left in reversed(range(TRIES)):
            with get(place, {"Range": f"bytes={offset}-{offset + count - 1}"}) as response:
                if response.status != 206:
                    if offset or count < size:
                        raise RemoteError("the server does not read parts of files", str(place.address),
                                          f"download it first: {place.address.download()}")  # fmt: skip
                elif str(response.headers.get("Content-Range", "")).rpartition("/")[2] not in (str(size), "*"):
                    raise changed(place.address)
                if etag and (response.headers.get("ETag") or etag) != etag:
                    raise changed(place.address)
                with suppress(OSError, http.client.HTTPException):  # the connection broke: once more
                    if len(raw := response.read(count)) == count:
                        return bytes(raw)
            if left:
                wait(_pause(None, TRIES - left))
        raise unreachable(place.address, OSError("the connection breaks"))

    return read


def download(  # noqa: PLR0913  # what the source states of the file
    place: Endpoint, target: Path, size: int, advance: Advance, *, sha256: str = "", etag: str = ""
) -> str:
    """Download a file; return its SHA-256. A download that broke is continued if the file has not changed.

    InputError for bytes of another length or hash; nothing is then left.
    """
    part = target.with_name(f"{target.name}.part")
    digest, done, other_length = hashlib.sha256(), 0, False
    with part.open("ab") as f:
        f.truncate(done := _hash(part, digest, advance) if etag and part.stat().st_size <= size else 0)
        stuck = 0
        while done < size:
            before, stated = done, {"Range": f"bytes={done}-", "If-Range": etag} if done else {}
            with get(place, stated) as response:
                if done and response.status != 206:  # the file has changed, or the server reads no ranges
                    f.truncate(0)
                    digest, done = hashlib.sha256(), 0
                if etag and not done and (response.headers.get("ETag") or etag) != etag:
                    raise changed(place.address)
                with suppress(OSError, http.client.HTTPException):
                    while data := response.read(min(BLOCK, size - done)):
                        write(f, data, target)
                        digest.update(data)
                        done += len(data)
                        advance(len(data))
                # all that the server promised has arrived, or more than that is to come
                other_length = response.length == 0 if done < size else bool(response.length)
            if other_length:
                break
            stuck = stuck + 1 if done == before else 0
            if stuck == TRIES:
                raise unreachable(place.address, OSError(f"the connection ends after {spoken_size(done)}"))
            if done < size:
                wait(_pause(None, stuck))
        f.flush()
        os.fsync(f.fileno())
    hashed = digest.hexdigest()
    if wrong := ("length" if other_length else "SHA-256" if sha256 and hashed != sha256.lower() else ""):
        part.unlink()
        raise InputError(f"the downloaded file has another {wrong} than its source states",
                         f"{place.address}: SHA-256 {hashed}",
                         "download it again; if that does not help, get it from another place")  # fmt: skip
    part.replace(target)
    return hashed


def _hash(part: Path, digest: Any, advance: Advance) -> int:
    """Hash what an earlier download has left; return the number of bytes."""
    done = 0
    with part.open("rb") as f:
        while data := f.read(BLOCK):
            digest.update(data)
            done += len(data)
            advance(len(data))
    return done


class WebSource(StoredSource):
    """A source that has each file at a URL."""

    @abstractmethod
    def endpoint(self, contents: SourceFiles, name: str) -> Endpoint:
        """Return the URL of a file."""

    def reader(self, contents: SourceFiles, name: str) -> ReadRange:
        """Return the function that reads ranges of a file."""
        file = contents.files[name]
        return ranges(self.endpoint(contents, name), file.size, file.etag)

    def download(self, contents: SourceFiles, name: str, target: Path, advance: Advance) -> str:
        """Download a file to a path, see `download`."""
        file = contents.files[name]
        return download(self.endpoint(contents, name), target, file.size, advance, sha256=file.sha256, etag=file.etag)


def refused(place: Endpoint, status: int) -> MergeError:
    """Return the error for an answer that is no success."""
    address = place.address
    what, fix = {
        401: ("the server wants a token, or does not accept the one it got", f"download it in a browser: {address}"),
        403: ("the server refuses access to this file", "ask its publisher for access"),
        404: ("the server has no such file", "check the address"),
        410: ("the server does not have this file any more", "look for another source of it"),
        416: ("the file has become shorter than it was", "run again"),
        310: ("the server redirects in a loop", "check the address"),
        INSECURE: ("the server redirects to an address without encryption", "get the file from another place"),
    }.get(status, (f"the server answers with an error ({status})", "run again later"))  # fmt: skip
    fix = place.advice.get(status, fix)
    if status in BUSY:
        what = "the server limits requests" if status == 429 else what
        return ResourceError(what, str(address), "run again later")
    return RemoteError(what, str(address), fix)


def unreachable(address: Address, e: Exception) -> MergeError:
    """Return the error for a network or a server that cannot be reached."""
    reason = getattr(e, "reason", e)
    text = getattr(reason, "strerror", None) or (str(reason) if isinstance(reason, OSError) else type(reason).__name__)
    return ResourceError(f"the network or the server cannot be reached: {text}", str(address),
                         "check the network and the proxy, and run again: a download is continued")  # fmt: skip


def changed(address: Address) -> MergeError:
    """Return the error for a file that was changed while it was read."""
    return RemoteError("the file on the server was changed while it was read", str(address), "run again")


class Url(WebSource):
    """A file at a URL. Its content may change: two states differ in the ETag, or else in size and query."""

    streams = True

    def contents(self, address: Address) -> SourceFiles:
        """Return the file, by a request of one byte."""
        size, etag, stated = facts_of(Endpoint(address, address.name))
        name = stated or Path(unquote(urlsplit(address.name).path)).name or "model.safetensors"
        return SourceFiles(Address(WEB, address.name), Path(name).stem, {name: SourceFile(size, "", etag)})

    def endpoint(self, contents: SourceFiles, name: str) -> Endpoint:
        """Return the URL."""
        return Endpoint(contents.address, contents.address.name)

    def state(self, contents: SourceFiles) -> str:
        """Return size and ETag, or size and query."""
        file = next(iter(contents.files.values()))
        return f"{file.size} {file.etag or urlsplit(contents.address.name).query}"
