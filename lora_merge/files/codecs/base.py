"""The interface of a codec: it decodes the stored numbers of a weight, and encodes new ones.

A weight is stored as a group: one tensor with its numbers, row after row, and perhaps small tensors, such as a scale,
anywhere in the file. Windows carry the numbers; the small tensors are read and written whole.
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
"""Role → the small tensor beside the numbers, as stored."""


@dataclass(frozen=True, eq=False)
class Codec:
    """One way to store weights: a row of `CODECS`. Its functions are pure and know nothing of adapters."""

    name: str
    decode: Callable[[Tensor, Sides, int], Tensor]
    """(stored numbers [rows, stored cols], small tensors, index of the first row) → weight [rows, cols], as floats."""
    encode: Callable[[Tensor, Sides, int], Tensor]
    """(weight [rows, cols] in the dtype of the arithmetic, small tensors, index of the first row) → numbers
    [rows, stored cols], not yet rounded to the stored dtype."""
    claim: Callable[[Tensors, Mapping[str, str]], Iterable[tuple[str, Packing]]] = lambda _, __: ()
    """(all tensors of a checkpoint, its metadata) → name and packing of each weight that this codec reads."""
    fault: Callable[[str, Sequence[float]], str] = lambda _, __: ""
    """(role, numbers of its tensor) → the reason why they are invalid; "" if they are valid."""
    refit: Callable[[Encoding, float], Mapping[str, bytes]] | None = None
    """(encoding, largest magnitude of a new weight) → small tensors, by role, whose range covers it."""


@dataclass(frozen=True, eq=False)
class Encoding:
    """A codec with the dtype and unit of stored numbers. Weights that are stored alike share one object."""

    codec: Codec
    dtype: str  # of the stored numbers
    unit: tuple[int, int]  # (n, bytes): n consecutive numbers of the weight take so many bytes
    row_group: int = 1  # rows that are encoded together; blocks are cut between such groups

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` consecutive numbers, a multiple of the unit."""
        numbers, size = self.unit
        return count // numbers * size

    def stored(self, count: int) -> int:
        """Return the number of stored numbers for `count` consecutive numbers of the weight."""
        return self.nbytes(count) // ITEM_BYTES[self.dtype]

    def count(self, nbytes: int) -> int:
        """Return how many consecutive numbers of the weight `nbytes` bytes hold."""
        numbers, size = self.unit
        return nbytes // size * numbers

    def stored_shape(self, shape: Shape) -> Shape:
        """Return the shape in the container of a weight with this shape: only the last axis is packed."""
        numbers, size = self.unit
        width = ITEM_BYTES.get(self.dtype, 0)
        return shape if numbers * width in (0, size) else (*shape[:-1], shape[-1] // numbers * size // width)


class Packing(NamedTuple):
    """How one weight is stored: its encoding, and the small tensors beside its numbers by role."""

    encoding: Encoding
    sides: Mapping[str, StoredTensor]
    beside: frozenset[str] = frozenset()  # names of other tensors of this weight: marks, scales of activations

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors beside the numbers, which a weight of plain numbers does not have."""
        return self.beside.union(side.name for side in self.sides.values())
