"""Models of the Hugging Face hub, by huggingface_hub (extra `hub`): its cache, tokens, endpoint and gated access.

Headers are read by ranges of our own client. Whole files are downloaded by the library into its cache, where every
other program finds them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ..addresses import HUB, Address
from ..disk.hashes import hash_file
from ..disk.remote import ReadRange
from ..errors import InputError, MergeError, ResourceError, UsageError
from ..paths import real_path
from ..version import __version__
from .contents import Advance, SourceFile, SourceFiles, is_offline, switched_off
from .hub_cache import commit_of, hub_folder, remember_commit, repository_folder, stored_at
from .web import Endpoint, ranges

NAME: Final = "lora-merge"
SITE: Final = "https://huggingface.co"
INSTALL: Final = "pip install huggingface_hub"
NOWHERE: Final = "neither a file nor a folder here, nor a model on the hub that you may see"
NETWORK: Final = "check the network, or run again later: a download is continued"


class Hub:
    """The hub, or what its cache on this machine has of it."""

    keeps = True

    def local(self, address: Address) -> Path | None:
        """Return the path in the cache: of a file of a commit, or of anything if no request can be made."""
        path = stored_at(address)
        if path is not None and (is_offline() or not is_installed() or (address.pinned and path.is_file())):
            return path
        return None

    def contents(self, address: Address) -> SourceFiles:
        """Return the files of a repository at the commit that a revision is now."""
        if not is_installed():
            what = "neither a file nor a folder here, nor in the cache of the hub; downloads need huggingface_hub"
            raise UsageError(what, str(address), f"download it first: {address.download()}; or {INSTALL}")
        try:
            info = client().model_info(address.name, revision=address.revision or None, files_metadata=True)
        except Exception as e:  # noqa: BLE001  # the library has dozens of errors, in two versions of its HTTP client
            error = failed(address, e)
            commit = commit_of(address)
            if isinstance(error, ResourceError) and (not commit or stored_at(address) is None):
                error = ResourceError(f"neither a file nor a folder here, and {error.what}", error.where, error.fix)
                raise error from None
            if not isinstance(error, ResourceError):
                raise error from None
            return self._contents_of_cache(address, commit)
        files = {
            f.rfilename: SourceFile(int(f.size), str(f.lfs.sha256) if f.lfs else "")
            for f in info.siblings or ()
            if f.size is not None
        }
        return _files_of(address, str(info.sha), files)

    def _contents_of_cache(self, address: Address, commit: str) -> SourceFiles:
        """Return what the cache has of a commit, if the hub cannot be reached."""
        root = repository_folder(address.name) / "snapshots" / commit
        files = {p.relative_to(root).as_posix(): SourceFile(p.stat().st_size) for p in root.rglob("*") if p.is_file()}
        return _files_of(address, commit, files)

    def reader(self, contents: SourceFiles, name: str) -> ReadRange:
        """Return the function that reads ranges of a file."""
        return ranges_of(replace(contents.address, path=name), contents.files[name].size)

    def stored(self, contents: SourceFiles, name: str) -> Path | None:
        """Return the path of a file in the cache."""
        path = stored_at(replace(contents.address, path=name))
        return path if path is not None and path.stat().st_size == contents.files[name].size else None

    def folder(self, contents: SourceFiles) -> Path:
        """Return the folder of the commit in the cache."""
        return repository_folder(contents.address.name) / "snapshots" / contents.address.revision

    def fetch(self, contents: SourceFiles, names: Iterable[str], advance: Advance) -> None:
        """Download files into the cache; InputError for one of another length than the hub states."""
        from huggingface_hub import hf_hub_download

        address = contents.address
        for name in names:
            file = replace(address, path=name)
            try:
                path = hf_hub_download(address.name, name, revision=address.revision, cache_dir=hub_folder(),
                                       library_name=NAME, library_version=__version__, endpoint=endpoint(),
                                       tqdm_class=_bar(advance))  # fmt: skip
            except Exception as e:  # noqa: BLE001  # as in `contents`
                if _has_other_length(e):
                    _remove_incomplete(address, contents.files[name])
                    raise _wrong("length", file) from None
                raise failed(file, e) from None
            _check(Path(path), contents.files[name], file)
        remember_commit(Address(HUB, address.name, contents.revision), address.revision)


def _files_of(address: Address, commit: str, files: Mapping[str, SourceFile]) -> SourceFiles:
    pinned = Address(HUB, address.name, commit, address.path)
    return SourceFiles(pinned, address.name.partition("/")[2], files, address.revision, folder=True)


def _check(path: Path, file: SourceFile, address: Address) -> None:
    """Raise InputError for a downloaded file of another length or hash than the hub states, which is then removed."""
    wrong = "length" if path.stat().st_size != file.size else ""
    if not wrong and file.sha256:
        wrong = "SHA-256" if hash_file(path) != file.sha256 else ""
    if wrong:
        blob = real_path(path)
        path.unlink()
        blob.unlink(missing_ok=True)
        raise _wrong(wrong, address)


def _wrong(what: str, address: Address) -> InputError:
    return InputError(f"the downloaded file has another {what} than the hub states", str(address), "run again")


def _has_other_length(e: Exception) -> bool:
    """Return whether the library refuses a download as it is too long or too short: an OSError without a number."""
    return isinstance(e, OSError) and e.errno is None and "Consistency check failed" in str(e)


def _remove_incomplete(address: Address, file: SourceFile) -> None:
    """Remove what the library has left of such a download, which it would continue."""
    for path in (repository_folder(address.name) / "blobs").glob(f"{file.sha256 or 'nothing'}*.incomplete"):
        path.unlink(missing_ok=True)


def client() -> Any:
    """Return the library's client."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint(), library_name=NAME, library_version=__version__)


def ranges_of(file: Address, size: int) -> ReadRange:
    """Return the function that reads ranges of a file of a commit."""
    from huggingface_hub import get_token

    url = f"{endpoint() or SITE}/{file.name}/resolve/{file.revision}/{quote(file.path)}"
    return ranges(Endpoint(file, url, get_token() or "", _advice(file)), size)


def is_installed() -> bool:
    """Return whether huggingface_hub is installed."""
    return find_spec("huggingface_hub") is not None


def endpoint() -> str | None:
    """Return the hub that the user names, which the library reads when it is imported only."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _bar(advance: Advance) -> Any:
    """Return a kind of bar for the library that draws nothing and passes on the bytes."""
    from tqdm.auto import tqdm

    def start(bar: Any, *_: Any, **options: Any) -> None:
        tqdm.__init__(bar, total=options.get("total"), initial=options.get("initial", 0), disable=True)

    def update(_: Any, n: float | None = 1) -> None:
        advance(int(n or 0))

    return type("ByteCounter", (tqdm,), {"__init__": start, "update": update})


FAILURES: Final[tuple[tuple[str, int, type[MergeError], str, str], ...]] = (
    # kind of error, status, ours, what is wrong, what to do or the status whose advice it is
    ("GatedRepoError", 0, InputError, "the model requires its terms to be accepted", "403"),
    ("RevisionNotFoundError", 0, InputError, "the repository has no such revision", "name a branch, tag or commit"),
    ("LocalEntryNotFoundError", 0, ResourceError, "the hub cannot be reached", NETWORK),
    ("EntryNotFoundError", 0, InputError, "the repository has no such file", "see its page for its files"),
    ("RepositoryNotFoundError", 0, InputError, NOWHERE, "404"),
    ("HFValidationError", 0, UsageError, "not a name of a model on the hub", "write owner/name"),
    ("", 401, InputError, NOWHERE, "404"),
    ("", 403, InputError, "the hub refuses access to this model", "403"),
    ("", 404, InputError, NOWHERE, "404"),
    ("", 429, ResourceError, "the hub limits requests", "log in (hf auth login), or run again later"),
)  # fmt: skip
"""Errors of huggingface_hub: the first row whose kind or status is that of the error counts."""


def failed(address: Address, e: Exception) -> MergeError:
    """Return the error for a failure of the library, by its kind: its texts hold URLs."""
    kinds = {kind.__name__ for kind in type(e).__mro__}
    status = getattr(getattr(e, "response", None), "status_code", 0)
    if isinstance(e, MergeError):
        return e
    if "LocalEntryNotFoundError" in kinds and isinstance(e.__cause__, Exception) and hasattr(e.__cause__, "response"):
        return failed(address, e.__cause__)  # the hub has answered, and the file is not in the cache
    if "OfflineModeIsEnabled" in kinds:
        return switched_off(address)
    for kind, number, error, what, fix in FAILURES:
        if kind in kinds or (status and number == status):
            return error(what, str(address), _advice(address)[int(fix)] if fix.isdigit() else fix)
    if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        return ResourceError(f"the download cannot be written: {e.strerror}", f"{address}: {hub_folder()}",
                             "remove files, or set HF_HOME to a folder on another disk")  # fmt: skip
    what = f"the hub answers with an error ({status})" if status else "the hub cannot be reached"
    return ResourceError(what, f"{address}: {type(e).__name__}", NETWORK)


def _advice(address: Address) -> dict[int, str]:
    page = f"{endpoint() or SITE}/{address.name}"
    return {
        401: f"log in with a token that may read it: hf auth login (or HF_TOKEN); the page is {page}",
        403: f"accept its terms on {page}, then log in: hf auth login",
        404: "check the path, or the name on the hub; if the model is private, log in: hf auth login",
    }
