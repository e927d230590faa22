"""Hashes by which model sites and user interfaces find a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..disk.files import open_regular
from ..disk.remote import remote
from ..files.checkpoint import Index
from ..files.safetensors import LEGACY_HASH

HASH_ENTRIES: Final = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
"""Metadata entries with a hash. `sshs_legacy_hash` covers the header as the trainer wrote it at first, so that it
cannot be computed again from the file."""

TITLES: Final = {"sha256": "SHA-256", "auto_v1": "AutoV1", "auto_v2": "AutoV2", "auto_v3": "AutoV3"}
"""Hash → its name on model sites."""

READ_BYTES: Final = 1 << 22  # bytes of a file, or of each of two files, that are read at once
QUICKLY_HASHED: Final = 256 << 20  # bytes; such a file is hashed in a fraction of a second


def hashes(path: Path, data_offset: int) -> dict[str, str]:
    """Return the hashes of a `.safetensors` file, in hexadecimal digits; the whole file is read.

    `sha256`: of all bytes; `auto_v2` are its first 10 digits (AUTOMATIC1111's short hash). `sshs_model_hash`: SHA-256
    of the bytes behind the header, which stays the same when metadata is edited; `auto_v3` are its first 12 digits.
    `auto_v1`: the first 8 digits for 64 KiB from 1 MiB on, where a file is that long. Source: addnet_hash_legacy and
    addnet_hash_safetensors in sd-scripts, library/train_util.py; the names AutoV1 to AutoV3 are those of CivitAI's API.
    """
    whole, data, old = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    at, (first, count) = 0, LEGACY_HASH
    with open_regular(path) as f:
        while part := f.read(READ_BYTES):
            whole.update(part)
            data.update(part[max(0, data_offset - at) :])
            old.update(part[max(0, first - at) : max(0, first + count - at)])
            at += len(part)
    of_all, of_data = whole.hexdigest(), data.hexdigest()
    return {
        "sha256": of_all, **({"auto_v1": old.hexdigest()[:8]} if at > first else {}), "auto_v2": of_all[:10],
        "auto_v3": of_data[:12], "sshs_model_hash": of_data,
    }  # fmt: skip


def hashes_of(index: Index, *, always: bool) -> Mapping[str, str]:
    """Return the hashes of a checkpoint in one `.safetensors` file; empty for others, and for large files unless
    `always`."""
    (file,) = index.files if len(index.files) == 1 else (None,)
    if file is None or file.suffix != ".safetensors":
        return {}
    if (far := remote(file)) is not None and not always:  # only its header is read
        return {"sha256": far.sha256, "auto_v2": far.sha256[:10]} if far.sha256 else {}
    header = index.headers[file]
    return hashes(file, header.data_offset) if always or header.state.size <= QUICKLY_HASHED else {}


def hash_title(name: str) -> str:
    """Return the name of a hash on model sites."""
    return TITLES.get(name, name)


def stored_hashes(index: Index) -> dict[str, str]:
    """Return the hashes that the metadata states."""
    return {key: index.metadata[key] for key in HASH_ENTRIES if key in index.metadata}
