"""Files with the headers of models of full size, whose data is a hole."""

from __future__ import annotations

from math import prod
from pathlib import Path

from lora_merge.files.safetensors import layout


def hollow(tensors: dict[str, tuple[int, ...]], path: Path, metadata: dict[str, str] | None = None) -> Path:
    """A file of full size without its data."""
    header = layout([(name, "BF16", shape) for name, shape in tensors.items()], metadata or {}, 0)
    with path.open("wb") as f:
        f.write(header)
        f.truncate(len(header) + sum(2 * prod(s) for s in tensors.values()))
    return path
