"""Files, written and read by the safetensors library, not by ours."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from lora_merge.dtypes import StoredTensor
from lora_merge.files.checkpoint import Index
from tests.kit.tensors import Tensors


def save(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> Path:
    """Written by the safetensors library, not by ours."""
    save_file({k: t.contiguous() for k, t in tensors.items()}, path, metadata=metadata or {"format": "pt"})
    return path


def load(path: Path) -> Tensors:
    """Read by the safetensors library, not by ours."""
    with safe_open(path, "pt") as f:
        return {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118


def load_all(folder: Path) -> Tensors:
    """The tensors of all shards."""
    return {k: t for f in sorted(folder.glob("*.safetensors")) for k, t in load(f).items()}


def metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` as the library reads it."""
    with safe_open(path, "pt") as f:
        return dict(f.metadata() or {})


def blob(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file of this header, whatever it says, and this data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def index(shapes: Mapping[str, tuple[int, ...]]) -> Index:
    """A checkpoint of which there are names and shapes alone."""
    infos = {k: StoredTensor(k, "BF16", s, Path("base.safetensors"), 0, 0) for k, s in shapes.items()}
    return Index(Path("base.safetensors"), infos, {}, ())


def sha(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def strays(folder: Path) -> list[str]:
    """Hidden files: temporary ones and claims."""
    return [p.name for p in folder.rglob("*") if p.name.startswith(".")]
