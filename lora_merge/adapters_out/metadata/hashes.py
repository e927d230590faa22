"""The legacy hash by which webui's Additional Networks knows a file; its other one is the SHA-256 of the data. Facts:
sd-scripts 48d368f, library/train_util.py, `precalculate_safetensors_hashes`, `addnet_hash_safetensors`,
`addnet_hash_legacy`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from ...files.checkpoint import Index
from ...files.safetensors import LEGACY_HASH, layout

HASHES: Final = ("sshs_model_hash", "sshs_legacy_hash")

ONE: Final = ("resize", "convert")
"""Commands whose output is the same adapter in another form: it keeps all entries."""


DTYPE_ORDER: Final = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32", "F64", "I64", "U64"),
)
"""dtypes as safetensors sorts tensors: the last ones first, and by name within a dtype."""


class HashedTensor(Protocol):
    """One tensor of a file."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def pieces(self) -> Iterable[memoryview]:
        """Yield its bytes in order."""


def has_hashes(command: str, inputs: Sequence[Index]) -> bool:
    """Return whether the metadata of an output may have these hashes."""
    return command not in ONE or any(name in index.metadata for index in inputs for name in HASHES)


def legacy_hash(tensors: Sequence[HashedTensor], metadata: Mapping[str, str]) -> str:
    """Return eight digits of the SHA-256 of 64 KiB behind the first MiB of the file.

    The file is the one that safetensors would write with the `ss_` entries alone.
    """
    ordered = sorted(tensors, key=lambda t: (-DTYPE_ORDER.index(t.dtype), t.name))
    of_trainer = {name: value for name, value in metadata.items() if name.startswith("ss_")}
    digest, at, (first, count) = hashlib.sha256(), 0, LEGACY_HASH
    header = _header(ordered, of_trainer)
    for pieces in ([memoryview(header)], *(tensor.pieces() for tensor in ordered)):
        for piece in pieces:
            low, high = max(first - at, 0), min(first + count - at, len(piece))
            if low < high:
                digest.update(piece[low:high])
            at += len(piece)
            if at >= first + count:
                return digest.hexdigest()[:8]
    return digest.hexdigest()[:8]


def _header(tensors: Sequence[HashedTensor], metadata: Mapping[str, str]) -> bytes:
    """Return the header as safetensors writes it: padded with spaces to 8 bytes."""
    aligned = layout([(t.name, t.dtype, t.shape) for t in tensors], metadata, 0)
    text = aligned[8:].rstrip(b" ")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
