"""What a format sees of a checkpoint, the weights that it claims, and the new tensors that it writes.

A format reads by a function `claim`: Checkpoint → the weights that it knows. It writes by functions from a tensor of
plain values to a `NewWeight`. The bytes of new tensors are zeros, or constants; a merge writes codes and scales over
them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeGuard

from ...disk.reader import read_bytes
from ...dtypes import ITEM_BYTES, Memory, Shape, StoredTensor
from ...text import from_json
from ..encodings.base import Packing, Tensors

NOTE_LIMIT: Final = 4096  # bytes of a JSON in a tensor; writers need about fifty

CODES_ALIGNMENT: Final = 8
"""The codes of a weight, and the tensors next to them, take a multiple of so many bytes, so that what follows them in
the file begins at a multiple of its own values' size; a plan puts what does not at the end of the file."""


class WeightClaim(NamedTuple):
    """A weight that a format reads: its tensor by the name and shape that the model knows, and how it is stored."""

    weight: StoredTensor
    packing: Packing


Claims: TypeAlias = Iterator[WeightClaim | None]
"""The weights that a format knows; None for one that it does not read."""


@dataclass(frozen=True)
class Checkpoint:
    """What formats see: all tensors, the metadata, and the section on quantisation of a config.json."""

    tensors: Tensors
    metadata: Mapping[str, str]
    config: Mapping[str, Any]

    def get(self, stem: str, last: str) -> StoredTensor | None:
        """Return the tensor `stem.last`."""
        return self.tensors.get(f"{stem}.{last}")

    def present(self, stem: str, *lasts: str) -> frozenset[str]:
        """Return which of the names `stem.last` there are."""
        return frozenset(name for name in (f"{stem}.{last}" for last in lasts) if name in self.tensors)

    def stems(self, last: str) -> Iterable[str]:
        """Yield every l for which there is a tensor `l.last`."""
        ending, same = f".{last}", self._by_level.get(last.rpartition(".")[2], ())
        return (name.removesuffix(ending) for name in same if name.endswith(ending))

    @cached_property
    def _by_level(self) -> Mapping[str, Sequence[str]]:
        """Last level of a name → the names that end with it."""
        names: dict[str, list[str]] = defaultdict(list)
        for name in self.tensors:
            names[name.rpartition(".")[2]].append(name)
        return names


def claimed(
    codes: StoredTensor, packing: Packing | None, name: str = "", shape: Shape | None = None
) -> WeightClaim | None:
    """Return the claim of a weight, of another name and shape than its codes if these are given; None without a
    packing."""
    if packing is None:
        return None
    name, shape = name or codes.name, codes.shape if shape is None else shape
    stored = codes.stored if name == codes.name else ""
    return WeightClaim(
        StoredTensor(name, codes.dtype, shape, codes.source, codes.offset, codes.nbytes, stored), packing
    )


def read_note(info: StoredTensor) -> Any:
    """Return the JSON in a tensor of bytes; None for anything else."""
    if info.dtype != "U8" or info.nbytes > NOTE_LIMIT:
        return None
    try:
        return from_json(read_bytes(info))
    except ValueError:
        return None


def positive(number: Any) -> TypeGuard[int]:
    """Return whether an entry of a configuration is a whole number above 0."""
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


class NewWeight(NamedTuple):
    """A weight in its new form, and the new tensors next to its codes."""

    packing: Packing
    others: tuple[StoredTensor, ...]


@lru_cache(maxsize=4096)
def _constant(file: Path, content: bytes) -> Memory:
    """Return a source for constant bytes; one object for equal ones, so that jobs can share the windows of a base."""
    return Memory.of(file, memoryview(bytearray(content)))


class _Zeros:
    """Zeros for all new tensors: one buffer of the size of the largest."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray())

    def content(self, nbytes: int) -> memoryview:
        """Return so many zeros."""
        if nbytes > len(self._buffer):
            self._buffer = memoryview(bytearray(nbytes))
        return self._buffer[:nbytes]


_ZEROS: Final = _Zeros()


@lru_cache(maxsize=4096)
def _zeros(file: Path, nbytes: int) -> Memory:
    """Return a source for zeros; one object for equal ones."""
    return Memory(file, partial(_ZEROS.content, nbytes))


def new_weight(packing: Packing | None, *marks: StoredTensor) -> NewWeight | None:
    """Return a weight in its new form, with these marks next to it; None without a packing."""
    if packing is None:
        return None
    parts = (part.info for part in packing.parts.values())
    return NewWeight(packing._replace(marks=frozenset(mark.name for mark in marks)), (*parts, *marks))


def codes_of(weight: StoredTensor, dtype: str, shape: Shape) -> StoredTensor:
    """Return the tensor of codes, by the name of the weight."""
    return replace(weight, dtype=dtype, shape=shape, nbytes=prod(shape) * ITEM_BYTES[dtype])


def new_tensor(weight: StoredTensor, last: str, dtype: str, shape: Shape, content: bytes | None = None) -> StoredTensor:
    """Return a tensor whose name has `last` in place of `weight`; of zeros if the merge writes its bytes."""
    name, stored = (f"{old.removesuffix('weight')}{last}" if old else "" for old in (weight.name, weight.stored))
    nbytes = prod(shape) * ITEM_BYTES[dtype]
    source = _zeros(weight.file, nbytes) if content is None else _constant(weight.file, content)
    return StoredTensor(name, dtype, shape, source, 0, nbytes, stored)


def new_note(
    weight: StoredTensor, last: str, entries: Mapping[str, Any], others: Sequence[StoredTensor]
) -> StoredTensor:
    """Return a JSON in a tensor, with spaces at its end so that it and the other tensors fill whole words."""
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + sum(t.nbytes for t in others)) % CODES_ALIGNMENT)
    return new_tensor(weight, last, "U8", (len(text),), text)
