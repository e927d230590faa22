"""Writes the header of an output file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ..disk.pages import PAGE
from ..dtypes import Shape, bytes_of
from ..errors import InputError
from .gguf.layout import is_gguf, texts_of, with_texts
from .safetensors import HEADER_LIMIT

_METADATA: Final = '{"__metadata__":'
_DECODER: Final = json.JSONDecoder()


def layout(tensors: Iterable[tuple[str, str, Shape]], metadata: Mapping[str, str], data_start: int) -> bytes:
    """Return the header of a .safetensors file whose tensors (name, dtype, shape) are stored in this order.

    Spaces pad the header so that its length, which is the offset of the data, equals `data_start` modulo 4096: pages of
    the output then line up with pages of the input. The length is always a multiple of 8.
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
            "merge its components one by one",
        )
    return struct.pack("<Q", len(text)) + text


def padded(header: bytes, least: int) -> bytes:
    """Return a header with spaces behind it, of `least` bytes at least."""
    text = header[8:].ljust(least - 8)
    return struct.pack("<Q", len(text)) + text


def with_metadata(header: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return a header of an output with other metadata entries and the same length.

    Spaces at the end make up for shorter entries. Raises ValueError if the new entries are longer than the old ones.
    """
    if is_gguf(header):
        return with_texts(header, metadata)
    text = header[8:].decode()
    start, (_, end) = len(_METADATA), _metadata(text)
    new = (text[:start] + _json(dict(metadata)).decode() + text[end:]).encode().rstrip(b" ")
    if len(new) + 8 > len(header):
        raise ValueError("the entries are longer than the planned ones")
    return header[:8] + new.ljust(len(header) - 8, b" ")


def metadata_of(header: bytes) -> dict[str, str]:
    """Return the metadata entries of the header of an output."""
    return texts_of(header) if is_gguf(header) else _metadata(header[8:].decode())[0]


def _metadata(text: str) -> tuple[dict[str, str], int]:
    """Return the metadata entries and the place of their end in `text`."""
    assert text.startswith(_METADATA), "every output has metadata"
    return _DECODER.raw_decode(text, len(_METADATA))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
