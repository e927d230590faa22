"""The output format: what the header of a file says."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any

from .algorithms import Shape
from .errors import InputError
from .header import HEADER_LIMIT, bytes_of
from .pages import PAGE


def layout(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str], data_start: int) -> bytes:
    """The header of a .safetensors file: name, dtype and shape of each tensor, laid out in this order.

    Padded with spaces so that its length, which is where the data starts, equals `data_start` modulo 4096:
    pages of the output then line up with pages of the input. It is a multiple of 8 in any case.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + bytes_of(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    start = data_start if data_start % 8 == 0 else 0
    text += b" " * ((start - len(text) - 8) % PAGE)
    if len(text) > HEADER_LIMIT:
        raise InputError(
            "the header would be longer than the format allows",
            f"{len(table)} tensors",
            "merge parts of it",
        )
    return struct.pack("<Q", len(text)) + text
