"""Uploads to S3, Google Cloud Storage and Azure, by obstore.

All files of an output are uploaded in parts, and get their names together at the end: weights first, indexes last. So
a half-written model is never visible. An upload that fails leaves neither parts nor objects, but one whose completion
the store has confirmed in a reply that was lost.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final

from ..addresses import Address
from ..errors import MergeError, UsageError
from ..process import begin_commit, deliver_pending
from ..progress import Progress, Step, counted
from ..text import Note, listed, plural
from .inputs import forget
from .objects import INSTALL, kinds_of, store_of
from .objects import failed as failed_read
from .sent_files import Source, address_of, compare, differs, files_of, pieces, refuse_input, size_of

PART: Final = 8 << 20  # bytes of a part, of which stores take 10 000
MOST_PARTS: Final = 9_000

RIGHTS: Final = "PutObject, GetObject, ListBucket, DeleteObject and AbortMultipartUpload"

FAILURES: Final[tuple[tuple[str, str, str], ...]] = (
    ("PermissionDeniedError", "the store refuses write access", f"the role needs the rights {RIGHTS}"),
    ("UnauthenticatedError", "the store wants credentials", "set the variables of the provider, or log in"),
    ("NotFoundError", "there is no such bucket", "create it, or check the address and the region"),
    ("FileNotFoundError", "there is no such bucket", "create it, or check the address and the region"),
)  # fmt: skip
"""Errors of obstore on writing; all others are those of reading."""


def failed(address: Address, e: Exception) -> MergeError:
    """Return the error for a failure of obstore on writing."""
    kinds = kinds_of(e) if not isinstance(e, MergeError) else set()
    for kind, what, fix in FAILURES:
        if kind in kinds:
            return UsageError(what, str(address), fix)
    return failed_read(address, e)


class ObjectWriter:
    """One object that is written in parts, and gets its name when it is complete."""

    def __init__(self, store: Any, key: str, source: Source) -> None:
        import obstore

        self.key, self.source, self.size = key, source, size_of(source)
        self._part = max(PART, -(-self.size // MOST_PARTS))
        self._writer = obstore.open_writer(store, key, buffer_size=self._part)
        self._whole, self._parts = _md5(), b""

    def write(self) -> Iterator[int]:
        """Upload the bytes; yield their number as they go."""
        digest, left = _md5(), self._part
        for data in pieces(self.source):
            self._writer.write(data)
            self._whole.update(data)
            view = memoryview(data)
            while len(view) >= left:
                digest.update(view[:left])
                self._parts += digest.digest()
                view, left, digest = view[left:], self._part, _md5()
            digest.update(view)
            left -= len(view)
            yield len(data)
        if left != self._part:
            self._parts += digest.digest()

    def complete(self) -> None:
        """Give the object its name."""
        self._writer.close()

    def abort(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        """After an exception remove the parts of an object that is not complete."""
        if e is not None and not self._writer.closed():
            with suppress(Exception):  # the store is out of reach: the error that led here counts
                self._writer.__exit__(kind, e, tb)

    @property
    def etags(self) -> tuple[str, str]:
        """What S3 states of these bytes: their MD5, or the MD5 of the MD5 of all parts with the number of these."""
        joined = hashlib.md5(self._parts, usedforsecurity=False).hexdigest()
        return self._whole.hexdigest(), f"{joined}-{len(self._parts) // 16}"


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


class ObjectSink:
    """A bucket that takes an object, or a folder of them."""

    def card_of(self, _: Path) -> None:
        """Return None: an object has no card unless a job asks for one."""

    def check(self, target: Path, inputs: Sequence[Path], *, overwrite: bool, contents: Sequence[str] | None) -> None:
        """Raise MergeError if there is something that may not be replaced, or if that cannot be found out."""
        address = address_of(target)
        if find_spec("obstore") is None:
            raise UsageError("outputs to object stores need obstore", str(address), INSTALL)
        refuse_input(address, inputs)
        names = _names_at(address, folder=contents is not None)
        if names and not overwrite:
            raise UsageError("the output exists", str(address), "choose another -o, or give --overwrite")
        if contents is not None and (lost := sorted({*names} - {*contents})):
            raise UsageError(f"the output folder holds {plural(len(lost), 'file')} that the merged model does not have",
                             f"{address}: {listed(lost)}", "choose another -o, or move them away")  # fmt: skip

    def send(
        self, copy: Path, target: Path, card: bytes | None, *, overwrite: bool, progress: Progress
    ) -> Sequence[Note]:  # fmt: skip
        """Upload a file or a folder, and compare it with the local copy. After a failure no object is left."""
        import obstore

        address = address_of(target)
        store = store_of(address)
        key = address.name.partition("/")[2]
        files: list[tuple[str, Source]] = [(f"{key}/{n}".strip("/") if n else key, p) for n, p in files_of(copy)]
        if card is not None:
            files.append((str(PurePosixPath(key).with_suffix(".md")), card))
        advance = counted(progress, "upload", str(address), sum(size_of(source) for _, source in files))
        done: list[ObjectWriter] = []
        try:
            with ExitStack() as unfinished:
                # Step 1: all bytes, in parts.
                uploads = []
                for name, source in files:
                    uploads.append(upload := ObjectWriter(store, name, source))
                    unfinished.push(upload.abort)
                    for count in upload.write():
                        advance(count)
                # Step 2: the names, together.
                if not overwrite and _names_at(address, folder=copy.is_dir()):
                    raise UsageError("another program created the output during the run", str(address),
                                     "choose another -o, or wait for the other run")  # fmt: skip
                begin_commit()
                for upload in uploads:
                    upload.complete()
                    done.append(upload)
            # Step 3: what is there now.
            deliver_pending()
            progress(Step("prove", str(address)))
            hashed = [_prove(store, upload, address) for upload in uploads]
            begin_commit()
        except BaseException as e:
            for upload in done:
                with suppress(Exception):  # the store is out of reach: the error that led here counts
                    obstore.delete(store, upload.key)
            if isinstance(e, Exception):
                raise failed(address, e) from None
            raise
        forget(address)
        how = "the MD5 of all bytes there is that" if all(hashed) else "sizes, headers and samples there are those"
        return [Note(f"uploaded to {address}: {how} of the local copy")]


def _names_at(address: Address, *, folder: bool) -> list[str]:
    """Return the names of the objects of a folder, or [""] for an object that is there; [] if nothing is."""
    import obstore

    store, key = store_of(address), address.name.partition("/")[2]
    prefix = f"{key}/" if key else ""
    try:
        if folder:
            return [str(row["path"]).removeprefix(prefix) for rows in obstore.list(store, prefix) for row in rows]
        try:
            obstore.head(store, key)
        except FileNotFoundError:
            next(iter(obstore.list(store, key, chunk_size=1)), None)  # fails without such a bucket
            return []
    except Exception as e:  # noqa: BLE001  # the library's errors have no common base
        raise failed(address, e) from None
    return [""]


def _prove(store: Any, upload: ObjectWriter, address: Address) -> bool:
    """Compare an object with its local copy; return whether the MD5 of all bytes is compared, and not only samples."""
    import obstore

    meta = obstore.head(store, upload.key)
    bucket = address.name.partition("/")[0]
    etag, where = str(meta.get("e_tag") or "").strip('"'), replace(address, name=f"{bucket}/{upload.key}")
    if int(meta["size"]) != upload.size:
        raise differs(where, "its size")
    proven = etag in upload.etags
    hashes = address.scheme == "s3" and re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) is not None

    def read(offset: int, count: int) -> bytes:
        return bytes(obstore.get_range(store, upload.key, start=offset, length=count)) if count else b""

    compare(read, upload.source, where, whole=hashes and not proven)
    return proven
