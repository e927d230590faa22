"""The GGUF container: a header of typed entries (kv) and tensor infos, then the data, each tensor aligned.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Versions 2 and 3, little endian. Every count, length
and offset is checked against the file, so a false header costs neither time nor memory. Long arrays (tokenizers)
are skipped. The axes of a shape are in torch's order, the last one contiguous; the file has them reversed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from ...disk.files import FileState, Header, open_regular
from ...dtypes import Shape, StoredTensor
from ...errors import InputError
from ...text import quoted
from .types import BY_NUMBER, GGML_TYPES

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
GGUF_HEADER_LIMIT: Final = 100_000_000  # bytes; a vocabulary of 260 000 words with its merges takes 15 million
STRINGS: Final = 1 << 21  # of all arrays together
MOST_ENTRIES: Final = 1 << 16
TENSORS: Final = 1 << 20
MOST_AXES: Final = 5  # ggml has four; tools write video models with five
READ_ITEMS: Final = 4096  # items of an array that is read; longer ones are skipped
ALIGNMENTS: Final = frozenset(1 << n for n in range(3, 17))
ALIGNMENT: Final = "general.alignment"
DEFAULT_ALIGNMENT: Final = 32  # bytes, where a file does not say it

PADDING: Final = "lora_merge.padding"
"""An entry of spaces that gives two headers the same length."""

SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a value's type → its character in `struct`."""

STRING: Final = 8
ARRAY: Final = 9


class _Malformed(ValueError):
    """The reason why a header is refused."""


class GgufEntry(NamedTuple):
    """One kv: its bytes in the header, and its value; None for a long array."""

    key: str
    start: int
    stop: int
    value: Any


class Info(NamedTuple):
    """One tensor info; `offset` counts from the start of the data."""

    name: str
    dtype: str
    shape: Shape
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufContent:
    """A header in its parts."""

    raw: bytes  # the header, without the padding before the data
    entries: tuple[GgufEntry, ...]
    infos: tuple[Info, ...]
    infos_start: int
    alignment: int

    @property
    def data(self) -> int:
        """Return the offset of the data in the file."""
        return aligned(len(self.raw), self.alignment)

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of all entries that were read."""
        return {e.key: e.value for e in self.entries if e.value is not None}


def aligned(at: int, alignment: int) -> int:
    """Return the first multiple of `alignment` from `at` on."""
    return -(-at // alignment) * alignment


def parse_gguf(path: Path) -> Header:
    """Return the header of a GGUF file; InputError if it is malformed."""
    with open_regular(path) as f:
        state = FileState.of(f.fileno())
        try:
            content = read_content(f, state.size)
            tensors = {t.name: t for t in _placed(content, path, state.size)}
        except OSError as e:
            raise InputError(f"file cannot be read: {e.strerror}", str(path), "check the disk") from e
        except _Malformed as e:
            raise InputError("not a valid GGUF file", f"{path}: {e}", "download or convert the model again") from e
    metadata = {key: value for key, value in content.values.items() if isinstance(value, str) and key != PADDING}
    return Header(tensors, metadata, content.data, state, (), content.values, content.alignment)


def content_of(raw: bytes) -> GgufContent:
    """Return the parts of a header in memory; ValueError if it is malformed."""
    return _content(_Cursor(raw, None, len(raw)))


def read_content(f: BinaryIO, size: int) -> GgufContent:
    """Return the header of an open file of `size` bytes; ValueError if it is malformed."""
    return _content(_Cursor(b"", f, size))


class _Cursor:
    """Reads the start of a file piece by piece, never more than the limit of a header."""

    def __init__(self, raw: bytes, file: BinaryIO | None, size: int) -> None:
        self.raw, self._file, self._size, self.at = bytearray(raw), file, size, 0

    def require(self, count: int) -> None:
        """Make `count` bytes from here on available."""
        end = self.at + count
        if end <= len(self.raw):
            return
        if end > self._size:
            raise _Malformed(f"its header ends at byte {self._size}, in the middle of an entry")
        if end > GGUF_HEADER_LIMIT:
            raise _Malformed(f"its header is longer than {GGUF_HEADER_LIMIT} bytes")
        while self._file is not None and len(self.raw) < end:
            more = self._file.read(min(self._size, max(end, 2 * len(self.raw), 1 << 20)) - len(self.raw))
            if not more:
                raise _Malformed("it became shorter while its header was read")
            self.raw += more

    def number(self, code: str) -> Any:
        """Return one number."""
        width = struct.calcsize(code)
        self.require(width)
        (value,) = struct.unpack_from(f"<{code}", self.raw, self.at)
        self.at += width
        return value

    def text(self) -> str:
        """Return a string."""
        length = self.number("Q")
        self.require(length)
        raw = bytes(self.raw[self.at : self.at + length])
        self.at += length
        try:
            return raw.decode()
        except ValueError as e:
            raise _Malformed(f"a text is not UTF-8: {quoted(repr(raw[:40]))}") from e

    def skip_strings(self, count: int) -> None:
        """Skip strings one by one."""
        self.require(8 * count)
        length, at = struct.Struct("<Q").unpack_from, self.at
        for _ in range(count):
            if at + 8 > len(self.raw):
                self.at = at
                self.require(8)
            at += 8 + length(self.raw, at)[0]
        self.at = at
        self.require(0)


def _content(cursor: _Cursor) -> GgufContent:
    cursor.require(4)
    if cursor.raw[:4] != MAGIC:
        raise _Malformed("it does not begin with GGUF")
    cursor.at = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "it is big endian" if swapped in VERSIONS else f"its version is {version}; versions 2 and 3 are read"
        raise _Malformed(why)
    count, kvs = cursor.number("Q"), cursor.number("Q")
    if count > TENSORS or kvs > MOST_ENTRIES:
        raise _Malformed(f"its header claims {count} tensors and {kvs} entries")
    entries = tuple(_entries(cursor, kvs))
    start, values = cursor.at, {e.key: e.value for e in entries}
    alignment = values.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment not in ALIGNMENTS:
        raise _Malformed(f"its alignment is {quoted(str(alignment))}")
    infos = tuple(_infos(cursor, count))
    return GgufContent(bytes(cursor.raw[: cursor.at]), entries, infos, start, alignment)


def _entries(cursor: _Cursor, count: int) -> Iterator[GgufEntry]:
    keys: set[str] = set()
    strings = STRINGS
    for _ in range(count):
        start, key = cursor.at, cursor.text()
        if key in keys:
            raise _Malformed(f"the entry {quoted(key)} appears twice")
        keys.add(key)
        kind = cursor.number("I")
        if kind == ARRAY:
            item, length = cursor.number("I"), cursor.number("Q")
            strings -= length if item == STRING else 0
            if strings < 0:
                raise _Malformed(f"the array {quoted(key)} claims {length} texts")
            value = _array(cursor, key, item, length)
        else:
            value = _value(cursor, key, kind)
        yield GgufEntry(key, start, cursor.at, value)


def _value(cursor: _Cursor, key: str, kind: int) -> Any:
    if kind == STRING:
        return cursor.text()
    if kind not in SCALARS:
        raise _Malformed(f"the entry {quoted(key)} has the type {kind}, which the format does not know")
    return cursor.number(SCALARS[kind])


def _array(cursor: _Cursor, key: str, item: int, length: int) -> list[Any] | None:
    """Return the items of a short array of numbers; None for others, which are skipped."""
    if item == STRING:
        cursor.skip_strings(length)
        return None
    if item not in SCALARS:
        raise _Malformed(f"the array {quoted(key)} has items of the type {item}, which the format does not know")
    code = SCALARS[item]
    cursor.require(length * struct.calcsize(code))
    start, cursor.at = cursor.at, cursor.at + length * struct.calcsize(code)
    return list(struct.unpack_from(f"<{length}{code}", cursor.raw, start)) if length <= READ_ITEMS else None


def _infos(cursor: _Cursor, count: int) -> Iterator[Info]:
    names: set[str] = set()
    for _ in range(count):
        name = cursor.text()
        if name in names or not name or "\0" in name:
            raise _Malformed(f"the name {quoted(name)} of a tensor is empty, holds NUL or appears twice")
        names.add(name)
        axes = cursor.number("I")
        if axes > MOST_AXES:
            raise _Malformed(f"{quoted(name)} has {axes} axes")
        shape = tuple(cursor.number("Q") for _ in range(axes))[::-1]
        number, offset = cursor.number("I"), cursor.number("Q")
        kind = BY_NUMBER.get(number)
        if kind is None:
            raise _Malformed(f"{quoted(name)} has the type {number}, which this version does not know")
        block, size = GGML_TYPES[kind].unit
        elements = prod(shape)
        if elements >= 1 << 63 or (shape and shape[-1] % block) or (not shape and block > 1):
            raise _Malformed(f"{quoted(name)} has the shape {list(shape)}, which {kind} cannot have")
        yield Info(name, kind, shape, offset, elements // block * size)


def _placed(content: GgufContent, path: Path, size: int) -> Iterator[StoredTensor]:
    """Yield the tensors in byte order; they follow each other, each at the next multiple of the alignment."""
    data, end = content.data, 0
    for name, dtype, shape, offset, nbytes in sorted(content.infos, key=lambda i: (i.offset, i.nbytes)):
        if offset != aligned(end, content.alignment):
            kind = "overlap the tensor before" if offset < end else "do not follow the tensor before"
            raise _Malformed(f"the bytes of {quoted(name)} {kind} it")
        end = offset + nbytes
        if data + end > size:
            raise _Malformed(f"{quoted(name)} ends at byte {data + end}, the file has {size}")
        yield StoredTensor(name, dtype, shape, path, data + offset, nbytes)
    if size > data + aligned(end, content.alignment):
        raise _Malformed(f"{size - data - end} bytes follow its data")
