"""What a codec is: how the numbers of one weight lie in a file, and how they become numbers and bytes again.

A weight is stored as a group: one tensor with its numbers, row after row, and perhaps small tensors beside it, such as
a scale, which lie anywhere in the file. Windows carry the numbers; the small tensors are read and written whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ...algorithms import Shape
from ...disk.files import StoredTensor
from ...dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from torch import Tensor

Tensors: TypeAlias = Mapping[str, StoredTensor]

Sides: TypeAlias = "Mapping[str, Tensor]"
"""Role → the small tensor beside the numbers, whole, as stored."""


@dataclass(frozen=True, eq=False)
class Codec:
    """One way to store weights: a row of `CODECS`. Its functions are pure and know nothing of adapters."""

    name: str
    decode: Callable[[Tensor, Sides, int], Tensor]
    """Stored numbers [rows, stored cols], and the number of their first row → the weight's [rows, cols], as floats."""
    encode: Callable[[Tensor, Sides, int], Tensor]
    """The weight's [rows, cols], in the dtype of the arithmetic → [rows, stored cols], not yet rounded to theirs."""
    claim: Callable[[Tensors, Mapping[str, str]], Iterable[tuple[str, Packing]]] = lambda _, __: ()
    """All tensors of a checkpoint and its metadata → those whose numbers are a weight's in this codec, by name."""
    fault: Callable[[str, Sequence[float]], str] = lambda _, __: ""
    """A role and the numbers of its tensor → what is wrong with them, "" for nothing."""
    refit: Callable[[Encoding, float], Mapping[str, bytes]] | None = None
    """The largest magnitude of a weight → the small tensors that cover it, where those of the file may not."""


@dataclass(frozen=True, eq=False)
class Encoding:
    """A codec with what it needs to know of a weight. One object for all weights that are stored alike."""

    codec: Codec
    dtype: str  # of the stored numbers
    unit: tuple[int, int]  # so many consecutive numbers of the weight take so many bytes
    row_group: int = 1  # rows that are encoded together; blocks are cut between such groups

    def nbytes(self, count: int) -> int:
        """Return the bytes of so many consecutive numbers: whole units."""
        numbers, size = self.unit
        return count // numbers * size

    def stored(self, count: int) -> int:
        """Return how many stored numbers so many consecutive ones of the weight are."""
        return self.nbytes(count) // ITEM_BYTES[self.dtype]

    def count(self, nbytes: int) -> int:
        """Return how many consecutive numbers have room in so many bytes."""
        numbers, size = self.unit
        return nbytes // size * numbers

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape that the container tells of a weight of this one: rows as they are, the last axis packed."""
        numbers, size = self.unit
        width = ITEM_BYTES.get(self.dtype, 0)
        return shape if numbers * width in (0, size) else (*shape[:-1], shape[-1] // numbers * size // width)


class Packing(NamedTuple):
    """How one weight is stored: its encoding, and the small tensors beside its numbers by role."""

    encoding: Encoding
    sides: Mapping[str, StoredTensor]
    beside: frozenset[str] = frozenset()  # names of tensors that mean nothing without it: marks, scales of activations

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors that a weight of plain numbers does not have beside it."""
        return self.beside.union(side.name for side in self.sides.values())
