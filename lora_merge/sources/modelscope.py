"""Repositories of ModelScope, by the file API that its own library uses.

If that library (modelscope) is installed, its login counts, and it downloads the files; headers are read by ranges of
our own client in either case.

A file is pinned by the commit that changed it last, a folder by the revision that the user names and by the hashes in
the recipe: the API states no commit of a branch. Source: github.com/modelscope/modelscope, hub/api.py and
hub/file_download.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import quote, urlencode

from ..addresses import MODELSCOPE, Address
from ..disk.hashes import hash_file
from ..errors import InputError
from .contents import Advance, SourceFile, SourceFiles, is_offline
from .web import Endpoint, WebSource, json_at, refused, unreachable

SITE: Final = "https://www.modelscope.cn"
BRANCH: Final = "master"
HEX: Final = "[0-9a-f]{40}"


def site() -> str:
    """Return the host of the API; another one for tests and mirrors."""
    return os.environ.get("MODELSCOPE_ENDPOINT", SITE).rstrip("/")


class ModelScope(WebSource):
    """ModelScope, or what this machine has of it."""

    def local(self, address: Address) -> Path | None:
        """Return the path of a file that is pinned, or of anything without requests, also from the cache of the library
        of ModelScope."""
        path = super().local(address) if address.path or is_offline() else None
        return path or (_cached(address) if is_offline() else None)

    def contents(self, address: Address) -> SourceFiles:
        """Return the files of a repository at a revision."""
        revision = address.revision or BRANCH
        query = urlencode({"Revision": revision, "Recursive": "true"})
        answer = json_at(_endpoint(address, f"repo/files?{query}"))
        data = answer.get("Data") if isinstance(answer, dict) else None
        listed = data.get("Files") if isinstance(data, dict) else None
        if not isinstance(listed, list):
            raise InputError(
                "ModelScope's answer has another form than its API states", str(address), "run again later"
            )
        rows = [row for row in listed if isinstance(row, dict) and row.get("Type") != "tree"]
        files = {
            str(row.get("Path")): SourceFile(int(row.get("Size") or 0), str(row.get("Sha256") or "")) for row in rows
        }
        commit = next((str(row.get("Revision", "")) for row in rows if row.get("Path") == address.path), "")
        pin = commit if re.fullmatch(HEX, commit) else revision
        pinned = Address(MODELSCOPE, address.name, pin, address.path)
        return SourceFiles(pinned, address.name.partition("/")[2], files, revision, folder=True)

    def endpoint(self, contents: SourceFiles, name: str) -> Endpoint:
        """Return the URL of a file."""
        query = urlencode({"Revision": contents.address.revision, "FilePath": name})
        return _endpoint(contents.address, f"repo?{query}")

    def state(self, contents: SourceFiles) -> str:
        """Return hashes and sizes: the API states no commit of a branch."""
        return " ".join(f"{name}:{f.sha256}{f.size}" for name, f in sorted(contents.files.items()))

    def download(self, contents: SourceFiles, name: str, target: Path, advance: Advance) -> str:
        """Download a file to a path, by the library of ModelScope if it is installed; return its SHA-256.

        InputError for other bytes than are stated.
        """
        if find_spec("modelscope") is None:
            return super().download(contents, name, target, advance)
        from modelscope.hub.file_download import model_file_download

        address, file = contents.address, contents.files[name]
        with TemporaryDirectory(dir=self.folder(contents).parent) as part:
            try:
                with redirect_stderr(StringIO()):
                    path = Path(
                        model_file_download(address.name, name, address.revision, local_dir=part, endpoint=site())
                    )
            except Exception as e:  # noqa: BLE001  # its errors are those of its HTTP client, whose texts hold URLs
                status = getattr(getattr(e, "response", None), "status_code", 0)
                place = self.endpoint(contents, name)
                raise (refused(place, status) if status else unreachable(address, OSError(type(e).__name__))) from None
            digest = hash_file(path)
            if path.stat().st_size != file.size or (file.sha256 and digest != file.sha256.lower()):
                raise InputError(
                    "the downloaded file has other bytes than ModelScope states", str(address), "run again"
                )
            path.replace(target)
        advance(file.size)
        return digest


def _cached(address: Address) -> Path | None:
    """Return the path of a file or folder in the cache of the library, which has one state of each repository and does
    not say which: none for a revision other than the usual one."""
    root = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub").expanduser()
    owner, _, name = address.name.partition("/")
    path = root / "models" / owner / name.replace(".", "___") / address.path
    return path if address.revision in ("", BRANCH) and path.exists() else None


def _endpoint(address: Address, path: str) -> Endpoint:
    url = f"{site()}/api/v1/models/{quote(address.name)}/{path}"
    return Endpoint(address, url, _token(), ADVICE)


def _token() -> str:
    """Return the token of the environment, or else of the library's login."""
    token = os.environ.get("MODELSCOPE_API_TOKEN", "").strip()
    if token or find_spec("modelscope") is None:
        return token
    from modelscope.hub.api import ModelScopeConfig

    return str(ModelScopeConfig.get_token() or "")


ADVICE: Final[Mapping[int, str]] = {
    401: "set MODELSCOPE_API_TOKEN to a token of your account",
    403: "its page on modelscope.cn says who may download it; set MODELSCOPE_API_TOKEN",
    404: "check the name; if the model is private, set MODELSCOPE_API_TOKEN",
}
