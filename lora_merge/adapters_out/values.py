"""Values of tensors: as files store them, in fp32 and back in 16 bits, by numpy; the effect of a change: its largest
value, and the share of values that are not zero. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from math import fsum, isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ..disk.reader import Reader
from ..dtypes import DTYPE_ROWS, ITEM_BYTES, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from ..engine.row_matrix import RowMatrix

SUM_RUN: Final = 512
"""Values whose squares are summed in fp32. The errors of many such sums are within 1e-7 of the whole."""

SMALL, LARGE = 1e-20, 1e20
"""Bounds of a sum of squares between which fp32 holds the squares of all values."""

PRODUCT_WORK: Final = 2**21
"""Multiplications for the rows of a product of factors that are looked at."""

LEAST_ROWS: Final = 8
"""Rows of such a product that are looked at at least."""


class Effect(NamedTuple):
    """The values of ΔW."""

    of: int
    elements: int  # of them, the ones that were looked at: whole rows, spread evenly
    changed: int | None  # of these, the ones that are not zero; None of a product of factors, in which none is zero
    largest: float  # |ΔW| of these

    @property
    def facts(self) -> dict[str, Any]:
        """The same for reports, in the words of a merge."""
        share = {} if self.changed is None else {"changed": self.changed / self.elements if self.elements else 0.0}
        return {"of": self.of, "elements": self.elements, **share, "largest": self.largest}


def effect_of_matrix(change: Tensor) -> Effect:
    """Return the effect of values, all of which are looked at."""
    count = change.numel()
    largest = max(-float(change.amin()), float(change.amax())) if count else 0.0  # half the time of aminmax()
    return Effect(count, count, int(change.count_nonzero()), largest)


class Totals(NamedTuple):
    """‖Δ‖² and the effect of Δ, or of some of its rows: those of several blocks of rows add up."""

    squares: float  # ‖Δ‖²
    effect: Effect

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]
        first, two = self.effect, other.effect
        changed = None if first.changed is None or two.changed is None else first.changed + two.changed
        whole = Effect(first.of + two.of, first.elements + two.elements, changed, max(first.largest, two.largest))
        return Totals(self.squares + other.squares, whole)


ZERO_TOTALS: Final = Totals(0.0, Effect(0, 0, 0, 0.0))


def totals_of(block: Tensor) -> Totals:
    """Return the totals of some rows."""
    return Totals(squares(block), effect_of_matrix(block))


def squares(block: Tensor) -> float:
    """Return the sum of the squares of all values.

    Runs of values are summed in fp32 where their dtype and size allow it: that takes a quarter of the time of fp64.
    """
    import torch

    if block.dtype in (torch.float32, torch.float16, torch.bfloat16) and block.numel() >= SUM_RUN:
        flat = block.reshape(-1)
        end = len(flat) // SUM_RUN * SUM_RUN
        runs = torch.linalg.vector_norm(flat[:end].view(-1, SUM_RUN), dim=1, dtype=torch.float32)
        total = float(runs.double().square().sum()) + float(flat[end:].double().square().sum())
        if SMALL < total < LARGE:
            return total
    return float(block.double().square().sum())


def squares_of_rows(matrix: RowMatrix) -> float:
    """Return the sum of the squares of all values."""
    return sum(squares(block) for _, block in matrix.blocks(owned=False))


def totals_of_rows(change: RowMatrix) -> Totals:
    """Return the totals of all rows."""
    return sum((totals_of(block) for _, block in change.blocks(owned=False)), ZERO_TOTALS)


def effect_of_layers(layers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the effect of several layers, as reports have it of one; {} where it is not known of all."""
    every = [*layers]
    if not every or any("largest" not in effect for effect in every):
        return {}
    elements, share = sum(effect["of"] for effect in every), {}
    if all("changed" in effect for effect in every):
        share = {"changed": fsum(effect["changed"] * effect["of"] for effect in every) / elements if elements else 0.0}
    return {
        "of": elements, "elements": sum(effect["elements"] for effect in every), **share,
        "largest": max(effect["largest"] for effect in every),
    }  # fmt: skip


Array = npt.NDArray[Any]
Matrix = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Raw: TypeAlias = bytearray | Bits | Bytes

OF_HALF: Final = np.int32(-0x70002000)
"""The bits of fp32 that an exponent of five bits, ten bits of a significand and a sign take."""

CANCELLED_SHARE_OF_FP32: Final = 1e-2
"""The share of the squares of all columns from which on the square of their sum has digits enough."""

HEADROOM: Final = 8.0
"""By how much values of usual size are inside the range of a dtype, so that most of a column is."""

PRODUCT_TABLES: Final = 32
"""Tables of products that are kept, of 128 KiB each: most layers have the same α / rank."""

INFINITY_BITS: Final = MappingProxyType({"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000})
"""dtype → the bits of infinity; those of NaN are larger."""


class Distinct:
    """Finds equal arrays in a time that grows with their number: by a checksum, then byte by byte."""

    def __init__(self) -> None:
        self._by_sum: dict[tuple[object, int], list[tuple[int, Bytes]]] = {}

    def first(self, number: int, raw: memoryview, kind: object = None) -> int:
        """Return the number of the first array with these bytes, this one's own if it is new. `kind`: what has to be
        equal too, such as the shape."""
        bits, alike = np.frombuffer(raw, np.uint8), self._by_sum.setdefault((kind, crc32(raw)), [])
        for other, earlier in alike:
            if np.array_equal(bits, earlier):
                return other
        alike.append((number, bits))
        return number


def _of_half(raw: Raw) -> Matrix:
    """Return values of fp16 in fp32, in a seventh of numpy's time: the bits are moved, and the exponent is corrected
    by a product, which is exact for subnormals too. They have to be finite."""
    bits = np.frombuffer(raw, np.int16).astype(np.int32)
    bits <<= 13
    bits &= OF_HALF  # without the copies of the sign
    values: Matrix = bits.view(np.float32)
    values *= np.float32(2.0**112)
    return values


def _of_bfloat(raw: Raw) -> Matrix:
    bits = np.frombuffer(raw, np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def _of_single(raw: Raw) -> Matrix:
    return np.frombuffer(raw, np.float32)


WIDEN: Final[Mapping[str, Callable[[Raw], Matrix]]] = MappingProxyType(
    {"F16": _of_half, "BF16": _of_bfloat, "F32": _of_single}
)
"""dtype → function that returns stored values in fp32."""


def narrowed(values: Matrix, dtype: str) -> Bits:
    """Return the bits of the nearest values of a dtype of 16 bits, ties to even; infinity for those too large."""
    with np.errstate(all="ignore"):
        if dtype == "F16":
            return values.astype(np.float16).view(np.uint16)
        wide = values.view(np.uint32)
        nearest = wide >> 16  # in place from here on
        nearest &= 1
        nearest += 0x7FFF
        nearest += wide
        nearest >>= 16
        return nearest.astype(np.uint16)


@lru_cache(maxsize=PRODUCT_TABLES)
def products(dtype: str, weight: float) -> Bits:
    """Return the products of all values of a dtype of 16 bits and a weight, rounded once, in the order of the values'
    bits; those of infinity and NaN have no meaning. To look one up takes a quarter of the time of numpy's rounding to
    fp16."""
    every = WIDEN[dtype](np.arange(2**16, dtype=np.uint16))
    with np.errstate(all="ignore"):
        return narrowed((every.astype(np.float64) * weight).astype(np.float32), dtype)


ROUNDED_VALUES: Final = 2**18
"""Values that are rounded to 16 bits at a time: the copies in between stay in the caches."""


def as_stored(values: Array, dtype: str) -> Array:
    """Return the nearest values of a dtype: their bits, or in fp32 and fp64 the values."""
    if dtype in ("F64", "F32"):
        return np.ascontiguousarray(values, DTYPE_ROWS[dtype].library)
    if dtype in WIDEN and values.size > ROUNDED_VALUES and len(values) > 1:
        step = max(1, ROUNDED_VALUES * len(values) // values.size)
        parts = [as_stored(values[first : first + step], dtype) for first in range(0, len(values), step)]
        return np.concatenate(parts)
    with np.errstate(all="ignore"):  # infinity for those too large
        single = np.ascontiguousarray(values, np.float32)
        if dtype in WIDEN:
            return narrowed(single, dtype)
    import torch  # for fp8 and whole numbers alone

    from ..engine.tensor_moves import TORCH_DTYPES, host

    raw: Bytes = host(torch.from_numpy(single), TORCH_DTYPES[dtype]).view(torch.uint8).numpy()
    return raw.view(f"u{ITEM_BYTES[dtype]}")


def stored_bits(raw: Bytes, dtype: str) -> Array:
    """Return stored bytes as `as_stored` has values."""
    return raw.view(DTYPE_ROWS[dtype].library if dtype in ("F64", "F32") else np.dtype(f"u{ITEM_BYTES[dtype]}"))


def data_of(bits: Array) -> memoryview:
    """Return the bytes of stored values."""
    return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data if bits.size else memoryview(b"")


def widened(bits: Array, dtype: str, kind: npt.DTypeLike) -> Array:
    """Return stored values in fp32 or fp64. Those of fp16 have to be finite, or to be looked at by `all_finite`."""
    if dtype == "F64":
        return bits.astype(kind, copy=False)
    if dtype in WIDEN:
        return WIDEN[dtype](bits).reshape(bits.shape).astype(kind, copy=False)
    import torch

    from ..engine.tensor_moves import TORCH_DTYPES, host

    values: Array = host(torch.from_numpy(bits).view(TORCH_DTYPES[dtype]), torch.float32).numpy()
    return values.astype(kind, copy=False)


def all_finite(bits: Array, dtype: str) -> bool:
    """Return whether all stored values of any dtype are finite."""
    return (
        is_finite(bits, dtype) if dtype in INFINITY_BITS else bool(np.isfinite(widened(bits, dtype, np.float64)).all())
    )


def is_finite(raw: Raw, dtype: str) -> bool:
    """Return whether all stored values are finite: their bits without the sign are smaller than those of infinity."""
    bits = np.frombuffer(raw, np.uint32 if dtype == "F32" else np.uint16)
    return int((bits << 1).max(initial=0)) < INFINITY_BITS[dtype] << 1


def stored(reader: Reader, info: StoredTensor) -> Bytes:
    """Return the bytes of a tensor, in memory that was not zeroed first."""
    raw = np.empty(info.nbytes, np.uint8)
    reader.read_into(raw.data, info.source, info.offset)
    return raw


def is_below(products: Matrix, largest: float | npt.NDArray[np.float64]) -> bool:
    """Return whether all values of columns are surely below a limit, from the products of the columns: none is larger
    than the norm of its column. Infinity and NaN are not below a limit that their dtype holds."""
    return bool((products.diagonal() < np.square(largest)).all())


def is_held_by_fp32(squares: float, alone: float) -> bool:
    """Return whether fp32 holds a sum of squares: it is finite, of its range, and no difference of larger values.
    `alone`: the sum of the squares of its terms."""
    return isfinite(alone) and SMALL < squares < LARGE and squares > CANCELLED_SHARE_OF_FP32 * alone
