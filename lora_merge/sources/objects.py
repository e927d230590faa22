"""Objects of S3, Google Cloud Storage and Azure, by obstore (extra `cloud`): read by ranges, or downloaded.

Credentials and endpoints are those of the providers' usual variables, files and roles; no option or address has any.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, Final

from ..addresses import Address
from ..disk.remote import ReadRange
from ..errors import InputError, MergeError, RemoteError, ResourceError, UsageError
from .contents import SourceFile, SourceFiles
from .store import StoredSource

INSTALL: Final = "pip install obstore"

FAILURES: Final[tuple[tuple[str, type[MergeError], str, str], ...]] = (
    ("NotFoundError", RemoteError, "the store has no such object", "check the address and the region"),
    ("FileNotFoundError", RemoteError, "the store has no such object", "check the address and the region"),
    ("PermissionDeniedError", RemoteError, "the store refuses access to the object", "see the rights of your role"),
    ("UnauthenticatedError", RemoteError, "the store wants credentials", "set the provider's variables, or log in"),
    ("PreconditionError", RemoteError, "the object was changed while it was read", "run again"),
)  # fmt: skip
"""Errors of obstore; all others are those of a store that cannot be reached."""


class Objects(StoredSource):
    """An object, or all objects below a prefix, of one bucket."""

    streams = True  # near an object store, to read it is as fast as a disk

    def contents(self, address: Address) -> SourceFiles:
        """Return the object, pinned by its version where the bucket keeps versions; or the objects of a folder."""
        if find_spec("obstore") is None:
            what = "models of object stores need obstore"
            raise UsageError(what, str(address), f"download it first: {address.download()}; or {INSTALL}")
        bucket, key = _parts(address)
        try:
            meta = _head(store_of(address), key, address.revision)
        except Exception as e:  # noqa: BLE001  # the library's errors have no common base
            error = failed(address, e)
            if not isinstance(error, InputError) or address.revision:
                raise error from None
            return self._folder(address, error)
        version = address.revision or str(meta.get("version") or "")
        pinned = Address(address.scheme, f"{bucket}/{key}", "" if version == "null" else version)
        name = PurePosixPath(key).name
        return SourceFiles(pinned, PurePosixPath(key).stem, {name: _listed(meta)})

    def _folder(self, address: Address, missing: MergeError) -> SourceFiles:
        """Return the objects below a prefix; their ETags distinguish two states of the folder."""
        import obstore

        prefix = f"{_parts(address)[1].rstrip('/')}/"
        try:
            rows = [row for rows in obstore.list(store_of(address), prefix) for row in rows]
        except Exception:  # noqa: BLE001  # a role that may not list: the answer for the object itself counts
            raise missing from None
        files = {str(row["path"]).removeprefix(prefix): _listed(row) for row in rows}
        if not files:
            raise missing from None
        return SourceFiles(
            Address(address.scheme, address.name.rstrip("/")), PurePosixPath(prefix).name, files, folder=True
        )

    def reader(self, contents: SourceFiles, name: str) -> ReadRange:
        """Return the function that reads ranges of an object, of the version or the ETag that it had at first."""
        import obstore

        address, file = contents.address, contents.files[name]
        store, key = store_of(address), _key(contents, name)

        def read(offset: int, count: int) -> bytes | memoryview:
            if not count:
                return b""
            state = ("version", address.revision) if address.revision else ("if_match", file.etag)
            stated: Any = {"range": (offset, offset + count), **({state[0]: state[1]} if state[1] else {})}
            try:
                raw = memoryview(obstore.get(store, key, options=stated).bytes())
            except Exception as e:  # noqa: BLE001
                raise failed(address, e) from None
            if len(raw) != count:
                raise RemoteError("the object was changed while it was read", str(address), "run again")
            return raw

        return read

    def state(self, contents: SourceFiles) -> str:
        """Return sizes and ETags of what has no version."""
        return "" if contents.address.revision else " ".join(f"{f.size}{f.etag}" for f in contents.files.values())


def _parts(address: Address) -> tuple[str, str]:
    bucket, _, key = address.name.partition("/")
    return bucket, key


def _key(contents: SourceFiles, name: str) -> str:
    key = _parts(contents.address)[1]
    return f"{key}/{name}" if contents.folder else key


def _listed(meta: Any) -> SourceFile:
    return SourceFile(int(meta["size"]), "", str(meta.get("e_tag") or ""))


def store_of(address: Address) -> Any:
    """Return the bucket of an address; UsageError without what its provider needs."""
    from obstore.store import AzureStore, GCSStore, S3Store

    bucket = _parts(address)[0]
    try:
        if address.scheme == "s3":
            return S3Store(bucket)
        return GCSStore(bucket) if address.scheme == "gs" else AzureStore(container_name=bucket)
    except Exception as e:
        raise UsageError("the variables of the provider are not complete", f"{address}: {type(e).__name__}",
                         "give those of your account: AWS_…, GOOGLE_…, AZURE_…") from e  # fmt: skip


def _head(store: Any, key: str, version: str) -> Any:
    import obstore

    return obstore.get(store, key, options={"head": True, **({"version": version} if version else {})}).meta


STATUS_KINDS: Final = {"401": "UnauthenticatedError", "403": "PermissionDeniedError", "404": "NotFoundError"}
"""Status of an answer to a listing → the error of obstore for the same answer about an object."""


def kinds_of(e: Exception) -> set[str]:
    """Return the names of the kinds of an error of obstore, which has the status of a listing in its text alone."""
    status = re.search(r"status code: (\d+)", str(e))
    kind = STATUS_KINDS.get(status[1]) if status else None
    return {kind.__name__ for kind in type(e).__mro__} | ({kind} if kind else set())


def failed(address: Address, e: Exception) -> MergeError:
    """Return the error for a failure of obstore, whose texts hold URLs."""
    if isinstance(e, MergeError):
        return e
    kinds = kinds_of(e)
    for kind, error, what, fix in FAILURES:
        if kind in kinds:
            return error(what, str(address), fix)
    return ResourceError("the store cannot be reached, or refuses the request", f"{address}: {type(e).__name__}",
                         "check the network, the endpoint, the region and the credentials")  # fmt: skip
