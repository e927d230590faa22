"""The output format: what the header of a file says."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..algorithms import Shape
from ..disk.pages import PAGE
from ..dtypes import bytes_of
from ..errors import InputError
from .safetensors import HEADER_LIMIT

_METADATA: Final = '{"__metadata__":'
_DECODER: Final = json.JSONDecoder()


def layout(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str], data_start: int) -> bytes:
    """Return the header of a .safetensors file: name, dtype and shape of each tensor, laid out in this order.

    Padded with spaces so that its length, which is where the data starts, equals `data_start` modulo 4096:
    pages of the output then line up with pages of the input. It is a multiple of 8 in any case.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + bytes_of(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = _json(table)
    start = data_start if data_start % 8 == 0 else 0
    text += b" " * ((start - len(text) - 8) % PAGE)
    if len(text) > HEADER_LIMIT:
        raise InputError(
            "the header would be longer than the format allows",
            f"{len(table)} tensors",
            "merge parts of it",
        )
    return struct.pack("<Q", len(text)) + text


def with_metadata(header: bytes, metadata: Mapping[str, str]) -> bytes:
    """Returns a header that `layout` made, with these metadata entries in place of its own, and as long as it was.

    ValueError if the entries are longer than those they replace; spaces at the end make up for shorter ones.
    """
    text = header[8:].decode()
    start, (_, end) = len(_METADATA), _metadata(text)
    made = (text[:start] + _json(dict(metadata)).decode() + text[end:]).encode().rstrip(b" ")
    if len(made) + 8 > len(header):
        raise ValueError("the entries are longer than the planned ones")
    return header[:8] + made.ljust(len(header) - 8, b" ")


def metadata_of(header: bytes) -> dict[str, str]:
    """Return the metadata entries of a header that `layout` made."""
    return _metadata(header[8:].decode())[0]


def _metadata(text: str) -> tuple[dict[str, str], int]:
    """Return the entries, and where they end."""
    assert text.startswith(_METADATA), "every output has metadata"
    return _DECODER.raw_decode(text, len(_METADATA))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
