"""Reads headers of `.safetensors` checkpoints, one file or many, and byte ranges and values out of them.

No torch here: plans and `inspect` work from headers alone. Format: a little-endian u64 length, that many
bytes of JSON, then the data; https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

from .algorithms import Shape
from .errors import InputError

ITEM_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E5M2FNUZ": 1, "F8_E4M3FNUZ": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of every dtype the format names, but for the sub-byte ones."""

HEADER_LIMIT: Final = 100_000_000  # bytes; the safetensors library refuses longer ones


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: where its bytes lie. `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: Shape
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Index:
    """All tensors of one checkpoint, in the order of their bytes; the headers of all its files."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    files: tuple[Path, ...]
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json / adapter_config.json beside it


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors by name in byte order, and the metadata, of one file; InputError for anything malformed."""
    size = path.stat().st_size
    with path.open("rb") as f:
        prefix = f.read(8)
        if len(prefix) < 8:
            raise _damaged(path, "it is shorter than a safetensors header")
        (length,) = struct.unpack("<Q", prefix)
        if length > HEADER_LIMIT or 8 + length > size:
            raise _damaged(path, f"its header claims {length} bytes, the file has {size}")
        raw = f.read(length)
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise _damaged(path, f"its header is no JSON: {e}") from e
    metadata = table.pop("__metadata__", {})
    infos = [
        TensorInfo(n, t["dtype"], tuple(t["shape"]), path, 8 + length + t["data_offsets"][0],
                   t["data_offsets"][1] - t["data_offsets"][0])
        for n, t in table.items()
    ]  # fmt: skip
    infos.sort(key=lambda t: (t.offset, t.nbytes))
    for t in infos:
        if t.nbytes != prod(t.shape) * ITEM_BYTES[t.dtype]:
            raise _damaged(path, f"{t.name} has {t.nbytes} bytes, its shape needs another number")
    return {t.name: t for t in infos}, metadata


def _damaged(path: Path, why: str) -> InputError:
    return InputError("not a valid .safetensors file", f"{path}: {why}", "download or export the file again")


def read_bytes(info: TensorInfo) -> bytes:
    """All bytes of one tensor; for small ones."""
    fd = os.open(info.file, os.O_RDONLY)
    try:
        return os.pread(fd, info.nbytes, info.offset)
    finally:
        os.close(fd)
