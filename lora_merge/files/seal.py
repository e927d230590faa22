"""A digest of a header inside that header: it shows later whether the header was changed.

The metadata entry `lora_merge.header_sha256` holds the SHA-256 of all bytes of the file before the tensors' data, with
64 zeros in place of the digest itself. So it covers all names, dtypes, shapes and offsets, all other metadata entries,
their order, and the spaces between them. It is not a signature: anyone who edits the header can compute a new digest.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from ..disk.files import Header, open_regular

SEAL: Final = "lora_merge.header_sha256"
ZEROS: Final = "0" * 64

_START: Final = f'"{SEAL}":"'.encode()
"""The start of the entry. These bytes occur nowhere else: JSON escapes quotes in texts, and after the name of a tensor
stands a brace."""


def sealed(header: bytes) -> bytes:
    """Return the header with the digest in place of the zeros in its entry."""
    at = header.index(_START) + len(_START)
    assert header[at : at + 64] == ZEROS.encode(), "only a new header is sealed"
    return header[:at] + hashlib.sha256(header).hexdigest().encode() + header[at + 64 :]


def intact(path: Path, header: Header) -> bool | None:
    """Return whether the header of a file is unchanged since it was sealed; None if it has no seal.

    `header` is the parsed header of the same file. Raises InputError if the file cannot be read.
    """
    digest = header.metadata.get(SEAL)
    if digest is None:
        return None
    with open_regular(path) as f:
        raw = f.read(header.data_offset)
    at = raw.find(_START) + len(_START)
    blank = raw[:at] + ZEROS.encode() + raw[at + 64 :]
    return at >= len(_START) and hashlib.sha256(blank).hexdigest() == digest
