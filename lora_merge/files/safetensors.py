"""The header of .safetensors files, read and written: a little-endian u64 length, so many bytes of JSON, then the data.

Format: https://github.com/huggingface/safetensors#format. This module accepts the same headers as the `safetensors`
library; a test compares both on generated headers. The differences are deliberate:

* A name, a metadata key or a field that appears twice is refused; the library keeps the last one and loses data.
* An entry must be a JSON object with the dtype as a string; the library also accepts the array
  `["F32", [1], [0, 4]]` and the dtype `{"F32": null}`, which no program writes.
* Both ignore unknown fields of an entry, but the library refuses those that are nested deeper than 128 levels.

The header of an output, also one in GGUF, is sealed: its entry `lora_merge.header_sha256` holds the SHA-256 of all
bytes of the file before the tensors' data, with 64 zeros in place of the digest itself. So the digest covers all names,
dtypes, shapes and offsets, all other metadata entries, their order, and the spaces between them, and shows later
whether they were changed. It is not a signature: anyone who edits the header can compute a new digest.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Final

from ..disk.files import FileState, Header, open_regular
from ..disk.pages import PAGE
from ..dtypes import ITEM_BITS, Shape, StoredTensor, bytes_of
from ..errors import InputError
from ..text import quoted
from .file_signatures import refusal
from .gguf.layout import is_gguf, string, texts_of, with_texts

HEADER_LIMIT: Final = 100_000_000  # bytes; the library refuses longer ones
U64: Final = 1 << 64

_MINUS_ZERO: Final = re.compile(r"[\s:,\[]-0")
"""A -0 in JSON. The character before it keeps texts such as `model-00001-of-00200` out."""

_METADATA_ENTRY: Final = '{"__metadata__":'
_DECODER: Final = json.JSONDecoder()

SEAL: Final = "lora_merge.header_sha256"
ZERO_HASH: Final = "0" * 64
LEGACY_HASH: Final = (0x100000, 0x10000)
"""Offset and count of the bytes that the oldest hash of web UIs covers."""

_SEAL_ENTRY: Final = f'"{SEAL}":"'.encode()
"""The start of the entry. These bytes occur nowhere else: JSON escapes quotes in texts, and after the name of a tensor
comes a brace."""

_SEAL_ENTRY_IN_GGUF: Final = string(SEAL, ZERO_HASH)[:-64]
"""The same in a GGUF file. It is the last place with these bytes: only texts of ours follow, and names of tensors,
which hold no zero byte."""


class _Malformed(ValueError):
    """The reason why a header is refused; `parse_file` turns it into an InputError with the path."""


def parse_file(path: Path) -> Header:
    """Return the header of one file; InputError if it is malformed, with the format of the file if that is known."""
    with open_regular(path) as f:
        state, start = FileState.of(f.fileno()), b""
        try:
            start = f.read(64)
            raw = _raw(f, start, state.size)
            tensors, metadata = parse(raw, path, state.size)
        except OSError as e:
            raise InputError(f"file cannot be read: {e.strerror}", str(path), "check the disk") from e
        except _Malformed as e:
            raise refusal(path, start, state.size, str(e)) from e
    return Header(tensors, metadata, 8 + len(raw), state)


def _raw(f: BinaryIO, start: bytes, size: int) -> bytes:
    if len(start) < 8:
        raise _Malformed(f"its {size} bytes are too few for a header")
    (length,) = struct.unpack("<Q", start[:8])
    if length > HEADER_LIMIT:
        raise _Malformed(f"its header claims {length} bytes; the format allows {HEADER_LIMIT}")
    if 8 + length > size:
        raise _Malformed(f"its header claims {length} bytes, the file has {size}")
    f.seek(8)
    raw = f.read(length)
    while len(raw) < length:
        more = f.read(length - len(raw))
        if not more:
            raise _Malformed("it became shorter while its header was read")
        raw += more
    return raw


def parse(raw: bytes, path: Path, size: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return tensors in byte order and metadata from the JSON of a file of `size` bytes; ValueError if malformed."""
    try:
        return _checked(_json(raw), path, 8 + len(raw), size)
    except RecursionError as e:
        raise _Malformed("its header is nested too deeply") from e


def _checked(table: Any, path: Path, data: int, size: int) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    if not isinstance(table, dict):
        raise _Malformed("its header is not a JSON object")
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _Malformed("its __metadata__ is not a table of strings")
    known: dict[Any, Any] = {name: name for name in ITEM_BITS}
    infos = sorted((_entry(n, e, path, data, known) for n, e in table.items()), key=attrgetter("offset", "nbytes"))
    end = data
    for t in infos:
        if t.offset != end:
            kind = "overlap the tensor before" if t.offset < end else "leave a gap before"
            raise _Malformed(f"the bytes of {quoted(t.name)} {kind} it")
        end += t.nbytes
    if end != size:
        missing = end - size
        raise _Malformed(
            f"{missing} bytes of its data are missing" if missing > 0 else f"{-missing} bytes follow its data"
        )
    return {t.name: t for t in infos}, metadata


def _json(raw: bytes) -> Any:
    """Parse JSON as serde_json does: strict UTF-8, no NaN, no lone surrogates, no number beyond a double."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_float=_float,
            parse_int=_int if "-0" in text and _MINUS_ZERO.search(text) else int,
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails for a lone surrogate
    except _Malformed:
        raise
    except ValueError as e:  # includes JSONDecodeError and UnicodeError
        raise _Malformed(f"its header is not JSON ({e})") from e
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = sorted(n for n, _ in pairs)
        raise _Malformed(f"{quoted(next(a for a, b in pairwise(names) if a == b))} appears twice in its header")
    return table


def _no_number(text: str) -> Any:
    raise _Malformed(f"its header contains {text}")


def _float(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise _Malformed("its header has a number out of range")
    return value


def _int(text: str) -> int | float:
    return -0.0 if text == "-0" else int(text)  # a float: "-0" is not an unsigned integer


def _entry(name: str, entry: Any, path: Path, data: int, known: dict[Any, Any]) -> StoredTensor:
    """Return one tensor. Equal dtypes and shapes share one object in `known`: this saves 20 MiB for 200 000 tensors."""
    if not isinstance(entry, dict):
        raise _Malformed(f"the entry of {quoted(name)} is not a JSON object")
    try:
        dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as e:
        raise _Malformed(f"the entry of {quoted(name)} has no {e.args[0]}") from e
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise _Malformed(f"{quoted(name)} has the dtype {quoted(str(dtype))}, which the format does not know")
    if not isinstance(shape, list) or not _all_u64(shape):
        raise _Malformed(f"the shape of {quoted(name)} is not a list of sizes")
    if not isinstance(span, list) or len(span) != 2 or not _all_u64(span) or span[1] < span[0]:
        raise _Malformed(f"the data_offsets of {quoted(name)} are not two ascending positions")
    begin, stop = span
    needed = _nbytes(shape, ITEM_BITS[dtype])
    if needed is None or needed != stop - begin:
        what = "no whole number of" if needed is None else str(needed)
        raise _Malformed(f"{quoted(name)} is given {stop - begin} bytes, {dtype} {shape} takes {what} bytes")
    sizes = tuple(shape)
    return StoredTensor(name, known[dtype], known.setdefault(sizes, sizes), path, data + begin, needed)


def _all_u64(numbers: list[Any]) -> bool:
    for n in numbers:  # noqa: SIM110  # all() takes twice as long, for each tensor of a file
        if type(n) is not int or not 0 <= n < U64:  # type(): isinstance accepts true as 1
            return False
    return True


def _nbytes(shape: list[int], bits: int) -> int | None:
    """Return the bytes of a tensor; None if 64 bits overflow, or if its bits are not whole bytes."""
    count = 1
    for n in shape:
        count *= n
        if count >= U64:
            return None
    bits *= count
    return bits // 8 if bits < U64 and bits % 8 == 0 else None


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
    text = _dumped(table)
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
    start, (_, end) = len(_METADATA_ENTRY), _split_metadata(text)
    new = (text[:start] + _dumped(dict(metadata)).decode() + text[end:]).encode().rstrip(b" ")
    if len(new) + 8 > len(header):
        raise ValueError("the entries are longer than the planned ones")
    return header[:8] + new.ljust(len(header) - 8, b" ")


def metadata_of(header: bytes) -> dict[str, str]:
    """Return the metadata entries of the header of an output."""
    return texts_of(header) if is_gguf(header) else _split_metadata(header[8:].decode())[0]


def _split_metadata(text: str) -> tuple[dict[str, str], int]:
    """Return the metadata entries and the place of their end in `text`."""
    assert text.startswith(_METADATA_ENTRY), "every output has metadata"
    return _DECODER.raw_decode(text, len(_METADATA_ENTRY))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def sealed(header: bytes) -> bytes:
    """Return the header with the digest in place of the zeros in its entry."""
    import hashlib

    at = _seal_place(header)
    assert header[at : at + 64] == ZERO_HASH.encode(), "only a new header is sealed"
    return header[:at] + hashlib.sha256(header).hexdigest().encode() + header[at + 64 :]


def intact(path: Path, header: Header) -> bool | None:
    """Return whether the header of a file is unchanged since it was sealed; None if it has no seal.

    `header` is the parsed header of the same file. Raises InputError if the file cannot be read.
    """
    digest = header.metadata.get(SEAL)
    if digest is None:
        return None
    import hashlib  # imported here: most runs of the command line hash nothing

    with open_regular(path) as f:
        raw = f.read(header.data_offset)
    at = _seal_place(raw)
    blank = raw[:at] + ZERO_HASH.encode() + raw[at + 64 :]
    return at > 0 and hashlib.sha256(blank).hexdigest() == digest


def _seal_place(header: bytes) -> int:
    """Return the place of the digest in a header; 0 without one."""
    entry = _SEAL_ENTRY_IN_GGUF if is_gguf(header) else _SEAL_ENTRY
    start = header.rfind(entry) if is_gguf(header) else header.find(entry)
    return start + len(entry) if start >= 0 else 0
