"""Writes the header of a GGUF output: that of the base with our own entries.

All entries of the base are copied as they are, and if every tensor keeps its type, the tensor infos too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ...disk.files import open_regular
from ...disk.pages import PAGE
from ...dtypes import Shape
from ...errors import InputError
from .container import ARRAY, GGUF_HEADER_LIMIT, MAGIC, PADDING, STRING, GgufContent, aligned, content_of, read_content
from .types import GGML_TYPES

FILE_TYPE: Final = "general.file_type"
QUANTISATION_VERSION_KEY: Final = "general.quantization_version"
QUANTISATION_VERSION: Final = 2  # of ggml's blocks (GGML_QNT_VERSION)

UNSIGNED: Final = 4
SIGNED: Final = 5
"""Numbers of the types of whole numbers of 32 bits."""

FILE_TYPES: Final = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12,
    "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
"""Type of most tensors → value of that entry (llama.cpp, `llama_ftype`)."""


def is_gguf(header: bytes) -> bool:
    """Return whether the bytes begin a GGUF file; no .safetensors header is so long."""
    return header.startswith(MAGIC)


def gguf_layout(base: Path, end: int, tensors: Sequence[tuple[str, str, Shape]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of an output whose tensors (name, type, shape) are stored in this order.

    `base`: a file whose data begins at `end`. Of its entries with a text, those are kept that `metadata` has too; all
    other entries are kept. The data of the output begin where the base's do, modulo 4096.
    """
    with open_regular(base) as f:
        return _laid_out(read_content(f, end), tensors, metadata, end)


def new_layout(header: bytes, tensors: Sequence[tuple[str, str, Shape]], metadata: Mapping[str, str]) -> bytes:
    """Return the header of an output of these tensors with the entries of `header`, which has no tensors.

    The data of the output begin at a multiple of 4096.
    """
    return _laid_out(content_of(header), tensors, metadata, 0)


def _laid_out(
    content: GgufContent, tensors: Sequence[tuple[str, str, Shape]], metadata: Mapping[str, str], end: int
) -> bytes:
    entries = [e for e in content.entries if not isinstance(e.value, str) or metadata.get(e.key) == e.value]
    keys, types = {e.key for e in entries}, _retyped(content, tensors)
    spans = [types.pop(e.key, content.raw[e.start : e.stop]) for e in entries if e.key != PADDING]
    texts = {key: text for key, text in metadata.items() if key not in keys}
    spans += [*types.values(), *(string(*entry) for entry in texts.items())]
    return _whole(content, spans, (len(tensors), _infos(content, tensors)), end)


def with_texts(header: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return a header from `gguf_layout` with other texts and the same length.

    Raises ValueError if the new texts are longer than the old ones.
    """
    content = content_of(header)
    spans = []
    for e in content.entries:
        if isinstance(e.value, str) and e.key != PADDING and metadata.get(e.key) != e.value:
            spans += [string(e.key, metadata[e.key])] if e.key in metadata else []
        elif e.key != PADDING:
            spans.append(content.raw[e.start : e.stop])
    infos = len(content.infos), content.raw[content.infos_start :]
    new = _whole(content, spans, infos, len(header), exactly=True)
    if len(new) != len(header):
        raise ValueError("the entries are longer than the planned ones")
    return new


def texts_of(header: bytes) -> dict[str, str]:
    """Return the entries with a text of a header."""
    return {key: value for key, value in content_of(header).values.items() if isinstance(value, str) and key != PADDING}


def string(key: str, value: str) -> bytes:
    """Return the bytes of an entry with a text."""
    return _text(key) + struct.pack("<I", STRING) + _text(value)


def unsigned(key: str, value: int) -> bytes:
    """Return the bytes of an entry with a whole number of 32 bits without a sign."""
    return _text(key) + struct.pack("<II", UNSIGNED, value)


def sizes(key: str, shape: Shape) -> bytes:
    """Return the bytes of an entry with the sizes of a shape."""
    return _text(key) + struct.pack(f"<IIQ{len(shape)}i", ARRAY, SIGNED, len(shape), *shape)


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _retyped(content: GgufContent, tensors: Iterable[tuple[str, str, Shape]]) -> dict[str, bytes]:
    """Return the entries on types that an output needs whose tensors have another type than the base's.

    They are those of llama.cpp's quantiser: the type of the matrices, and the version of ggml's blocks.
    """
    old = {i.name: i.dtype for i in content.infos}
    new = {dtype for name, dtype, _ in tensors if old.get(name) != dtype}
    if len(new) != 1:
        return {}
    (kind,) = new
    entries = {FILE_TYPE: unsigned(FILE_TYPE, FILE_TYPES[kind])}
    return (
        entries | {QUANTISATION_VERSION_KEY: unsigned(QUANTISATION_VERSION_KEY, QUANTISATION_VERSION)}
        if GGML_TYPES[kind].unit[0] > 1
        else entries
    )


def _infos(content: GgufContent, tensors: Sequence[tuple[str, str, Shape]]) -> bytes:
    """Return the tensor infos: the bytes of the base if nothing changes, else new ones in the order of the data."""
    placed = [*_places(tensors, content.alignment)]
    if {(i.name, i.dtype, i.shape, i.offset) for i in content.infos} == {*placed}:
        return content.raw[content.infos_start :]
    infos = []
    for name, dtype, shape, offset in placed:
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(_text(name) + axes + struct.pack("<IQ", GGML_TYPES[dtype].number, offset))
    return b"".join(infos)


def _places(tensors: Iterable[tuple[str, str, Shape]], alignment: int) -> Iterator[tuple[str, str, Shape, int]]:
    at = 0
    for name, dtype, shape in tensors:
        yield name, dtype, shape, at
        at = aligned(at + GGML_TYPES[dtype].nbytes(shape), alignment)


def _whole(
    content: GgufContent, spans: Sequence[bytes], count_and_infos: tuple[int, bytes], end: int, *, exactly: bool = False
) -> bytes:
    """Return a header of these entries and infos, with spaces so that its length is `end`, or `end` modulo 4096."""
    count, infos = count_and_infos
    counts = struct.pack("<QQ", count, len(spans) + 1)
    length = 8 + len(counts) + sum(map(len, spans)) + len(string(PADDING, "")) + len(infos)
    spaces = end - length if exactly else (end - length) % max(PAGE, content.alignment)
    header = b"".join((content.raw[:8], counts, *spans, string(PADDING, " " * spaces), infos))
    if len(header) > GGUF_HEADER_LIMIT:
        raise InputError("the header would be longer than is read", f"{len(header)} bytes", "merge the base as it is")
    return header
