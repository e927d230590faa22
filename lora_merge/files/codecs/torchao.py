"""Weights of torchao as transformers saves them: Int8Tensor and Float8Tensor, W = (q − z) · s.

`L.weight` is stored as `L._weight_qdata`, `L._weight_scale` and, with zero points, `L._weight_zero_point`; an entry
`L.weight` of the metadata says of which class the weight is and which block of it shares a scale.
https://github.com/pytorch/ao torchao/prototype/safetensors/safetensors_support.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

from ...disk.reader import read_bytes
from ...limits import from_json
from .base import Checkpoint, Claim, claimed
from .scaled import Stored, scaled

CLASSES: Final = {"Int8Tensor": "I8", "Float8Tensor": "F8_E4M3"}
"""Class of a weight → dtype of its codes. Others hold numbers of fewer bits, or codes in the order of a kernel."""

NAMES: Final = "tensor_names"
"""Entry of the metadata with the names of all tensors."""

ENTRY_LIMIT: Final = 4096  # bytes of the entry of one weight; torchao writes about 250


def claim(found: Checkpoint) -> Iterator[Claim]:
    """Yield the weights of these classes."""
    if NAMES not in found.metadata:
        return
    for codes in [info for name, info in found.tensors.items() if name.endswith("_qdata")]:
        stem, _, last = codes.name.rpartition(".")
        parameter = last.removeprefix("_").removesuffix("_qdata")
        name = f"{stem}.{parameter}"
        scale, zero = (found.get(stem, f"_{parameter}_{part}") for part in ("scale", "zero_point"))
        kind, block = _entry(found.metadata.get(name, ""))
        if scale is None or CLASSES.get(kind) != codes.dtype or len(block) != len(codes.shape) or len(block) < 2:
            continue
        if not all(isinstance(n, int) and n > 0 for n in block) or any(n != 1 for n in block[:-2]):
            continue
        if zero is not None and (prod(zero.shape) != prod(scale.shape) or prod(scale.shape) > prod(codes.shape)):
            continue
        beside: frozenset[str] = frozenset()
        if zero is not None and not any(read_bytes(zero)):  # symmetric, and it stays so
            beside, zero = frozenset((zero.name,)), None
        one = prod(scale.shape) == 1 and zero is None
        of = Stored(codes, scale, f"torchao {kind}", beside, zero, None if one else (block[-2], block[-1]))
        if packing := scaled(of):
            yield claimed(codes, name, codes.shape, packing)


def _entry(text: str) -> tuple[str, list[Any]]:
    """Return (class of a weight, shape of the block with one scale) from its metadata; ("", []) if none."""
    try:
        entry = from_json(text.encode()) if 0 < len(text) <= ENTRY_LIMIT else {}
    except ValueError:
        entry = {}
    inner = entry.get("_data") if isinstance(entry, dict) else None
    block = inner.get("block_size") if isinstance(inner, dict) else None
    kind = entry.get("_type") if isinstance(entry, dict) else None
    return (kind, block) if isinstance(kind, str) and isinstance(block, list) else ("", [])
