"""Files of Civitai, by its API: versions, AIRs, pages and hashes.

The token goes to the API alone; the store that it redirects to refuses requests with one. HEAD is not used, as the
servers mishandle tokens in it. The SHA-256 that the API states is checked. Sources: developer.civitai.com/docs/api and
github.com/civitai/civitai (AIR).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..addresses import CIVITAI, HASH, Address
from ..errors import InputError, UsageError
from ..text import listed
from ..text import size as spoken_size
from .contents import SourceFile, SourceFiles
from .store import stored_file
from .web import Endpoint, WebSource, facts_of, json_at

TOKENS: Final = ("CIVITAI_API_TOKEN", "CIVITAI_TOKEN", "CIVITAI_API_KEY")
SITE: Final = "https://civitai.com"
WEIGHTS: Final = ("Model", "Pruned Model")
"""Types of files of a version that hold the weights; others are a VAE, a configuration, training data."""


def site() -> str:
    """Return the host of the API; another one for tests and mirrors."""
    return os.environ.get("CIVITAI_ENDPOINT", SITE).rstrip("/")


class Civitai(WebSource):
    """Civitai, or what this machine has of it."""

    def local(self, address: Address) -> Path | None:
        """Return the path of a file that is pinned, or named by its hash, if it is in the store."""
        if address.scheme != HASH:
            return super().local(address)
        for folder, _, files in self.store.folders():
            for name, facts in files.items():
                if facts.get("sha256") == address.name:
                    return stored_file(folder, name, facts.get("size", -1))
        return None

    def contents(self, address: Address) -> SourceFiles:
        """Return the file of a version that holds the weights; UsageError if there are several and none is chosen."""
        version = self._version(address)
        files = [f for f in version.get("files", []) if isinstance(f, dict) and str(f.get("id", "")).isdigit()]
        number, model = str(version.get("id", "")), str(version.get("modelId", "") or address.model)
        file = _chosen(address, number, files)
        name = Path(str(file.get("name", "")).replace("\\", "/")).name or f"{number}.safetensors"
        kind = address.kind or _kind(version)
        pinned = Address(CIVITAI, number, model=model, file=str(file["id"]), kind=kind)
        size, etag, _ = facts_of(_download(pinned))
        digest = str((file.get("hashes") or {}).get("SHA256") or "").lower()
        if address.scheme == HASH and digest != address.name:
            raise InputError("Civitai has no file with this SHA-256", str(address), "check the hash")
        return SourceFiles(pinned, Path(name).stem, {name: SourceFile(size, digest, etag)})

    def _version(self, address: Address) -> Mapping[str, Any]:
        if address.scheme == HASH:
            path = f"model-versions/by-hash/{address.name}"
        elif address.name:
            path = f"model-versions/{address.name}"
        else:  # the newest version of a model
            model = self._json(address, f"models/{address.model}")
            versions = model.get("modelVersions")
            if not isinstance(versions, list) or not versions or not isinstance(versions[0], dict):
                raise InputError("the model has no version that can be downloaded", str(address), "see its page")
            return {"modelId": address.model, **versions[0], "model": {"type": model.get("type")}}
        return self._json(address, path)

    def _json(self, address: Address, path: str) -> Mapping[str, Any]:
        value = json_at(Endpoint(address, f"{site()}/api/v1/{path}", _token(), ADVICE))
        if not isinstance(value, dict):
            raise InputError("Civitai's answer has another form than its API states", str(address), "run again later")
        return value

    def endpoint(self, contents: SourceFiles, name: str) -> Endpoint:
        """Return the URL of the file."""
        return _download(contents.address)


def _download(address: Address) -> Endpoint:
    url = f"{site()}/api/download/models/{address.name}?fileId={address.file}"
    return Endpoint(address, url, _token(), ADVICE)


def _token() -> str:
    return next((token for name in TOKENS if (token := os.environ.get(name, "").strip())), "")


def _chosen(address: Address, number: str, files: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the file that an address means; UsageError if it does not say which."""
    if address.file:
        chosen = [f for f in files if str(f["id"]) == address.file]
        if not chosen:
            raise InputError(f"the version has no file {address.file}", str(address), _choice(number, files))
        return chosen[0]
    if address.scheme == HASH:
        for f in files:
            if str((f.get("hashes") or {}).get("SHA256") or "").lower() == address.name:
                return f
    weights = [f for f in files if f.get("type", "Model") in WEIGHTS and not str(f.get("name", "")).endswith(".zip")]
    safe = [f for f in weights if str(f.get("name", "")).endswith((".safetensors", ".gguf"))] or weights
    if len(safe) != 1:
        what = "the version has several files of weights" if safe else "the version has no file of weights"
        error = UsageError if safe else InputError
        raise error(what, str(address), _choice(number, safe or files))
    return safe[0]


def _choice(number: str, files: list[dict[str, Any]]) -> str:
    """Return how to name each file of a version."""
    names = []
    for f in files:
        facts = f.get("metadata") or {}
        words = [str(facts[key]) for key in ("fp", "size", "format") if facts.get(key)]
        kilobytes = f.get("sizeKB")
        words += [spoken_size(int(kilobytes * 1024))] if isinstance(kilobytes, int | float) else []
        names.append(f"civitai:{number}#{f['id']} ({', '.join([str(f.get('name', '')), *words])})")
    return f"name one: {listed(names, 12)}" if names else "see its page on civitai.com"


def _kind(version: Mapping[str, Any]) -> str:
    """Return the words of an AIR before the source, if the API states the whole AIR."""
    match = re.match(r"urn:air:([\w.-]+:[\w.-]+):civitai:", str(version.get("air", "")))
    return match[1] if match else ""


ADVICE: Final[Mapping[int, str]] = {
    401: "set CIVITAI_API_TOKEN to a token of your account (civitai.com/user/account); files in early access have "
    "to be bought first",
    403: "its page on civitai.com says who may download it",
    404: "check the number: that of a version is the modelVersionId in the address of its page",
}
