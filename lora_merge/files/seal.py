"""A digest of a header inside that header: it tells later whether anything in it was changed.

The metadata entry `lora_merge.header_sha256` holds the SHA-256 of all bytes of the file before the tensors' data, with
64 zeros where the digest itself stands. So it covers all names, dtypes, shapes and offsets, all other metadata entries,
their order, and the spaces between them. It is no signature: whoever edits a header on purpose can compute it again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from ..disk.files import Header, open_regular

SEAL: Final = "lora_merge.header_sha256"
ZEROS: Final = "0" * 64

_START: Final = f'"{SEAL}":"'.encode()
"""How the entry begins. These bytes can stand in no other place: texts in JSON have no bare quotes, and the name of a
tensor is followed by a brace."""


def sealed(header: bytes) -> bytes:
    """Returns the header of a file with the digest in place of the zeros that its entry holds."""
    at = header.index(_START) + len(_START)
    assert header[at : at + 64] == ZEROS.encode(), "only a new header is sealed"
    return header[:at] + hashlib.sha256(header).hexdigest().encode() + header[at + 64 :]


def intact(path: Path, header: Header) -> bool | None:
    """Returns whether the header in a file is as it was sealed; None where it has no seal.

    `header` is what was read from the same file. InputError if the file cannot be read.
    """
    digest = header.metadata.get(SEAL)
    if digest is None:
        return None
    with open_regular(path) as f:
        raw = f.read(header.data_offset)
    at = raw.find(_START) + len(_START)
    blank = raw[:at] + ZEROS.encode() + raw[at + 64 :]
    return at >= len(_START) and hashlib.sha256(blank).hexdigest() == digest
