"""Uploads to S3, Google Cloud Storage and Azure, by obstore.

All files of an output are uploaded in parts, and get their names together at the end: weights first, indexes last. So
a half-written model is never visible. An upload that fails leaves neither parts nor objects; the error names what may
be left where the store is out of reach by then.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..addresses import Address
from ..disk.destination import appeared
from ..errors import MergeError, OutputExists, UsageError, VerificationFailed
from ..process import begin_commit, deliver_pending
from ..progress import Progress, Step
from ..text import Note, listed, plural
from .inputs import forget
from .objects import INSTALL, kinds_of, store_of
from .objects import failed as failed_read
from .sent_files import (
    FileSource,
    GrowingFile,
    Sending,
    address_of,
    compare,
    differs,
    files_of,
    refuse_input,
)

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

    def __init__(self, address: Address, key: str, file: GrowingFile) -> None:
        import obstore

        self.key, self.file = key, file
        self._where = replace(address, name=f"{address.name.partition('/')[0]}/{key}")
        self._store = store_of(address)
        self._part = max(PART, -(-file.size // MOST_PARTS))
        self._writer = obstore.open_writer(self._store, key, buffer_size=self._part)
        self._digests = b""  # the MD5 of each part
        self._asked = self._named = False

    def write(self) -> Iterator[int]:
        """Upload the bytes as they become final; yield their number as they go."""
        digest, left = _md5(), self._part
        for data in self.file.pieces():
            self._writer.write(data)
            view = memoryview(data)
            while len(view) >= left:
                digest.update(view[:left])
                self._digests += digest.digest()
                view, left, digest = view[left:], self._part, _md5()
            digest.update(view)
            left -= len(view)
            yield len(data)
        if left != self._part or not self._digests:
            self._digests += digest.digest()

    def complete(self) -> None:
        """Give the object its name. An error is none if the object is there: the reply alone was lost."""
        self._asked = True
        try:
            self._writer.close()
        except Exception:
            if not self._is_there():
                raise
        self._named = True

    def _is_there(self) -> bool:
        try:
            self.prove()
        except (FileNotFoundError, VerificationFailed):
            return False
        return True

    def prove(self) -> bool:
        """Compare the object with its local copy; VerificationFailed if they differ.

        Returns whether the MD5 of all bytes is compared, and not only samples.
        """
        import obstore

        meta = obstore.head(self._store, self.key)
        etag = str(meta.get("e_tag") or "").strip('"')
        if int(meta["size"]) != self.file.size:
            raise differs(self._where, "its size")
        proven = etag in self.etags
        hashes = self._where.scheme == "s3" and re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) is not None

        def read(offset: int, count: int) -> bytes:
            return bytes(obstore.get_range(self._store, self.key, start=offset, length=count)) if count else b""

        compare(read, self.file.source, self._where, whole=hashes and not proven)
        return proven

    def remove(self) -> bool:
        """Remove the object, or the parts of one without a name. Another object that has the name stays.

        Returns False if parts may be left: the library forgets those of an object that could not get its name.
        """
        import obstore

        if self._named or (self._asked and self._is_there()):
            obstore.delete(self._store, self.key)
        elif not self._asked:
            self._writer.__exit__(InterruptedError, InterruptedError(), None)
        else:
            return self.file.size <= self._part
        return True

    @property
    def etags(self) -> tuple[str, str]:
        """What S3 states of these bytes: their MD5 if they are one part, or the MD5 of the MD5 of all parts with the
        number of these."""
        joined = hashlib.md5(self._digests, usedforsecurity=False).hexdigest()
        return self._digests.hex(), f"{joined}-{len(self._digests) // 16}"


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


class ObjectUpload:
    """The upload of an object, or of a folder of them."""

    def __init__(self, copy: Path, target: Path, *, overwrite: bool, progress: Progress) -> None:
        self.address = address_of(target)
        self._copy, self._overwrite, self._progress = copy, overwrite, progress
        self._key = self.address.name.partition("/")[2]
        self._sending = Sending(self._send)
        self._remains: list[str] = []

    def ready(self, name: str, size: int, end: int) -> None:
        """Send a file up to a byte."""
        self._sending.ready(self._key_of(name), self._copy / name, size, end)

    def _key_of(self, name: str) -> str:
        return f"{self._key}/{name}".strip("/") if name else self._key

    def _send(self, key: str, file: GrowingFile) -> ObjectWriter:
        try:
            upload = ObjectWriter(self.address, key, file)
        except Exception as e:  # noqa: BLE001  # the library's errors have no common base
            raise failed(self.address, e) from None
        try:
            for count in upload.write():
                self._sending.count(count)
        except BaseException as e:
            self._remove(upload)
            if isinstance(e, Exception):
                raise failed(self.address, e) from None
            raise
        return upload

    def finish(self, card: bytes | None) -> Sequence[Note]:
        """Send the rest, name all objects together, and compare them with the local copy."""
        # Step 1: all bytes, in parts.
        files: dict[str, FileSource] = {self._key_of(name): path for name, path in files_of(self._copy)}
        if card is not None:
            files[str(PurePosixPath(self._key).with_suffix(".md"))] = card
        uploads = self._sending.finish(files, self.address, self._progress)
        try:
            # Step 2: the names, together.
            if not self._overwrite and _names_at(self.address, folder=self._copy.is_dir()):
                raise appeared(str(self.address))
            begin_commit()
            for upload in uploads:
                upload.complete()
            # Step 3: what is there now.
            deliver_pending()
            self._progress(Step("prove", str(self.address)))
            hashed = [upload.prove() for upload in uploads]
            begin_commit()
        except Exception as e:  # noqa: BLE001
            raise failed(self.address, e) from None
        forget(self.address)
        how = "sizes, headers and samples there are those of the local copy"
        if all(hashed):
            how += ", and the MD5 of all bytes is that of what was sent"
        return [Note(f"uploaded to {self.address}: {how}")]

    def stop(self) -> Sequence[str]:
        """End the upload, and remove what was uploaded; return the names of what may be left."""
        for upload in self._sending.stop():
            self._remove(upload)
        return self._remains

    def _remove(self, upload: ObjectWriter) -> None:
        with suppress(Exception):  # the store is out of reach: the error that led here counts
            if upload.remove():
                return
        self._remains.append(upload.key)


class ObjectSink:
    """A bucket that takes an object, or a folder of them."""

    def card_of(self, _: Path) -> None:
        """Return None: an object has no card unless a job asks for one."""

    def check(self, target: Path, inputs: Sequence[Path], *, overwrite: bool, contents: Sequence[str] | None) -> bool:
        """Return whether there is something that is replaced; MergeError if it may not be, or if that cannot be found
        out."""
        address = address_of(target)
        if find_spec("obstore") is None:
            raise UsageError("outputs to object stores need obstore", str(address), INSTALL)
        refuse_input(address, inputs)
        names = _names_at(address, folder=contents is not None)
        if names and not overwrite:
            raise OutputExists("the output exists", str(address), "choose another -o, or give `--overwrite`")
        if contents is not None and (lost := sorted({*names} - {*contents})):
            raise UsageError(f"the output folder holds {plural(len(lost), 'file')} that the merged model does not have",
                             f"{address}: {listed(lost)}", "choose another -o, or move them away")  # fmt: skip
        return bool(names)

    def begin(self, copy: Path, target: Path, *, overwrite: bool, progress: Progress) -> ObjectUpload:
        """Return the upload of a local copy."""
        return ObjectUpload(copy, target, overwrite=overwrite, progress=progress)


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
