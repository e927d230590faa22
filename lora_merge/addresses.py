"""Addresses of models on other machines, as users write them, before strengths are split off.

A row of `ADDRESS_FORMS` is one way to write an address. A local path of the same name comes first, and a bare
`owner/name` that ends like a file of weights is always a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from .errors import WINDOWS, UsageError

HUB: Final = "hf"
CIVITAI: Final = "civitai"
HASH: Final = "sha256"
MODELSCOPE: Final = "ms"
WEB: Final = "https"
OBJECTS: Final = ("s3", "gs", "az")
OTHERS: Final = ("sftp", "ssh", "webdavs", "abfs", "abfss")
"""Schemes that fsspec opens."""

CURL: Final = f"curl{'.exe' * WINDOWS} -L -O -J"
"""The command that downloads a file; PowerShell has another one by the name `curl`."""
_NAME: Final = r"[\w-][\w.-]{0,95}/[\w.-]{1,96}"
_REVISION: Final = r"(?:@(?P<revision>[\w.-]+(?:(?<=refs)/(?:pr|convert)/[\w.-]+)?))?"
_INSIDE: Final = r"(?:/(?P<path>[^:?#\s@][^:?#]*?))?/?"
_WEIGHTS: Final = r"safetensors|sft|ckpt|pt|pth|bin|gguf|json|yaml|yml|csv"
_NUMBER: Final = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_TAIL: Final = rf"(?P<tail>(?::{_NUMBER})?(?:[,:](?:re:)?[^,:=/?&#]+=.*)?)"
"""The strength and the parts behind an address, as behind a path."""


@dataclass(frozen=True)
class Address:
    """A model or a file on another machine.

    `name`: `owner/name` of a repository; the number of a Civitai version, "" if `model` alone is known; a SHA-256; a
    URL; bucket and key. `file`: the number of a file of a Civitai version.
    """

    scheme: str
    name: str
    revision: str = ""
    path: str = ""
    model: str = ""
    file: str = ""
    kind: str = ""
    """Of a Civitai address the words of an AIR before the source: `sdxl:lora`."""

    def __str__(self) -> str:
        """Return the address without secrets: queries of URLs and users in them are left out."""
        if self.scheme in (HUB, MODELSCOPE):
            revision, path = self.revision and f"@{self.revision}", self.path and f"/{self.path}"
            return f"{self.scheme}://{self.name}{revision}{path}"
        if self.scheme == CIVITAI:
            number = "@".join(filter(None, (self.model, self.name)))
            scheme = "civitai:" if self.name else "https://civitai.com/models/"  # a number alone is that of a version
            return (f"urn:air:{self.kind}:civitai:" if self.kind else scheme) + number + (self.file and f"#{self.file}")
        if self.scheme == WEB:
            return without_secrets(self.name)
        if self.scheme in OTHERS:  # the user of sftp and the container of abfs belong to the name
            user = urlsplit(self.name).netloc.rpartition("@")[0].partition(":")[0]
            return without_secrets(self.name).replace("://", f"://{user}@", 1) if user else without_secrets(self.name)
        if self.scheme == HASH:
            return f"sha256:{self.name}"
        version = self.revision and f"?versionId={quote(self.revision, safe='')}"
        return f"{self.scheme}://{self.name}{version}"

    @property
    def pinned(self) -> bool:
        """Whether the address names the same bytes for ever, as far as its source keeps its word."""
        if self.scheme in (HUB, MODELSCOPE):
            return re.fullmatch("[0-9a-f]{40}", self.revision) is not None
        return self.scheme == HASH or bool(self.file or (self.scheme in OBJECTS and self.revision))

    def download(self) -> str:
        """Return a command that downloads the model without this program."""
        revision = f" --revision {self.revision}" if self.revision else ""
        if self.scheme == HUB:
            whole = f" --local-dir {self.name}" if not self.path else ""
            return f"hf download {self.name}{self.path and f' {_typed(self.path)}'}{revision}{whole}"
        if self.scheme == MODELSCOPE:
            return f"modelscope download --model {self.name}{self.path and f' {_typed(self.path)}'}{revision}"
        if self.scheme == CIVITAI and self.name:
            return f"{CURL} https://civitai.com/api/download/models/{self.name}"
        if self.scheme == WEB:
            query = "?…" if urlsplit(self.name).query else ""  # it may be a secret
            return f"{CURL} {_typed(str(self)[:200] + query)}"
        if self.scheme in OTHERS:
            return "copy it to this machine"
        commands = {"s3": "aws s3 cp {} .", "gs": "gcloud storage cp {} .", "az": "azcopy copy {} ."}
        text = commands.get(self.scheme, "open its page on civitai.com in a browser")
        return text.format(_typed(f"{self.scheme}://{self.name}"))


def _typed(word: str) -> str:
    mark = '"' if WINDOWS else "'"
    return word if re.fullmatch(r"[\w.:/@%+=-]+", word) else f"{mark}{word.replace(mark, '')}{mark}"


def without_secrets(url: str) -> str:
    """Return a URL without its query, fragment, user and password, any of which may be a secret."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


def _hub(groups: Mapping[str, str | None]) -> Address:
    return Address(HUB, str(groups["name"]), unquote(groups.get("revision") or ""), unquote(groups.get("path") or ""))


def _of_modelscope(groups: Mapping[str, str | None]) -> Address:
    return Address(MODELSCOPE, str(groups["name"]), groups.get("revision") or "", groups.get("path") or "")


def _civitai(groups: Mapping[str, str | None]) -> Address:
    return Address(CIVITAI, groups.get("version") or "", model=groups.get("model") or "",
                   file=groups.get("file") or "", kind=(groups.get("kind") or "").lower())  # fmt: skip


def _url(groups: Mapping[str, str | None]) -> Address:
    return Address(WEB, str(groups["url"]))


def _object(groups: Mapping[str, str | None]) -> Address:
    return Address(str(groups["scheme"]).lower(), str(groups["key"]), groups.get("revision") or "")


def _other(groups: Mapping[str, str | None]) -> Address:
    return Address(str(groups["scheme"]).lower(), str(groups["url"]))


_HUB_HOST: Final = r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)"
_CIVITAI_HOST: Final = r"https?://(?:www\.)?civitai\.(?:com|red)"
_QUERY: Final = r"(?:\?[^\s:,]*)?"
_FILE: Final = r"(?:#(?P<file>\d+))?"

ADDRESS_FORMS: Final[tuple[tuple[str, Callable[[Mapping[str, str | None]], Address]], ...]] = (
    # the hub of Hugging Face: its URIs, pages and files
    (rf"hf:/+(?:models/)?(?P<name>{_NAME}?){_REVISION}{_INSIDE}", _hub),
    (rf"{_HUB_HOST}/(?P<name>{_NAME})/(?:resolve|blob|raw|tree)/(?P<revision>[^/?#:,\s]+){_INSIDE}{_QUERY}", _hub),
    (rf"{_HUB_HOST}/(?!datasets/|spaces/|api/)(?P<name>{_NAME}?)/?(?:[?#][^\s:,]*)?", _hub),
    # Civitai: versions, AIRs, pages, files
    (rf"civitai:/*(?:models/)?(?:(?P<model>\d+)@)?(?P<version>\d+){_FILE}", _civitai),
    (r"civitai:/*(?P<model>\d+)@", _civitai),
    (r"urn:air:(?P<kind>[\w.-]+:[\w.-]+):civitai:(?P<model>\d+)(?:@(?P<version>\d+))?"
     rf"(?::[A-Za-z][\w.-]*)?{_FILE}", _civitai),
    (rf"{_CIVITAI_HOST}/api/download/models/(?P<version>\d+)(?:\?(?:[^\s#]*&)?fileId=(?P<file>\d+)[^\s:,]*)", _civitai),
    (rf"{_CIVITAI_HOST}/api/download/models/(?P<version>\d+)(?:\?[^\s:,]*)?", _civitai),
    (rf"{_CIVITAI_HOST}/models/(?P<model>\d+)[^\s?:,]*\?(?:[^\s#]*&)?modelVersionId=(?P<version>\d+)[^\s:,]*",
     _civitai),
    (rf"{_CIVITAI_HOST}/models/(?P<model>\d+)[^\s:,]*", _civitai),
    (r"sha256:(?P<digest>[0-9A-Fa-f]{64})", lambda groups: Address(HASH, str(groups["digest"]).lower())),
    # other places
    (rf"ms:/+(?:models/)?(?P<name>{_NAME}?){_REVISION}{_INSIDE}", _of_modelscope),
    (rf"https?://(?:www\.)?modelscope\.(?:cn|ai)/models/(?P<name>{_NAME})"
     rf"(?:/resolve/(?P<revision>[^/?#:,\s]+){_INSIDE}|[/?#][^\s:,]*)?", _of_modelscope),
    (r"(?P<url>https?://[^\s/]+/\S*?)", _url),
    (rf"(?P<url>(?P<scheme>{'|'.join(OTHERS)})://[^\s/]+/\S*?)", _other),
    (r"(?P<scheme>s3|gs|az)://(?P<key>[^\s/?#]+/[^?#]+?)(?:\?versionId=(?P<revision>[\w.~%+/=-]+))?", _object),
)  # fmt: skip
"""Pattern of an address → the address. The first pattern that matches counts."""

_BARE: Final = rf"(?P<name>{_NAME}?){_REVISION}{_INSIDE}"
"""`owner/name[@revision][/path]`, without a scheme."""

_HOSTS: Final = r"(?:www\.[\w.-]+|huggingface\.co|hf\.co|civitai\.(?:com|red)|modelscope\.(?:cn|ai))/"
"""The beginning of a web address as browsers show it, without https://."""

_SCHEMES: Final = r"(?:hf|civitai|urn:air|sha256|ms|https?|s3|gs|az|sftp|ssh|webdavs|abfss?):"


def is_spelled_out(text: str) -> bool:
    """Return whether a text has the scheme or the host of an address, as a bare `owner/name` has not."""
    return re.match(f"(?i){_SCHEMES}|{_HOSTS}", text) is not None


def split(text: str) -> tuple[Address, str] | None:
    """Return the address at the beginning of a text and what follows it, such as ":0.8,te=0"; None for a path.

    UsageError for an address of a known form that this program cannot use.
    """
    if len(text) > LONGEST_ADDRESS or ("/" not in text and ":" not in text) or _exists(text):
        return None
    if re.match(f"(?i){_HOSTS}", text) and not _exists(text.partition("/")[0]):
        return _split(f"https://{text}")
    return _split(text) if is_spelled_out(text) else _bare(text)


def parse(text: str) -> Address | None:
    """Return the address that a text is; None for a path, and for an address with a strength behind it."""
    parts = split(text)
    return parts[0] if parts is not None and not parts[1] else None


LONGEST_ADDRESS: Final = 4000
"""Letters of an address; signed URLs have up to 2000."""


@lru_cache(maxsize=256)
def _split(text: str) -> tuple[Address, str]:
    if re.match("(?i)hf:/+(?:datasets|spaces|buckets)/|https?://[^/]*huggingface.co/(?:datasets|spaces)/(?!.*/resolve/)",
                text):  # fmt: skip
        raise UsageError(
            "the address is a data set, a Space or a bucket, not a model", text[:200], "name a model: hf://owner/name"
        )
    for pattern, make in ADDRESS_FORMS:
        if match := re.fullmatch(f"(?i:{pattern}){_TAIL}", text):
            address = make(match.groupdict())
            if {".", ".."} & {*address.path.split("/"), *address.revision.split("/"), *address.name.split("/")}:
                break
            if address.scheme == WEB and not is_private(address.name):
                break
            return address, match["tail"]
    if text.lower().startswith("http:"):
        fix = f"write https://, or download it first: {CURL} URL"
        raise UsageError(
            "the address has no encryption: anyone on the network could change the weights", text[:200], fix
        )
    raise UsageError("unknown form of address", _shown(text), f"write it like one of {ADDRESS_EXAMPLES}")


def _shown(text: str) -> str:
    return without_secrets(text)[:200] if re.match("(?i)https?://", text) else text[:200]


ADDRESS_EXAMPLES: Final = (
    "hf://owner/name@revision/file.safetensors, civitai:12345, sha256:… (64 digits), https://host/file.safetensors, "
    "s3://bucket/file.safetensors"
)


def is_private(url: str) -> bool:
    """Return whether nobody on the way can change what a URL gives: by encryption, or on this machine alone."""
    parts = urlsplit(url)
    return parts.scheme.lower() == "https" or parts.hostname in ("127.0.0.1", "localhost", "::1")


def _bare(text: str) -> tuple[Address, str] | None:
    match = re.fullmatch(_BARE + _TAIL, text)
    if match is None or re.fullmatch(rf"(?i).*\.(?:{_WEIGHTS})/?", text[: match.start("tail")]):
        return None
    path = text[: match.start("tail")]
    first = path.partition("/")[0]
    if re.fullmatch(r"[\d.,/]+", path) or first in (".", "..") or _exists(first) or _exists(path):
        return None
    address = _hub(match.groupdict())
    return (
        None
        if {".", ".."} & {*address.path.split("/"), *address.name.split("/"), address.revision}
        else (address, match["tail"])
    )


_openers: list[Callable[[str], Path | None]] = []


def open_addresses_with(locate: Callable[[str], Path | None]) -> None:
    """Let a function give the local path of what an address leads to."""
    _openers[:] = [locate]


def located(text: str) -> Path | None:
    """Return the local path of what an address leads to; None for a text that is a path itself."""
    return _openers[0](text) if _openers and parse(text) is not None else None


CACHE: Final = "LORA_MERGE_CACHE"
"""The variable that names the folder of downloads, as `--cache` does."""

_downloads: ContextVar[Path | None] = ContextVar("the folder of downloads", default=None)


@contextmanager
def downloads_in(folder: str | Path | None) -> Iterator[None]:
    """Keep what is read from object stores, URLs, Civitai and ModelScope in a folder, if one is named; UsageError for
    a value that is no path."""
    if folder is None:
        yield
        return
    try:
        path = Path(os.path.expanduser(folder)).absolute()  # noqa: PTH111  # ~name of no user stays a name
    except TypeError as e:
        raise UsageError(
            f"a value of type {type(folder).__name__} is not a path", "--cache", "give a str or a Path"
        ) from e
    token = _downloads.set(path)
    try:
        yield
    finally:
        _downloads.reset(token)


def downloads_folder() -> Path | None:
    """Return the folder that the user names for downloads, by `--cache` or by the variable; None without one."""
    if (folder := _downloads.get()) is not None:
        return folder
    named = os.environ.get(CACHE)
    return Path(named).expanduser().absolute() if named else None


_speakers: list[Callable[[str], str]] = []


def speak_with(words: Callable[[str], str]) -> None:
    """Let a function put addresses in place of the local paths of what they lead to."""
    _speakers[:] = [words]


def with_addresses(text: str) -> str:
    """Return a text for people with addresses in place of the local paths of what they lead to."""
    text = _speakers[0](text) if _speakers else text
    for outbox in _outboxes if UPLOADS in text else ():
        pattern = rf"{re.escape(outbox)}[/\\]({'|'.join(WRITABLE)})[/\\](\S*)"
        text = type(text)(re.sub(pattern, lambda m: f"{m[1]}://{unquote(m[2].replace(os.sep, '/'))}", text))
    return text


WRITABLE: Final = (HUB, *OBJECTS)
"""Schemes of the addresses that an output can have."""

UPLOADS: Final = "lora-merge-uploads"
"""The folder of outputs that are uploaded. The path of a local copy below it is that of its address, so that every
process finds the address again: `lora-merge-uploads/s3/bucket/key`."""

_outboxes: set[str] = set()
"""Paths of such folders that this process has used."""

_BUCKET: Final = r"(?i)(?P<scheme>s3|gs|az)://(?P<key>[^\s/?#]+(?:/[^?#]*)?)"


def output_address(text: str) -> Address | None:
    """Return the address that the name of an output is; None for a path, as a bare `owner/name` is.

    UsageError for an address that no output can have.
    """
    if not re.match(_SCHEMES, text):
        return None
    text = re.sub("(?i)^(hf|s3|gs|az):/+", r"\1://", text.rstrip("/"))
    if match := re.fullmatch(_BUCKET, text):
        address = Address(match["scheme"].lower(), match["key"])
    else:
        address, tail = _split(text)
        if tail:
            raise UsageError("an output has no strength", text[:200], f"write {address}")
    names = [*address.name.split("/"), *(address.path.split("/") if address.path else ())]
    if address.scheme not in WRITABLE or {"", ".", ".."} & {*names}:
        fix = "write a file here with `-o NAME`, or name hf://owner/name, s3://bucket/key, gs://… or az://…"
        raise UsageError("outputs cannot be uploaded to this address", _shown(text), fix)
    if address.scheme in OBJECTS and address.revision:
        raise UsageError("a version of an object cannot be written", str(address), "leave out ?versionId=…")
    if address.pinned or "/" in address.revision:
        raise UsageError("a commit or a reference of the hub cannot be written", str(address), "name a branch")
    return address


def is_whole(address: Address) -> bool:
    """Return whether an output's address is that of a whole repository or bucket."""
    return not address.path if address.scheme == HUB else "/" not in address.name


def upload_path(address: Address, folder: Path) -> Path:
    """Return the path of the local copy of an output with an address, below `UPLOADS` in a folder."""
    owner, *inside = address.name.split("/")
    if address.scheme == HUB:
        inside = [f"{inside[0]}@{address.revision}" if address.revision else inside[0],
                  *(address.path.split("/") if address.path else ())]  # fmt: skip
    outbox = folder / UPLOADS
    _outboxes.add(str(outbox))
    return outbox.joinpath(address.scheme, *(_quoted(name) for name in (owner, *inside)))


def upload_address(path: Path) -> Address | None:
    """Return the address of the output whose local copy has a path; None for other paths."""
    if UPLOADS not in path.parts:
        return None
    at = path.parts.index(UPLOADS)
    scheme, *names = [*map(unquote, path.parts[at + 1 :])] or [""]
    if scheme not in WRITABLE or len(names) < 1 + (scheme == HUB):
        return None
    _outboxes.add(str(Path(*path.parts[: at + 1])))
    if scheme != HUB:
        return Address(scheme, "/".join(names))
    name, _, branch = names[1].partition("@")
    return Address(HUB, f"{names[0]}/{name}", branch, "/".join(names[2:]))


def _quoted(name: str) -> str:
    """Return a part of an address as the name of a file that every file system takes."""
    return re.sub(r'[%<>:"|?*\\\x00-\x1f]|^\.|[. ]$', lambda m: f"%{ord(m[0]):02X}", name)


_stages: list[Callable[[Address], Path]] = []


def stage_outputs_with(stage: Callable[[Address], Path]) -> None:
    """Let a function give the path of the local copy of an output with an address."""
    _stages[:] = [stage]


def staged(text: str) -> Path | None:
    """Return the path of the local copy of an output whose name is an address; None for a path."""
    address = output_address(text) if ":" in text else None
    assert address is None or _stages, "the room files is loaded"
    return None if address is None else _stages[0](address)


def _exists(path: str) -> bool:
    return "\0" not in path and os.path.exists(path)  # noqa: PTH110  # cheap, for thousands of jobs
