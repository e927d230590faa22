"""Files of other file systems (sftp, ssh, webdav, abfs), by fsspec if it is installed: read by ranges, or downloaded.

Logins, such as keys of ssh, are read by fsspec's implementation of a scheme.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any, Final

from ..addresses import Address
from ..disk.remote import ReadRange
from ..errors import MergeError, RemoteError, ResourceError, UsageError
from .contents import SourceFile, SourceFiles
from .store import StoredSource

INSTALL: Final = "pip install fsspec"
CHANGES: Final = ("ETag", "etag", "mtime", "last_modified", "LastModified")
"""Facts of a file that change with its bytes, by their names in implementations of fsspec."""


class OtherSystem(StoredSource):
    """A file, or all files below a folder."""

    streams = True

    def contents(self, address: Address) -> SourceFiles:
        """Return the file or the files of a folder, with what shows a change of them."""
        system, path = _system(address)
        try:
            facts = system.info(path)
            if facts.get("type") != "directory":
                name = PurePosixPath(path).name
                return SourceFiles(address, PurePosixPath(path).stem, {name: _listed(facts)})
            rows = system.find(path, detail=True)
        except Exception as e:  # noqa: BLE001  # each implementation has errors of its own
            raise _failed(address, e) from None
        files = {str(PurePosixPath(file).relative_to(path)): _listed(facts) for file, facts in rows.items()}
        return SourceFiles(address, PurePosixPath(path).name, files, folder=True)

    def reader(self, contents: SourceFiles, name: str) -> ReadRange:
        """Return the function that reads ranges of a file."""
        address = contents.address
        system, path = _system(address)
        path = f"{path.rstrip('/')}/{name}" if contents.folder else path

        def read(offset: int, count: int) -> bytes:
            try:
                raw = bytes(system.cat_file(path, start=offset, end=offset + count)) if count else b""
            except Exception as e:  # noqa: BLE001
                raise _failed(address, e) from None
            if len(raw) != count:
                raise RemoteError("the file was changed while it was read", str(address), "run again")
            return raw

        return read

    def state(self, contents: SourceFiles) -> str:
        """Return sizes and what shows a change."""
        return " ".join(f"{file.size}{file.etag}" for file in contents.files.values())


def _system(address: Address) -> tuple[Any, str]:
    """Return the file system of an address, and the path there."""
    if find_spec("fsspec") is None:
        what = f"models at {address.scheme}:// need fsspec"
        raise UsageError(what, str(address), f"{INSTALL}; or copy it to this machine first")
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(address.name)
    except ImportError as e:  # of the library that the scheme needs, which the text names
        raise UsageError(
            f"fsspec cannot open {address.scheme}://: {e}", str(address), "get the library that it names"
        ) from None
    except Exception as e:  # noqa: BLE001
        raise _failed(address, e) from None
    return system, str(path)


def _listed(facts: Any) -> SourceFile:
    return SourceFile(int(facts["size"]), "", next((str(facts[name]) for name in CHANGES if facts.get(name)), ""))


def _failed(address: Address, e: Exception) -> MergeError:
    """Return the error for a failure, whose text may hold secrets."""
    if isinstance(e, MergeError):
        return e
    if isinstance(e, FileNotFoundError):
        return RemoteError("the remote machine has no such file", str(address), "check the address")
    if isinstance(e, PermissionError):
        return RemoteError("the remote machine refuses access to the file", str(address), "check the rights there")
    return ResourceError("the remote machine cannot be reached", f"{address}: {type(e).__name__}",
                         "check the network, the address and the login")  # fmt: skip
