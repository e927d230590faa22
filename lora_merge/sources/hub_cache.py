"""The cache of huggingface_hub on this disk, read without that library.

`models--owner--name/refs/REVISION` holds a commit, `snapshots/COMMIT/` the files, as links into `blobs`. Source:
huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from ..addresses import HUB, Address

COMMIT: Final = "[0-9a-f]{40}"


def hub_folder() -> Path:
    """Return the folder of the cache, by the variables of huggingface_hub."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(name):
            return Path(os.path.expandvars(folder)).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def repository_folder(name: str) -> Path:
    """Return the folder of a repository in the cache."""
    return hub_folder() / f"models--{name.replace('/', '--')}"


def commit_of(address: Address) -> str:
    """Return the commit that the cache has for a revision; "" if it has none."""
    revision = address.revision or "main"
    if re.fullmatch(COMMIT, revision):
        return revision
    try:
        text = (repository_folder(address.name) / "refs" / revision).read_text(encoding="ascii")[:64].strip()
    except (OSError, ValueError):
        return ""
    return text if re.fullmatch(COMMIT, text) else ""


def remember_commit(address: Address, commit: str) -> None:
    """Write the commit of a branch or tag into the cache, as huggingface_hub does."""
    revision = address.revision or "main"
    if not re.fullmatch(COMMIT, revision):
        file = repository_folder(address.name) / "refs" / revision
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit, encoding="ascii")


def stored_at(address: Address) -> Path | None:
    """Return the path of the file or folder that an address means in the cache; None if it is not there."""
    commit = commit_of(address)
    path = repository_folder(address.name) / "snapshots" / commit / address.path
    return path if commit and path.exists() else None


def address_in_cache(path: Path) -> Address | None:
    """Return the address of a file or folder in a cache of huggingface_hub, by its path; None for any other path."""
    pattern = rf".*/models--(?P<name>[^/]+--[^/]+)/snapshots/(?P<commit>{COMMIT})(?:/(?P<path>.+))?"
    match = re.fullmatch(pattern, path.as_posix())
    if match is None:
        return None
    return Address(HUB, match["name"].replace("--", "/", 1), match["commit"], match["path"] or "")
