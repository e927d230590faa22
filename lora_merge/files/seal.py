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
from .gguf.layout import is_gguf, string

SEAL: Final = "lora_merge.header_sha256"
ZEROS: Final = "0" * 64

_START: Final = f'"{SEAL}":"'.encode()
"""The start of the entry. These bytes occur nowhere else: JSON escapes quotes in texts, and after the name of a tensor
stands a brace."""


_START_IN_GGUF: Final = string(SEAL, ZEROS)[:-64]
"""The same in a GGUF file. It is the last place with these bytes: only texts of our own follow, and names of tensors,
none of which holds a zero byte."""


def sealed(header: bytes) -> bytes:
    """Return the header with the digest in place of the zeros in its entry."""
    at = _place(header)
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
    at = _place(raw)
    blank = raw[:at] + ZEROS.encode() + raw[at + 64 :]
    return at > 0 and hashlib.sha256(blank).hexdigest() == digest


def _place(header: bytes) -> int:
    """Return the place of the digest in a header; 0 without one."""
    at, length = (
        (header.rfind(_START_IN_GGUF), len(_START_IN_GGUF)) if is_gguf(header) else (header.find(_START), len(_START))
    )
    return at + length if at >= 0 else 0
