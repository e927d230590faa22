"""The interface of an encoding, which decodes the stored values of a weight and encodes new ones; plain values.

A weight is stored as a group of tensors: one with codes, and others (the parts) with scales, zero points, tables. They
may be anywhere in the file, or in another shard. Every tensor of the group either grows with the weight, so many bytes
for so many consecutive values, or belongs to the weight as a whole. Windows carry the codes; the other bytes that a
block needs are read for it, and written back to their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

from ...dtypes import ITEM_BITS, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

SCALE_DTYPES: Final = ("F32", "F16", "BF16")
"""Dtypes of scales, zero points, tables and factors."""

ROTATION_SIZES: Final = (4, 16, 64, 256, 1024)
"""How many columns may be rotated together, by `arithmetic.rotated`."""

Tensors: TypeAlias = Mapping[str, StoredTensor]

PartValues: TypeAlias = "Mapping[str, Tensor]"
"""Role → stored values of a range of the weight, flat, in their stored dtype; codes, and dtypes that torch may lack,
as bytes."""

CODES: str = "codes"
"""The role of the tensor that the windows carry."""

DRAW: Final = "draw"
"""The role of uniform numbers for stochastic rounding, one for each number; no tensor of the file has it."""

BARELY: Final = 2.0**-12  # of a step: what a level may be off by, as it is computed in fp32

ALL_ZEROS: Final = "a scale is not a positive number: 0, for codes that are not 0"
"""The reason why codes are invalid: only a block of zeros may have the scale 0, as its largest number is 0."""


def end_margin(parts: PartValues, most: float = 0.5) -> float:
    """Return how many steps a number may be beyond the outermost codes of a scale that covers it: so many as round to
    these. Stochastic rounding needs a code on both sides of a number, else the mean is another one."""
    return BARELY if DRAW in parts else most


class InvalidPart(ValueError):
    """The error for a scale or a code that is not a number. Its message does not name the tensor; the caller does."""


class OutOfRange(ValueError):
    """The error for new values that no scale can cover."""


class WeightPart(NamedTuple):
    """One stored tensor of a group: `size` bytes for every `group` consecutive values of the weight.

    `group` is 0 for a tensor that belongs to the whole weight.
    """

    info: StoredTensor
    group: int = 0
    size: int = 0

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return (first byte, bytes) for `count` values of the weight from `first` on, which begins a unit."""
        if not self.group:
            return 0, self.info.nbytes
        low = first // self.group * self.size
        return low, min(-(-(first + count) // self.group) * self.size, self.info.nbytes) - low


@dataclass(frozen=True, eq=False)
class Encoding:
    """One way to store values, with its settings; a subclass for each form of codes. Weights share one object.

    The functions are pure, and know nothing of adapters.
    """

    unit: tuple[int, int]  # (n, bytes): n consecutive values of the weight take so many bytes of the codes; bytes may
    # be 0, then no window carries the codes, and `CODES` is a part that belongs to the whole weight
    group: int = 1  # consecutive values that are decoded and encoded together; blocks are cut between such groups

    size: int = 0  # columns, or consecutive values, with one scale; 0 for scales of other blocks, or of the weight
    label: str = ""  # the name of the format, for the user
    new_scales: bool = False  # whether the base has no scales to keep: those of an output are new

    decode_only: ClassVar[str] = ""
    """The reason why new values cannot be stored; "" if they can."""
    fixed: ClassVar[frozenset[str]] = frozenset()
    """Roles of the parts that new values never change."""
    from_zeros: ClassVar[bool] = False
    """Whether new values can be stored if no codes were before: `encode` then gets codes of zeros."""

    @classmethod
    def shared(cls, unit: tuple[int, int], group: int = 1, **settings: Any) -> Self:
        """Return the encoding with these settings, always the same object: weights with one are merged together."""
        encoding: Self = _shared(cls, unit, group, **settings)  # type: ignore[arg-type]
        return encoding

    @property
    def needs_largest(self) -> bool:
        """Whether a part of the whole weight depends on its largest number; 0 is written until that number is known."""
        return False

    @property
    def joint_scale(self) -> bool:
        """Whether weights that servers join, such as q, k and v, need one scale of the whole weight."""
        return False

    @property
    def common(self) -> str:
        """Role of the per-tensor scale s; "" without one. If it is withheld, `decode` returns W / s and `encode` takes
        W / s."""
        return ""

    @property
    def title(self) -> str:
        """Name of the format, for the user."""
        return self.label

    @property
    def quantised(self) -> bool:
        """Whether the codes are something else than floating-point numbers of the weight."""
        return not self.plain

    @property
    def plain(self) -> bool:
        """Whether the stored values are the weight."""
        return False

    @property
    def block_of_scale(self) -> tuple[int, int]:
        """Rows and columns with one scale; (0, 0) if there is one for the whole weight, or in another shape."""
        return (1, self.size) if self.size else (0, 0)

    def nbytes(self, count: int) -> int:
        """Return the bytes of the codes of `count` consecutive values, which begin a unit."""
        values, size = self.unit
        return -(-count // values) * size

    def count(self, nbytes: int) -> int:
        """Return how many consecutive values of the weight `nbytes` bytes hold."""
        values, size = self.unit
        return nbytes // size * values

    def fault(self, role: str, values: Sequence[float]) -> str:
        """Return the reason why the values of a part of the whole weight are invalid; "" if they are valid."""
        return ""

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return `count` values of the weight from `first` on, as floats in any shape; InvalidPart for bad parts."""
        raise NotImplementedError

    def factor_of(self, parts: PartValues) -> float:
        """Return the factor of all values, 1 without one; InvalidPart if it is not a positive number."""
        return 1.0

    def encode(self, values: Tensor, parts: PartValues) -> PartValues | None:
        """Return the codes, and the parts that grow with the weight, of new values.

        `values`: flat, fp32 or fp64, finite. `parts`: those of the values before the change; their scales are kept
        if they cover the new values. None if a part of the whole weight does not cover them: see `refit`.
        """
        raise NotImplementedError

    def refit(self, parts: PartValues, largest: float) -> PartValues:
        """Return the parts of the whole weight that cover values of this largest magnitude."""
        raise NotImplementedError


@cache
def _shared(form: type[Any], unit: tuple[int, int], group: int, /, **settings: Any) -> Any:
    return form(unit, group, **settings)


def whole_bytes(bits: int) -> tuple[int, int]:
    """Return (n, bytes): the fewest values of so many bits that take whole bytes."""
    shared = gcd(bits, 8)
    return 8 // shared, bits // shared


def finite(values: Tensor, what: str) -> Tensor:
    """Return values in fp32; InvalidPart if one is not finite. `what`: what they are, for the message."""
    floats = values.float()
    if not bool(floats.isfinite().all()):
        raise InvalidPart(f"{what} is not a finite number")
    return floats


class Packing(NamedTuple):
    """The form in which one weight is stored: its encoding, and the tensors next to its codes by role."""

    encoding: Encoding
    codes: StoredTensor | None = None  # as the container lists it; None for plain values
    parts: Mapping[str, WeightPart] = {}
    marks: frozenset[str] = frozenset()  # names of other tensors of this weight: marks, scales of activations

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors next to the values, which a weight of plain values does not have."""
        return self.marks.union(part.info.name for part in self.parts.values())

    @property
    def changing(self) -> frozenset[str]:
        """Return the names of the tensors next to the codes that new values may change."""
        fixed = frozenset[str]() if self.encoding.new_scales else self.encoding.fixed
        return frozenset(part.info.name for role, part in self.parts.items() if role not in fixed)

    @property
    def scaled(self) -> bool:
        """Whether the values are not in units of their common factor, or have none."""
        return not self.encoding.common or self.encoding.common in self.parts

    @property
    def in_units(self) -> Packing:
        """Return how values in units of their common factor are stored: without the part that holds it."""
        return self._replace(parts={role: part for role, part in self.parts.items() if role != self.encoding.common})


@dataclass(frozen=True, eq=False)
class Plain(Encoding):
    """Values of a dtype of the container."""

    dtype: str = ""

    @property
    def title(self) -> str:
        """Return the dtype."""
        return self.dtype

    @property
    def plain(self) -> bool:
        """Whether the stored values are the weight."""
        return True

    def decode(self, parts: PartValues, first: int, count: int) -> Tensor:
        """Return the stored values."""
        return parts[CODES]


@cache
def plain(dtype: str) -> Packing:
    """Return the packing of a weight of plain values; one object for each dtype."""
    return Packing(Plain(whole_bytes(ITEM_BITS[dtype]), dtype=dtype))
