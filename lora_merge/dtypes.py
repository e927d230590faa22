"""What a header says of a stored tensor: its dtype, with the table of all dtypes, its shape and its byte range.

Imports no torch and no numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import frexp, inf, nextafter, prod
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

Shape: TypeAlias = tuple[int, ...]


def flat(shape: Shape) -> tuple[int, int]:
    """Return (rows, cols) of a weight: axis 0, and all other axes flattened; a vector is a column."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes that no file holds in this order: of a state dict in memory, or of a transposed tensor in a pickle.

    `file` is the file that the bytes come from, or a name in its place. `content` returns the same bytes at each call.
    """

    file: Path
    content: Callable[[], memoryview]

    @staticmethod
    def of(file: Path, data: memoryview) -> Memory:
        """Return a source for bytes that exist already."""
        return Memory(file, lambda: data)


Source: TypeAlias = Path | Memory
"""The source of bytes: a local file, or memory."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as a file holds it: name, dtype, shape and byte range. `offset` counts from the start of the source.

    `stored` is its name inside the file if that differs from `name` (components of a pipeline, unwrapped pickles).
    """

    name: str
    dtype: str
    shape: Shape
    source: Source
    offset: int
    nbytes: int
    stored: str = ""

    @property
    def file(self) -> Path:
        """Return the file of this tensor, for messages and to find its checkpoint."""
        return self.source.file if isinstance(self.source, Memory) else self.source


class Dtype(NamedTuple):
    """One dtype. Only floating-point dtypes have the last three columns."""

    name: str  # in the header of .safetensors
    bits: int  # of one element
    library: str  # name in torch, and in numpy or ml_dtypes; torch lacks some dtypes of less than a byte
    code: str = ""  # character in struct and numpy; "" for a format that only ml_dtypes has
    option: str = ""  # name on the command line
    significand: int = 0  # bits of the significand, with the leading one that is not stored
    smallest: int = 0  # exponent of two of the smallest step
    largest: float = 0.0  # the largest finite number

    @property
    def room(self) -> float:
        """The largest number that rounds to a finite one.

        It is half a step above the largest finite number. That midpoint itself rounds down only where the largest
        finite number is even, as a tie goes to the even neighbour: 448 of e4m3 is even, the others are odd.
        """
        if self.name == "F64":
            return inf
        step = 2.0 ** (frexp(self.largest)[1] - self.significand)
        beyond = self.largest + step / 2
        return beyond if self.largest / step % 2 == 0 else nextafter(beyond, 0)


DTYPE_ROWS: Final = MappingProxyType({
    row.name: row
    for row in (
        #     name           bits  library            code  option        significand, smallest step, largest
        Dtype("F64",         64, "float64",           "d", "fp64",        53, -1074, (2.0 - 2.0**-52) * 2.0**1023),
        Dtype("F32",         32, "float32",           "f", "fp32",        24, -149, 2.0**128 - 2.0**104),
        Dtype("F16",         16, "float16",           "e", "fp16",        11, -24, 65504.0),
        Dtype("BF16",        16, "bfloat16",          "",  "bf16",        8, -133, 2.0**128 - 2.0**120),
        Dtype("F8_E4M3",     8,  "float8_e4m3fn",     "",  "fp8_e4m3fn",  4, -9, 448.0),
        Dtype("F8_E5M2",     8,  "float8_e5m2",       "",  "fp8_e5m2",    3, -16, 57344.0),
        Dtype("F8_E4M3FNUZ", 8,  "float8_e4m3fnuz",   "",  "",            4, -10, 240.0),
        Dtype("F8_E5M2FNUZ", 8,  "float8_e5m2fnuz",   "",  "",            3, -17, 57344.0),
        Dtype("F8_E8M0",     8,  "float8_e8m0fnu",    "",  "",            1, -127, 2.0**127),
        Dtype("F6_E2M3",     6,  "float6_e2m3fn"),
        Dtype("F6_E3M2",     6,  "float6_e3m2fn"),
        Dtype("F4",          4,  "float4_e2m1fn"),
        Dtype("C64",         64, "complex64"),
        Dtype("I64",         64, "int64",             "q"),
        Dtype("I32",         32, "int32",             "i"),
        Dtype("I16",         16, "int16",             "h"),
        Dtype("I8",          8,  "int8",              "b"),
        Dtype("U64",         64, "uint64",            "Q"),
        Dtype("U32",         32, "uint32",            "I"),
        Dtype("U16",         16, "uint16",            "H"),
        Dtype("U8",          8,  "uint8",             "B"),
        Dtype("BOOL",        8,  "bool",              "?"),
    )
})  # fmt: skip
"""Name in files → its row. Sources: https://github.com/huggingface/safetensors, safetensors/src/tensor.rs; for 8 bits
the OCP specification of microscaling formats, and for the fnuz formats Noune et al. 2022, arXiv:2206.02915."""

ITEM_BITS: Final = {name: row.bits for name, row in DTYPE_ROWS.items()}
ITEM_BYTES: Final = {name: row.bits // 8 for name, row in DTYPE_ROWS.items() if row.bits >= 8}

FLOATS: Final = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
"""Dtypes of weights: an adapter may change such tensors, and `--dtype` converts them."""

WHOLE_DTYPES: Final = frozenset(name for name, row in DTYPE_ROWS.items() if row.code and name not in FLOATS)
"""Dtypes of whole numbers, and of truth values."""

_NAMES: Final = {row.option: name for name, row in DTYPE_ROWS.items() if row.option}

DTYPES: Final = {option: _NAMES[option] for option in ("fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2")}
"""Value of `--dtype` → name in files; `keep` is not a dtype."""

GGUF_TYPES: Final = (
    "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
"""Values of `--dtype` that are types of GGUF files."""

QUANTISED_DTYPES: Final = ("fp8_scaled", "fp8_block", "mxfp8", "nvfp4", "int8", "nf4", *GGUF_TYPES)
"""Values of `--dtype` that quantise: codes with scales next to them."""

COMPUTE_DTYPES: Final = {option: _NAMES[option] for option in ("fp32", "fp64", "bf16", "fp16")}
"""Value of `--compute-dtype` → name in files."""


def spoken(dtype: str) -> str:
    """Return the name that options and reports have for a dtype or a GGUF type: "fp16" for F16, "int32" for I32."""
    row = DTYPE_ROWS.get(dtype)
    if row is None:
        return dtype.lower() if dtype.lower() in GGUF_TYPES else dtype
    return row.option or row.library


def bytes_of(dtype: str, shape: Shape) -> int:
    """Return the bytes of a tensor of this dtype and shape."""
    return prod(shape) * ITEM_BITS[dtype] // 8
